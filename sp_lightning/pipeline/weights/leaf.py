"""The leaf of a twin: a Parameter that stands in for the master while its unit computes.

[Note: one weight, two Parameters]
The one in the module tree is the weight; code that uses the other one gets it. A program may hold a master since
`__init__` and use it within its module's call: the guard gives it the leaf (guard.py). And a program may keep a leaf
beyond the call: once no module has it any more, its class is `DepartedLeaf`, which gives the master. So a kept leaf
never reads what others have put in its place.

A forward may contain `self.weight.data.clamp_()`, which has to reach the master like any other change. So the leaf's
`.data` shares its version. Attributes that users set on a Parameter, its hooks, and its gradient are those of the
master.

`torch.compile` has to look into this file. The engine's work around graphs is in others, or it would be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.operations import ABOUT, Args, Kwargs, Meaning, Operation, meaning_of, replace_instances
from sp_lightning.pipeline.torch_private import without_torch_function


class CopiedPlainly(nn.Parameter):
    """A Parameter whose copies are ordinary ones, as its pickles are anyway."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy it as an ordinary Parameter."""
        return nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)


class WithMaster(Protocol):
    """The part of a weight that its leaf has to know."""

    name: str
    master: nn.Parameter


class TwinParameter(CopiedPlainly):
    """A Parameter that counts writes to its `.data`."""

    __slots__ = ("weight",)

    weight: WithMaster

    @property
    def twin_of(self) -> str:
        """The weight's name."""
        return self.weight.name

    @property
    def data(self) -> Tensor:
        """The values, without history, like the `.data` of any Parameter."""
        return self.detach()  # shares the leaf's version, as dynamo has it, too

    @data.setter
    def data(self, values: Tensor) -> None:
        self._refuse_other_memory(values)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Give it the memory that it has, as `parametrize` does; a leaf gets no other."""
        self._refuse_other_memory(source if not (args or kwargs) else None)
        return self

    def _refuse_other_memory(self, values: object) -> None:
        """Raise unless these are the values that it has: `module.float()` may have nothing to convert."""
        is_same = values is self or (
            isinstance(values, Tensor) and values.data_ptr() == self.data_ptr() and values.dtype is self.dtype
        )
        if not is_same:
            raise RuntimeError(
                f"A forward gives weight {self.twin_of!r} other memory (`weight.data = ...`, "
                "`weight.set_(...)`, or a conversion of its module) while it is on the device. Write "
                "into it (`weight.data.copy_(...)`), or convert it between steps."
            )

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Register a hook on the master, which keeps it when another leaf stands for the weight."""
        return self.weight.master.register_hook(hook)  # type: ignore[no-any-return, no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Register a hook on the master, which has the accumulated gradient."""
        master = self.weight.master
        return master.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the attributes that users have set, and not the weight: all Parameters pickle as ordinary ones."""
        return vars(self)


class EagerLeaf(TwinParameter):
    """The leaf of a weight of a model that is not compiled: the attributes that users set are those of the master."""

    __slots__ = ()

    @property
    def grad(self) -> Tensor | None:
        """The master's gradient: the engine takes the one that autograd gives the leaf at once."""
        return self.weight.master.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.weight.master.grad = gradient


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
