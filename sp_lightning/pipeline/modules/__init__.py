"""The engine inside the user's modules: gates around calls, twins in place of masters, guarded masters."""
