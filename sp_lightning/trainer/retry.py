"""If one of the first steps fails for a reason of ours, something is given up and the micro-batch runs again.

What a step needs besides weights is not known before it has run, so device memory may run out. Nor is it known whether
a unit's forward can run again in backward. Everything that a failed attempt has changed is restored: random generators,
buffers, metrics, logged values, attributes of the module. So the run goes on with the numbers of one in which nothing
failed.

[Note: two graphs for one loss]
If backward fails, its graph still holds what backward has not reached, and Lightning's loop holds the loss. So while a
step may have to run again, Lightning gets a loss without the module's graph and builds its own graph on it, which
divides for accumulation. Backward joins the two graphs, and if it fails, nobody holds the module's graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline import Pipeline, readable_bytes
from sp_lightning.pipeline.activations.recompute import CannotRunAgain
from sp_lightning.pipeline.modules.tensors import tensor_bytes, tensors_in
from sp_lightning.pipeline.transfer.backend import is_out_of_memory
from sp_lightning.trainer._namespace import Namespace
from sp_lightning.trainer.attempt import Attempt
from sp_lightning.trainer.when_to_step import overridden

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

T = TypeVar("T")

_IN_BETWEEN = ("optimizer_zero_grad", "on_before_zero_grad", "on_before_backward")  # the user's code before backward
_WATCHED = 8  # micro-batches that may run again after a new choice; later ones only with larger inputs than before


class StepRetry:
    """Runs evaluation steps, and if one fails, runs it again: with a smaller window, say.

    Training has a `TrainingRetry` of its own, because what works in one need not work in the other.

    Args:
        pipeline: The engine, which gives something up.
        module: The user's module, whose changes are undone.
        lightning: The namespace of Lightning in use.
        enabled: Whether steps may run again at all.

    Attributes:
        gave_up: Whether the pipeline has given something up to use less memory.
    """

    def __init__(self, pipeline: Pipeline, module: LightningModule, lightning: Namespace, enabled: bool = True) -> None:
        self.gave_up = False
        self._enabled = enabled
        self._pipeline = pipeline
        self._module = module
        self._lightning = lightning
        self._chosen = (0, 0)
        self._left = _WATCHED
        self._proven = _Proven((0, 0), 0)

    def step(self, inputs: tuple[Any, ...], run: Callable[[], T]) -> T:
        """Run a validation, test or prediction step.

        Args:
            inputs: Its arguments.
            run: Calls it.

        Raises:
            torch.OutOfMemoryError: If it does not fit, and nothing is left to give up or it cannot run again.
        """
        output, attempt = self._run(inputs, run)
        if attempt is not None:
            self._note_success(attempt)
        return output

    def _run(self, inputs: tuple[Any, ...], run: Callable[[], T]) -> tuple[T, Attempt | None]:
        """Run a step; return what it has returned, and the state before it if the step was watched."""
        self._forget_attempt()
        with self._pipeline.about_to_step():
            attempt = self._begin(inputs, run)
            return run() if attempt is None else self._until_it_works(attempt, run), attempt

    def _begin(self, inputs: tuple[Any, ...], run: Callable[[], Any]) -> Attempt | None:
        """Note the state that a step may change; None if the step will not run again."""
        if not (self._enabled and self._pipeline.may_run_out):
            return None
        size = sum(map(tensor_bytes, tensors_in(inputs)))
        if not self._is_watched(size):
            return None
        return Attempt(self._module, self._pipeline, self._lightning, inputs, run, size)

    def _until_it_works(self, attempt: Attempt, run: Callable[[], T]) -> T:
        result, failure = _try(run)
        while failure is not None:
            if self._pipeline.step_record.has_stepped():
                raise failure.as_error(
                    "The step cannot run again, because the optimizer has stepped already. Continue from a "
                    "checkpoint with smaller batches, or set `overlap_optimizer=False`."
                )
            if not self._pipeline.drop_new_gradients():  # before units are arranged anew, which moves gradients
                raise failure.as_error(
                    "The step cannot run again, because it adds to gradients that were there before it, or changes "
                    "them."
                )
            given_up = failure.given_up or self._make_room(failure)
            lost = attempt.undo()
            if lost is not None:
                raise failure.as_error(f"The step cannot run again, because it {lost}.")
            self._lightning.warn(f"{given_up}. The step runs again, with the same data and the same random numbers.")
            result, failure = _try(run)
        return cast("T", result)

    def _forget_attempt(self) -> None:
        self._pipeline.step_record.end()

    def _is_watched(self, size: int) -> bool:
        if self._chosen != self._pipeline.choices:
            self._chosen, self._left = self._pipeline.choices, _WATCHED
        self._left -= 1
        return self._left >= 0 or not self._is_proven(size)

    def _is_proven(self, size: int) -> bool:
        """Tell whether a step with inputs of at least this many bytes has worked with what is chosen."""
        return self._proven.choices == self._pipeline.choices and size <= self._proven.size

    def _note_success(self, attempt: Attempt) -> None:
        self._forget_attempt()
        choices, proven = self._pipeline.choices, self._proven
        before = proven.size if proven.choices == choices else 0
        self._proven = _Proven(choices, max(attempt.size, before))

    def _make_room(self, failure: _Failure) -> str:
        """Give something up and free cached memory, outside of any `except`: a traceback would hold activations.

        Returns:
            What was given up, for the log.
        """
        given_up = self._pipeline.shrink()
        if given_up is None:
            raise failure.as_error(_advice(self._pipeline))
        self.gave_up = True
        gc.collect()
        device = self._pipeline.device
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
        return f"The device's memory did not suffice: {given_up}"


class TrainingRetry(StepRetry):
    """Runs training steps and their backward passes; if either fails, both run again.

    Arguments and attributes are those of `StepRetry`.
    """

    _pending: _PendingBackward | None = None

    @override
    def step(self, inputs: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run a training step; arguments and errors are those of an evaluation step."""
        self._pending = None
        output, attempt = self._run(inputs, run)
        if attempt is None:
            return output
        self._pipeline.step_record.weights.conclude()
        if not self._module.automatic_optimization or (loss := _loss_in(output)) is None:
            self._note_success(attempt)
            return output
        lightning_loss = loss.detach().requires_grad_()
        lightning_loss.register_post_accumulate_grad_hook(_refuse_other_backward)  # type: ignore[no-untyped-call]
        trainer: Any = self._module.trainer
        if any(overridden([self._module, *trainer.callbacks], _IN_BETWEEN)):
            attempt.watch_hooks()
        self._pending = _PendingBackward(attempt, loss, lightning_loss, self._pipeline.with_gradients())
        return {**output, "loss": lightning_loss} if isinstance(output, Mapping) else lightning_loss

    @property
    def is_probing(self) -> bool:
        """Whether the step under way is the first one with what is chosen, or has larger inputs than all before."""
        return self._pending is not None and not self._is_proven(self._pending.attempt.size)

    def backward(self, loss: Tensor, run: Callable[[Tensor], None]) -> None:
        """Run the backward pass of the last training step.

        Args:
            loss: The loss that Lightning computed from the one it was given.
            run: Runs backward from a loss.

        Raises:
            torch.OutOfMemoryError: If it does not fit, and nothing is left to give up or the step cannot run again.
            RuntimeError: If a unit cannot recompute its activations, and the step cannot run again.
        """
        pending = self._pending
        if pending is None:
            run(loss)
            return
        try:
            self._backward(pending, loss, run)
        finally:
            self._pending = None
        self._note_success(pending.attempt)

    def _backward(self, pending: _PendingBackward, loss: Tensor, run: Callable[[Tensor], None]) -> None:
        attempt = pending.attempt
        attempt.note_hooks()
        (scale,) = torch.autograd.grad(loss, pending.lightning_loss)
        value = loss.detach()
        with_gradients = self._pipeline.with_gradients()

        def backward() -> None:
            if pending.loss is None:
                with self._lightning.in_hook(self._module, "training_step"):
                    pending.loss = _loss_in(attempt.run())
                self._pipeline.drop_gradients(but=with_gradients)  # as `zero_grad` before backward did
                attempt.redo_hooks()
                self._check_loss(pending)
            joined, pending.loss = _Joined.apply(pending.loss, value, scale), None
            run(joined)

        if not with_gradients <= pending.with_gradients:  # a hook made some, which does not run again
            backward()
        else:
            self._until_it_works(attempt, backward)

    def _check_loss(self, pending: _PendingBackward) -> None:
        """Warn if the loss of a step that has run again is another one."""
        first, second = pending.lightning_loss.detach(), pending.loss
        if second is not None and not torch.allclose(second.detach(), first, rtol=0, atol=0, equal_nan=True):
            self._lightning.warn(
                f"When the step ran again, its loss was {second.item()}, and {first.item()} before. It depends on "
                "something that could not be put back, such as weights that a hook changes before backward, a random "
                "generator of another library, or an operation that does not repeat itself."
            )


