"""Runs the code of the user's optimizer on parameters of our choice, and tells for which optimizers that is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from sp_lightning.pipeline.gradients.scaling import Scaling
from sp_lightning.pipeline.torch_private import StepCode, step_is_replaced, without_torch_function
from sp_lightning.pipeline.weights.buffers import is_dense
from sp_lightning.pipeline.weights.guard import HostParameter

BY_ELEMENT = (Adam, AdamW, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, ASGD, Adadelta, Rprop)
"""Optimizers that treat each element by itself: exactly these classes, as subclasses may do anything."""

BY_WEIGHT = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers that treat each weight by itself, but as a whole."""

HAVE_FUSED_KERNELS = (Adam, AdamW, SGD, Adagrad)
"""Optimizers with a fused CPU kernel."""

VECTOR_MULTIPLE = 64
"""Weights are joined with others, and cut, at multiples of this many elements only.

It is the most that torch's CPU loops take at once: two vectors of 64 bytes, at two bytes an element. The elements left
over at the end of a tensor are computed one by one and may round differently, because vectors use fused multiply-adds.
So the position of an element in its tensor decides its bits; the address of the tensor does not.
"""

_PART = 1 << 18  # elements for each thread: so many of a gradient, a master and a copy stay in its cache

State = dict[str, Any]


def why_not_by_unit(optimizer: Optimizer, group: dict[str, Any], weights: Iterable[nn.Parameter]) -> str | None:
    """Return why units cannot be stepped one by one, with the bits of a plain step; None if they can.

    Args:
        optimizer: The user's optimizer.
        group: One of its param groups.
        weights: Weights of the group.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in BY_ELEMENT + BY_WEIGHT:
        return f"{name} is not one of torch's optimizers that treat each weight by itself"
    if step_is_replaced(optimizer):
        return f"`step` of {name} was replaced"
    if type(optimizer) in BY_WEIGHT and torch.is_autocast_enabled("cpu"):
        return f"autocast is on, which casts the matrix products of {name} only in the thread that calls `step()`"
    flag = next((flag for flag in ("capturable", "differentiable") if group.get(flag)), None)
    if flag is not None:
        return f"{name} has {flag}=True"
    with without_torch_function():
        for weight in weights:
            if type(weight) not in (nn.Parameter, HostParameter):
                return f"a weight is a {type(weight).__name__}, which has operations of its own"
            if weight.device.type != "cpu" or not weight.is_floating_point() or not is_dense(weight):
                return f"a weight is not a dense tensor of real numbers on the host ({weight.dtype}, {weight.device})"
            if weight.grad is not None and weight.grad.layout is not torch.strided:
                return "a gradient is sparse"
    return None


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Iterate over the parameters of all param groups."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def keeps_state(optimizer: Optimizer, settings: dict[str, Any]) -> bool:
    """Tell whether one of these optimizers keeps state of a weight in a param group with these settings."""
    return type(optimizer) is not SGD or settings["momentum"] != 0


def settings_of(param_group: dict[str, Any], optimizer: Optimizer, fused: bool) -> dict[str, Any]:
    """Copy a param group, without its parameters: a scheduler may change it before the copy is used.

    Args:
        param_group: The param group.
        optimizer: Its optimizer.
        fused: Whether to take torch's fused CPU kernels where the user left the choice to torch, which takes its
            slowest path on the CPU then (pytorch#74588).
    """
    settings = {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in param_group.items()
        if key != "params"
    }
    undecided = settings.get("fused", False) is None and settings.get("foreach") is None
    if fused and undecided and type(optimizer) in HAVE_FUSED_KERNELS:
        dtypes = {p.dtype for p in param_group["params"]}
        settings["fused"] = all(fused_kernel_works(type(optimizer).__name__, dtype) for dtype in dtypes) or None
    return settings


@cache
def fused_kernel_works(name: str, dtype: torch.dtype) -> bool:
    """Tell whether the fused CPU kernel of a class in `torch.optim` updates weights of this dtype.

    Up to torch 2.13 that of SGD silently leaves weights in half precision as they are (pytorch#191763).
    """
    with torch.inference_mode(False), torch.no_grad():
        weight = nn.Parameter(torch.zeros(VECTOR_MULTIPLE, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        optimizer: Optimizer = getattr(torch.optim, name)([weight], lr=1.0, fused=True)
        StepCode(optimizer, optimizer.param_groups[0]).run({weight: optimizer.state[weight]})
        return bool((weight != 0).all())


class Part(NamedTuple):
    """One parameter in the eyes of the optimizer's code: a weight, several weights, or a part of them.

    Attributes:
        parameter: Memory of masters.
        gradient: Its gradient, as it arrived.
        copy: The lowered copy to write; None if there is none.
        state: The optimizer's state, which its code changes.
        store_state: Stores the state that the code makes in a first step; None in any other step.
    """

    parameter: Tensor
    gradient: Tensor
    copy: Tensor | None
    state: State
    store_state: Callable[[], None] | None


class Update:
    """One step of one param group: casts and scales gradients, runs the optimizer's code, and writes copies.

    Attributes:
        limit: The elements that stay in the cache from one operation to the next.
        is_fused: Whether the code is one kernel, so that a part with nothing else to do need not stay in the cache.
    """

    def __init__(self, optimizer: Optimizer, settings: dict[str, Any], scaling: Scaling) -> None:
        # for two threads at least: in smaller parts the time that Python takes between them would show
        self.limit = _PART * max(2, torch.get_num_threads())
        self.keeps_state = keeps_state(optimizer, settings)
        self.is_fused = bool(settings.get("fused"))
        self._scaling = scaling.without_ones()
        self._code = StepCode(optimizer, settings.copy())
        self._scratch: dict[torch.dtype, Tensor] = {}  # the same memory for one batch after the other: it stays cached
        self._scratch_used = 0

    def run(self, parts: Iterable[Part]) -> None:
        """Update these parts, in batches that stay in the cache until done."""
        batch: list[Part] = []
        size = 0
        for part in parts:
            does_more = part.store_state is not None or part.copy is not None
            does_more |= part.gradient.dtype != part.parameter.dtype
            in_cache = part.parameter.numel() if does_more or not self.is_fused else 0
            # first steps apart: the fused kernel of SGD wants momentum buffers for all of its parameters, or for none
            if batch and (size + in_cache > self.limit or (part.store_state is None) != (batch[0].store_state is None)):
                self._run(batch)
                batch, size = [], 0
            batch.append(part)
            size += in_cache
        if batch:
            self._run(batch)

    def _run(self, parts: Sequence[Part]) -> None:
        self._scratch_used = 0
        for part in parts:
            gradient = self._cast(part.gradient, part.parameter.dtype)
            self._scaling.apply_(gradient)
            part.parameter.grad = gradient
        self._code.run({part.parameter: part.state for part in parts})
        for part in parts:
            if part.copy is not None:
                part.copy.copy_(part.parameter)
            if part.store_state is not None:
                part.store_state()

    def _cast(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        if gradient.dtype == dtype:
            return gradient
        if self._scratch_used + gradient.numel() > self.limit:
            return gradient.to(dtype)
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(self.limit, dtype=dtype)
        start = self._scratch_used
        self._scratch_used += gradient.numel()
        return self._scratch[dtype].as_strided(gradient.size(), gradient.stride(), start).copy_(gradient)
