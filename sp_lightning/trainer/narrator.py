"""What is said of a run: its plan, as a table or in brief, what is chosen later, what was streamed, and advice.

Advice on what would make a step shorter is the callback's, who has recorded some; it is given only where a run's
numbers support it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from sp_lightning.pipeline import (
    Kind,
    Lane,
    Pipeline,
    Stats,
    Summary,
    WindowPlan,
    as_table,
    readable_bytes,
)
from sp_lightning.planning.report import readable_seconds
from sp_lightning.timeline import LANES, Breakdown
from sp_lightning.trainer import Namespace, is_fitting, is_tuning
from sp_lightning.trainer.steps import SteppingPlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_MUCH = 0.3  # the least share of a lane's work that is worth doing something about
_WORTH_ROOM = 0.1  # the least share of device memory that a larger batch or window could use


class Narrator:
    """Reports what a run is going to do and what it has done, and nothing twice."""

    def __init__(self, lightning: Namespace, callback: type[Any]) -> None:
        self._lightning = lightning
        self._callback = callback
        self._said: set[Hashable] = set()
        self._silent = True
        self._tells_outcome = False

    def begin(
        self,
        trainer: Trainer,
        pipeline: Pipeline | None,
        optimizers: Iterable[tuple[Optimizer, SteppingPlan]],
    ) -> None:
        """Say what the plan is: as a table if the Trainer prints a model summary or the callback asks for it."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        in_full = any(isinstance(callback, self._lightning.summary) for callback in callbacks)
        is_quiet = False
        chosen = [callback.summary for callback in callbacks if isinstance(callback, self._callback)]
        if chosen:
            in_full = any(chosen)
            is_quiet = not in_full
        self._silent = is_quiet or is_tuning(trainer) or not trainer.is_global_zero
        self._tells_outcome = False
        if pipeline is None or self._silent:
            return
        texts = list(dict.fromkeys(_stepping(*pair) for pair in optimizers))
        plan = plan_table(pipeline, texts) if in_full else plan_in_brief(pipeline, texts)
        is_new = self._is_new(plan)
        if is_new:
            self._lightning.info(plan)
        self._tells_outcome = in_full and (is_new or is_fitting(trainer))

    def measured(self, result: WindowPlan | str) -> None:
        """Report the result of measuring the first steps: a plan, or why there is none."""
        if isinstance(result, str):
            if self._is_new("a warning"):
                self._lightning.warn(result)
            return
        # without times, which differ each time
        if not self._silent and self._is_new(result.window):
            self._lightning.info(f"Superpipeline: {planned(result)}")

    def end(self, pipeline: Pipeline | None) -> None:
        """Report what was streamed, if the plan was shown as a table."""
        if self._tells_outcome and pipeline is not None:
            self._lightning.info(outcome(pipeline.stats, pipeline.summary()))

    def _is_new(self, what: Hashable) -> bool:
        """Tell whether something is about to be said for the first time."""
        is_new = what not in self._said
        self._said.add(what)
        return is_new


def _stepping(optimizer: Optimizer, plan: SteppingPlan) -> str:
    name = type(optimizer).__name__
    if plan.why_not is not None:
        return f"{name} steps all weights after backward: {plan.why_not}."
    if plan.why_not_in_backward is None:
        return f"{name} steps each unit in backward, as soon as its gradients are complete."
    return f"{name} steps unit by unit under the next forward: {plan.why_not_in_backward}."


def plan_table(pipeline: Pipeline, optimizers: Sequence[str]) -> str:
    """Describe the plan of a pipeline line by line, with how each optimizer steps, and why, if one does."""
    rows = dict(pipeline.summary().rows())
    rows["k, k_prime"] += _auto(pipeline)
    if optimizers:
        rows["activations"] = pipeline.options.activations
    return as_table([*rows.items(), *(("optimizer", words) for words in optimizers)])


def plan_in_brief(pipeline: Pipeline, optimizers: Sequence[str]) -> str:
    """Describe the plan of a pipeline in two lines."""
    plan = pipeline.summary()
    window = f"{_many(plan.units, 'unit')}, k={plan.k}, k_prime={plan.k_prime}{_auto(pipeline)}"
    share = f"{readable_bytes(plan.device_bytes)} of {readable_bytes(plan.model_bytes)}"
    weights = f"at most {share} of weights on {plan.device}"
    return "\n".join([f"Superpipeline: {window}; {weights}.", *optimizers])


