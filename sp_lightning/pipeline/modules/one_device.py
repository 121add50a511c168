"""Operations on tensors of which some lie on the host and some on the device, where in plain training all are on one.

Weights and gradients are on the host, buffers and batches on the device. Code that is not ours to place meets both:
hooks on weights (weight_hooks.py), and what runs between steps. `torch.compile` has to look into this file, as it may
compile what runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sp_lightning.pipeline._private import in_backward, push_function_mode, remove_function_mode, without_torch_function
from sp_lightning.pipeline.modules.operands import instances_in, run_on
from sp_lightning.pipeline.modules.suspension import guards_suspended

_MAKE_ALIKE = (Tensor.to, Tensor.type_as)
# These work across devices: if they fail, it is for another reason.
_LEFT_ALONE = (*_MAKE_ALIKE, Tensor.copy_, Tensor.backward, torch.autograd.backward, torch.autograd.grad)

_ON_LISTS = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_"))


class OperandsOnOneDevice(TorchFunctionMode):
    """Runs operations that torch refuses for this reason with all operands where the first one is.

    An operation in place writes to the first one. What torch does not refuse stays as it is: copies from one device to
    another, numbers in tensors, indices on the host.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, if need be with operands on one device."""
        kwargs = kwargs or {}
        if func in _ON_LISTS:
            # It may be refused in the middle, and counts no writes. The tensors that it writes to come first.
            movable = _are_apart(args, kwargs) and not _are_apart(args[:1])
            return _where_the_first_is(func, args, kwargs) if movable else func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if func in _LEFT_ALONE or _is_private(func) or not _are_apart(args, kwargs):
                raise
            try:
                return _where_the_first_is(func, args, kwargs)
            except RuntimeError:
                raise error from None


def _is_private(func: Callable[..., Any]) -> bool:
    """Tell whether an operation is torch's own, such as an optimizer's: it may write to any operand, uncounted."""
    name = getattr(func, "__name__", "")
    return name.startswith("_") and not name.startswith("__")


def _are_apart(*operation: Any) -> bool:
    with without_torch_function():  # a guarded weight says that it is on the device
        return len({operand.device for operand in instances_in(operation, Tensor)}) > 1


def _where_the_first_is(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with without_torch_function():
        device = next(instances_in((args, kwargs), Tensor)).device
    return run_on(device, func, args, kwargs)


class HostMeetsDevice(OperandsOnOneDevice):
    """The same wherever users' code in this thread may hold what lies on the host: between steps, and in some steps.

    Elsewhere it is not on the thread's stack: steps call thousands of operations, and compiled code is guarded on it.

    Attributes:
        weights: The identities of masters, by which they are known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: Container[int] = ()
        self._on = False
        self._enabled = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, if need be with operands on one device; what is made like a weight is not moved."""
        if func in _MAKE_ALIKE and len(args) > 1 and isinstance(args[1], Tensor) and id(args[1]) in self.weights:
            # `shadow.type_as(weight)` is the shadow itself in plain training, and may be written to.
            return args[0].to(args[1].dtype, *args[2:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def enable(self) -> None:
        """Bring operands together from now on."""
        self._enabled = True
        self._put(on=True)

    def disable(self) -> None:
        """Undo `enable`."""
        self._enabled = False
        self._put(on=False)

    def is_around(self) -> bool:
        """Tell whether it is on the stack of this thread, which is not one of autograd's."""
        return self._on and not in_backward()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Open a scope for a step, or for a unit's call in one, in which weights are where they are used."""
        if in_backward():  # perhaps in one of autograd's threads, where it is not
            yield
            return
        was_on = self._on
        self._put(on=False)
        try:
            yield
        finally:
            self._put(on=was_on and self._enabled)

    def note_alias(self) -> None:
        """Bring operands together in the rest of this step, whose code has got an alias of a weight, or a gradient."""
        if self._enabled and not (self._on or in_backward() or guards_suspended()):
            self._put(on=True)

    def _put(self, on: bool) -> None:
        if on != self._on:
            self._on = on
            if on:
                push_function_mode(self)
            else:
                remove_function_mode(self)
