"""Which gradients a step has made, so that they can be dropped before it runs again.

What backward adds to a gradient cannot be subtracted again, so a step that has added to one does not run again. To hold
copies of gradients would take as much memory as gradients do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor, nn

from sp_lightning.pipeline.gradients.host_gradients import HostGradients
from sp_lightning.pipeline.weights.weight import Weight


class NewGradients:
    """The gradients that a step makes; those of masters may be half added up when its backward fails."""

    def __init__(self) -> None:
        self._is_open = False
        self._has_begun = False
        self._before: dict[int, _Gradient] = {}
        self._of_masters_are_new: bool | None = None

    def begin(self) -> None:
        """Begin a step that may have to run again."""
        self.end()
        self._is_open = True

    def end(self) -> None:
        """Forget everything: the step will not run again."""
        self._is_open = self._has_begun = False
        self._before.clear()
        self._of_masters_are_new = None

    def note_before(self, elsewhere: Callable[[], Iterable[nn.Parameter]]) -> None:
        """Note gradients as the step begins, once units are arranged for it.

        Args:
            elsewhere: Returns the parameters whose gradients autograd itself accumulates.
        """
        if self._is_open and not self._has_begun:
            self._has_begun = True
            self._before = {
                id(p): _Gradient(weakref.ref(p.grad), p.grad._version) for p in elsewhere() if p.grad is not None
            }

    def note_backward(self, gradients: HostGradients, weights: Iterable[Weight]) -> None:
        """Note whether masters have gradients as a backward pass begins: the step may have dropped them before."""
        if self._is_open and self._of_masters_are_new is None:
            self._of_masters_are_new = all(gradients.get(weight) is None for weight in weights)

    def drop(self, elsewhere: Iterable[nn.Parameter], gradients: HostGradients, weights: Iterable[Weight]) -> bool:
        """Drop the gradients that the step has made, when all of them have landed.

        Args:
            elsewhere: The parameters whose gradients autograd itself accumulates.
            gradients: The gradients of masters.
            weights: The weights that have masters.

        Returns:
            Whether that was possible; if not, nothing is dropped.
        """
        with_gradients = [(parameter, parameter.grad) for parameter in elsewhere if parameter.grad is not None]
        if self._of_masters_are_new is False or any(
            id(p) in self._before and self._before[id(p)].was_changed(gradient) for p, gradient in with_gradients
        ):
            return False
        for parameter, gradient in with_gradients:
            if id(parameter) not in self._before or not self._before[id(parameter)].is_same(gradient):
                parameter.grad = None
        if self._of_masters_are_new:
            gradients.drop_all(weights)
        return True


class _Gradient(NamedTuple):
    """A gradient before the step. It is not held, so that dropping it frees its memory."""

    tensor: weakref.ref[Tensor]
    version: int

    def is_same(self, gradient: Tensor) -> bool:
        return self.tensor() is gradient

    def was_changed(self, gradient: Tensor) -> bool:
        return self.is_same(gradient) and gradient._version != self.version
