"""The leaf of a twin: a Parameter that counts in-place changes of its `.data`, which autograd does not count.

A forward may contain `self.weight.data.clamp_()`. That has to reach the master like any other change, but `.data` is an
alias with a version of its own. So the leaf holds on to one alias, whose version all others share; weight.py reads it.

`torch.compile` has to look into this file. What the engine does around graphs is elsewhere, or it would be compiled.
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

    alias: Tensor | None = None
    earlier_writes = 0  # to aliases that it had before it was given other memory

    @property
    def data(self) -> Tensor:
        """The values, without history, as of any Parameter."""
        if torch.compiler.is_compiling():
            return self.detach()  # so does dynamo, which thereby makes the leaf's own version count
        alias = self.alias
        if alias is None or not alias.is_set_to(self):
            self._drop_alias()
            with torch.inference_mode(False):
                alias = self.alias = _DATA.__get__(self)
        return cast("Tensor", alias.detach())  # shares the alias's version

    @data.setter
    def data(self, values: Tensor) -> None:
        self._drop_alias()
        _DATA.__set__(self, values)

    def _drop_alias(self) -> None:
        if self.alias is not None:
            self.earlier_writes += self.alias._version
            self.alias = None
