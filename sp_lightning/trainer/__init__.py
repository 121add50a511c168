"""What the strategy does for a Trainer, in parts: its steps, processes, precision, checkpoints, and what it refuses."""
