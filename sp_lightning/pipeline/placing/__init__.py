"""Between steps: what steps have shown of units, where weights lie, and when they get other places."""
