"""The leaf of a twin: a Parameter that stands in for the master while its unit computes.

A forward may contain `self.weight.data.clamp_()`, which has to reach the master like any other change. So the leaf's
`.data` shares its version. Attributes that users set on a Parameter, and its gradient, are those of the master.

`torch.compile` has to look into this file. What the engine does around graphs is elsewhere, or it would be compiled.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class CopiedPlainly(nn.Parameter):
    """A Parameter whose copies are ordinary ones, as its pickles are anyway."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy it as an ordinary Parameter."""
        return nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)


class TwinParameter(CopiedPlainly):
    """A Parameter that counts what is written to its `.data`."""

    __slots__ = ("twin_of",)

    twin_of: str  # the weight's name

    @property
    def data(self) -> Tensor:
        """The values, without history, as of any Parameter."""
        return self.detach()  # shares the leaf's version, as dynamo has it, too

    @data.setter
    def data(self, values: Tensor) -> None:
        if values is self or (values.data_ptr() == self.data_ptr() and values.dtype is self.dtype):
            return  # `module.float()` had nothing to convert
        raise RuntimeError(
            f"A forward gives weight {self.twin_of!r} other memory (`weight.data = ...`, or a "
            "conversion of its module) while it is on the device. Write into it "
            "(`weight.data.copy_(...)`), or convert it between steps."
        )


class WithMaster(Protocol):
    """A weight, as far as its leaf has to know it."""

    master: nn.Parameter


class EagerLeaf(TwinParameter):
    """The leaf of a weight of a model that is not compiled: the attributes that users set are those of the master."""

    __slots__ = ("weight",)

    weight: WithMaster

    @property
    def grad(self) -> Tensor | None:
        """The master's gradient: what autograd gives the leaf is taken from it at once."""
        return self.weight.master.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.weight.master.grad = gradient

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what users have set, and not the weight: Parameters of all classes are pickled as ordinary ones."""
        return vars(self)
