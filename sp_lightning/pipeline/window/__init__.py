"""What is on the device, in which order it is needed, and where it lies."""
