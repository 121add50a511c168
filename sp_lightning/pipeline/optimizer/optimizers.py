"""How a pipeline notices that an optimizer steps, and what it offers to optimizers.

The user's own optimizer steps the masters, which are ordinary CPU Parameters. All that the engine has to know is *when*
it steps, whoever calls it, and torch's hooks on the steps of all optimizers tell that. `Optimizers` is what the engine
offers in return: steps unit by unit while the device computes (overlap.py), and clipping (clipping.py).
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.optimizer.clipping import Clipping
from sp_lightning.pipeline.optimizer.kinds import parameters_of
from sp_lightning.pipeline.optimizer.on_device import is_elsewhere, move_state
from sp_lightning.pipeline.optimizer.overlap import Overlap
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.guard import (
    EngineAtWork,
    begin_optimizer_step,
    end_optimizer_step,
    optimizer_waits,
)
from sp_lightning.pipeline.weights.window import Window


class Afterwards(enum.Enum):
    """What becomes of a gradient that an optimizer has used."""

    DROPPED = enum.auto()
    """It is gone when `step()` returns, as after `zero_grad`: the step has consumed it."""

    KEPT_UNTIL_THE_NEXT_STEP = enum.auto()
    """It can be read until the next step begins."""

    KEPT_UNTIL_ZEROED = enum.auto()
    """It stays until the user's `zero_grad`, and is added to if there is none."""


class _Listener(Protocol):
    def before_closure(self) -> None:
        """Called before an optimizer calls its closure; it may have written to its parameters since the last call."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called when gradients are there, before the optimizer updates its parameters."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after the optimizer has updated its parameters."""


class OptimizerParts(Protocol):
    """The engine, as far as optimizers know it."""

    @property
    def overlap(self) -> Overlap:
        """Steps units while the device computes."""

    @property
    def clipping(self) -> Clipping:
        """Clips and unscales gradients."""

    @property
    def stream(self) -> GradientStream:
        """Brings gradients, with their norms."""

    @property
    def window(self) -> Window:
        """Knows which groups are on the device."""

    @property
    def parameters(self) -> frozenset[int]:
        """The identities of the module's parameters."""

    def settle(self) -> None:
        """Finish all steps."""

    def relax_guard(self) -> None:
        """Note that work for an optimizer is over."""


