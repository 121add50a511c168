"""What the callback measures and says: recordings of a few steps, metrics, tables, and what would help."""
