"""The arguments of a unit's call, held for a second call (recompute.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_lightning.pipeline.activations.contract import PLAIN
from sp_lightning.pipeline.activations.memory import Offloaded
from sp_lightning.pipeline.activations.saved import Kept, Packed, SavedTensors


class Inputs:
    """The arguments of a unit's call, with tensors packed as autograd would have saved them.

    Attributes:
        objects: Arguments that are neither tensors nor containers known to pytree, such as a cache.
        have_attributes: Whether a user has set attributes of a tensor among them, which a second one would not have.
    """

    def __init__(self, saved: SavedTensors, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._saved = saved
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        # an argument that is given twice stays one object: `nn.MultiheadAttention` branches on `key is value`
        held = {id(leaf): _Input(leaf) for leaf in leaves if _is_data(leaf)}
        self.objects = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))]
        self.have_attributes = any(type(leaf) is Tensor and bool(vars(leaf)) for leaf in leaves)
        self._distinct = list(held.values())
        self._leaves = [held.get(id(leaf), leaf) for leaf in leaves]  # a weight is held as it is

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, without weights, until they are released."""
        return [held.tensor for held in self._distinct if held.tensor is not None]

    @property
    def are_changed(self) -> bool:
        """Whether a tensor among the arguments was changed in place since the call."""
        return any(held.is_changed for held in self._distinct)

    def pack(self) -> None:
        """Pack the tensors, from which they are unpacked to be rebuilt."""
        for held in self._distinct:
            assert held.tensor is not None
            held.packed = self._saved.handle(held.tensor) or self._saved.hold(held.tensor)

    def release(self) -> None:
        """Leave the tensors to what they were packed into."""
        for held in self._distinct:
            held.tensor = None

    def rebuild(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for another call."""
        tensors = {id(held): held.rebuild_from(self._saved.unpack(held.packed)) for held in self._distinct}
        leaves = [tensors.get(id(leaf), leaf) for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs


class _Input:
    """An input tensor of a unit's call, detached from its graph.

    So it forms no cycle with the node that an in-place change gives it, and hooks that the forward registers on it do
    not fire a second time.

    Attributes:
        tensor: The tensor; None once it was released.
        packed: What it was packed into.
    """

    packed: Packed

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self._requires_grad = tensor.requires_grad

    @property
    def is_changed(self) -> bool:
        if isinstance(self.packed, Offloaded):
            return self.packed.view.changed_in_place
        if isinstance(self.packed, Kept):
            return self.packed.is_changed
        return type(self.packed) is tuple and self.packed[0]._version != self.packed[1]

    def rebuild_from(self, unpacked: Tensor) -> Tensor:
        return unpacked.detach().requires_grad_(self._requires_grad)


def _is_data(value: Any) -> bool:
    """Tell whether an argument is a tensor that autograd could save, and not a weight, which stands for itself."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference()
