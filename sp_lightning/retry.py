"""When one of the first steps fails for a reason that is ours: something is given up, and the micro-batch runs again.

What a step needs besides weights is not known before it has run, so the device's memory may be exhausted. Nor
is it known whether a unit's forward can run again in backward. Whatever a failed attempt has changed is put back:
random generators, buffers, metrics, what was logged, attributes of the module. So the run goes on with the numbers of
one in which nothing failed.

[Note: two graphs for one loss]
If backward fails, its graph still holds what it has not come to, and Lightning's loop holds the loss. So while a step
may have to run again, Lightning gets a loss without the module's graph, and makes its own of it: divided for
accumulation. In backward the two are joined, and if that fails, nobody holds the module's graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from sp_lightning._namespace import Namespace
from sp_lightning.pipeline import Pipeline, readable_bytes
from sp_lightning.pipeline.activations.effects import SideEffects
from sp_lightning.pipeline.activations.recompute import CannotRunAgain
from sp_lightning.pipeline.activations.surroundings import RandomStates
from sp_lightning.pipeline.modules.tensors import tensors_in

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

T = TypeVar("T")

_LARGEST = 1 << 28  # bytes of a tensor that is copied: a queue of features is smaller, a data set is larger
_WATCHED = 8  # micro-batches after units were arranged anew; later ones only if their inputs are the largest so far


class StepRetry:
    """Runs steps so that one which fails runs again: with a smaller window, or without second forwards.

    One for training, and another for evaluation: what works in the one need not in the other.

    Args:
        pipeline: The engine, which gives something up.
        module: The user's module, whose changes are undone.
        lightning: What is borrowed from the namespace.
        enabled: Whether steps may run again at all.

    Attributes:
        gave_up: Whether the pipeline takes less memory than it would have chosen to.
    """

    def __init__(self, pipeline: Pipeline, module: LightningModule, lightning: Namespace, enabled: bool = True) -> None:
        self.gave_up = False
        self._enabled = enabled
        self._pipeline = pipeline
        self._module = module
        self._lightning = lightning
        self._arranged = 0
        self._left = _WATCHED
        self._proven = _Proven(0, 0)
        self._attempt: _Attempt | None = None

    def training_step(self, inputs: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run a training step.

        Args:
            inputs: What it is called with.
            run: Calls it.

        Raises:
            torch.OutOfMemoryError: If it does not fit, and there is nothing left to give up.
        """
        self._attempt = None
        attempt = self._begin(inputs, run)
        if attempt is None:
            return run()
        output = self._until_it_works(attempt, run)
        if not self._module.automatic_optimization or (loss := _loss_in(output)) is None:
            self._note_success(attempt)
            return output
        attempt.loss, attempt.given = loss, loss.detach().requires_grad_()
        self._attempt = attempt
        return {**output, "loss": attempt.given} if isinstance(output, Mapping) else attempt.given

    def evaluation_step(self, inputs: tuple[Any, ...], run: Callable[[], T]) -> T:
        """Run a step of validation, of a test, or of a prediction; the rest is as for `training_step`."""
        attempt = self._begin(inputs, run)
        if attempt is None:
            return run()
        output = self._until_it_works(attempt, run)
        self._note_success(attempt)
        return output

    def _begin(self, inputs: tuple[Any, ...], run: Callable[[], Any]) -> _Attempt | None:
        """Look at what a step may change; None if it does not run again."""
        if not (self._enabled and self._pipeline.may_run_out):
            return None
        size = sum(tensor.nbytes for tensor in tensors_in(inputs))
        if not self._is_watched(size):
            return None
        return _Attempt(self._module, self._pipeline, self._lightning, inputs, run, size)

    @property
    def is_probing(self) -> bool:
        """Whether the step that is under way is the first one since units were arranged, or with inputs so large."""
        return self._attempt is not None and not self._is_proven(self._attempt.size)

    def backward(self, loss: Tensor, run: Callable[[Tensor], None]) -> None:
        """Run the backward pass of the last training step.

        Args:
            loss: What Lightning has made of the loss that it was given.
            run: Runs backward from a loss.

        Raises:
            torch.OutOfMemoryError: If it does not fit, and there is nothing left to give up, or it cannot run again.
            RuntimeError: If a unit cannot compute its activations a second time, and the step cannot run again.
        """
        attempt = self._attempt
        if attempt is None:
            run(loss)
            return
        try:
            self._backward(attempt, loss, run)
        finally:
            self._attempt = None
        self._note_success(attempt)

    def _backward(self, attempt: _Attempt, loss: Tensor, run: Callable[[Tensor], None]) -> None:
        (scale,) = torch.autograd.grad(loss, attempt.given)
        value = loss.detach()

        def backward() -> None:
            if attempt.loss is None:
                self._pipeline.drop_gradients()
                with self._lightning.in_hook(self._module, "training_step"):
                    attempt.loss = _loss_in(attempt.run())
            joined, attempt.loss = _Joined.apply(attempt.loss, value, scale), None
            run(joined)

        if self._pipeline.has_gradients():  # what is added to their sums cannot be taken away again
            backward()
        else:
            self._until_it_works(attempt, backward)

    def _until_it_works(self, attempt: _Attempt, run: Callable[[], T]) -> T:
        result, failure = _try(run)
        while failure is not None:
            if attempt.has_stepped():
                raise failure.as_error(
                    "The step cannot run again, because the optimizer has stepped already. Go on from a "
                    "checkpoint with smaller batches, or set `overlap_optimizer=False`."
                )
            given_up = failure.given_up or self._make_room(failure)
            lost = attempt.undo()
            if lost is not None:
                raise failure.as_error(f"The step cannot run again, because it {lost}.")
            self._lightning.warn(f"{given_up}. The step runs again, with the same data and the same random numbers.")
            result, failure = _try(run)
        return cast("T", result)

    def _is_watched(self, size: int) -> bool:
        if self._arranged != self._pipeline.stats.arrangements:
            self._arranged, self._left = self._pipeline.stats.arrangements, _WATCHED
        self._left -= 1
        return self._left >= 0 or not self._is_proven(size)

    def _is_proven(self, size: int) -> bool:
        """Whether a step with inputs of this many bytes has worked as units are arranged now."""
        return self._proven.arrangement == self._pipeline.stats.arrangements and size <= self._proven.size

    def _note_success(self, attempt: _Attempt) -> None:
        arrangement, proven = self._pipeline.stats.arrangements, self._proven
        before = proven.size if proven.arrangement == arrangement else 0
        self._proven = _Proven(arrangement, max(attempt.size, before))

    def _make_room(self, failure: _Failure) -> str:
        """Outside of any `except`, whose traceback would hold the activations."""
        given_up = self._pipeline.shrink()
        if given_up is None:
            raise failure.as_error(_advice(self._pipeline))
        self.gave_up = True
        gc.collect()
        device = self._pipeline.device
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
        return f"The device's memory did not suffice: {given_up}"