def _auto(pipeline: Pipeline) -> str:
    return " (auto)" if "auto" in (pipeline.options.k, pipeline.options.k_prime) else ""


def planned(plan: WindowPlan) -> str:
    """Describe the plan that was chosen after measuring the first steps, and what it is expected to take."""
    chosen = [f"k={plan.k}", f"k_prime={plan.k_prime}"]
    if plan.kept:
        chosen.append(f"{_many(len(plan.kept), 'unit')} kept on the device")
    if plan.on_device:
        there = readable_bytes(plan.on_device_bytes)
        chosen.append(f"{_many(len(plan.on_device), 'unit')} living on the device with their state ({there})")
    if plan.visiting:
        chosen.append(f"{_many(len(plan.visiting), 'unit')} visiting it to be stepped there")
    cost = f"{readable_seconds(plan.step_seconds)} and {readable_bytes(plan.device_bytes)} of the device"
    return (
        f"chosen by the first steps: {', '.join(chosen)}. A step should take {cost}; "
        f"the busiest lane is {LANES[plan.bottleneck]}."
    )


def outcome(stats: Stats, summary: Summary) -> str:
    """Describe in a few lines what was streamed, and what that saved."""
    counts = [_many(stats.steps, "batch")]
    if stats.optimizer_steps:
        counts.append(_many(stats.optimizer_steps, "optimizer step"))
    counts.append(_many(stats.loads, "unit load"))
    counts.append(f"{readable_bytes(stats.bytes_to_device)} to the device")
    counts.append(f"{readable_bytes(stats.bytes_to_host)} back")
    window = f"k={summary.k}, k_prime={summary.k_prime}"
    saved = "" if summary.living else f", {summary.saved:.0%} less"
    # What masters take beyond the model's own bytes is what is sent in their place.
    copies = max(0, summary.host_bytes - summary.model_bytes) if summary.lowered else 0
    parts = {
        "weights": summary.host_bytes - copies,
        "copies of them in autocast's dtype": copies,
        "gradients": summary.host_gradient_bytes,
        "optimizer": summary.optimizer_bytes,
    }
    on_host = [
        f"{name} {readable_bytes(size)} ({size / summary.parameters:.1f})" for name, size in parts.items() if size
    ]
    shared = f", for {summary.devices} devices" if summary.devices > 1 else ""
    in_all = f"{summary.host_bytes_per_parameter:.1f} bytes per parameter in all"
    lines = [
        f"Superpipeline: {', '.join(counts)}; {_many(stats.misses, 'load')} came late.",
        f"Weights on {summary.device}, {window}: at most {summary.weights_on_device}{saved}.",
        f"On the host{shared}: {', '.join(on_host)}; {in_all}.",
    ]
    if summary.stepping:
        lines.append(f"Optimizer steps: {summary.stepping}.")
    if summary.visiting_bytes:
        page_locked = readable_bytes(summary.visiting_bytes)
        lines.append(f"{page_locked} of the optimizer's state are page-locked, as they visit the device.")
    return "\n".join(lines)


def _many(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}es" if noun.endswith("h") else f"{count} {noun}s"


def device_memory(pipeline: Pipeline) -> tuple[int, int | None]:
    """Return the peak of device memory so far, and the device memory available to this process (None if unknown).

    On a device whose memory torch does not count, the peak is what the engine itself has counted.
    """
    memory = pipeline.backend.memory()
    if memory is not None:
        return memory.peak_so_far, memory.free + memory.allocated
    summary = pipeline.summary()
    return (
        summary.device_bytes + summary.gradient_bytes + pipeline.stats.activation_peak_bytes,
        None,
    )


