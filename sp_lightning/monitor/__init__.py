"""What the callback and the strategy measure and report: recorded steps, metrics, tables and advice."""
