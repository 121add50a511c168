"""From the device's gradients to those of masters."""