def diagnose(
    numbers: Breakdown,
    pipeline: Pipeline,
    retries: float,
    waits_for_optimizer: str | None,
    compact: str | None,
) -> list[str]:
    """Return lines that say where the time of a step went and what would make it shorter.

    A step has `retries` of the allocator. Perhaps it waits for the optimizer, which steps all weights after backward,
    and perhaps there is a more compact one.
    """
    advice = []
    if retries >= 1:
        advice.append(
            f"The device's memory runs short {retries:.0f} times in a step: torch then waits for "
            "the device, to free what it has cached. A smaller `memory_budget`, or smaller "
            "batches, leave it room."
        )
    if numbers.bottleneck is None:
        if waits_for_optimizer is None:
            reason = "Lightning's `Trainer(profiler='simple')` shows what the loop does in that time."
        else:
            reason = f"The optimizer steps while the device waits: {waits_for_optimizer}."
        advice.append(reason)
    elif numbers.bottleneck in (Lane.HOST, Lane.VISIT):
        advice += _on_the_optimizer(numbers, pipeline, numbers.bottleneck, compact)
    else:
        advice += _on_the_device(numbers, pipeline, numbers.bottleneck, compact)
    seconds = readable_seconds(numbers.seconds / numbers.steps)
    return [f"A step takes {seconds}. {numbers.headline()}", *(f"  - {words}" for words in advice)]


def _unused(pipeline: Pipeline) -> int:
    """Return the bytes of the device that were never needed; 0 if these are few, or unknown."""
    peak, total = device_memory(pipeline)
    if total is None or total - peak <= _WORTH_ROOM * total:
        return 0
    return total - peak


def _on_the_device(numbers: Breakdown, pipeline: Pipeline, lane: Lane, compact: str | None) -> Iterator[str]:
    """Give advice where computing itself takes the time, or copies do."""
    summary, stats = pipeline.summary(), pipeline.stats
    # what a budget leaves is left free on purpose
    unused = _unused(pipeline) if pipeline.options.memory_budget is None else 0
    if lane is Lane.COMPUTE:
        if stats.recomputed > stats.steps and unused:
            yield (
                f"Units compute their forward twice, and {readable_bytes(unused)} of the device "
                "are free: `activations='keep'`, or 'offload', computes it once."
            )
        return
    if not summary.pinned and summary.device != "cpu":
        yield "Host memory is not page-locked, which makes copies slow: see `pin_memory`; WSL allows little of it."
    activations, state = Kind.FETCH, Kind.STATE_UP
    if lane is Lane.TO_HOST:
        activations, state = Kind.OFFLOAD, Kind.STATE_DOWN
    part = numbers.kinds[activations] / numbers.busy[lane]
    if part > _MUCH:
        way = "come back" if lane is Lane.TO_DEVICE else "leave"
        advice = "`activations='recompute'` moves none"
        yield f"{part:.0%} of these copies are activations that {way}: {advice}."
    part = numbers.kinds[state] / numbers.busy[lane]
    if part > _MUCH and compact is not None:
        yield f"{part:.0%} of these copies are optimizer state that visits: {compact} has less (docs/host_memory.md)."
    if unused:
        yield (
            f"{readable_bytes(unused)} of the device are free: a larger batch computes more for "
            "the same copies of weights and gradients."
        )


def _on_the_optimizer(numbers: Breakdown, pipeline: Pipeline, lane: Lane, compact: str | None) -> Iterator[str]:
    """Give advice where a step waits for the optimizer, on the host or in visits."""
    stepping = numbers.kinds[Kind.STEP if lane is Lane.HOST else Kind.VISIT]
    if stepping <= _MUCH * numbers.busy[lane]:
        return
    whose = "host" if lane is Lane.HOST else "device"
    yield (
        f"The optimizer's steps take {readable_seconds(stepping / numbers.steps)} of the {whose}'s time in a step: a "
        "larger batch, or `accumulate_grad_batches`, steps less often for the same data."
    )
    options, unused = pipeline.options, _unused(pipeline)
    if options.optimizer_on == "host" and pipeline.summary().device != "cpu":
        yield "`optimizer_on='auto'` has units stepped on the device, where that is faster."
    elif unused and options.k != "auto":
        yield f"{readable_bytes(unused)} of the device are free: with `k='auto'`, units live and are stepped there."
    elif unused and options.memory_budget is not None:
        yield f"{readable_bytes(unused)} of the device are free: with a larger `memory_budget`, more units live there."
    if compact is not None:
        yield f"{compact} reads and writes half as much memory (docs/host_memory.md)."
