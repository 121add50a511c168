"""What is said of a run, and nothing twice: its plan as a table, what is chosen later, and what was streamed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from sp_lightning.pipeline import Pipeline, Stats, Summary, WindowPlan, as_table, readable_bytes
from sp_lightning.planning.report import readable_seconds
from sp_lightning.trainer import Namespace, is_fitting, is_tuning
from sp_lightning.trainer.steps import SteppingPlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Narrator:
    """Reports what a run is going to do and has done, if the Trainer prints a model summary or has our callback."""

    def __init__(self, lightning: Namespace, callback: type[object]) -> None:
        self._lightning = lightning
        self._asking = (lightning.summary, callback)
        self._said: set[Hashable] = set()
        self._silent = True
        self._tells_outcome = False

    def begin(
        self,
        trainer: Trainer,
        pipeline: Pipeline | None,
        optimizers: Iterable[tuple[Optimizer, SteppingPlan]],
    ) -> None:
        """Print the plan, if it is a new one."""
        callbacks: list[object] = trainer.callbacks  # type: ignore[attr-defined]
        is_asked_for = any(isinstance(callback, self._asking) for callback in callbacks)
        self._silent = is_tuning(trainer) or not trainer.is_global_zero
        self._tells_outcome = False
        if pipeline is None or self._silent or not is_asked_for:
            return
        plan = plan_table(pipeline, list(dict.fromkeys(_stepping(*pair) for pair in optimizers)))
        is_new = self._is_new(plan)
        if is_new:
            self._lightning.info(plan)
        self._tells_outcome = is_new or is_fitting(trainer)

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
        """Report what was streamed, if the plan was shown."""
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
    rows = pipeline.summary().rows()
    if optimizers:
        rows.append(("activations", pipeline.options.activations))
    return as_table([*rows, *(("optimizer", words) for words in optimizers)])


def planned(plan: WindowPlan) -> str:
    """Describe the plan that was chosen after measuring the first steps, and what it is expected to take."""
    chosen = [f"k={plan.k}"]
    if plan.on_device:
        there = readable_bytes(plan.on_device_bytes)
        living = many(len(plan.on_device), "unit")
        chosen.append(f"{living} living on the device with their state ({there})")
    if plan.visiting:
        chosen.append(f"{many(len(plan.visiting), 'unit')} visiting it to be stepped there")
    cost = f"{readable_seconds(plan.step_seconds)} and {readable_bytes(plan.device_bytes)} of the device"
    return f"chosen by the first steps: {', '.join(chosen)}. A step should take {cost}."


def outcome(stats: Stats, summary: Summary) -> str:
    """Describe in a sentence what was streamed, and what it took."""
    up, down = readable_bytes(stats.bytes_to_device), readable_bytes(stats.bytes_to_host)
    done = f"{many(stats.steps, 'batch')}, {many(stats.loads, 'unit load')} ({stats.misses} late)"
    on_host = summary.host_bytes + summary.host_gradient_bytes + summary.optimizer_bytes
    return (
        f"Superpipeline: {done}, {up} to the device, {down} back; weights took at most "
        f"{readable_bytes(summary.device_bytes)} of {summary.device}, and all took "
        f"{readable_bytes(on_host)} of the host, "
        f"{on_host / max(1, summary.parameters):.1f} bytes per parameter."
    )


def many(count: int, noun: str) -> str:
    """Return a count with its noun."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}es" if noun.endswith("h") else f"{count} {noun}s"
