"""Weights: the groups in which they travel, and their places on host and device."""
