"""Weights: which of them travel together, where they lie on host and device, and which are on the device now."""
