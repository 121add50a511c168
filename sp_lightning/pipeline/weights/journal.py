"""What weights were before a step wrote to them, so that the step can run again as if for the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sp_lightning.pipeline._private import without_torch_function
from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.weights.buffers import as_bytes
from sp_lightning.pipeline.weights.weight import Weight

_LEAST_COPIED = 1 << 24  # bytes, wherever they are needed: enough for a scale that is clamped
_SHARE_COPIED = 8  # of the host memory that is free, one part in so many may be taken: by a model that is averaged
_SAMPLED = 1 << 16  # bytes that tell whether a larger weight was written to


class Journal:
    """Copies weights before they are written to, by a forward or by code around it; optimizers' steps do not count.

    Attributes:
        lost: The name of a weight that was written to, or may have been, and was not copied: the host has not enough
            memory for that, or it is not streamed.
    """

    def __init__(self) -> None:
        self.lost: str | None = None
        self._is_open = False
        self._before: dict[int, tuple[Weight, Tensor]] = {}
        self._not_copied: dict[int, tuple[Weight, _Sample]] = {}  # others have an alias, which they may only read
        self._elsewhere: list[tuple[str, nn.Parameter, int]] = []
        self._left = 0

    def begin(self) -> None:
        """Begin a step that may have to run again."""
        self.end()
        self._is_open, self._left = True, _most_copied()

    def end(self) -> None:
        """Forget everything: the step will not run again."""
        self.lost, self._is_open = None, False
        self._elsewhere.clear()
        self._before.clear()
        self._not_copied.clear()

    def note_elsewhere(self, parameters: Callable[[], dict[str, nn.Parameter]]) -> None:
        """Note the versions of parameters that are not streamed, once units are arranged for the step.

        Args:
            parameters: Returns them by name.
        """
        if self._is_open and not self._elsewhere:
            self._elsewhere = [(name, parameter, parameter._version) for name, parameter in parameters().items()]

    def note(self, weight: Weight) -> None:
        """Note that a master is about to be written to, or may be."""
        if not self._is_new(weight):
            return
        if weight.nbytes > self._left:
            self.lost = weight.name
            self._before.clear()
        else:
            self._copy(weight)

    def note_alias(self, weight: Weight) -> None:
        """Note that somebody gets an alias of a master: most of them only read it, which loses nothing."""
        if not self._is_new(weight) or id(weight.master) in self._not_copied:
            return
        if weight.nbytes > self._left:
            self._not_copied[id(weight.master)] = weight, _sample(weight)
        else:
            self._copy(weight)

    def conclude(self) -> None:
        """Forget weights that the step has not written to after all: hooks may do so next, and do not run again."""
        for key, (weight, values) in list(self._before.items()):
            if torch.equal(as_bytes(weight.values()), as_bytes(values)):
                del self._before[key]
        for weight, before in self._not_copied.values():
            now = _sample(weight)
            if now.version != before.version or not torch.equal(now.values, before.values):
                self.lost = weight.name
        self._not_copied.clear()
        for name, parameter, version in self._elsewhere:
            if parameter._version != version:
                self.lost = name
        self._elsewhere.clear()

    def undo(self) -> None:
        """Give weights back the values that they had when the step began."""
        with torch.inference_mode(False), torch.no_grad(), without_torch_function():
            for weight, values in self._before.values():
                weight.overwrite(values)

    def _is_new(self, weight: Weight) -> bool:
        return self._is_open and self.lost is None and id(weight.master) not in self._before

    def _copy(self, weight: Weight) -> None:
        self._left -= weight.nbytes
        self._before[id(weight.master)] = weight, weight.values().clone()


def _most_copied() -> int:
    """Return how many bytes of weights may be copied in a step."""
    return max(_LEAST_COPIED, (available_host_memory() or 0) // _SHARE_COPIED)


class _Sample(NamedTuple):
    """The version of a master, and some of its bytes: writes through numpy do not count in the former."""

    version: int
    values: Tensor


def _sample(weight: Weight) -> _Sample:
    everything = as_bytes(weight.values())
    with without_torch_function():
        version = weight.version
    return _Sample(version, everything[:: everything.nbytes // _SAMPLED | 1].clone())  # odd: of each byte of a number
