"""Uses of weights that torch does not tell their class of: `torch.tensor(weight)`, and custom autograd Functions.

Masters and leaves learn of operations by `__torch_function__`, which some of torch's functions do not ask. They do from
here on, for our classes alone. Like `nn.Parameter(weight)`, they are changed once in a process.

[Note: what a custom Function keeps]
`ctx.weight = weight` passes the hooks for saved tensors by, so nothing brings the weight back when backward reads it.
But the Function's own node reads it. So each call of a unit collects the nodes of the Functions that are applied in it.
Backward announces itself there, wherever the Function's output goes. And a unit whose weight a Function was given is
stepped only when backward has left it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import Node

from sp_lightning.pipeline.torch_private import apply_of, ask, ask_classes, storage_key
from sp_lightning.pipeline.units.unit import Member, Unit
from sp_lightning.pipeline.weights.weight import Twin

_FACTORIES = (
    "tensor", "as_tensor", "asarray", "sparse_coo_tensor", "sparse_compressed_tensor", "sparse_csr_tensor",
    "sparse_csc_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor",
)  # fmt: skip
_METHODS = ("new_tensor", "new", "set_", "as_subclass")


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


class RunningCalls(threading.local):
    """The calls that this thread is in, of all models, innermost last."""

    def __init__(self) -> None:
        self.stack: list[RunningCall] = []


running_calls = RunningCalls()


def see_all_uses(kinds: Sequence[type[nn.Parameter]]) -> None:
    """Have these classes see what torch does not tell them of, and calls of units see custom Functions."""
    for name in _FACTORIES:
        ask_classes(torch, name, kinds)
    for name in _METHODS:
        ask_classes(Tensor, name, kinds)
    _see_functions(kinds)


def _see_functions(kinds: Sequence[type[nn.Parameter]]) -> None:
    bind = apply_of(Function)

    @functools.wraps(Function.apply)
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        output = ask(kinds, bind(cls), args, kwargs)
        for call in running_calls.stack:
            call.note_function(args, output)
        return output

    Function.apply = classmethod(apply)
