"""Steps of an attached module: scopes of the engine around them, again if they fail, and stepped when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from sp_lightning._namespace import Namespace
from sp_lightning.pipeline import Pipeline
from sp_lightning.retry import StepRetry
from sp_lightning.when_to_step import SteppingPlan, is_users, plan_stepping

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class Steps:
    """What the strategy's hooks of a step do while a module is attached.

    Args:
        pipeline: The engine.
        module: The user's module.
        precision: The precision plugin.
        strategy: The class of the strategy, which may be a user's.
        lightning: What is borrowed from the namespace.
    """

    def __init__(
        self, pipeline: Pipeline, module: LightningModule, precision: Any, strategy: type, lightning: Namespace
    ) -> None:
        self._pipeline = pipeline
        self._module = module
        self._precision = precision
        self._strategy = strategy
        self._lightning = lightning
        # A step that ran again in one process alone would leave the others waiting. A `backward` of the user's own may
        # leave out ours, which joins the graphs of a step that may run again.
        alone = pipeline.replicas is None and not is_users(strategy, "backward")
        self._retry = StepRetry(pipeline, module, lightning, enabled=alone)
        self._evaluation_retry = StepRetry(pipeline, module, lightning, enabled=pipeline.replicas is None)
        self._steps_next: tuple[Optimizer, SteppingPlan] | None = None

    @property
    def gave_up(self) -> bool:
        """Whether the pipeline takes less memory than it would have chosen to."""
        return self._retry.gave_up or self._evaluation_retry.gave_up

    def training_step(self, inputs: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run a training step, again if it fails for want of memory.

        Args:
            inputs: What it is called with.
            run: Calls it.
        """
        return self._retry.training_step(inputs, partial(self._in_step, run))

    def evaluation_step(self, inputs: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run a step of validation, of a test, or of a prediction, again if it fails for want of memory.

        Args:
            inputs: What it is called with.
            run: Calls it.
        """
        return self._evaluation_retry.evaluation_step(inputs, partial(self._in_step, run))

    def _in_step(self, run: Callable[[], Any]) -> Any:
        with self._pipeline.step():
            return run()

    def backward(self, run: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a training step.

        Args:
            run: Calls the module's `backward`, with a loss and the other arguments.
            loss: What Lightning has made of the training step's loss.
            *args: The others.
            **kwargs: The others, by name.
        """

        def in_step(loss: Tensor) -> None:
            with self._pipeline.step(), self._stepping(), self._pipeline.in_all_processes():
                named = kwargs.get("inputs")
                if named is None:
                    run(loss, *args, **kwargs)
                else:  # the weights that a user names are not the tensors that the graph was built with
                    tensors = [named] if isinstance(named, Tensor) else named
                    run(loss, *args, **{**kwargs, "inputs": self._pipeline.backward_inputs(tensors)})

        self._retry.backward(loss, in_step)

    def _stepping(self) -> AbstractContextManager[None]:
        """The scope around a backward pass, by what is planned for the step that it belongs to."""
        if self._steps_next is None or self._steps_next[1].why_not is not None:
            return nullcontext()
        optimizer, plan = self._steps_next
        optimizers = self._pipeline.optimizers
        # what has been stepped cannot run again
        if plan.why_not_in_backward is None and not self._retry.is_probing:
            return optimizers.stepping_in_backward(optimizer, clamp=plan.clamp, keep_gradients=plan.keeps_gradients)
        return optimizers.measuring_norms() if plan.needs_norms else nullcontext()

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer, automatic: bool) -> Iterator[SteppingPlan]:
        """Scope around a step of an optimizer, in which Lightning's own loop runs forward and backward."""
        plan = self.plan(optimizer, automatic)
        self._steps_next = optimizer, plan
        try:
            yield plan
        finally:
            self._steps_next = None
        self._pipeline.weights_changed()

    def plan(self, optimizer: Optimizer, automatic: bool) -> SteppingPlan:
        """When the next step of an optimizer steps which weights."""
        return plan_stepping(
            self._pipeline, self._module, optimizer, automatic, self._precision, self._strategy, self._lightning
        )
