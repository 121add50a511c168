"""Counters of what the engine did, for tests, the callback and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Stats:
    """Counts since the pipeline was attached or `clear` was called.

    Attributes:
        steps: Outermost `step()` scopes.
        loads: Units copied to the device (resident weights not counted).
        resident_loads: Copies of resident weights to the device.
        misses: Loads that had not been prefetched, so that computing waited for the whole copy.
        bytes_to_device: Bytes copied from host to device.
        bytes_to_host: Bytes copied from device to host.
        offloaded_bytes: The part of `bytes_to_host` that was saved activations.
        fetched_bytes: The part of `bytes_to_device` that was saved activations coming back.
        activation_misses: Activations that backward needed and that had not been fetched ahead.
        heals: Loads, counted in `misses` too, of what backward needed without having announced its unit; those of
            `k_prime` units together count as one.
        promotions: Weights that became resident because they were used outside of their unit.
        write_backs: Weights copied back to the host because a forward changed them in place.
        recomputed: Unit calls whose forward ran again in backward.
        host_syncs: Times that the host waited for the device.
        activation_bytes: Device memory that saved tensors hold now, weights not counted.
        activation_peak_bytes: The maximum of `activation_bytes`.
        optimizer_waits: Times that the host waited for an optimizer's step because a weight was accessed.
        overlapped_steps: Units that an optimizer stepped while the device could compute.
        steps_in_backward: The part of `overlapped_steps` that happened before backward had ended.
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
        """Set every counter to zero, and the activation peak to the current `activation_bytes`."""
        held = self.activation_bytes
        for field in fields(self):
            setattr(self, field.name, 0)
        self.activation_bytes = self.activation_peak_bytes = held
