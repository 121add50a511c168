"""Advice on the bottleneck of a step, given only where this run's numbers support it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from sp_lightning.pipeline import Kind, Lane, PipelineOptions, Summary, readable_bytes, readable_seconds
from sp_lightning.pipeline.transfer.cores import allowed_cores, user_chose_threads
from sp_lightning.timeline import Breakdown, headline

_MUCH = 0.3  # the least share of a lane's work that is worth doing something about
_WORTH_ROOM = 0.1  # the least share of device memory that a larger batch or window could use


@dataclass(frozen=True)
class Evidence:
    """The facts about a run that advice is based on.

    Attributes:
        numbers: Where the time of a recorded step went.
        recomputed: Number of units that computed their forward twice in a step.
        retries: How often in a step the allocator ran out of memory, freed its cache and tried again.
        summary: The plan.
        options: The user's options.
        device_peak: Peak device memory.
        device_total: Device memory available to this process; None if unknown.
        waits_for_optimizer: Why the optimizer steps all weights after backward; None if it does not.
    """

    numbers: Breakdown
    recomputed: float
    retries: float
    summary: Summary
    options: PipelineOptions
    device_peak: int
    device_total: int | None
    waits_for_optimizer: str | None

    @property
    def free(self) -> int:
        """Device memory that was never used; zero if unknown, too little to use, or due to the user's budget."""
        if self.device_total is None or self.options.memory_budget is not None:
            return 0
        free = self.device_total - self.device_peak
        return free if free > _WORTH_ROOM * self.device_total else 0

    def part_of_lane(self, kind: Kind) -> float:
        """Return the share of a kind of work in all the work of its lane."""
        busy = self.numbers.busy[kind.lane]
        return self.numbers.kinds[kind] / busy if busy else 0.0


def diagnose(evidence: Evidence) -> list[str]:
    """Return lines that say where the time of a step went and what would make it shorter."""
    numbers = evidence.numbers
    lines = [f"A step takes {readable_seconds(numbers.seconds / numbers.steps)}. {headline(numbers)}"]
    sources = {Lane.COMPUTE: _computing, Lane.TO_DEVICE: _to_device, Lane.TO_HOST: _to_host, Lane.HOST: _host}
    lane = numbers.bottleneck
    given = [*_memory(evidence), *(_elsewhere if lane is None else sources[lane])(evidence)]
    return lines + [f"  - {advice}" for advice in given]


def _memory(evidence: Evidence) -> Iterator[str]:
    if evidence.retries >= 1:
        yield (
            f"The device's memory runs short {evidence.retries:.0f} times in a step: torch then waits for the device, "
            "to free what it has cached. A smaller `memory_budget`, or smaller batches, leave it room."
        )


def _computing(evidence: Evidence) -> Iterator[str]:
    if evidence.recomputed >= 1 and evidence.free:
        yield (
            f"{evidence.recomputed:.0f} units compute their forward twice in a step, and "
            f"{readable_bytes(evidence.free)} of the device are free: `activations='keep'`, or 'offload', computes it "
            "once."
        )


def _to_device(evidence: Evidence) -> Iterator[str]:
    return _copies(evidence, Kind.FETCH, "come back")


def _to_host(evidence: Evidence) -> Iterator[str]:
    return _copies(evidence, Kind.OFFLOAD, "leave")


def _copies(evidence: Evidence, of_activations: Kind, what_they_do: str) -> Iterator[str]:
    if not evidence.summary.pinned and evidence.summary.device != "cpu":
        yield "Host memory is not page-locked, which makes copies slow: see `ulimit -l` and `pin_memory`."
    part = evidence.part_of_lane(of_activations)
    if part > _MUCH:
        yield f"{part:.0%} of these copies are activations that {what_they_do}: `activations='recompute'` moves none."
    if evidence.free:
        yield (
            f"{readable_bytes(evidence.free)} of the device are free: a larger batch computes more for the same "
            "copies of weights and gradients."
        )


def _host(evidence: Evidence) -> Iterator[str]:
    numbers = evidence.numbers
    stepping = readable_seconds(numbers.kinds[Kind.STEP] / numbers.steps)
    if evidence.part_of_lane(Kind.STEP) > _MUCH:
        yield (
            f"The optimizer's steps take {stepping} of the host's time in a step: a larger batch, or "
            "`accumulate_grad_batches`, steps less often for the same data."
        )
    if evidence.options.host_threads == "auto" and user_chose_threads():
        limit, cores = os.environ["OMP_NUM_THREADS"], len(allowed_cores())
        if limit.isdecimal() and int(limit) < cores // 2:
            yield f"OMP_NUM_THREADS={limit} holds them to {limit} of {cores} cores: `host_threads` overrides it."


def _elsewhere(evidence: Evidence) -> Iterator[str]:
    if evidence.waits_for_optimizer is not None:
        yield f"The optimizer steps while the device waits: {evidence.waits_for_optimizer}."
    else:
        yield "Lightning's `Trainer(profiler='simple')` shows what the loop does in that time."
