"""A step as one pass, for whoever has more to do than the update: of our optimizers, and torch's AdamW, Adam and SGD.

Under mixed precision a gradient is cast, scaled and clipped before the update, and the weight is copied to bf16 after
it. In torch each of these is a pass over memory. Here all are one, with the bits that they have together, as the
kernels have those of torch's fused ones. Torch's may round otherwise on another CPU, so each kind is tried once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.optim.host import HostOptimizer
from sp_lightning.optim.layout import State, fills_memory, flat, make_state
from sp_lightning.optim.optimizers import SGD, Adam, AdamW
from sp_lightning.optim.passes import Pass, run
from sp_lightning.optim.rules import NO_SCALING, Scaling

_OURS: dict[type[Optimizer], type[HostOptimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
}
_TRIED: dict[type[HostOptimizer], list[dict[str, Any]]] = {
    AdamW: [{"weight_decay": 0.1}, {"betas": (0.4, 0.95)}],
    Adam: [{"weight_decay": 0.1}, {"betas": (0.4, 0.95)}],
    SGD: [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}, {}],
}
_SIZES = (5, 13, 1024, 4096 + 5, 4096 + 13)  # with all kinds of rests after whole vectors


def one_pass(
    optimizer: Optimizer,
    settings: dict[str, Any],
    weight: Tensor,
    gradient: Tensor,
    state: State,
    copy: Tensor | None = None,
    factors: Sequence[float | Tensor] = (),
    limit: float | None = None,
) -> Pass | None:
    """Return the pass that steps a weight, and count the step; None where that is left to the optimizer's own code.

    Args:
        optimizer: One of ours, or one of torch's that would run its fused kernel.
        settings: Its param group.
        weight: The weight.
        gradient: Its gradient, fp32 or bf16, which is not changed.
        state: The optimizer's state of it. A step that makes torch's state is left to torch.
        copy: A bf16 copy of the weight to write.
        factors: What the gradient is multiplied by, one after the other, in the dtype of the weight.
        limit: What its absolute value is clipped to after that.
    """
    fits = (
        len(factors) <= 2
        and find_spec("numba") is not None
        and fills_memory(weight)
        and _lies_like(weight, gradient, weight.dtype, torch.bfloat16)
        and (copy is None or _lies_like(weight, copy, torch.bfloat16))
    )
    if not fits:
        return None
    if isinstance(optimizer, HostOptimizer):
        cls = type(optimizer)
        cls.count_step(settings, weight, state)
    else:
        found = _OURS.get(type(optimizer))
        if found is None or not _runs_fused_kernel(found, settings, weight, state):
            return None
        cls = found
        if "step" in state:
            state["step"] += 1
    made = cls.pass_of(settings, weight, gradient, state, _scaling(factors, limit, weight.dtype))
    return made if copy is None else made._replace(lowered=flat(copy, weight))


def _runs_fused_kernel(cls: type[HostOptimizer], settings: dict[str, Any], weight: Tensor, state: State) -> bool:
    """Tell whether torch would run the fused kernel whose bits ours have."""
    moments = (state.get(name) for name in cls.moments_of(settings))
    return (
        settings.get("fused", False)
        and not settings.get("amsgrad")
        and not settings["maximize"]
        and all(_lies_like(weight, each, torch.float32) for each in (weight, *moments))
        and has_torchs_bits(cls)  # type: ignore[arg-type]  # classes are hashable
    )


def _lies_like(weight: Tensor, other: Tensor | None, *dtypes: torch.dtype) -> bool:
    return (
        isinstance(other, Tensor)
        and other.device.type == "cpu"
        and other.dtype in dtypes
        and other.shape == weight.shape
        and other.stride() == weight.stride()
    )


def _scaling(factors: Sequence[float | Tensor], limit: float | None, dtype: torch.dtype) -> Scaling:
    if not factors and limit is None:
        return NO_SCALING
    numbers = [*map(float, factors), 1.0, 1.0][:2] + [math.inf if limit is None else limit]
    first, then, most = torch.tensor(numbers, dtype=dtype).float().numpy()
    return Scaling(first, then, most, in_bf16=True if dtype == torch.bfloat16 else None)


@cache
def has_torchs_bits(cls: type[HostOptimizer]) -> bool:
    """Try whether an optimizer's kernels and torch's fused ones round alike on this CPU."""
    if find_spec("numba") is None:
        return False
    random = torch.Generator().manual_seed(0)
    return all(
        _agree(cls, options, torch.randn(4, size, generator=random)) for options in _TRIED[cls] for size in _SIZES
    )


def _agree(cls: type[HostOptimizer], options: dict[str, Any], values: Tensor) -> bool:
    """Make the same step in both ways."""
    value, gradient, *moments = values
    weights = [nn.Parameter(value.clone()) for _ in range(2)]
    optimizer = cls(weights, **options)
    settings = optimizer.param_groups[0]
    for weight in weights:
        weight.grad = gradient.bfloat16().float()
        optimizer.state[weight] = state = make_state(weight, None, "fp32", optimizer.moments_of(settings))
        state["step"].fill_(3.0)
        for name, moment in zip(optimizer.moments_of(settings), moments, strict=False):
            state[name].copy_(moment.abs())
    copy = torch.empty_like(value, dtype=torch.bfloat16)
    theirs, ours = weights
    with torch.no_grad():
        optimizer.step_by_torch(settings, [theirs])
    run([cls.pass_of(settings, ours, gradient.bfloat16(), optimizer.state[ours])._replace(lowered=flat(copy, ours))])
    pairs = zip(optimizer.state[theirs].values(), optimizer.state[ours].values(), strict=True)
    return (
        torch.equal(theirs, ours) and torch.equal(copy, ours.bfloat16()) and all(torch.equal(*pair) for pair in pairs)
    )
