"""Handles: autograd saves one in place of a weight, or of a view of one.

The engine may give a place to another unit between forward and backward. So backward unpacks a handle, makes sure that
the weight is on the device, and reads it there (activations/saved.py).
"""

from __future__ import annotations

from torch import Tensor

from sp_lightning.pipeline.torch_private import contains_others, without_torch_function
from sp_lightning.pipeline.weights.weight import Twin


class Handle:
    """A saved weight, or a view of one: an alias of its fixed place, valid whenever the weight is on the device.

    Attributes:
        alias: The tensor over the place.
        key: The identity of the place.
    """

    __slots__ = ("_readers", "_twin", "_version", "alias", "key")

    def __init__(self, twin: Twin, tensor: Tensor) -> None:
        self.key = twin.key
        self._twin = twin
        with without_torch_function():
            self.alias = tensor.detach() if contains_others(tensor) else tensor
            self._version = twin.version()
        self._readers = twin.unit.readers
        self._readers.handles += 1

    @property
    def name(self) -> str:
        """The weight's name in errors."""
        return f"weight {self._twin.weight.name!r}"

    @property
    def is_changed(self) -> bool:
        """Whether the weight has changed since it was saved."""
        with without_torch_function():
            return self._twin.version() != self._version

    def __del__(self) -> None:
        self._readers.handles -= 1
