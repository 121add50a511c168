"""The metrics that are logged under `superpipeline/` in training: counters of the engine, times of a recorded step."""

from __future__ import annotations

from dataclasses import replace

from sp_lightning.pipeline import Lane, Pipeline
from sp_lightning.timeline import Breakdown

PREFIX = "superpipeline/"

COUNTED = {
    "device_peak_bytes": "peak device memory so far, as counted by torch's allocator, or on a CPU by the engine",
    "host_bytes": "host memory for weights, gradients, optimizer state and offloaded activations",
    "to_device_bytes": "bytes copied to the device per step",
    "to_host_bytes": "bytes copied to the host per step",
    "loads": "units copied to the device per step",
    "late_loads": "loads per step that were not requested ahead of time",
    "heals": "weights per step that backward needed and that had to be brought back without notice",
}
"""Metrics that are logged whenever Lightning logs. Those "per step" are means over the steps since the last time."""

TIMED = {
    "step_seconds": "time of a step",
    "compute_share": "share of that time in which the device computed units",
    "stall_seconds": "time per step in which computing waited for copies",
    "stall_seconds_weights": "... for weights",
    "stall_seconds_gradients": "... for room for gradients",
    "stall_seconds_activations": "... for activations in transfer",
    "to_device_gb_per_s": "10^9 bytes per second to the device, while copies to it were running",
    "to_host_gb_per_s": "10^9 bytes per second to the host, while copies to it were running",
    "host_seconds": "time per step in which the host stepped units or accumulated gradients",
    "overlap": "share of all copying and host work that ran while the device computed",
}
"""Metrics that are logged after a step was recorded."""


class Counters:
    """Converts the engine's counters into values per step.

    Args:
        pipeline: The engine.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._before = replace(pipeline.stats)

    def read(self) -> dict[str, float]:
        """Return values for `COUNTED`, for the steps since the last call."""
        now, before = replace(self._pipeline.stats), self._before
        self._before = now
        steps = max(1, now.steps - before.steps)
        summary = self._pipeline.summary()
        values = {
            "device_peak_bytes": device_memory(self._pipeline)[0],
            "host_bytes": summary.host_bytes
            + summary.host_gradient_bytes
            + summary.optimizer_bytes
            + summary.host_activation_bytes,
            "to_device_bytes": (now.bytes_to_device - before.bytes_to_device) / steps,
            "to_host_bytes": (now.bytes_to_host - before.bytes_to_host) / steps,
            "loads": (now.loads - before.loads) / steps,
            "late_loads": (now.misses - before.misses) / steps,
            "heals": (now.heals - before.heals) / steps,
        }
        return {PREFIX + name: float(value) for name, value in values.items()}


def timed_metrics(numbers: Breakdown) -> dict[str, float]:
    """Return values for `TIMED`, for the recorded steps."""
    values = {
        "step_seconds": numbers.seconds / numbers.steps,
        "compute_share": numbers.share(numbers.busy[Lane.COMPUTE]),
        "stall_seconds": numbers.stalled / numbers.steps,
        **{
            f"stall_seconds_{cause}": numbers.stalls.get(cause, 0.0) / numbers.steps
            for cause in ("weights", "gradients", "activations")
        },
        "to_device_gb_per_s": numbers.rate(Lane.TO_DEVICE) / 1e9,
        "to_host_gb_per_s": numbers.rate(Lane.TO_HOST) / 1e9,
        "host_seconds": numbers.busy[Lane.HOST] / numbers.steps,
        "overlap": numbers.overlap,
    }
    return {PREFIX + name: value for name, value in values.items()}


def device_memory(pipeline: Pipeline) -> tuple[int, int | None]:
    """Return the peak of device memory so far, and the device memory available to this process (None if unknown).

    Args:
        pipeline: The engine. On a device whose memory torch does not count, its own counters are used.
    """
    peak = pipeline.survey.peak_memory
    if peak is None:
        summary = pipeline.summary()
        peak = summary.device_bytes + summary.gradient_bytes + pipeline.stats.activation_peak_bytes
    return peak, pipeline.survey.usable_memory
