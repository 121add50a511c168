"""When the optimizer may step under the device's computing: what a module and its callbacks override says it.

Lightning calls users' hooks between backward and the optimizer's step. Whatever they do to gradients and weights must
have the effect that it has in plain training. Stepping after backward, under the next forward, is right with all of
them. Stepping in backward is right only where none of them is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from sp_lightning._namespace import Namespace
from sp_lightning.pipeline import Pipeline

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_SEES_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
_OF_THE_MODULE = (*_SEES_GRADIENTS, "backward", "configure_gradient_clipping", "clip_gradients", "manual_backward")
_OF_THE_STRATEGY = ("backward", "post_backward", "optimizer_step")
_OF_THE_PRECISION = (
    "backward",
    "clip_grad_by_norm",
    "clip_grad_by_value",
    "clip_gradients",
    "optimizer_step",
    "post_backward",
)
_AFTER_THE_STEP = (
    "optimizer_step",
    "optimizer_zero_grad",
    "on_before_zero_grad",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_validation_start",
)
_NOT_OF_USERS = ("lightning", "pytorch_lightning", "sp_lightning")


@dataclass(frozen=True)
class OverlapPlan:
    """How one optimizer step is overlapped.

    Attributes:
        pipeline: The engine.
        optimizer: The optimizer.
        why_not: Why it steps as in plain training; None if it steps unit by unit.
        why_not_in_backward: Why its units wait for the end of backward; None if they do not.
        needs_norms: Whether something between backward and the step needs the norms of gradients.
        clamp: The value by which gradients are clipped.
        keeps_gradients: Whether somebody may look at gradients after the step.
    """

    pipeline: Pipeline
    optimizer: Optimizer
    why_not: str | None
    why_not_in_backward: str | None
    needs_norms: bool
    clamp: float | None
    keeps_gradients: bool

    def around_backward(self, may_step: bool = True) -> AbstractContextManager[None]:
        """The scope for the backward pass before the step.

        Args:
            may_step: Whether units may be stepped in this one: what has been stepped cannot run again.
        """
        if self.why_not is not None:
            return nullcontext()
        if self.why_not_in_backward is None and may_step:
            return self.pipeline.optimizers.stepping_in_backward(
                self.optimizer, clamp=self.clamp, keep_gradients=self.keeps_gradients
            )
        return self.pipeline.optimizers.measuring_norms() if self.needs_norms else nullcontext()

    def __str__(self) -> str:
        name = type(self.optimizer).__name__
        if self.why_not is not None:
            return f"Superpipeline: {name} steps all weights after backward: {self.why_not}."
        if self.why_not_in_backward is None:
            return f"Superpipeline: {name} steps each unit in backward, as soon as its gradients are on the host."
        return f"Superpipeline: {name} steps unit by unit under the next forward: {self.why_not_in_backward}."


def plan_overlap(
    pipeline: Pipeline,
    module: LightningModule,
    optimizer: Optimizer,
    automatic: bool,
    precision: Any,
    strategy: type,
    lightning: Namespace,
) -> OverlapPlan:
    """Decide how the next step of an optimizer is overlapped.

    Args:
        pipeline: The engine.
        module: The user's module, attached to its Trainer.
        optimizer: The optimizer about to step.
        automatic: Whether Lightning's own loop steps it.
        precision: The precision plugin.
        strategy: The class of the strategy, which may be a user's.
        lightning: Where the module comes from.

    Returns:
        The plan.
    """
    trainer: Any = module.trainer
    clips = bool(trainer.gradient_clip_val)
    by_value = clips and trainer.gradient_clip_algorithm == "value"
    scales = getattr(precision, "scaler", None) is not None
    reasons = _hindrances(module, trainer.callbacks, automatic, precision, strategy, lightning)
    if pipeline.options.overlap_optimizer is False:
        why_not: str | None = "`overlap_optimizer=False`"
    else:
        why_not = pipeline.optimizers.why_not_overlapped(optimizer)
    if clips and not by_value:
        reasons.append(f"`gradient_clip_val={trainer.gradient_clip_val}` needs the norm of all gradients")
    if scales:
        reasons.append("the loss scaler has to look at all gradients")
    return OverlapPlan(
        pipeline,
        optimizer,
        why_not,
        reasons[0] if reasons else None,
        needs_norms=scales or (clips and not by_value) or _is_users(module, "configure_gradient_clipping"),
        clamp=float(trainer.gradient_clip_val) if by_value else None,
        keeps_gradients=any(_overridden([module, *trainer.callbacks], _AFTER_THE_STEP)),
    )


def _hindrances(
    module: LightningModule,
    callbacks: Iterable[Any],
    automatic: bool,
    precision: Any,
    strategy: type,
    lightning: Namespace,
) -> list[str]:
    """What may look at gradients, or change them, between backward and the step."""
    hindrances = []
    if not automatic:
        hindrances.append("the step is not one of automatic optimization")
    elif not isinstance(precision, lightning.precisions) and type(precision) is not lightning.precision:
        hindrances.append(f"`{type(precision).__name__}` may do anything to gradients")
    # of the classes: on the objects themselves some of them are ours
    for cls, hooks in ((type(precision), _OF_THE_PRECISION), (strategy, _OF_THE_STRATEGY)):
        hindrances += [f"`{cls.__name__}.{hook}` is overridden" for hook in hooks if _is_users(cls, hook)]
    hindrances += [f"`{name}` is overridden" for name in _overridden([module], _OF_THE_MODULE)]
    hindrances += [f"`{name}` is overridden" for name in _overridden(callbacks, _SEES_GRADIENTS)]
    return hindrances


def _overridden(objects: Iterable[Any], hooks: Iterable[str]) -> Iterator[str]:
    """Hooks that are users' own code."""
    for thing in objects:
        yield from (f"{type(thing).__name__}.{hook}" for hook in hooks if _is_users(thing, hook))


def _is_users(thing: Any, hook: str) -> bool:
    method = getattr(thing, hook, None)
    package = getattr(method, "__module__", "").split(".")[0]
    return method is not None and package not in _NOT_OF_USERS
