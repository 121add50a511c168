"""Optimizers around a pipeline: noticing that they step, and what is done for them meanwhile.

The user's own optimizer steps the masters, which are ordinary CPU Parameters. All the engine has to know is *when* it
does, wherever it is called from: torch's hooks for all optimizers tell. `Optimizers` is what the engine offers in
return; how units are stepped while the device computes is in overlap.py, how gradients are clipped in clipping.py.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.gradients.gradient_return import GradientReturn
from sp_lightning.pipeline.modules.at_work import EngineAtWork
from sp_lightning.pipeline.modules.suspension import guards_resumed, resume_guards, suspend_guards
from sp_lightning.pipeline.optimizer.clipping import Clipping
from sp_lightning.pipeline.optimizer.on_device import move_state
from sp_lightning.pipeline.optimizer.overlap import Overlap
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.window import Window


class _Listener(Protocol):
    def before_closure(self) -> None:
        """An optimizer is about to call its closure, and may have written to its parameters since the last time."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are there, and the optimizer is about to update its parameters."""

    def after_step(self, optimizer: Optimizer) -> None:
        """It has."""


class Optimizers:
    """What a pipeline does for the optimizers of its weights.

    Args:
        stats: Counters.
        at_work: Entered around what is done.
        close: Called when something was done between steps.
        insists: Whether it is an error if an optimizer cannot step unit by unit.

    Attributes:
        seen: Optimizers that have stepped.
    """

    def __init__(self, stats: Stats, at_work: EngineAtWork, close: Callable[[], None], insists: bool) -> None:
        self._stats = stats
        self._at_work = at_work
        self._close = close
        self._insists = insists
        self.seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._overlap: Overlap
        self._clipping: Clipping
        self._returns: GradientReturn
        self._window: Window
        self._on_device: Sequence[nn.Parameter]
        self._parameters: set[int]

    def work_with(
        self,
        overlap: Overlap,
        clipping: Clipping,
        returns: GradientReturn,
        window: Window,
        on_device: Sequence[nn.Parameter],
        parameters: Iterable[nn.Parameter],
    ) -> None:
        """Units were arranged anew."""
        self._parameters = set(map(id, parameters))
        self._overlap, self._clipping, self._returns = overlap, clipping, returns
        self._window, self._on_device = window, on_device

    def before_closure(self) -> None:
        """An optimizer is about to call its closure, and may have written to its parameters since the last time."""
        self._window.suspect_all()

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update its parameters."""
        if optimizer not in self.seen:
            self._refuse_twins(optimizer)
            if not self._is_ours(optimizer):
                return
        if self._insists and (reason := self.why_not_overlapped(optimizer)) is not None:
            raise ValueError(f"`overlap_optimizer=True`: {reason}. Set it to 'auto' to step this one as it is.")
        if optimizer not in self.seen:
            self.seen.add(optimizer)
            move_state(optimizer, self._on_device)
        with self._at_work:
            self._overlap.before_step(optimizer)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """Whether it steps any weight of the module, and not those of other models alone."""
        return any(id(parameter) in self._parameters for parameter in _parameters_of(optimizer))

    def _refuse_twins(self, optimizer: Optimizer) -> None:
        # A twin has no gradient, so an optimizer would leave it as it is, and nobody would notice.
        for parameter in _parameters_of(optimizer):
            name = parameter.__dict__.get("twin_of")
            if name is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} is to step a copy of weight {name!r} that is on the device"
                    " while it is used there; the weight itself would never change. Whoever gave it to the optimizer"
                    " took it from its module in the middle of a forward, as Pyro's parameter store does. Give the"
                    " optimizer what `module.parameters()` yields outside of the forward; where that is not possible,"
                    " the model needs plain training."
                )

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has updated what it was left with."""
        if optimizer not in self.seen:
            self._window.suspect_all()  # it may be the one inside of another, which copies what it has stepped
            return
        with self._at_work:
            self._overlap.after_step()
            self._window.suspect_all()
            self._stats.optimizer_steps += 1
            self._close()

    @property
    def step_by_unit(self) -> bool:
        """Whether there are any that have stepped, and all of these step unit by unit."""
        return bool(self.seen) and all(self.why_not_overlapped(optimizer) is None for optimizer in self.seen)

    def why_not_overlapped(self, optimizer: Optimizer) -> str | None:
        """Why an optimizer steps all of its weights at once, as in plain training; None if it steps unit by unit."""
        with self._at_work:
            return self._overlap.why_not(optimizer)

    def stepping_in_backward(
        self, optimizer: Optimizer, *, clamp: float | None = None, keep_gradients: bool = False
    ) -> AbstractContextManager[None]:
        """Scope around a backward pass whose gradients are final: each unit is stepped as soon as its own have landed.

        `optimizer.step()` must follow, with the settings that the optimizer has now; it steps what is left. It is an
        error to look at gradients in between, or to change them.

        Args:
            optimizer: The optimizer.
            clamp: Clip gradients to plus and minus this value, as `torch.nn.utils.clip_grad_value_` does.
            keep_gradients: Keep gradients that arrive in a lower dtype until `zero_grad`. If they are not kept, it is
                an error to read them after the step.
        """
        return self._overlap.stepping_in_backward(optimizer, clamp, keep_gradients)

    @contextmanager
    def measuring_norms(self) -> Iterator[None]:
        """Scope around a backward pass whose gradients bring their norms: `clip_grad_norm` and `unscale` need them."""
        self._returns.measures_norms = True
        try:
            yield
        finally:
            self._returns.measures_norms = False

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """`torch.nn.utils.clip_grad_norm_`, done while the optimizer reads the gradients where that is possible."""
        parameters = list(parameters)
        with self._at_work:
            done = self._clipping.clip_norm(parameters, max_norm)
            self._close()
        if not done:
            nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value(self, parameters: Iterable[nn.Parameter], limit: float) -> None:
        """`torch.nn.utils.clip_grad_value_`, done while the optimizer reads the gradients where that is possible."""
        parameters = list(parameters)
        with self._at_work:
            done = self._clipping.clip_value(parameters, limit)
            self._close()
        if not done:
            nn.utils.clip_grad_value_(self._clipping.not_stepped(parameters), limit)

    def unscale(self, optimizer: Optimizer, inverse_scale: Tensor) -> bool | None:
        """What `GradScaler.unscale_` does, while the optimizer reads the gradients.

        Args:
            optimizer: Whose gradients.
            inverse_scale: What to multiply them with, on the host.

        Returns:
            Whether a gradient is not finite; None if nothing was done, because the norms did not come with them.
        """
        with self._at_work:
            overflow = self._clipping.unscale(optimizer, inverse_scale)
            self._close()
            return overflow


def _parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def listen_to_optimizers(listener: _Listener) -> None:
    """Tell `listener` of every optimizer step."""
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
    suspend_guards(sys._getframe(1))  # the frame of torch's wrapper around `step`
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    if closure is None:
        _tell(optimizer)
        return None
    # gradients are there only when the optimizer has called the closure
    if len(args) > 1:
        return (args[0], _then_tell(optimizer, closure), *args[2:]), kwargs
    return args, {**kwargs, "closure": _then_tell(optimizer, closure)}


def _then_tell(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    def closure_and_more() -> Any:
        for listener in list(_listeners):
            listener.before_closure()
        with guards_resumed():  # it computes, also outside of modules
            result = closure()
        _tell(optimizer)
        return result

    return closure_and_more


def _tell(optimizer: Optimizer) -> None:
    for listener in list(_listeners):
        listener.before_step(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    resume_guards()
    for listener in list(_listeners):
        listener.after_step(optimizer)
