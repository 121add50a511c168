"""The steps of an attached module: the engine's scopes around them, their retries, and when the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.pipeline import Pipeline
from sp_lightning.trainer._namespace import Namespace
from sp_lightning.trainer.retry import StepRetry, TrainingRetry
from sp_lightning.trainer.when_to_step import SteppingPlan, WhenToStep, is_users

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
        # If a step ran again in one process only, the others would be left waiting. A user's own `backward` may not
        # call ours, which joins the graphs of a step that may run again.
        alone = pipeline.replicas is None and not is_users(strategy, "backward")
        self._training = TrainingRetry(pipeline, module, lightning, enabled=alone)
        self._evaluation = StepRetry(pipeline, module, lightning, enabled=pipeline.replicas is None)
        self._steps_next: tuple[Optimizer, SteppingPlan] | None = None

    @property
    def gave_up(self) -> bool:
        """Whether the pipeline has given something up to use less memory."""
        return self._training.gave_up or self._evaluation.gave_up

    def training_step(self, inputs: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run a training step, and run it again if it runs out of memory.

        Args:
            inputs: Its arguments.
            run: Calls it.
        """
        return self._training.step(inputs, partial(self._in_step, run))

    def evaluation_step(self, inputs: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run a validation, test or prediction step, and run it again if it runs out of memory.

        Args:
            inputs: Its arguments.
            run: Calls it.
        """
        return self._evaluation.step(inputs, partial(self._in_step, run))

    def _in_step(self, run: Callable[[], Any]) -> Any:
        with self._pipeline.step():
            return run()

    def backward(self, run: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a training step.

        Args:
            run: Calls the module's `backward` with a loss and the other arguments.
            loss: The loss that Lightning computed from the training step's.
            *args: Further positional arguments of `backward`.
            **kwargs: Further keyword arguments of `backward`.
        """

        def in_step(loss: Tensor) -> None:
            with self._pipeline.step_goes_on(), self._stepping(), self._pipeline.in_all_processes():
                named = kwargs.get("inputs")
                if named is None:
                    run(loss, *args, **kwargs)
                else:  # the graph was built with other tensors than the weights that the user names
                    tensors = [named] if isinstance(named, Tensor) else named
                    run(loss, *args, **{**kwargs, "inputs": self._pipeline.backward_inputs(tensors)})

        self._training.backward(loss, in_step)

    def _stepping(self) -> AbstractContextManager[None]:
        """Return the scope for a backward pass, according to the plan for the optimizer's step that follows."""
        if self._steps_next is None or self._steps_next[1].why_not is not None:
            return nullcontext()
        optimizer, plan = self._steps_next
        optimizers = self._pipeline.optimizers
        # While the step may have to run again, nothing is stepped in backward: that could not be undone.
        if plan.why_not_in_backward is None and not self._training.is_probing:
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
