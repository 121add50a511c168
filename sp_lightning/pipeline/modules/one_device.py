"""Operations on tensors of which some lie on the host and some on the device, where in plain training all are on one.

Weights and gradients are on the host, buffers and batches on the device. Code that is not ours to place meets both:
hooks on weights (weight_hooks.py), and what runs between steps. `torch.compile` has to look into this file, as it may
compile what runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sp_lightning.pipeline._private import push_function_mode, remove_function_mode, without_torch_function
from sp_lightning.pipeline.modules.operands import instances_in, replace_instances

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
            return _on_one_device(func, args, kwargs) if movable else func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if func in _LEFT_ALONE or not _are_apart(args, kwargs):
                raise
            try:
                return _on_one_device(func, args, kwargs)
            except RuntimeError:
                raise error from None


def _are_apart(*operation: Any) -> bool:
    with without_torch_function():  # a guarded weight says that it is on the device
        return len({operand.device for operand in instances_in(operation, Tensor)}) > 1


def _on_one_device(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    copies: list[tuple[Tensor, Tensor]] = []
    with without_torch_function():
        device = next(instances_in((args, kwargs), Tensor)).device

    def bring(operand: Tensor) -> Tensor:
        with without_torch_function():
            if operand.device == device:
                return operand
        copies.append((operand, _copy(operand, device)))
        return copies[-1][1]

    args, kwargs = replace_instances((args, kwargs), Tensor, bring)
    result = func(*args, **kwargs)
    for operand, copy in copies:
        if copy._version:  # `out=`, an embedding that bounds its rows
            with torch.no_grad():
                operand.copy_(copy)
    return result


def _copy(operand: Tensor, device: torch.device) -> Tensor:
    builds_graph = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(builds_graph):  # tensors of inference have no version
        return operand.to(device)


class BetweenSteps(OperandsOnOneDevice):
    """The same for what runs in this thread between steps, from `begin` to `end`.

    Args:
        is_weight: Tells whether a tensor is a weight, which in plain training is on the device.
    """

    def __init__(self, is_weight: Callable[[Any], bool]) -> None:
        super().__init__()
        self._is_weight = is_weight

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, if need be with operands on one device; what is made like a weight is not moved."""
        if func in _MAKE_ALIKE and len(args) > 1 and self._is_weight(args[1]):
            # `shadow.type_as(weight)` is the shadow itself in plain training, and may be written to.
            return args[0].to(args[1].dtype, *args[2:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def begin(self) -> None:
        """Bring operands together from now on."""
        push_function_mode(self)

    def end(self) -> None:
        """Undo `begin`."""
        remove_function_mode(self)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Open a scope in which operations are left alone: a step has guards, and calls too many of them."""
        was_on = remove_function_mode(self)
        try:
            yield
        finally:
            if was_on:
                push_function_mode(self)
