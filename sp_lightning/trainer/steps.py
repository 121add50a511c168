"""The steps of an attached module: the engine's scopes around them, and when the optimizer steps.

Lightning calls users' hooks between backward and the optimizer's step. Their changes of gradients and weights must have
the same effect as in plain training. A step after backward, during the next forward, is right with any hook. A step in
backward is right only where there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from sp_lightning.pipeline import Afterwards, Pipeline
from sp_lightning.pipeline.lanes.at_work import optimizer_waits
from sp_lightning.pipeline.optimizer.kinds import why_not_by_unit
from sp_lightning.trainer import StrategyPart

_SEES_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
_OF_THE_MODULE = (
    *_SEES_GRADIENTS,
    "backward",
    "configure_gradient_clipping",
    "clip_gradients",
    "manual_backward",
)
_OF_THE_STRATEGY = ("backward", "post_backward", "optimizer_step")
# All other methods of a precision plugin may look at gradients, or change them.
_NOT_OF_GRADIENTS = (
    "__",
    "connect",
    "convert_",
    "forward_context",
    "load_state_dict",
    "module_init_context",
    "on_",
    "pre_backward",
    "predict_step_context",
    "state_dict",
    "teardown",
    "tensor_init_context",
    "test_step_context",
    "train_step_context",
    "val_step_context",
)
_BEFORE_ZERO_GRAD = ("optimizer_zero_grad", "on_before_zero_grad")
_AFTER_THE_STEP = ("optimizer_step", "lr_scheduler_step", "teardown")
# All other hooks, by their names, may read the gradients that a step has used.
_SEES_NONE_USED = (
    *_SEES_GRADIENTS,  # these see those of the step that follows
    "on_before_backward",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "on_fit_start",
    "on_train_start",
    "on_load_checkpoint",
    "on_sanity_check_",
    "on_test_",
    "on_predict_",
    "on_validation_batch_",  # Lightning zeroes gradients as validation starts
    "on_validation_end",
    "on_validation_epoch_",
)
_NOT_OF_USERS = ("lightning", "pytorch_lightning", "sp_lightning")


@dataclass(frozen=True)
class SteppingPlan:
    """The time at which the weights of one optimizer are updated."""

    optimizer: Optimizer
    # whether Lightning's loop runs the backward that precedes the step, and not the user
    automatic: bool
    # why they are stepped all at once, as in plain training; None if unit by unit
    why_not: str | None
    # why units are not stepped before backward ends; None if they are
    why_not_in_backward: str | None
    # whether something between backward and the step needs the norms of gradients
    needs_norms: bool
    # the fate of the gradients that the step has used: whether other code may read them
    afterwards: Afterwards
    # whether only the optimizer reads gradients, so that they may wait on the device for it
    gradients_may_wait: bool

    @property
    def gradients_pass(self) -> bool:
        """Whether gradients are used as they come, and never wait for all others."""
        is_in_backward = self.why_not is None and self.why_not_in_backward is None
        return is_in_backward and self.afterwards is Afterwards.DROPPED

    def __str__(self) -> str:
        name = type(self.optimizer).__name__
        if self.why_not is not None:
            return f"{name} updates all weights after backward, because {self.why_not}."
        if self.why_not_in_backward is None:
            return f"{name} updates each unit in backward, as soon as its gradients are complete."
        return f"{name} updates one unit at a time during the next forward, because {self.why_not_in_backward}."


@contextmanager
def step_of_all(pipelines: Iterable[Pipeline]) -> Iterator[None]:
    """Open a step of several models, for code that may use their weights before any of them is called."""
    with ExitStack() as scopes:
        for pipeline in pipelines:
            scopes.enter_context(pipeline.step())
        yield


class StepsMixin(StrategyPart):
    """The part of the strategy that deals with steps: the engine's scopes around them, and the optimizers' plans."""

    # the plan of the optimizer in whose step Lightning runs forward and backward
    _stepping: SteppingPlan | None = None

    def overlapping(self, pipeline: Pipeline) -> AbstractContextManager[None]:
        """Return the scope for a backward pass, according to the plan for the optimizer's step that follows."""
        plan = self._stepping
        if plan is None:
            return nullcontext()
        # `training_step` and hooks may have changed the facts behind the plan
        self._stepping = plan = self.plan_step(pipeline, plan.optimizer, plan.automatic)
        pipeline.optimizers.afterwards = plan.afterwards
        if plan.why_not is not None:
            return nullcontext()
        if plan.why_not_in_backward is None:
            return pipeline.optimizers.stepping_in_backward(plan.optimizer)
        return pipeline.optimizers.clipping.measuring_norms() if plan.needs_norms else nullcontext()

    @contextmanager
    def optimizer_scope(self, pipeline: Pipeline, plan: SteppingPlan) -> Iterator[None]:
        """Open a scope around an optimizer's step, within which Lightning's own loop runs forward and backward."""
        self._stepping = plan
        pipeline.optimizers.afterwards = plan.afterwards
        try:
            with optimizer_waits():
                yield
        except BaseException:
            pipeline.optimizers.abandon()  # some units may have been stepped in backward
            raise
        finally:
            self._stepping = None
            pipeline.optimizers.afterwards = Afterwards.DROPPED

    def plan_step(self, pipeline: Pipeline, optimizer: Optimizer, automatic: bool) -> SteppingPlan:
        """Decide when the next step of an optimizer, in automatic optimization or not, steps which weights."""
        trainer: Any = self._module.trainer
        limit = trainer.gradient_clip_val
        scales = getattr(self.precision_plugin, "scaler", None) is not None
        needs_norms = scales or _is_users(self._module, "configure_gradient_clipping")
        reasons = [] if automatic else ["the step is not one of automatic optimization"]
        reasons += self._looks_at_gradients(trainer.callbacks)
        clips_each = bool(limit) and trainer.gradient_clip_algorithm == "value"
        afterwards = self._afterwards(trainer.callbacks)
        is_off = pipeline.options.overlap_optimizer is False
        why_not = "`overlap_optimizer=False` is set" if is_off else why_not_by_unit(optimizer)
        nobody_looks = not reasons and not clips_each and afterwards is Afterwards.DROPPED
        if limit:
            needs_norms |= not clips_each
            reasons.append(f"`gradient_clip_val={limit}` needs all gradients first")
        if scales:
            reasons.append("the loss scaler needs all gradients first")
        return SteppingPlan(
            optimizer,
            automatic,
            why_not=why_not,
            why_not_in_backward=next(iter(reasons), None),
            needs_norms=needs_norms,
            afterwards=afterwards,
            gradients_may_wait=nobody_looks and why_not is None,
        )

    def _looks_at_gradients(self, callbacks: list[Any]) -> list[str]:
        """List the hooks and methods that may read or change gradients between backward and the step."""
        # This looks at the classes of plugin and strategy: on the objects, some of these methods are ours.
        of_precision = [name for name in dir(self.lightning.precision) if not name.startswith(_NOT_OF_GRADIENTS)]
        return [
            *_overridden([type(self.precision_plugin)], of_precision),
            *_overridden([type(self)], _OF_THE_STRATEGY),
            *_overridden([self._module], _OF_THE_MODULE),
            *_overridden(callbacks, _SEES_GRADIENTS),
        ]

    def _afterwards(self, callbacks: list[Any]) -> Afterwards:
        # In an epoch in which SWA moves BatchNorm, a step without a backward takes the last gradients again.
        steps_again = any(isinstance(callback, self.lightning.swa) for callback in callbacks)
        hooked = [self._module, *callbacks]
        if steps_again or any(_overridden(hooked, _BEFORE_ZERO_GRAD)):
            return Afterwards.KEPT_UNTIL_ZEROED
        # hooks that run after a step has used gradients, before they are zeroed
        reads_used = any(
            _is_users(thing, name)
            for thing in hooked
            for name in dir(type(thing))
            if name.startswith("on_") and not name.startswith(_SEES_NONE_USED)
        )
        if reads_used or any(_overridden([*hooked, type(self)], _AFTER_THE_STEP)):
            return Afterwards.KEPT_UNTIL_THE_NEXT_STEP
        return Afterwards.DROPPED


def _overridden(objects: Iterable[Any], hooks: Iterable[str]) -> Iterator[str]:
    """Yield, as phrases, those of these hooks that users have overridden in objects or classes."""
    for thing in objects:
        cls = thing if isinstance(thing, type) else type(thing)
        for hook in hooks:
            if _is_users(thing, hook):
                yield f"`{cls.__name__}.{hook}` is overridden"


def _is_users(thing: Any, hook: str) -> bool:
    """Tell whether a hook of an object or class is defined neither by Lightning nor by us."""
    method = getattr(thing, hook, None)
    package = getattr(method, "__module__", "").split(".")[0]
    return callable(method) and package not in _NOT_OF_USERS