@dataclass
class _PendingBackward:
    """A training step that has run, and whose backward is still to come.

    Attributes:
        attempt: The state before the step.
        loss: The loss that it returned, with the module's graph; None if the step has to compute it again.
        lightning_loss: The leaf that Lightning got in its place.
        with_gradients: The parameters that had gradients when the step had run, by identity.
    """

    attempt: Attempt
    loss: Tensor | None
    lightning_loss: Tensor
    with_gradients: set[int]


class _Proven(NamedTuple):
    """What was chosen (`Pipeline.choices`), and the largest input size with which a step has worked with that."""

    choices: tuple[int, int]
    size: int


class _Failure(NamedTuple):
    """Why an attempt failed. It does not hold the error itself, whose traceback would hold the activations.

    Attributes:
        kind: The class of the error to raise for the user.
        message: The message of the original error.
        given_up: What has already been given up to avoid this failure, for the log; None if nothing has.
    """

    kind: type[RuntimeError]
    message: str
    given_up: str | None = None

    def as_error(self, why: str) -> RuntimeError:
        """Return the error for the user, with the reason why the step does not run again."""
        return self.kind(f"{self.message}\n{why}")


class _Joined(torch.autograd.Function):
    """Joins the two graphs: a loss on the module's graph with the value and the gradient of Lightning's loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.scale, None, None


def _advice(pipeline: Pipeline) -> str:
    """Return a message that says what a step takes, as far as is known, and how to make it smaller."""
    summary, activations = pipeline.summary(), pipeline.stats.activation_peak_bytes
    takes = f"{readable_bytes(summary.device_bytes)} for weights"
    choices = ["`k=1`", "smaller `units`"] if summary.k > 1 else ["smaller `units`"]
    if torch.is_grad_enabled():
        takes += (
            f", {readable_bytes(summary.gradient_bytes)} for gradients on their way, at least "
            f"{readable_bytes(activations)} for activations"
        )
        if pipeline.options.activations not in ("auto", "recompute_offload"):
            choices.insert(0, "`SuperpipelineStrategy(activations='recompute_offload')`")
        choices.append("for a large vocabulary `chunked_cross_entropy`")
    return (
        f"Nothing is left that superpipeline could give up. With `k={summary.k}` a step needs {takes}, and what "
        f"operations take in between. Use smaller batches, or less memory for each: {', '.join(choices)}."
    )


def _try(run: Callable[[], T]) -> tuple[T | None, _Failure | None]:
    """Return the result of an attempt, or why there is none. In that case, all that the attempt held is released."""
    try:
        return run(), None
    except CannotRunAgain as error:
        if not error.is_avoided:
            raise
        return None, _Failure(RuntimeError, str(error), f"{error.reason}: what it saves is held from now on")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None, _Failure(torch.OutOfMemoryError, str(error))


def _refuse_other_backward(loss: Tensor) -> None:
    loss.grad = None
    raise RuntimeError(
        "`backward()` was called on the loss between `training_step` and Lightning's own backward, where the loss has "
        "no graph of the model, because the step may have to run again. Call it in `training_step`."
    )


def _loss_in(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:  # a `backward` of the user's own may reduce it
        return None
    return loss if loss.requires_grad else None
