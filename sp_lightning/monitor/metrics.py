"""The metrics that are logged under `superpipeline/` in training: counters of the engine, times of a recorded step.

What each of them means stands in docs/timeline.md.
"""

from __future__ import annotations

from dataclasses import replace

from sp_lightning.pipeline import Lane, Pipeline
from sp_lightning.timeline import Breakdown

PREFIX = "superpipeline/"


class Counters:
    """Converts the engine's counters into values per step.

    Args:
        pipeline: The engine.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._before = replace(pipeline.stats)
        self._retries_before = pipeline.survey.allocation_retries

    def read(self) -> dict[str, float]:
        """Return what is logged whenever Lightning logs: means over the steps since the last call, and memory."""
        now, before = replace(self._pipeline.stats), self._before
        self._before = now
        retries, retries_before = self._pipeline.survey.allocation_retries, self._retries_before
        self._retries_before = retries
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
            "allocation_retries": (retries - retries_before) / steps,
        }
        return {PREFIX + name: float(value) for name, value in values.items()}


def timed_metrics(numbers: Breakdown) -> dict[str, float]:
    """Return what is logged after steps were recorded."""
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
