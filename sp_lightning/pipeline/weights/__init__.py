"""Weights: which travel together, where they lie on host and device, and which of them are there."""
