"""One weight and its two Parameter objects.

The *master* is the `nn.Parameter` that the user's module was built with. It stays on the host for good; optimizers,
clipping, EMA and checkpoints see nothing else. The *twin* is a Parameter over device memory; while a unit computes,
twins stand in the module tree in place of the masters, so the graph is built on the device.
"""

from __future__ import annotations

import sys
import weakref
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline._private import storage_key, users_of_storage

if TYPE_CHECKING:
    from sp_lightning.pipeline.weights.device import Group
    from sp_lightning.pipeline.weights.graphs import Graph
    from sp_lightning.pipeline.weights.units import Unit


CAN_SAY_OTHER_DTYPE = torch.__version__ >= "2.11"  # compared as versions
"""Whether torch compiles units that have `LoweredParameter` as others; 2.6 made three times the graphs of them."""

_OWN_USERS = 2  # of a twin's memory: its data and its parameter


def built_before(name: str) -> RuntimeError:
    """What is raised where backward comes to a weight that lies elsewhere by now."""
    return RuntimeError(
        f"backward needs weight {name!r} of a graph that was built before superpipeline arranged its memory anew "
        "(after a first step, in `rebuild()` or in `detach()`). Call backward in the step of its forward."
    )


class LoweredParameter(nn.Parameter):
    """A weight that was lowered on the host, as autocast would lower it for its one use, and nobody should notice.

    Models ask for the dtype before that use: `x.to(self.weight.dtype)`, and then dropout. Torch's own code is told the
    truth: a checkpoint compares what was saved with a copy that is no Parameter.
    """

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The master's, for models."""
        if not torch.compiler.is_compiling() and sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return super().dtype
        return torch.float32


class Twin:
    """A weight on the device: tensors over a fixed place in a slot, or over memory that is never given away.

    Attributes:
        weight: Whose twin it is.
        group: What has to be on the device for the bytes to be right.
        data: The bytes as a tensor without autograd.
        parameter: The leaf that the graph is built on.
    """

    def __init__(self, weight: Weight, group: Group, data: Tensor) -> None:
        self.weight = weight
        self.group = group
        self.data = data
        with torch.inference_mode(False):
            kind = LoweredParameter if weight.lowered and CAN_SAY_OTHER_DTYPE else nn.Parameter
            self.parameter = kind(data, requires_grad=False)
        self.parameter.__dict__["twin_of"] = weight.name  # it may be kept by somebody for longer than this is here
        self.key = storage_key(data)
        self.gradient_hook: RemovableHandle | None = None
        self._seen_version = self.parameter._version
        self._write_backs = 0
        self._replacements = 0

    def moved_to(self, group: Group, data: Tensor) -> Twin:
        """The same leaf over other memory: a graph that has the leaf already goes on adding up its gradient there."""
        moved = copy(self)
        moved.group, moved.data, moved.key = group, data, storage_key(data)
        self.parameter.data = data
        return moved

    def version(self) -> int:
        """Grows with every in-place change that autograd would count on a plain parameter.

        Saved-tensor hooks switch autograd's own check off, so saved weights are checked against this.
        """
        return self.weight.master._version + self.parameter._version - self._write_backs + self._replacements

    def refuse_gradients(self) -> None:
        """Units were arranged anew: a gradient that came here would be lost."""
        name = self.weight.name

        def refuse(_: Tensor) -> None:
            raise built_before(name)

        if self.parameter.requires_grad:
            self.parameter.register_hook(refuse)  # type: ignore[no-untyped-call]  # before the gradient is added, which would say that shapes differ

    @property
    def changed_in_place(self) -> bool:
        """Whether a forward wrote into the twin (`nn.Embedding(max_norm=...)` does) since it was last written back."""
        return self.parameter._version != self._seen_version

    @property
    def is_aliased(self) -> bool:
        """Whether others hold its memory, without a handle: a checkpoint does that until backward has read it."""
        return users_of_storage(self.data) > _OWN_USERS

    @property
    def is_replaced(self) -> bool:
        """Whether a forward gave the leaf other memory (`weight.data = ...`)."""
        return self.parameter.data_ptr() != self.data.data_ptr()

    def take_back(self) -> None:
        """Put the values that a forward gave the leaf where the weight lies.

        Raises:
            RuntimeError: They are of another shape.
        """
        given, self.parameter.data = self.parameter.data, self.data
        if given.shape != self.data.shape:
            raise RuntimeError(
                f"A forward gave weight {self.weight.name!r} a `.data` of shape {tuple(given.shape)} in place of "
                f"{tuple(self.data.shape)}. Change the shape of a weight before the training."
            )
        self.data.data.copy_(given)  # what was saved since then has memory of its own: no change of version for it
        self._replacements += 1

    def written_back(self) -> None:
        """The master got the change, by one in-place write, which must not count twice."""
        self._seen_version = self.parameter._version
        self._write_backs += 1


class Weight:
    """A weight of the model.

    Args:
        name: Its first name in the module tree.
        master: The user's Parameter.

    Attributes:
        host: The master's memory as a plain tensor.
        compute_dtype: The dtype in which it is sent: the master's, or the one that autocast lowers it to.
        averaged: Whether its gradient is averaged over several processes.
        unit: The unit it belongs to.
        used_for: The graph that it was last used for, where that matters (autocast without its cache).
        twin: Its current twin.
    """

    unit: Unit
    twin: Twin

    def __init__(self, name: str, master: nn.Parameter) -> None:
        self.name = name
        self.master = master
        self.host = master.data
        self.compute_dtype = master.dtype
        self.averaged = False
        self.used_for: weakref.ref[Graph] | None = None

    @property
    def lowered(self) -> bool:
        """Whether it is sent in another dtype than the master's."""
        return self.compute_dtype != self.master.dtype

    @property
    def compute_bytes(self) -> int:
        """Bytes of the weight as it is sent."""
        return self.master.numel() * self.compute_dtype.itemsize

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which its gradient leaves the device; averages are taken in the master's."""
        return self.master.dtype if self.averaged else self.compute_dtype

    def adopt(self, host: Tensor) -> None:
        """Move the master's values into `host` and point the master there; the Parameter object stays the same."""
        host.copy_(self.master.data)
        self.master.data = host
        self.host = host

    @property
    def is_replaced(self) -> bool:
        """Whether someone gave the master memory that ours cannot stand for.

        They keep ours, as an EMA does that puts the weights back, or theirs is of another kind (`module.double()`).
        """
        return self.master.data_ptr() != self.host.data_ptr() and (
            self._is_of_another_kind or users_of_storage(self.host) > 1
        )

    @property
    def _is_of_another_kind(self) -> bool:
        return self.master.dtype != self.host.dtype or self.master.shape != self.host.shape

    def readopt(self) -> None:
        """If someone gave the master other memory (`p.data = ...`), take its values back into ours."""
        if self.master.data_ptr() != self.host.data_ptr():
            if self._is_of_another_kind:
                raise RuntimeError(
                    f"Weight {self.name!r} was {self.host.dtype} of shape {list(self.host.shape)} and is "
                    f"{self.master.dtype} of shape {list(self.master.shape)} now, while a graph waits for its backward "
                    "or an optimizer has not stepped yet. Convert the module between steps."
                )
            self.adopt(self.host)
