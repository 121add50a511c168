"""Decides when the optimizer may step while the device computes, from the hooks that users override.

Lightning calls users' hooks between backward and the optimizer's step. Whatever these do to gradients and weights must
have the same effect as in plain training. Stepping after backward, during the next forward, is right with any hook.
Stepping in backward is right only where there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from sp_lightning.pipeline import Afterwards, Pipeline
from sp_lightning.pipeline.optimizer.kinds import why_not_by_unit
from sp_lightning.trainer._namespace import Namespace

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_SEES_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
_OF_THE_MODULE = (*_SEES_GRADIENTS, "backward", "configure_gradient_clipping", "clip_gradients", "manual_backward")
_OF_THE_STRATEGY = ("backward", "post_backward", "optimizer_step")
_CLIPS = ("clip_grad_by_norm", "clip_grad_by_value", "clip_gradients")
_OF_THE_PRECISION = ("backward", *_CLIPS, "optimizer_step", "post_backward")
_BEFORE_ZERO_GRAD = ("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad", "lr_scheduler_step")
_AFTER_THE_STEP = ("on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_validation_start")
_NOT_OF_USERS = ("lightning", "pytorch_lightning", "sp_lightning")


@dataclass(frozen=True)
class SteppingPlan:
    """When the weights of one optimizer are stepped.

    Attributes:
        why_not: Why they are stepped all at once, as in plain training; None if they are stepped unit by unit.
        why_not_in_backward: Why units are not stepped before backward ends; None if they are.
        needs_norms: Whether something between backward and the step needs the norms of gradients.
        clamp: The absolute value that gradients are clipped to; None if they are not clipped by value.
        afterwards: What becomes of the gradients that the step has used: whether something may read them.
    """

    why_not: str | None
    why_not_in_backward: str | None
    needs_norms: bool
    clamp: float | None
    afterwards: Afterwards


@dataclass(frozen=True)
class WhenToStep:
    """Plans the steps of an attached module's optimizers; the strategy may be of a user's subclass."""

    pipeline: Pipeline
    module: LightningModule
    precision: Any
    strategy: type
    lightning: Namespace

    def plan(self, optimizer: Optimizer, automatic: bool) -> SteppingPlan:
        """Decide when the next step of an optimizer, in automatic optimization or not, steps which weights."""
        trainer: Any = self.module.trainer
        clips = bool(trainer.gradient_clip_val)
        by_value = clips and trainer.gradient_clip_algorithm == "value"
        scales = getattr(self.precision, "scaler", None) is not None
        reasons = self._hindrances(automatic)
        is_off = self.pipeline.options.overlap_optimizer is False
        if clips and not by_value:
            reasons.append(f"`gradient_clip_val={trainer.gradient_clip_val}` needs the norm of all gradients")
        if scales:
            reasons.append("the loss scaler has to look at all gradients")
        return SteppingPlan(
            "`overlap_optimizer=False`" if is_off else why_not_by_unit(optimizer),
            reasons[0] if reasons else None,
            needs_norms=scales or (clips and not by_value) or _is_users(self.module, "configure_gradient_clipping"),
            clamp=float(trainer.gradient_clip_val) if by_value else None,
            afterwards=self._afterwards(),
        )

    def _afterwards(self) -> Afterwards:
        hooked = [self.module, *self.module.trainer.callbacks]  # type: ignore[attr-defined]
        if any(_overridden(hooked, _BEFORE_ZERO_GRAD)) or any(_overridden([self.strategy], ("optimizer_step",))):
            return Afterwards.KEPT_UNTIL_ZEROED
        kept = any(_overridden(hooked, _AFTER_THE_STEP))
        return Afterwards.KEPT_UNTIL_THE_NEXT_STEP if kept else Afterwards.DROPPED

    def _hindrances(self, automatic: bool) -> list[str]:
        """List what may read or change gradients between backward and the step."""
        precision, trainer = type(self.precision), self.module.trainer
        is_known = issubclass(precision, self.lightning.precisions) or precision is self.lightning.precision
        # Of plugin and strategy the classes: on the objects, some of these methods are ours.
        return [
            *([] if automatic else ["the step is not one of automatic optimization"]),
            *([] if is_known else [f"`{precision.__name__}` may do anything to gradients"]),
            *_overridden([precision], _OF_THE_PRECISION),
            *_overridden([self.strategy], _OF_THE_STRATEGY),
            *_overridden([self.module], _OF_THE_MODULE),
            *_overridden(trainer.callbacks, _SEES_GRADIENTS),  # type: ignore[attr-defined]
        ]


def _overridden(objects: Iterable[Any], hooks: Iterable[str]) -> Iterator[str]:
    """Yield, in words, which of these hooks users have overridden in objects or classes."""
    for thing in objects:
        name = (thing if isinstance(thing, type) else type(thing)).__name__
        yield from (f"`{name}.{hook}` is overridden" for hook in hooks if _is_users(thing, hook))


def _is_users(thing: Any, hook: str) -> bool:
    """Tell whether a hook of an object or class is defined neither by Lightning nor by us."""
    method = getattr(thing, hook, None)
    package = getattr(method, "__module__", "").split(".")[0]
    return method is not None and package not in _NOT_OF_USERS
