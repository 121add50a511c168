"""The steps of an attached module: the engine's scopes around them, when the optimizer steps, and what one lacks.

The error of a step that runs out of device memory says what it took, and which one option helps next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.pipeline import Afterwards, Pipeline, is_out_of_memory, readable_bytes
from sp_lightning.trainer.when_to_step import SteppingPlan, WhenToStep

_SMALLER_BUDGET = 0.85  # the budget to try next, as a share of one that did not suffice: fragmentation took the rest


class Steps:
    """Runs the parts of a step for the strategy's hooks while a module is attached.

    Attributes:
        when: The same.
        pipeline: The engine.
    """

    def __init__(self, when: WhenToStep) -> None:
        self.when = when
        self.pipeline = when.pipeline
        self._steps_next: tuple[Optimizer, SteppingPlan] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Open a scope for a training, validation, test or prediction step."""
        with out_of_memory_explained(self.pipeline, trains=torch.is_grad_enabled()), self.pipeline.step():
            yield

    @contextmanager
    def backward(self, arguments: dict[str, Any]) -> Iterator[None]:
        """Open a scope for the backward pass of a training step.

        Args:
            arguments: The keyword arguments of `backward`. Weights that the user names as `inputs` are replaced: the
                graph was built with other tensors.
        """
        pipeline, inputs = self.pipeline, arguments.get("inputs")
        with (
            out_of_memory_explained(pipeline, trains=True),
            pipeline.step_goes_on(),
            self._stepping(),
            pipeline.in_all_processes(),
        ):
            if inputs is not None:
                arguments["inputs"] = pipeline.backward_inputs([inputs] if isinstance(inputs, Tensor) else inputs)
            yield

    def _stepping(self) -> AbstractContextManager[None]:
        """Return the scope for a backward pass, according to the plan for the optimizer's step that follows."""
        if self._steps_next is None or self._steps_next[1].why_not is not None:
            return nullcontext()
        optimizer, plan = self._steps_next
        optimizers = self.pipeline.optimizers
        if plan.why_not_in_backward is None:
            return optimizers.stepping_in_backward(optimizer, clamp=plan.clamp)
        return optimizers.measuring_norms() if plan.needs_norms else nullcontext()

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer, automatic: bool) -> Iterator[SteppingPlan]:
        """Open a scope around an optimizer's step, within which Lightning's own loop runs forward and backward."""
        plan = self.when.plan(optimizer, automatic)
        optimizers = self.pipeline.optimizers
        self._steps_next, optimizers.afterwards = (optimizer, plan), plan.afterwards
        try:
            yield plan
        finally:
            self._steps_next, optimizers.afterwards = None, Afterwards.DROPPED


@contextmanager
def out_of_memory_explained(pipeline: Pipeline, trains: bool) -> Iterator[None]:
    """Open a scope for a step or its backward; scopes may be nested.

    Args:
        pipeline: The engine.
        trains: Whether the step builds a graph, so that activations are part of what it takes.

    Raises:
        torch.OutOfMemoryError: If what runs in the scope runs out of device memory. The message begins with the
            original one, by which Lightning's `BatchSizeFinder` knows such errors.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error) or error.__cause__ is not None:  # the latter if a scope inside has explained it
            raise
        raise torch.OutOfMemoryError(f"{error}\n{_taken(pipeline, trains)} {_remedy(pipeline, trains)}") from error


def _taken(pipeline: Pipeline, trains: bool) -> str:
    summary, peak = pipeline.summary(), pipeline.backend.peak_memory()
    parts = [f"{readable_bytes(summary.device_bytes)} for weights (`k={summary.k}` of {summary.units} units)"]
    if trains:
        activations = readable_bytes(pipeline.stats.activation_peak_bytes)
        parts += [
            f"{readable_bytes(summary.gradient_bytes)} for gradients on their way to the host",
            f"up to {activations} for activations (`activations={pipeline.options.activations!r}`)",
        ]
    used = "" if peak is None else f" The peak of allocated memory was {readable_bytes(peak)}."
    return f"superpipeline: this step had {', '.join(parts)}, and what operations take in between.{used}"


def _remedy(pipeline: Pipeline, trains: bool) -> str:
    """Return the one option that is most likely to help."""
    options, summary, budget = pipeline.options, pipeline.summary(), pipeline.budget
    if trains and options.activations in ("keep", "offload", "recompute"):
        less = "recompute" if options.activations == "keep" else "recompute_offload"
        return f"Set `activations={less!r}`."
    if options.k != "auto" and summary.k > 1:
        return "Set `k=1`."
    if summary.plan is not None and budget is not None:
        return f"Set `memory_budget={int(_SMALLER_BUDGET * budget)}`, so that less is planned."
    if summary.k > 1 and not (trains and summary.device_bytes < pipeline.stats.activation_peak_bytes):
        return "Set `k=1`."
    return (
        "Use smaller batches, or `chunked_cross_entropy` where it is the logits of a large vocabulary that do not fit."
    )
