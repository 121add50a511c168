"""The units on the device, the order in which they are needed, and their places."""
