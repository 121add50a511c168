"""Copies between host and device, and work on the host, for each kind of device."""
