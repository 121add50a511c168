"""The leaf of a twin: a Parameter that stands in for the master while its unit computes.

A forward may contain `self.weight.data.clamp_()`, which has to reach the master like any other change. So the leaf's
`.data` shares its version. Attributes that users set on a Parameter, and its gradient, are those of the master.

`torch.compile` has to look into this file. What the engine does around graphs is elsewhere, or it would be compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CAN_COMPILE_SUBCLASSES = torch.__version__ >= "2.11"  # compared as versions
"""Whether torch compiles units with such leaves like others; 2.6 made three times as many graphs of them."""

_DATA: Any = Tensor.data
_GRADIENT: Any = Tensor.grad


def refuse_to_set_data(leaf: nn.Parameter, values: Tensor) -> None:
    """Raise if a forward gives a weight other memory; nothing happens where `module.float()` has nothing to convert."""
    if values is leaf or (values.data_ptr() == leaf.data_ptr() and values.dtype is leaf.dtype):
        return
    raise RuntimeError(
        f"A forward gives weight {leaf.__dict__['twin_of']!r} other memory (`weight.data = ...`, or a conversion of "
        "its module) while it is on the device. Write into it (`weight.data.copy_(...)`), or convert it between steps."
    )


class TwinParameter(nn.Parameter):
    """A Parameter that counts what is written to its `.data`."""

    @property
    def data(self) -> Tensor:
        """The values, without history, as of any Parameter."""
        return self.detach()  # shares the leaf's version, as dynamo has it, too

    @data.setter
    def data(self, values: Tensor) -> None:
        refuse_to_set_data(self, values)


class StandsIn:
    """What a leaf has of its master, in code that is not compiled: attributes that users set, and the gradient."""

    master: nn.Parameter
    data: Tensor
    requires_grad: bool

    def __getattr__(self, name: str) -> Any:
        """Look for an attribute that the leaf does not have in the master."""
        master = self.__dict__.get("master")
        if master is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(master, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, on the master if it is one of the user's."""
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self.master, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute, from the master if it is one of the user's."""
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self.master, name)

    def _is_own(self, name: str) -> bool:
        return name in self.__dict__ or hasattr(type(self), name)

    @property
    def grad(self) -> Tensor | None:
        """The master's gradient: what autograd gives the leaf is taken from it at once."""
        gradient: Tensor | None = self.master.grad
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.master.grad = gradient

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy it as an ordinary Parameter."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as an ordinary Parameter."""
        ordinary = nn.Parameter(self.data, self.requires_grad)
        vars(ordinary).update(vars(self.master))
        return ordinary.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class EagerLeaf(StandsIn, TwinParameter):
    """The leaf of a weight of a model that is not compiled."""


def take_gradient(leaf: nn.Parameter) -> Tensor | None:
    """Take from a leaf what autograd has given it."""
    gradient: Tensor | None = _GRADIENT.__get__(leaf)
    _GRADIENT.__set__(leaf, None)
    return gradient
