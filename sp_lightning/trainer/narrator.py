"""What is said of a run: its plan, as a table or in brief, what is chosen later, what was streamed, and advice.

Advice on what would make a step shorter is the callback's, who has recorded some; it is given only where a run's
numbers support it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
        self._said: set[Any] = set()
        self._silent = True
        self._has_warned = self._tells_outcome = False

    def begin(
        self, trainer: Trainer, pipeline: Pipeline | None, optimizers: Iterable[tuple[Optimizer, SteppingPlan]]
    ) -> None:
        """Say what the plan is: as a table if the Trainer prints a model summary or the callback asks for it."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        chosen = [callback.summary for callback in callbacks if isinstance(callback, self._callback)]
        in_full = any(chosen or (isinstance(callback, self._lightning.summary) for callback in callbacks))
        self._silent = (bool(chosen) and not in_full) or is_tuning(trainer) or not trainer.is_global_zero
        self._tells_outcome = False
        if pipeline is None or self._silent:
            return
        texts = list(dict.fromkeys(_stepping(*pair) for pair in optimizers))
        is_new = self._say(plan_table(pipeline, texts) if in_full else plan_in_brief(pipeline, texts))
        self._tells_outcome = in_full and (is_new or is_fitting(trainer))

    def measured(self, result: WindowPlan | str) -> None:
        """Report the result of measuring the first steps: a plan, or why there is none."""
        if not isinstance(result, str):
            choice = (result.k, result.k_prime, result.kept, result.on_device)  # without times, which differ each time
            self._say(f"Superpipeline: {planned(result)}", choice)
        elif not self._has_warned:
            self._has_warned = True
            self._lightning.warn(result)

    def end(self, pipeline: Pipeline | None) -> None:
        """Report what was streamed, if the plan was shown as a table."""
        if self._tells_outcome and pipeline is not None:
            self._lightning.info(outcome(pipeline.stats, pipeline.summary()))

    def _say(self, text: str, what: Any = None) -> bool:
        """Say something unless it was said before; return whether it was new."""
        is_new = not self._silent and (what or text) not in self._said
        if is_new:
            self._said.add(what or text)
            self._lightning.info(text)
        return is_new


def _stepping(optimizer: Optimizer, plan: SteppingPlan) -> str:
    name = type(optimizer).__name__
    if plan.why_not is not None:
        return f"{name} steps all weights after backward: {plan.why_not}."
    if plan.why_not_in_backward is None:
        return f"{name} steps each unit in backward, as soon as its gradients are on the host."
    return f"{name} steps unit by unit under the next forward: {plan.why_not_in_backward}."


def plan_table(pipeline: Pipeline, optimizers: Sequence[str]) -> str:
    """Describe the plan of a pipeline line by line, with how each optimizer steps, and why, if one does."""
    rows = pipeline.summary().rows()
    rows = [(name, value + _auto(pipeline) if name == "k, k_prime" else value) for name, value in rows]
    if optimizers:
        rows.append(("activations", pipeline.options.activations))
    return as_table([*rows, *(("optimizer", optimizer) for optimizer in optimizers)])


def plan_in_brief(pipeline: Pipeline, optimizers: Sequence[str]) -> str:
    """Describe the plan of a pipeline in two lines."""
    plan = pipeline.summary()
    weights = f"{readable_bytes(plan.device_bytes)} of {readable_bytes(plan.model_bytes)} of weights on {plan.device}"
    window = f"k={plan.k}, k_prime={plan.k_prime}{_auto(pipeline)}"
    return "\n".join([f"Superpipeline: {_many(plan.units, 'unit')}, {window}; at most {weights}.", *optimizers])


def _auto(pipeline: Pipeline) -> str:
    return " (auto)" if "auto" in (pipeline.options.k, pipeline.options.k_prime) else ""


def planned(plan: WindowPlan) -> str:
    """Describe the plan that was chosen after measuring the first steps, and what it is expected to take."""
    chosen = [f"k={plan.k}", f"k_prime={plan.k_prime}"]
    if plan.kept:
        chosen.append(f"{_many(len(plan.kept), 'unit')} kept on the device")
    if plan.on_device:
        chosen.append(f"{_many(len(plan.on_device), 'unit')} with optimizer state on the device")
    return (
        f"chosen by the first steps: {', '.join(chosen)}. A step should take {readable_seconds(plan.step_seconds)} and "
        f"{readable_bytes(plan.device_bytes)} of the device; the busiest lane is {LANES[plan.bottleneck]}."
    )


def outcome(stats: Stats, summary: Summary) -> str:
    """Describe in a few lines what was streamed, and what that saved."""
    stepped = f", {_many(stats.optimizer_steps, 'optimizer step')}" if stats.optimizer_steps else ""
    moved = f"{readable_bytes(stats.bytes_to_device)} to the device, {readable_bytes(stats.bytes_to_host)} back"
    late = f"{_many(stats.misses, 'load')} came late"
    weights = f"at most {readable_bytes(summary.device_bytes)} of {readable_bytes(summary.model_bytes)}"
    # What masters take beyond the model's own bytes is what is sent in their place.
    copies = max(0, summary.host_bytes - summary.model_bytes) if summary.lowered else 0
    parts = {
        "weights": summary.host_bytes - copies,
        "copies of them in autocast's dtype": copies,
        "gradients": summary.host_gradient_bytes,
        "optimizer": summary.optimizer_bytes,
    }
    words = [f"{name} {readable_bytes(size)} ({size / summary.parameters:.1f})" for name, size in parts.items() if size]
    shared = f", for {summary.devices} devices" if summary.devices > 1 else ""
    living = f"\nLiving on the device: {summary.living_on_device}." if summary.living_on_device else ""
    return (
        f"Superpipeline: {_many(stats.steps, 'batch')}{stepped}, {_many(stats.loads, 'unit load')}, {moved}; {late}.\n"
        f"Weights on {summary.device}, k={summary.k}, k_prime={summary.k_prime}: {weights}, {summary.saved:.0%} less.\n"
        f"On the host{shared}: {', '.join(words)}; {summary.host_bytes_per_parameter:.1f} bytes per parameter in all."
        f"{living}"
    )


def _many(count: int, noun: str) -> str:
    ending = "" if count == 1 else "es" if noun.endswith("h") else "s"
    return f"{count} {noun}{ending}"


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
