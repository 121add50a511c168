"""A leaf that no module has now: it stands for its master ([Note: one weight, two Parameters] in leaf.py).

`torch.compile` does not look into this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from sp_lightning.pipeline.operations import ABOUT, Args, Kwargs, Meaning, Operation, meaning_of, replace_instances
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.leaf import EagerLeaf


class DepartedLeaf(EagerLeaf):
    """A leaf that no module has now, though the program may."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """The master's values, without history."""
        return self.weight.master.data

    @data.setter
    def data(self, values: Tensor) -> None:
        self.weight.master.data = values

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Give the master other memory."""
        return self.weight.master.set_(source, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Operation,
        types: Iterable[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run an operation with the master in place of the leaf."""
        kwargs = kwargs or {}
        if meaning_of(func) in (*ABOUT, Meaning.MEMORY):
            with without_torch_function():
                return func(*args, **kwargs)
        args, kwargs = replace_instances((args, kwargs), cls, lambda leaf: leaf.weight.master)
        return func(*args, **kwargs)
