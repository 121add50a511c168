"""The bench: workloads, systems, a process for each measurement, rooflines, reports. `../bench.py` is its command."""
