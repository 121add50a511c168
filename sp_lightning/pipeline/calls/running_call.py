"""A call of a unit that is under way: the custom autograd Functions in it, and what it returns.

[Note: what a custom Function keeps]
`ctx.weight = weight` passes the hooks for saved tensors by, so nothing brings the weight back when backward reads it.
But the Function's own node reads it. So each call of a unit collects the nodes of the Functions that are applied in it.
Backward announces itself there, wherever the Function's output goes. If a Function was applied in a unit's call, the
optimizer updates the unit only after backward has left it: the Function may hold any weight, in a list or a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from sp_lightning.pipeline.operations import replace_instances
from sp_lightning.pipeline.tensors_in import tensors_in
from sp_lightning.pipeline.torch_private import alias_count, storage_key
from sp_lightning.pipeline.units.unit import Member, Unit
from sp_lightning.pipeline.weights.weight import Twin


class RunningCall:
    """A call of a member that is under way.

    Attributes:
        member: The member.
        needed: The units whose weights it computes with.
        number: The number of the call among all calls.
        nodes: The nodes of custom Functions that were applied in it.
    """

    def __init__(
        self,
        member: Member,
        needed: Sequence[Unit],
        number: int,
        places: dict[int, Twin],
    ) -> None:
        self.member = member
        self.needed = needed
        self.number = number
        self.nodes: list[Node] = []
        self._twins_by_memory = places

    def note_function(self, output: Any) -> None:
        """Note that a custom Function was applied: it may read any weight of the call in backward."""
        outputs = output if isinstance(output, tuple | list) else [output]
        nodes = [value.grad_fn for value in outputs if isinstance(value, Tensor) and value.grad_fn is not None]
        if nodes:
            self.nodes.append(nodes[0])
            for unit in self.needed:
                unit.readers.has_raw_readers = True

    def outside_of_places(self, output: Any) -> tuple[Any, list[Tensor]]:
        """Return the call's output, with clones of tensors that lie in the place of a weight, and all tensors in it.

        Raises:
            RuntimeError: A clone cannot replace a weight there, or an object that cannot be searched may hold one.
        """
        places = self._twins_by_memory.keys()

        def out_of_place(tensor: Tensor) -> Tensor:
            is_outside = places.isdisjoint(map(storage_key, tensors_in(tensor)))
            return tensor if is_outside else tensor.clone()

        hidden: list[Any] = []
        tensors = tensors_in(output, hidden)
        if not places.isdisjoint(map(storage_key, tensors)):
            output = replace_instances(output, Tensor, out_of_place)
            tensors = tensors_in(output)
            if not places.isdisjoint(map(storage_key, tensors)):
                raise RuntimeError(
                    f"superpipeline: {self.member.name!r} returns one of its weights in an object (of a "
                    "class of its own, a function, an array), where a clone cannot take its place. "
                    "Return a clone of the weight, or name it in `resident`."
                )
        # Something else than the twin and its data has a view of a weight: a graph, or a hidden object.
        if hidden and any(alias_count(entry.weight.twin.data) > 2 for entry in self.member.entries):
            raise RuntimeError(
                f"superpipeline: {self.member.name!r} returns an object of the class "
                f"{type(hidden[0]).__qualname__!r}, which cannot be searched for weights. Return "
                "what it holds as tensors, or name the weights in `resident`."
            )
        return output, tensors
