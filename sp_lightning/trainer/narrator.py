"""The strategy's own messages about a run: its plan, later choices, how optimizers step, what was streamed.

Metrics, recordings and advice come from the callback, if the user adds it: the strategy itself adds nothing to the
Trainer's loggers and callbacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from sp_lightning.monitor.report import outcome, plan_in_brief, plan_table, planned
from sp_lightning.pipeline import Pipeline, WindowPlan
from sp_lightning.trainer._namespace import Namespace, is_tuning
from sp_lightning.trainer.when_to_step import SteppingPlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Narrator:
    """Reports what a run is going to do and what it has done."""

    def __init__(self, lightning: Namespace, callback: type[Any]) -> None:
        self._lightning = lightning
        self._callback = callback
        self._said: set[Any] = set()
        self._silent = True
        self._has_warned = self._tells_outcome = False

    def begin(
        self, trainer: Trainer, pipeline: Pipeline | None, optimizers: Iterable[tuple[Optimizer, SteppingPlan]]
    ) -> None:
        """Say what the plan is: as a table if the Trainer prints a model summary or the callback asks for it.

        Repeated evaluations whose plan is the same say nothing, also at their end.
        """
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        chosen = [callback.summary for callback in callbacks if isinstance(callback, self._callback)]
        in_full = any(chosen or (isinstance(callback, self._lightning.summary) for callback in callbacks))
        self._silent = (bool(chosen) and not in_full) or is_tuning(trainer) or not trainer.is_global_zero
        self._tells_outcome = False
        if pipeline is None or self._silent:
            return
        texts = list(dict.fromkeys(_stepping(*pair) for pair in optimizers))
        brief = plan_in_brief(pipeline, texts)
        is_new = self._say(plan_table(pipeline, texts) if in_full else brief)
        self._said.update((brief, *texts))
        self._tells_outcome = in_full and (is_new or trainer.state.fn == self._lightning.fitting)

    def stepping(self, optimizer: Optimizer, plan: SteppingPlan) -> None:
        """Report when an optimizer steps which weights, unless that was reported before."""
        text = _stepping(optimizer, plan)
        self._say(f"Superpipeline: {text}", text)

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
