"""What the strategy says of a run by itself: its plan at the start, how optimizers step, and what was streamed.

It says it to whom the Trainer prints a summary of the model. Metrics, recordings and advice are the callback's, if it
is asked for: loggers, and the Trainer's callbacks, have what the user gave them and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sp_lightning._namespace import Namespace, is_tuning
from sp_lightning.monitor.report import outcome, plan_rows, show_table
from sp_lightning.pipeline import Pipeline

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
        self._said: set[str] = set()

    def begin(self, trainer: Trainer, pipeline: Pipeline | None, optimizers: Callable[[], Iterable[str]]) -> None:
        """Show the plan. Of evaluations in a loop nothing is said, also in the end, while their plan stays the same.

        Args:
            trainer: Whose run begins.
            pipeline: The engine; None if there is nothing to stream.
            optimizers: Tells how each optimizer is going to step, and why.
        """
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._speaks = pipeline is not None and self._is_asked(trainer)
        if not self._speaks:
            return
        assert pipeline is not None
        texts = list(dict.fromkeys(optimizers()))
        self._said.update(texts)
        rows = plan_rows(pipeline, [text.removeprefix("Superpipeline: ") for text in texts])
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

    def once(self, text: str) -> None:
        """Say how an optimizer steps, unless that was said before."""
        if text not in self._said:
            self._said.add(text)
            self._lightning.info(text)

    def end(self, pipeline: Pipeline | None) -> None:
        """Say what was streamed, if the plan was shown."""
        if self._speaks and pipeline is not None:
            self._lightning.info(outcome(pipeline.stats, pipeline.summary()))
