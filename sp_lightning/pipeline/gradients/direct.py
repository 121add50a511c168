"""Gradients that autograd brings to masters themselves, on the host.

Between steps, masters are ordinary Parameters, so a graph may be built on them: a penalty on weights that is computed
before the step that adds it to its loss. Autograd would add such a gradient to `.grad` in the middle of what the engine
adds. It is taken from autograd instead, and added when backward has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline._private import without_torch_function
from sp_lightning.pipeline.weights.weight import Weight


class DirectGradients:
    """Takes what autograd is about to add to the `.grad` of masters.

    Args:
        take: Called with a weight and its gradient.
    """

    def __init__(self, take: Callable[[Weight, Tensor], None]) -> None:
        self._take = take
        self._watched: dict[Weight, tuple[Node, RemovableHandle]] = {}

    def watch(self, weight: Weight) -> None:
        """Take the gradients of a weight's master, which requires one, from now on."""
        if weight in self._watched:
            return
        taker = weakref.WeakMethod(self._hand_over)

        def take(gradients: Sequence[Tensor | None]) -> tuple[None] | None:
            hand_over = taker()
            if hand_over is None or gradients[0] is None:
                return None
            hand_over(weight, gradients[0])
            return (None,)  # autograd adds nothing

        with without_torch_function():
            node = get_gradient_edge(weight.master).node
        self._watched[weight] = node, node.register_prehook(take)  # the node lives for as long as somebody holds it

    def _hand_over(self, weight: Weight, gradient: Tensor) -> None:
        with without_torch_function():
            self._take(weight, gradient)

    def close(self) -> None:
        """Leave gradients to autograd again."""
        for _, hook in self._watched.values():
            hook.remove()
        self._watched.clear()
