"""What weights were before a step wrote to them, so that the step can run again as if for the first time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sp_lightning.pipeline._private import without_torch_function
from sp_lightning.pipeline.weights.weight import Weight

_LARGEST = 1 << 24  # bytes that are copied: enough for a scale that is clamped; a model that is averaged is too much


class Journal:
    """Copies weights before they are written to, by a forward or by code around it; optimizers' steps do not count.

    Attributes:
        lost: The name of a weight that was written to, or may have been, and is too large to be copied.
    """

    def __init__(self) -> None:
        self.lost: str | None = None
        self._is_open = False
        self._before: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._left = 0

    def begin(self) -> None:
        """Begin a step that may have to run again."""
        self.end()
        self._is_open, self._left = True, _LARGEST

    def end(self) -> None:
        """Forget everything: the step will not run again."""
        self.lost, self._is_open = None, False
        self._before.clear()

    def note(self, weight: Weight) -> None:
        """Note that a master is about to be written to, or may be."""
        if not self._is_open or self.lost is not None or id(weight.master) in self._before:
            return
        self._left -= weight.host.nbytes
        if self._left < 0:
            self.lost = weight.name
            self._before.clear()
        else:
            self._before[id(weight.master)] = weight.master, weight.host.clone()

    def undo(self) -> None:
        """Give weights back the values that they had when the step began."""
        with torch.inference_mode(False), torch.no_grad(), without_torch_function():
            for master, values in self._before.values():
                master.copy_(values)
