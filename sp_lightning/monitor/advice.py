"""Advice on the bottleneck of a step, given only where this run's numbers support it."""

from __future__ import annotations

from collections.abc import Iterator

from sp_lightning.monitor.metrics import device_memory
from sp_lightning.pipeline import Kind, Lane, Pipeline, readable_bytes, readable_seconds
from sp_lightning.timeline import Breakdown

_MUCH = 0.3  # the least share of a lane's work that is worth doing something about
_WORTH_ROOM = 0.1  # the least share of device memory that a larger batch or window could use


def diagnose(numbers: Breakdown, pipeline: Pipeline, retries: float, waits_for_optimizer: str | None) -> list[str]:
    """Return lines that say where the time of a step went and what would make it shorter.

    Args:
        numbers: Where the time of a recorded step went.
        pipeline: The engine, at the end of the run.
        retries: How often in a step the allocator ran out of memory, freed its cache and tried again.
        waits_for_optimizer: Why the optimizer steps all weights after backward; None if it does not.
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
        lines += _on_the_host(numbers)
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


def _on_the_host(numbers: Breakdown) -> Iterator[str]:
    stepping = numbers.kinds[Kind.STEP]
    if stepping > _MUCH * numbers.busy[Lane.HOST]:
        yield (
            f"The optimizer's steps take {readable_seconds(stepping / numbers.steps)} of the host's time in a step: a "
            "larger batch, or `accumulate_grad_batches`, steps less often for the same data."
        )
