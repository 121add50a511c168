"""Arrangements: where units lie on host and device, given the user's options, the memory, and what was learned."""
