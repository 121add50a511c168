"""Gradients on their way from the device to the masters on the host."""
