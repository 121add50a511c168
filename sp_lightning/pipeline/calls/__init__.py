"""The calls of modules and their surroundings: gates, steps, backward passes, graphs, and the guard of weights."""