class Optimizers:
    """The services of a pipeline to the optimizers of its weights.

    Attributes:
        seen: Optimizers that have stepped weights of the module.
        steps_taken: Number of their steps.
        afterwards: What becomes of the gradients that the next optimizer step uses.
    """

    _parts: OptimizerParts

    def __init__(
        self,
        stats: Stats,
        at_work: EngineAtWork,
        *,
        must_overlap: bool,
    ) -> None:
        self._stats = stats
        self._at_work = at_work
        self._must_overlap = must_overlap
        self._hooks: weakref.WeakKeyDictionary[Optimizer, list[RemovableHandle]] = weakref.WeakKeyDictionary()
        self.seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.steps_taken = 0
        self.afterwards = Afterwards.DROPPED
        self._kept: list[nn.Parameter] = []

    def work_with(self, parts: OptimizerParts) -> None:
        """Work with these parts from now on."""
        self._parts = parts

    def begin_step(self) -> None:
        """Drop gradients that were kept until the next step begins."""
        if self._kept:
            with self._at_work:
                self._parts.overlap.drop_gradients(self._kept)
            self._kept = []

    def before_closure(self) -> None:
        """Suspect all weights before a closure: the optimizer may have written to them since its last call."""
        self._parts.window.suspect_all()

    def before_step(self, optimizer: Optimizer) -> None:
        """Take the weights that are stepped unit by unit out of an optimizer that is about to step."""
        is_new = optimizer not in self.seen
        if is_new:
            self._refuse_twins(optimizer)
            if not self._is_ours(optimizer):
                return
        self._refuse_weights_at_work(optimizer)
        if self._must_overlap and (reason := self.why_not_overlapped(optimizer)) is not None:
            raise ValueError(
                f"`overlap_optimizer=True`: {reason}. Set it to 'auto' to let this optimizer step as in plain training."
            )
        if is_new:
            self.seen.add(optimizer)
            self._watch_state(optimizer)
            move_state(optimizer, self._with_state_elsewhere(optimizer))
        with self._at_work:
            self._parts.window.write_back_all()  # to the masters that are stepped
            self._parts.overlap.before_step(optimizer)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer has any weight of the module, and not only weights of other models."""
        return any(id(parameter) in self._parts.parameters for parameter in parameters_of(optimizer))

    def _with_state_elsewhere(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the weights of the module whose state is on another device: they have moved since it was made."""
        own = [parameter for parameter in parameters_of(optimizer) if id(parameter) in self._parts.parameters]
        with without_torch_function():  # looking state up by a guarded weight would wait for its gradient
            return [parameter for parameter in own if is_elsewhere(optimizer.state.get(parameter, {}), parameter)]

    def _refuse_twins(self, optimizer: Optimizer) -> None:
        # A twin has no gradient, so an optimizer would silently skip it.
        for parameter in parameters_of(optimizer):
            name = parameter.__dict__.get("twin_of")
            if name is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} is to step a copy of weight {name!r} that is on the device only "
                    "while it is used there; the weight itself would never change. The copy was taken from its module "
                    "in the middle of a forward, as Pyro's parameter store does. Give the optimizer what "
                    "`module.parameters()` yields outside of the forward; where that is not possible, train without "
                    "superpipeline."
                )

    def _refuse_weights_at_work(self, optimizer: Optimizer) -> None:
        """Raise if a forward that is under way computes with weights that are to be stepped: it has the old values."""
        groups = [group for group in self._parts.window.groups if group.users]
        stepped = set(map(id, parameters_of(optimizer))) if groups else set()
        for weight in [weight for group in groups for weight in group.weights]:
            if id(weight.master) in stepped and weight.twin.group.users:
                raise RuntimeError(
                    f"{type(optimizer).__name__} is to step weight {weight.name!r} inside of a forward that computes "
                    "with it, and would go on with the old values. Step it after that forward, in `training_step` for "
                    "example."
                )

    def after_step(self, optimizer: Optimizer) -> None:
        """Step the weights that were taken out of an optimizer, after it has stepped the others."""
        if optimizer not in self.seen:
            self._parts.window.suspect_all()  # another optimizer may wrap it, and copy what it has stepped
            return
        with self._at_work:
            self._parts.overlap.after_step(optimizer)
            used = list(parameters_of(optimizer))
            if self.afterwards is Afterwards.DROPPED:
                self._parts.overlap.drop_gradients(used)
            else:
                self._parts.overlap.keep_gradients(optimizer)
                self._kept += used if self.afterwards is Afterwards.KEPT_UNTIL_THE_NEXT_STEP else []
            self._parts.window.suspect_all()
            self._stats.optimizer_steps += 1
            self.steps_taken += 1
            self._parts.relax_guard()

    def _watch_state(self, optimizer: Optimizer) -> None:
        """Finish all steps before an optimizer's state is saved or loaded: it steps unit by unit from now on."""
        if optimizer not in self._hooks:
            self._hooks[optimizer] = [
                optimizer.register_state_dict_pre_hook(lambda _: self._parts.settle()),
                optimizer.register_load_state_dict_pre_hook(lambda *_: self._parts.settle()),
            ]

    def let_go(self) -> None:
        """Remove all hooks from optimizers."""
        for hook in chain.from_iterable(self._hooks.values()):
            hook.remove()

    def state_bytes(self, on_device: Collection[nn.Parameter]) -> int:
        """Return the bytes of host memory that the optimizers' state takes.

        Args:
            on_device: Parameters whose state is on the device.
        """
        elsewhere = set(map(id, on_device))
        with without_torch_function():
            # lists, because the thread that steps may add state at the same time
            states = [item for optimizer in self.seen for item in list(optimizer.state.items())]
            kept = [state for parameter, state in states if id(parameter) not in elsewhere]
        return sum(value.nbytes for state in kept for value in list(state.values()) if isinstance(value, Tensor))

    @property
    def step_by_unit(self) -> bool:
        """Whether an optimizer has stepped, and every one that has steps unit by unit."""
        return bool(self.seen) and all(self.why_not_overlapped(optimizer) is None for optimizer in self.seen)

    def why_not_overlapped(self, optimizer: Optimizer) -> str | None:
        """Return why an optimizer steps all weights at once, as in plain training; None if it steps unit by unit."""
        with self._at_work:
            return self._parts.overlap.why_not(optimizer)

    def stepping_in_backward(self, optimizer: Optimizer, *, clamp: float | None = None) -> AbstractContextManager[None]:
        """Step each unit in the backward pass of this scope as soon as its gradients have landed; they must be final.

        `optimizer.step()` must follow, with the settings that the optimizer has now; it steps what is left. It is an
        error to read or change gradients in between.

        Args:
            optimizer: The optimizer.
            clamp: Clip gradients to plus and minus this value, as `torch.nn.utils.clip_grad_value_` does.
        """
        return self._parts.overlap.stepping_in_backward(optimizer, clamp, self.afterwards is not Afterwards.DROPPED)

    @contextmanager
    def measuring_norms(self) -> Iterator[None]:
        """Have gradients of the backward pass in this scope bring their norms, for `clip_grad_norm` and `unscale`."""
        self._parts.stream.measures_norms = True
        try:
            yield
        finally:
            self._parts.stream.measures_norms = False

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """Clip as `torch.nn.utils.clip_grad_norm_` does; where possible, while the optimizer reads the gradients."""
        parameters = list(parameters)
        with self._at_work:
            done = self._parts.clipping.clip_norm(parameters, max_norm)
            self._parts.relax_guard()
        if not done:
            nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value(self, parameters: Iterable[nn.Parameter], limit: float) -> None:
        """Clip as `torch.nn.utils.clip_grad_value_` does; where possible, while the optimizer reads the gradients."""
        parameters = list(parameters)
        with self._at_work:
            done = self._parts.clipping.clip_value(parameters, limit)
            self._parts.relax_guard()
        if not done:
            nn.utils.clip_grad_value_(self._parts.clipping.not_stepped(parameters), limit)

    def unscale(self, optimizer: Optimizer, inverse_scale: Tensor) -> bool | None:
        """Unscale as `GradScaler.unscale_` does, but while the optimizer reads the gradients.

        Args:
            optimizer: The optimizer whose gradients are unscaled.
            inverse_scale: The factor, on the host.

        Returns:
            Whether a gradient is not finite; None if nothing was done, because the gradients did not bring their norms.
        """
        with self._at_work:
            overflow = self._parts.clipping.unscale(optimizer, inverse_scale)
            self._parts.relax_guard()
            return overflow


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def listen_to_optimizers(listener: _Listener) -> None:
    """Notify `listener` of every optimizer step."""
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))
    _listeners.add(listener)


def stop_listening(listener: _Listener) -> None:
    """Undo `listen_to_optimizers`."""
    _listeners.discard(listener)
    if not _listeners:
        while _handles:
            _handles.pop().remove()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    begin_optimizer_step()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    if closure is None:
        _tell(optimizer)
        return None
    # there are no gradients before the optimizer has called the closure
    if len(args) > 1:
        return (args[0], _then_tell(optimizer, closure), *args[2:]), kwargs
    return args, {**kwargs, "closure": _then_tell(optimizer, closure)}


def _then_tell(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    def closure_and_more() -> Any:
        for listener in list(_listeners):
            listener.before_closure()
        with optimizer_waits():  # the closure computes, and may do so outside of modules
            result = closure()
        _tell(optimizer)
        return result

    return closure_and_more


def _tell(optimizer: Optimizer) -> None:
    for listener in list(_listeners):
        listener.before_step(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    end_optimizer_step()
    for listener in list(_listeners):
        listener.after_step(optimizer)
