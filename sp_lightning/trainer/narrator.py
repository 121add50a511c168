"""The strategy's own messages about a run: its plan, later choices, how optimizers step, what was streamed.

They are shown if the Trainer prints a model summary. Metrics, recordings and advice come from the callback, if the user
adds it: the strategy itself adds nothing to the Trainer's loggers and callbacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from sp_lightning.monitor.report import outcome, plan_rows, planned, show_table
from sp_lightning.pipeline import Pipeline, WindowPlan
from sp_lightning.trainer._namespace import Namespace, is_tuning
from sp_lightning.trainer.when_to_step import SteppingPlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Narrator:
    """Reports what a run is going to do and what it has done.

    Args:
        lightning: The namespace of Lightning in use.
        callback: Its `SuperpipelineCallback`. If the Trainer has one, its `summary` decides what is shown.
    """

    def __init__(self, lightning: Namespace, callback: type[Any]) -> None:
        self._lightning = lightning
        self._callback = callback
        self._speaks = False
        self._shown: list[tuple[str, str]] | None = None
        self._said: set[Any] = set()

    def begin(
        self, trainer: Trainer, pipeline: Pipeline | None, optimizers: Iterable[tuple[Optimizer, SteppingPlan]]
    ) -> None:
        """Show the plan. Repeated evaluations stay silent, also at their end, while their plan does not change.

        Args:
            trainer: The Trainer whose run begins.
            pipeline: The engine; None if there is nothing to stream.
            optimizers: Each optimizer, with the plan for when it steps which weights.
        """
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._speaks = pipeline is not None and self._is_asked(trainer)
        if not self._speaks:
            return
        assert pipeline is not None
        texts = list(dict.fromkeys(_stepping(*pair) for pair in optimizers))
        self._said.update(texts)
        rows = plan_rows(pipeline, texts)
        self._speaks = trainer.state.fn == self._lightning.fitting or rows != self._shown
        if self._speaks:
            self._shown = rows
            rich = any(isinstance(callback, self._lightning.rich) for callback in callbacks)
            show_table(rows, rich, self._lightning.info)

    def _is_asked(self, trainer: Trainer) -> bool:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if is_tuning(trainer) or not trainer.is_global_zero:
            return False
        chosen = [callback.summary for callback in callbacks if isinstance(callback, self._callback)]
        return any(chosen or (isinstance(callback, self._lightning.summary) for callback in callbacks))

    def stepping(self, optimizer: Optimizer, plan: SteppingPlan) -> None:
        """Report when an optimizer steps which weights, unless that was reported before."""
        text = _stepping(optimizer, plan)
        if self._is_new(text):
            self._lightning.info(f"Superpipeline: {text}")

    def measured(self, result: WindowPlan | str) -> None:
        """Report the result of measuring the first steps: a plan, or why there is none."""
        if isinstance(result, str):
            if self._is_new("no plan"):  # once: the numbers in the text differ each time
                self._lightning.warn(result)
        elif self._speaks and self._is_new((result.k, result.k_prime, result.kept, result.on_device)):
            self._lightning.info(f"Superpipeline: {planned(result)}")

    def _is_new(self, said: Any) -> bool:
        is_new = said not in self._said
        self._said.add(said)
        return is_new

    def end(self, pipeline: Pipeline | None) -> None:
        """Report what was streamed, if the plan was shown."""
        if self._speaks and pipeline is not None:
            self._lightning.info(outcome(pipeline.stats, pipeline.summary()))


def _stepping(optimizer: Optimizer, plan: SteppingPlan) -> str:
    name = type(optimizer).__name__
    if plan.why_not is not None:
        return f"{name} steps all weights after backward: {plan.why_not}."
    if plan.why_not_in_backward is None:
        return f"{name} steps each unit in backward, as soon as its gradients are on the host."
    return f"{name} steps unit by unit under the next forward: {plan.why_not_in_backward}."