class _Proven(NamedTuple):
    """With which arrangement, by its number, a step has worked, and how large its inputs were."""

    arrangement: int
    size: int


class _Failure(NamedTuple):
    """Why an attempt has failed. The error itself is not held: its traceback would hold the activations.

    Attributes:
        kind: Of the error that tells the user.
        message: What it says.
        given_up: What has been given up already so that it does not happen again, in words.
    """

    kind: type[RuntimeError]
    message: str
    given_up: str | None = None

    def as_error(self, why: str) -> RuntimeError:
        """The error for the user, with the reason why the step does not run again."""
        return self.kind(f"{self.message}\n{why}")


class _Attempt:
    """A step that may have to run again, and what was there before it.

    Attributes:
        run: Runs it.
        size: Bytes of its inputs.
        loss: What it returned, with the module's graph.
        given: What Lightning got in its place.
    """

    loss: Tensor | None = None
    given: Tensor

    def __init__(
        self,
        module: LightningModule,
        pipeline: Pipeline,
        lightning: Namespace,
        inputs: tuple[Any, ...],
        run: Callable[[], Any],
        size: int,
    ) -> None:
        self.run = run
        self.size = size
        self._stats = pipeline.stats
        self._steps = self._stats.optimizer_steps, self._stats.steps_in_backward
        self._random = RandomStates(pipeline.device)
        self._takes_its_batch = any(isinstance(value, Iterator) for value in inputs)
        inputs = (*lightning.logged(module), *inputs)
        self._look = partial(SideEffects, module, inputs, outside=[module._trainer], largest=_LARGEST)
        self._effects = self._look()

    def has_stepped(self) -> bool:
        """Whether an optimizer has changed weights since."""
        return self._steps != (self._stats.optimizer_steps, self._stats.steps_in_backward)

    def undo(self) -> str | None:
        """Everything is as it was before the attempt that failed, and the next one can fail, too.

        Returns:
            What it has changed that cannot be undone, in words.
        """
        if self._takes_its_batch:
            return "takes its batch from an iterator"
        lost = self._effects.settle()
        if lost is None:
            self._effects.undo()
            self._effects = self._look()
            self._random.restore()
        return lost


class _Joined(torch.autograd.Function):
    """A loss with the module's graph, and the value and the gradient of what Lightning has made of it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.scale, None, None


def _advice(pipeline: Pipeline) -> str:
    """What a step takes, as far as it is known, and what would make it smaller."""
    summary, activations = pipeline.summary(), pipeline.stats.activation_peak_bytes
    weights = readable_bytes(summary.device_bytes)
    takes, choices = f"{weights} for weights, and what operations take", "`k=1`, smaller `units`"
    if torch.is_grad_enabled():
        takes = (
            f"{weights} for weights, {readable_bytes(summary.gradient_bytes)} for gradients on their way, at least "
            f"{readable_bytes(activations)} for activations, and what operations take in between"
        )
        choices = f"`SuperpipelineStrategy(activations='recompute')`, {choices}"
    return (
        f"Nothing is left that superpipeline could give up. With `k={summary.k}` a step needs {takes}. Use smaller "
        f"batches, or less memory for each: {choices}."
    )


def _try(run: Callable[[], T]) -> tuple[T | None, _Failure | None]:
    """The result, or why there is none; whatever the attempt held is free again."""
    try:
        return run(), None
    except torch.OutOfMemoryError as error:
        return None, _Failure(torch.OutOfMemoryError, str(error))
    except CannotRunAgain as error:
        if not error.is_avoided:
            raise
        return None, _Failure(RuntimeError, str(error), f"{error.reason}: what it saves is held from now on")


def _loss_in(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:  # a `backward` of the user's own may reduce it
        return None
    return loss if loss.requires_grad else None
