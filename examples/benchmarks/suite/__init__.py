"""The benchmark suite: workloads, systems, one process per measurement, rooflines, reports. Run it by `../bench.py`."""
