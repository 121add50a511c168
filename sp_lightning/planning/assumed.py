"""A machine that is assumed, where placement may not depend on measured times: `Trainer(deterministic=True)`."""

from __future__ import annotations

from dataclasses import replace

from sp_lightning.planning.cost import Machine, Workload

ASSUMED = Machine(to_device=25e9, to_host=25e9, host=60e9, both=40e9, device=1e12, host_memory=80e9)
"""A machine by which units are placed where a run has to be the same each time: rates that are measured never are."""

_COMPUTED = 4e10  # bytes of weights per second that it computes with


def assumed(workload: Workload) -> Workload:
    """Return the workload with what an assumed machine would take instead of times that were measured."""
    units = []
    for unit in workload.units:
        seconds = unit.weight_bytes / _COMPUTED
        ways = [
            replace(way, seconds=number * seconds, repeating=seconds if way.repeating else 0.0)
            for number, way in enumerate(unit.ways)
        ]
        units.append(replace(unit, forward_seconds=seconds, backward_seconds=2 * seconds, ways=tuple(ways)))
    stepping = "after backward" if workload.stepping == "under forward" else workload.stepping
    return replace(workload, units=tuple(units), stepping=stepping, add_seconds=0.0, rest_seconds=0.0)
