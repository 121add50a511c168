"""A call of a unit that is under way, and the custom autograd Functions in it.

[Note: what a custom Function keeps]
`ctx.weight = weight` passes the hooks for saved tensors by, so nothing brings the weight back when backward reads it.
But the Function's own node reads it. So each call of a unit collects the nodes of the Functions that are applied in it.
Backward announces itself there, wherever the Function's output goes. And a unit whose weight a Function was given is
stepped only when backward has left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from sp_lightning.pipeline.torch_private import storage_key
from sp_lightning.pipeline.units.unit import Member, Unit
from sp_lightning.pipeline.weights.weight import Twin


class RunningCall:
    """A call of a member that is under way.

    Attributes:
        member: The member.
        needed: The units whose weights it computes with.
        number: Its number among all calls.
        nodes: The nodes of custom Functions that were applied in it.
    """

    def __init__(self, member: Member, needed: Sequence[Unit], number: int, places: dict[int, Twin]) -> None:
        self.member = member
        self.needed = needed
        self.number = number
        self.nodes: list[Node] = []
        self._places = places

    def note_function(self, given: Sequence[Any], output: Any) -> None:
        """Note that a custom Function was applied."""
        outputs = output if isinstance(output, tuple | list) else [output]
        node = next((each.grad_fn for each in outputs if isinstance(each, Tensor) and each.grad_fn is not None), None)
        if node is None:
            return
        self.nodes.append(node)
        for each in given:
            twin = self._places.get(storage_key(each)) if isinstance(each, Tensor) else None
            if twin is not None:
                twin.unit.has_raw_readers = True
