"""The steps of an attached module: the engine's scopes around them, and when the optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.pipeline import Afterwards
from sp_lightning.trainer.out_of_memory import out_of_memory_explained
from sp_lightning.trainer.when_to_step import SteppingPlan, WhenToStep


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
