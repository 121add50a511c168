"""The units on the device, the order in which they are needed, and waits for the work that uses masters."""
