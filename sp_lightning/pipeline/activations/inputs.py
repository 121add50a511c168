"""The arguments of a unit's call, held for a second call (recompute.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_lightning.pipeline.activations.contract import PLAIN
from sp_lightning.pipeline.activations.offload import Offloaded
from sp_lightning.pipeline.activations.saved import Kept, Packed, SavedTensors


class Inputs:
    """The arguments of a unit's call, with tensors packed as autograd would have saved them.

    Tensors are detached from their graph. So they form no cycle with the node that an in-place change gives them, and
    hooks that the forward registers on them do not fire a second time.

    Attributes:
        tensors: The tensors among them, without weights, which stand for themselves; none once they are packed.
        objects: Arguments that are neither tensors nor containers known to pytree, such as a cache.
        have_attributes: Whether a user has set attributes of a tensor among them, which a second one would not have.
    """

    def __init__(self, saved: SavedTensors, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._saved = saved
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        # an argument that is given twice stays one object: `nn.MultiheadAttention` branches on `key is value`
        given = {id(leaf): leaf for leaf in leaves if _is_data(leaf)}
        number = {key: number for number, key in enumerate(given)}
        self.tensors = [tensor.detach() for tensor in given.values()]
        self.objects = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))]
        self.have_attributes = any(type(tensor) is Tensor and bool(vars(tensor)) for tensor in given.values())
        self._require_grad = [tensor.requires_grad for tensor in given.values()]
        self._packed: list[Packed] = []
        self._leaves = [_Number(number[id(leaf)]) if id(leaf) in number else leaf for leaf in leaves]

    @property
    def are_changed(self) -> bool:
        """Whether a tensor among the arguments was changed in place since the call."""
        return any(map(_is_changed, self._packed))

    def pack(self) -> None:
        """Pack the tensors, from which they are unpacked to be rebuilt."""
        self._packed = [self._saved.handle(tensor) or self._saved.hold(tensor) for tensor in self.tensors]

    def rebuild(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for another call."""
        tensors = [self._saved.unpack(packed).detach() for packed in self._packed]
        for tensor, requires_grad in zip(tensors, self._require_grad, strict=True):
            tensor.requires_grad_(requires_grad)
        leaves = [tensors[leaf] if type(leaf) is _Number else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs


class _Number(int):
    """Stands for a tensor among the arguments."""


def _is_changed(packed: Packed) -> bool:
    if isinstance(packed, Offloaded):
        return packed.is_changed
    return isinstance(packed, Kept) and packed.is_changed


def _is_data(value: Any) -> bool:
    """Tell whether an argument is a tensor that autograd could save, and not a weight."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference()
