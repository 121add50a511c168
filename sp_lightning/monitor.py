"""What the callback measures and says: metrics, recordings now and then, and advice on the bottleneck of a step.

docs/timeline.md explains the metrics under `superpipeline/`. Advice is given only where a run's numbers support it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from sp_lightning.pipeline import Kind, Lane, Pipeline, Recording, readable_bytes, readable_seconds
from sp_lightning.timeline import Breakdown

PREFIX = "superpipeline/"
_SETTLING_STEPS = 5  # first steps, in which the engine learns, measures and plans
_LEAST_INTERVAL = 20  # steps from one recording to the next, because each makes the host wait for the device at its end
_MUCH = 0.3  # the least share of a lane's work that is worth doing something about
_WORTH_ROOM = 0.1  # the least share of device memory that a larger batch or window could use


class Monitor:
    """Counts what a run does, and records steps: often enough to tell where time goes, seldom enough not to cost any.

    A recording shows only its last steps. Copies and optimizer steps that were issued before it are not recorded when
    they run during its first step, and would be missing from the picture; and in the first steps of a run the engine
    learns.
    """

    def __init__(self, pipeline: Pipeline, steps: int, interval: int) -> None:
        self.pipeline = pipeline  # the engine
        self.latest: Recording | None = None  # the latest recording; None before the first
        self._first = self._counted = self._count()
        self._shown = steps
        self._interval = max(interval, _LEAST_INTERVAL, steps + 2)
        self._seen = 0
        self._last = _SETTLING_STEPS + steps + 1  # the step whose beginning ends the recording
        self._scope = ExitStack()
        self._recording: Recording | None = None

    def step_begins(self) -> Recording | None:
        """Note that a step is about to begin, and return the recording if the previous step was the last one in it.

        A recording does not end with its last step: the time between steps, such as waiting for data, is part of it.
        """
        finished = self.finish() if self._seen == self._last else None
        position = self._seen % self._interval
        if self._recording is None and (self._seen == 0 or position == self._interval - self._shown - 2):
            self._recording = self._scope.enter_context(self.pipeline.record())
            self._last = self._seen + self._shown + 1 + (_SETTLING_STEPS if self._seen == 0 else 0)
        self._seen += 1
        return finished

    def finish(self) -> Recording | None:
        """End the current recording early, if there is one, and return it if it shows anything new.

        Called when the run ends, or something else comes between training steps.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        self._scope.close()
        if not recording.steps or (len(recording.steps) == 1 and self.latest is not None):
            return None
        recording.steps = recording.steps[1:][-self._shown :] or recording.steps
        begin = recording.steps[0][0]
        recording.spans = [span for span in recording.spans if span.end > begin]
        self.latest = recording
        return recording

    def _count(self) -> dict[str, int]:
        stats, memory = self.pipeline.stats, self.pipeline.backend.memory()
        return {
            "steps": stats.steps,
            "to_device_bytes": stats.bytes_to_device,
            "to_host_bytes": stats.bytes_to_host,
            "loads": stats.loads,
            "late_loads": stats.misses,
            "heals": stats.heals,
            "allocation_retries": memory.retries if memory else 0,
        }

    def read(self) -> dict[str, float]:
        """Return what is logged whenever Lightning logs: means over the steps since the last call, and memory."""
        before, self._counted = self._counted, self._count()
        summary = self.pipeline.summary()
        on_host = summary.host_bytes + summary.host_gradient_bytes + summary.optimizer_bytes
        values = {
            "device_peak_bytes": device_memory(self.pipeline)[0],
            "host_bytes": on_host + summary.host_activation_bytes,
            **_means(before, self._counted),
        }
        return {PREFIX + name: float(value) for name, value in values.items()}

    @property
    def retries(self) -> float:
        """How often in a step of this run the allocator ran out of memory, freed its cache and tried again."""
        return _means(self._first, self._count())["allocation_retries"]


def _means(before: dict[str, int], now: dict[str, int]) -> dict[str, float]:
    steps = max(1, now["steps"] - before["steps"])
    return {name: (count - before[name]) / steps for name, count in now.items() if name != "steps"}


