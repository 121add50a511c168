"""The steps of an attached module: the engine's scopes around them, and when the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.pipeline import Pipeline
from sp_lightning.trainer._namespace import Namespace
from sp_lightning.trainer.out_of_memory import out_of_memory_explained
from sp_lightning.trainer.when_to_step import SteppingPlan, WhenToStep

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class Steps:
    """Runs the parts of a step for the strategy's hooks while a module is attached.

    Args:
        pipeline: The engine.
        module: The user's module.
        precision: The precision plugin.
        strategy: The class of the strategy, which may be a user's subclass.
        lightning: The namespace of Lightning in use.
    """

    def __init__(
        self, pipeline: Pipeline, module: LightningModule, precision: Any, strategy: type, lightning: Namespace
    ) -> None:
        self._pipeline = pipeline
        self.plan = WhenToStep(pipeline, module, precision, strategy, lightning).plan
        self._steps_next: tuple[Optimizer, SteppingPlan] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Open a scope for a training, validation, test or prediction step."""
        with out_of_memory_explained(self._pipeline, trains=torch.is_grad_enabled()), self._pipeline.step():
            yield

    def backward(self, run: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a training step.

        Args:
            run: Calls the module's `backward` with a loss and the other arguments.
            loss: The loss that Lightning computed from the training step's.
            *args: Further positional arguments of `backward`.
            **kwargs: Further keyword arguments of `backward`.
        """
        pipeline, named = self._pipeline, kwargs.get("inputs")
        with (
            out_of_memory_explained(pipeline, trains=True),
            pipeline.step_goes_on(),
            self._stepping(),
            pipeline.in_all_processes(),
        ):
            if named is not None:  # the graph was built with other tensors than the weights that the user names
                kwargs["inputs"] = pipeline.backward_inputs([named] if isinstance(named, Tensor) else named)
            run(loss, *args, **kwargs)

    def _stepping(self) -> AbstractContextManager[None]:
        """Return the scope for a backward pass, according to the plan for the optimizer's step that follows."""
        if self._steps_next is None or self._steps_next[1].why_not is not None:
            return nullcontext()
        optimizer, plan = self._steps_next
        optimizers = self._pipeline.optimizers
        if plan.why_not_in_backward is None:
            return optimizers.stepping_in_backward(optimizer, clamp=plan.clamp, keep_gradients=plan.keeps_gradients)
        return optimizers.measuring_norms() if plan.needs_norms else nullcontext()

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer, automatic: bool) -> Iterator[SteppingPlan]:
        """Open a scope around an optimizer's step, within which Lightning's own loop runs forward and backward."""
        plan = self.plan(optimizer, automatic)
        self._steps_next = optimizer, plan
        try:
            yield plan
        finally:
            self._steps_next = None
        if automatic and plan.why_not is None and not plan.keeps_gradients:
            self._pipeline.optimizers.give_up_gradients(optimizer)
        self._pipeline.weights_changed()
