"""The leaf of a twin: a Parameter that counts in-place changes of its `.data`, which autograd does not count.

A forward may contain `self.weight.data.clamp_()`. That has to reach the master like any other change, but `.data` is an
alias with a version of its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

CAN_COMPILE_SUBCLASSES = torch.__version__ >= "2.11"  # compared as versions
"""Whether torch compiles units with such leaves like others; 2.6 made three times as many graphs of them."""

_DATA: Any = Tensor.data


class TwinParameter(nn.Parameter):
    """A Parameter that counts what is written to its `.data`."""

    @property
    def data(self) -> Tensor:
        """The values, without history, as of any Parameter."""
        if torch.compiler.is_compiling():
            return self.detach()  # so does dynamo, which thereby makes the leaf's own version count
        alias = self.__dict__.get("alias")
        if alias is None or not alias.is_set_to(self):
            _drop_alias(self)
            with torch.inference_mode(False):
                alias = self.__dict__["alias"] = _DATA.__get__(self)
        return cast("Tensor", alias.detach())  # shares the alias's version

    @data.setter
    def data(self, values: Tensor) -> None:
        _drop_alias(self)
        _DATA.__set__(self, values)


def writes_to_data(leaf: nn.Parameter) -> int:
    """Return how often a leaf's `.data` has been written to in place, as far as that is counted."""
    alias = leaf.__dict__.get("alias")
    return int(leaf.__dict__.get("writes_before", 0) + (0 if alias is None else alias._version))


def holds_alias(leaf: nn.Parameter) -> bool:
    """Tell whether a leaf holds its memory a second time, to count writes."""
    return "alias" in leaf.__dict__


def _drop_alias(leaf: TwinParameter) -> None:
    leaf.__dict__["writes_before"] = writes_to_data(leaf)
    leaf.__dict__.pop("alias", None)
