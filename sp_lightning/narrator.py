"""What the strategy says of a run by itself: its plan, what was chosen since, how optimizers step, what was streamed.

It says it to whom the Trainer prints a summary of the model. Metrics, recordings and advice are the callback's, if it
is asked for: loggers, and the Trainer's callbacks, have what the user gave them and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from sp_lightning._namespace import Namespace, is_tuning
from sp_lightning.monitor.report import outcome, plan_rows, planned, show_table
from sp_lightning.pipeline import Pipeline, WindowPlan
from sp_lightning.when_to_step import SteppingPlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Narrator:
    """Says what a run is going to do, and what it has done.

    Args:
        lightning: What is borrowed from the namespace.
        callback: Its `SuperpipelineCallback`, which decides if there is one.
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
        """Show the plan. Of evaluations in a loop nothing is said, also in the end, while their plan stays the same.

        Args:
            trainer: Whose run begins.
            pipeline: The engine; None if there is nothing to stream.
            optimizers: Each optimizer, and when it is going to step which weights.
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
        """Say when an optimizer steps which weights, unless that was said before."""
        text = _stepping(optimizer, plan)
        if self._is_new(text):
            self._lightning.info(f"Superpipeline: {text}")

    def measured(self, result: WindowPlan | str) -> None:
        """Say what came of measuring the first steps: a plan, or why there is none."""
        if isinstance(result, str):
            if self._is_new("no plan"):  # with other numbers each time
                self._lightning.warn(result)
        elif self._speaks and self._is_new((result.k, result.k_prime, result.resident, result.on_device)):
            self._lightning.info(f"Superpipeline: {planned(result)}")

    def _is_new(self, said: Any) -> bool:
        is_new = said not in self._said
        self._said.add(said)
        return is_new

    def end(self, pipeline: Pipeline | None) -> None:
        """Say what was streamed, if the plan was shown."""
        if self._speaks and pipeline is not None:
            self._lightning.info(outcome(pipeline.stats, pipeline.summary()))


def _stepping(optimizer: Optimizer, plan: SteppingPlan) -> str:
    name = type(optimizer).__name__
    if plan.why_not is not None:
        return f"{name} steps all weights after backward: {plan.why_not}."
    if plan.why_not_in_backward is None:
        return f"{name} steps each unit in backward, as soon as its gradients are on the host."
    return f"{name} steps unit by unit under the next forward: {plan.why_not_in_backward}."
