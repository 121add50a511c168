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
        offloaded_bytes: Those of them that were saved activations.
        fetched_bytes: Bytes of saved activations that came back to the device, among `bytes_to_device`.
        activation_misses: Activations that backward needed and that had not been fetched ahead.
        heals: Weights that backward needed and that had to be brought back without a prior notice.
        promotions: Weights used outside of their unit, which became resident.
        write_backs: Weights that a forward changed in place, copied back to the host.
        recomputed: Calls of units whose forward ran again in backward.
        host_syncs: Times that the host waited for the device.
        activation_bytes: Device memory that is held now because autograd saved it for backward, without weights.
        activation_peak_bytes: The most that it has been.
        optimizer_waits: Times that the host waited for an optimizer's step, because somebody looked at a weight.
        overlapped_steps: Units that an optimizer stepped while the device could compute.
        steps_in_backward: Those of them that were stepped before backward had ended.
        optimizer_steps: Calls of an optimizer's `step`.
        arrangements: Times that units, host memory and places on the device were laid out.
        resets: Recoveries after an exception in the middle of a step.
    """

    steps: int = 0
    loads: int = 0
    resident_loads: int = 0
    misses: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    offloaded_bytes: int = 0
    fetched_bytes: int = 0
    activation_misses: int = 0
    heals: int = 0
    promotions: int = 0
    write_backs: int = 0
    recomputed: int = 0
    host_syncs: int = 0
    activation_bytes: int = 0
    activation_peak_bytes: int = 0
    optimizer_waits: int = 0
    overlapped_steps: int = 0
    steps_in_backward: int = 0
    optimizer_steps: int = 0
    arrangements: int = 0
    resets: int = 0

    def clear(self) -> None:
        """Set every counter to zero, and the peak to what is held now."""
        held = self.activation_bytes
        for field in fields(self):
            setattr(self, field.name, 0)
        self.activation_bytes = self.activation_peak_bytes = held