def timed_metrics(numbers: Breakdown) -> dict[str, float]:
    """Return what is logged after steps were recorded."""
    causes = ("weights", "gradients", "activations")
    values = {
        "step_seconds": numbers.seconds / numbers.steps,
        "compute_share": numbers.share(numbers.busy[Lane.COMPUTE]),
        "stall_seconds": numbers.kinds[Kind.STALL] / numbers.steps,
        **{f"stall_seconds_{cause}": numbers.stalls.get(cause, 0.0) / numbers.steps for cause in causes},
        "to_device_gb_per_s": numbers.rate(Lane.TO_DEVICE) / 1e9,
        "to_host_gb_per_s": numbers.rate(Lane.TO_HOST) / 1e9,
        "host_seconds": numbers.busy[Lane.HOST] / numbers.steps,
        "overlap": numbers.overlap,
    }
    return {PREFIX + name: value for name, value in values.items()}


def device_memory(pipeline: Pipeline) -> tuple[int, int | None]:
    """Return the peak of device memory so far, and the device memory available to this process (None if unknown).

    On a device whose memory torch does not count, the peak is what the engine itself has counted.
    """
    memory = pipeline.backend.memory()
    if memory is not None:
        return memory.peak_so_far, memory.free + memory.allocated
    summary = pipeline.summary()
    return summary.device_bytes + summary.gradient_bytes + pipeline.stats.activation_peak_bytes, None


def diagnose(
    numbers: Breakdown, pipeline: Pipeline, retries: float, waits_for_optimizer: str | None, compact: str | None
) -> list[str]:
    """Return lines that say where the time of a step went and what would make it shorter.

    A step has `retries` of the allocator. Perhaps it waits for the optimizer, which steps all weights after backward,
    and perhaps there is a more compact one.
    """
    lines = [f"A step takes {readable_seconds(numbers.seconds / numbers.steps)}. {numbers.headline()}"]
    if retries >= 1:
        lines.append(
            f"The device's memory runs short {retries:.0f} times in a step: torch then waits for the device, to free "
            "what it has cached. A smaller `memory_budget`, or smaller batches, leave it room."
        )
    if numbers.bottleneck is None:
        lines.append(
            "Lightning's `Trainer(profiler='simple')` shows what the loop does in that time."
            if waits_for_optimizer is None
            else f"The optimizer steps while the device waits: {waits_for_optimizer}."
        )
    elif numbers.bottleneck is Lane.HOST:
        lines += _on_the_host(numbers, compact)
    else:
        lines += _on_the_device(numbers, pipeline, numbers.bottleneck)
    return lines[:1] + [f"  - {advice}" for advice in lines[1:]]


def _on_the_device(numbers: Breakdown, pipeline: Pipeline, lane: Lane) -> Iterator[str]:
    """Give advice where computing itself takes the time, or copies do."""
    summary, stats = pipeline.summary(), pipeline.stats
    peak, total = device_memory(pipeline)
    # The rest is unknown, or left free on purpose.
    unused = total - peak if total is not None and pipeline.options.memory_budget is None else 0
    has_room = total is not None and unused > _WORTH_ROOM * total
    if lane is Lane.COMPUTE:
        if stats.recomputed > stats.steps and has_room:
            yield (
                f"Units compute their forward twice, and {readable_bytes(unused)} of the device are free: "
                "`activations='keep'`, or 'offload', computes it once."
            )
        return
    if not summary.pinned and summary.device != "cpu":
        yield "Host memory is not page-locked, which makes copies slow: see `ulimit -l` and `pin_memory`."
    kind, go = (Kind.FETCH, "come back") if lane is Lane.TO_DEVICE else (Kind.OFFLOAD, "leave")
    part = numbers.kinds[kind] / numbers.busy[lane]
    if part > _MUCH:
        yield f"{part:.0%} of these copies are activations that {go}: `activations='recompute'` moves none."
    if has_room:
        yield (
            f"{readable_bytes(unused)} of the device are free: a larger batch computes more for the same copies of "
            "weights and gradients."
        )


def _on_the_host(numbers: Breakdown, compact: str | None) -> Iterator[str]:
    stepping = numbers.kinds[Kind.STEP]
    if stepping > _MUCH * numbers.busy[Lane.HOST]:
        yield (
            f"The optimizer's steps take {readable_seconds(stepping / numbers.steps)} of the host's time in a step: a "
            "larger batch, or `accumulate_grad_batches`, steps less often for the same data."
        )
        if compact is not None:
            yield f"{compact} reads and writes half as much host memory (docs/host_memory.md)."
