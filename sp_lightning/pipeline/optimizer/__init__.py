"""The user's optimizer, stepping unit by unit on the host."""
