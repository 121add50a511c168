"""What surrounds the calls of modules: gates, steps, backward passes, graphs, and the guard of weights."""
