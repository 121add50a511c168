"""Stepping the user's optimizer unit by unit on the host."""
