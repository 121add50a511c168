"""Leaves at rest: whoever has kept the leaf of a weight from its unit's call uses the master instead.

In a call, the module tree holds leaves (weight.py), so a forward or a hook may keep one: `used.append(module.weight)`.
Afterwards its memory may hold another unit's weights. So while no call of its unit runs, a leaf has a class with
`__torch_function__`, and operations on it become operations on its master, which guard.py serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

from torch import nn

from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.guard import GoesFirst
from sp_lightning.pipeline.weights.leaf import StandsIn
from sp_lightning.pipeline.weights.operands import replace_instances
from sp_lightning.pipeline.weights.quantized import QuantizedTwin
from sp_lightning.pipeline.weights.weight import Twin


class RestingLeaf(StandsIn, GoesFirst, nn.Parameter):
    """The class of a leaf while no call of its unit runs."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation with masters in place of their leaves."""
        with without_torch_function():
            new_args, new_kwargs = replace_instances((args, kwargs or {}), cls, master_of)
        return func(*new_args, **new_kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the master."""
        return deepcopy(master_of(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the master."""
        return master_of(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def master_of(leaf: nn.Parameter) -> nn.Parameter:
    """Return the master that a leaf stands for."""
    master: nn.Parameter = leaf.__dict__["master"]
    return master


def put_to_rest(twin: Twin) -> None:
    """Have the master used in place of the twin's leaf."""
    if isinstance(twin, QuantizedTwin):
        twin.put_to_rest()
        return
    leaf = twin.parameter
    if type(leaf) is not RestingLeaf:
        twin.awake_class = type(leaf)
        _set_class(leaf, RestingLeaf)


def wake(twin: Twin) -> None:
    """Undo `put_to_rest`: the twin's memory holds the weight."""
    if isinstance(twin, QuantizedTwin):
        twin.wake()
    elif type(twin.parameter) is RestingLeaf:
        _set_class(twin.parameter, twin.awake_class)


def _set_class(leaf: nn.Parameter, cls: type[nn.Parameter]) -> None:
    object.__setattr__(leaf, "__class__", cls)  # past the leaf's own: this happens around every call of a unit
