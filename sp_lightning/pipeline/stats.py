"""Counters that show what the engine did; tests, the callback and the benchmarks read them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Stats:
    """Counts since the pipeline was attached or `clear` was called.

    Attributes:
        steps: Outermost `step()` scopes.
        loads: Units copied to the device (resident weights not counted).
        resident_loads: Copies of resident weights to the device.
        misses: Loads that nothing had prefetched, so that computing waited for all of the copy.
        bytes_to_device: Bytes copied from host to device.
        bytes_to_host: Bytes copied from device to host.
        heals: Weights that backward needed and that had to be brought back without a prior notice.
        promotions: Weights used outside of their unit, which became resident.
        write_backs: Weights that a forward changed in place, copied back to the host.
        host_syncs: Times that the host waited for the device.
        optimizer_waits: Times that the host waited for an optimizer's step, because somebody looked at a weight.
        overlapped_steps: Units that an optimizer stepped while the device could compute.
        steps_in_backward: Those of them that were stepped before backward had ended.
        resets: Recoveries after an exception in the middle of a step.
    """

    steps: int = 0
    loads: int = 0
    resident_loads: int = 0
    misses: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    heals: int = 0
    promotions: int = 0
    write_backs: int = 0
    host_syncs: int = 0
    optimizer_waits: int = 0
    overlapped_steps: int = 0
    steps_in_backward: int = 0
    resets: int = 0

    def clear(self) -> None:
        """Set every counter to zero."""
        for field in fields(self):
            setattr(self, field.name, 0)
