"""Gradients that autograd is about to bring to masters themselves, on the host, which is an error.

Between steps, masters are ordinary Parameters, so a graph may be built on them: a penalty on weights that is computed
before the step that adds it to its loss. Within a step, an `autograd.Function` that masters are given to does so, as
torch does not ask `__torch_function__` there. Autograd would add such a gradient to `.grad` in the middle of what the
engine adds, or what the function computes with masters would be wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.weight import Weight


class DirectGradients:
    """Notices what autograd is about to add to the `.grad` of masters.

    Args:
        refuse: Called with the weight.
    """

    def __init__(self, refuse: Callable[[Weight], None]) -> None:
        self._refuse = refuse
        self._watched: dict[Weight, tuple[Node, RemovableHandle]] = {}

    def watch(self, weight: Weight) -> None:
        """Watch a weight's master, which requires a gradient, from now on."""
        if weight in self._watched:
            return
        refuser = weakref.WeakMethod(self._refuse_now)

        def look(gradients: Sequence[Tensor | None]) -> None:
            refuse = refuser()
            if refuse is not None and gradients[0] is not None:
                refuse(weight)

        with without_torch_function():
            node = get_gradient_edge(weight.master).node
        self._watched[weight] = node, node.register_prehook(look)  # the node lives for as long as somebody holds it

    def _refuse_now(self, weight: Weight) -> None:
        with without_torch_function():
            self._refuse(weight)

    def close(self) -> None:
        """Leave gradients to autograd again."""
        for _, hook in self._watched.values():
            hook.remove()
        self._watched.clear()
