"""The steps of an attached module: the engine's scopes around them, and when the optimizer steps.

Lightning calls users' hooks between backward and the optimizer's step. Whatever these do to gradients and weights must
have the same effect as in plain training. Stepping after backward, during the next forward, is right with any hook.
Stepping in backward is right only where there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.pipeline import Afterwards, Pipeline, is_out_of_memory, readable_bytes
from sp_lightning.pipeline.optimizer.kinds import why_not_by_unit
from sp_lightning.trainer import StrategyPart

_SEES_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
_OF_THE_MODULE = (*_SEES_GRADIENTS, "backward", "configure_gradient_clipping", "clip_gradients", "manual_backward")
_OF_THE_STRATEGY = ("backward", "post_backward", "optimizer_step")
_CLIPS = ("clip_grad_by_norm", "clip_grad_by_value", "clip_gradients")
_OF_THE_PRECISION = ("backward", *_CLIPS, "optimizer_step", "post_backward")
_BEFORE_ZERO_GRAD = ("optimizer_zero_grad", "on_before_zero_grad")
_AFTER_THE_STEP = (
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_validation_start",
)
_NOT_OF_USERS = ("lightning", "pytorch_lightning", "sp_lightning")
_SMALLER_BUDGET = 0.85  # the budget to try next, as a share of one that did not suffice: fragmentation took the rest


@dataclass(frozen=True)
class SteppingPlan:
    """When the weights of one optimizer are stepped."""

    why_not: str | None  # why they are stepped all at once, as in plain training; None if unit by unit
    why_not_in_backward: str | None  # why units are not stepped before backward ends; None if they are
    needs_norms: bool  # whether something between backward and the step needs the norms of gradients
    clamp: float | None  # the absolute value that gradients are clipped to; None if they are not clipped by value
    afterwards: Afterwards  # what becomes of the gradients that the step has used: whether something may read them

    @property
    def gradients_pass(self) -> bool:
        """Whether gradients are stepped as they come, and never wait for all others."""
        is_in_backward = self.why_not is None and self.why_not_in_backward is None
        return is_in_backward and self.afterwards is Afterwards.DROPPED


class StepsMixin(StrategyPart):
    """The part of the strategy that deals with steps: the engine's scopes around them, and the optimizers' plans."""

    # the optimizer in whose step Lightning runs forward and backward, with the plan for it
    _stepping: tuple[Optimizer, SteppingPlan] | None = None

    @contextmanager
    def backward_scope(self, pipeline: Pipeline, arguments: dict[str, Any]) -> Iterator[None]:
        """Open a scope for the backward pass of a training step.

        In its keyword arguments, weights that the user names as `inputs` are replaced: the graph was built with others.
        """
        inputs = arguments.get("inputs")
        with (
            out_of_memory_explained(pipeline, trains=True),
            pipeline.step(goes_on=True),
            self._overlapping(pipeline),
            pipeline.in_all_processes(),
        ):
            if inputs is not None:
                arguments["inputs"] = pipeline.backward_inputs([inputs] if isinstance(inputs, Tensor) else inputs)
            yield

    def _overlapping(self, pipeline: Pipeline) -> AbstractContextManager[None]:
        """Return the scope for a backward pass, according to the plan for the optimizer's step that follows."""
        if self._stepping is None or self._stepping[1].why_not is not None:
            return nullcontext()
        optimizer, plan = self._stepping
        if plan.why_not_in_backward is None:
            return pipeline.optimizers.stepping_in_backward(optimizer, clamp=plan.clamp)
        return pipeline.optimizers.clipping.measuring_norms() if plan.needs_norms else nullcontext()

    @contextmanager
    def optimizer_scope(self, pipeline: Pipeline, optimizer: Optimizer, plan: SteppingPlan) -> Iterator[None]:
        """Open a scope around an optimizer's step, within which Lightning's own loop runs forward and backward."""
        self._stepping, pipeline.optimizers.afterwards = (optimizer, plan), plan.afterwards
        try:
            yield
        finally:
            self._stepping, pipeline.optimizers.afterwards = None, Afterwards.DROPPED

    def plan_step(self, pipeline: Pipeline, optimizer: Optimizer, automatic: bool) -> SteppingPlan:
        """Decide when the next step of an optimizer, in automatic optimization or not, steps which weights."""
        trainer: Any = self._module.trainer
        clips = bool(trainer.gradient_clip_val)
        by_value = clips and trainer.gradient_clip_algorithm == "value"
        scales = getattr(self.precision_plugin, "scaler", None) is not None
        reasons = self._hindrances(automatic)
        if pipeline.processes is not None and pipeline.processes.machines > 1:
            reasons.append("sums of gradients of several machines are complete when backward has ended")
        is_off = pipeline.options.overlap_optimizer is False
        if clips and not by_value:
            reasons.append(f"`gradient_clip_val={trainer.gradient_clip_val}` needs the norm of all gradients")
        if scales:
            reasons.append("the loss scaler has to look at all gradients")
        return SteppingPlan(
            "`overlap_optimizer=False`" if is_off else why_not_by_unit(optimizer),
            reasons[0] if reasons else None,
            needs_norms=scales or (clips and not by_value) or _is_users(self._module, "configure_gradient_clipping"),
            clamp=float(trainer.gradient_clip_val) if by_value else None,
            afterwards=self._afterwards(),
        )

    def _afterwards(self) -> Afterwards:
        hooked = [self._module, *self._module.trainer.callbacks]  # type: ignore[attr-defined]
        if any(_overridden(hooked, _BEFORE_ZERO_GRAD)) or self._steps_without_backward():
            return Afterwards.KEPT_UNTIL_ZEROED
        kept = any(_overridden([*hooked, type(self)], _AFTER_THE_STEP))
        return Afterwards.KEPT_UNTIL_THE_NEXT_STEP if kept else Afterwards.DROPPED

    def _steps_without_backward(self) -> bool:
        """Tell whether SWA moves BatchNorm in an epoch that ends with a step, which takes the last gradients again."""
        callbacks: list[Any] = self._module.trainer.callbacks  # type: ignore[attr-defined]
        averaging = (each for each in callbacks if isinstance(each, self.lightning.swa))
        return any(each.pl_module_contains_batch_norm(self._module) for each in averaging)

    def _hindrances(self, automatic: bool) -> list[str]:
        """List what may read or change gradients between backward and the step."""
        callbacks: list[Any] = self._module.trainer.callbacks  # type: ignore[attr-defined]
        # Of plugin and strategy the classes: on the objects, some of these methods are ours.
        return [
            *([] if automatic else ["the step is not one of automatic optimization"]),
            *_overridden([type(self.precision_plugin)], _OF_THE_PRECISION),
            *_overridden([type(self)], _OF_THE_STRATEGY),
            *_overridden([self._module], _OF_THE_MODULE),
            *_overridden(callbacks, _SEES_GRADIENTS),
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


@contextmanager
def out_of_memory_explained(pipeline: Pipeline, trains: bool) -> Iterator[None]:
    """Have an error of device memory say what a step, or its backward, took; scopes may be nested.

    The message begins with the original one, by which Lightning's `BatchSizeFinder` knows such errors. Of a step that
    trains, activations are a part.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error) or error.__cause__ is not None:  # the latter if a scope inside has explained it
            raise
        raise torch.OutOfMemoryError(f"{error}\n{_taken(pipeline, trains)} {_remedy(pipeline, trains)}") from error


def _taken(pipeline: Pipeline, trains: bool) -> str:
    summary, memory = pipeline.summary(), pipeline.backend.memory()
    parts = [f"{readable_bytes(summary.device_bytes)} for weights (`k={summary.k}` of {summary.units} units)"]
    if trains:
        activations = readable_bytes(pipeline.stats.activation_peak_bytes)
        parts += [
            f"{readable_bytes(summary.gradient_bytes)} for gradients on their way to the host",
            f"up to {activations} for activations (`activations={pipeline.options.activations!r}`)",
        ]
    used = "" if memory is None else f" The peak of allocated memory was {readable_bytes(memory.peak_so_far)}."
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
