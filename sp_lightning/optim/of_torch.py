"""A step as one pass, for whoever has more to do than the update: of our optimizers, and torch's AdamW, Adam and SGD.

Under mixed precision a gradient is cast, scaled and clipped before the update, and the weight is copied to bf16 after
it. In torch each of these is a pass over memory. Here all are one, with the bits that they have together, as the
kernels have those of torch's fused ones. Torch's may round otherwise on another CPU, so each kind is tried once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.optim.host import HostOptimizer, Work
from sp_lightning.optim.layout import fills_memory
from sp_lightning.optim.optimizers import SGD, Adam, AdamW
from sp_lightning.optim.passes import run
from sp_lightning.optim.rules import ONE, Scaling

_OURS: dict[type[Optimizer], type[HostOptimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
}
_TRIED: dict[type[Optimizer], list[dict[str, Any]]] = {
    torch.optim.AdamW: [{"weight_decay": 0.1}, {"betas": (0.4, 0.95)}],
    torch.optim.Adam: [{"weight_decay": 0.1}, {"betas": (0.4, 0.95)}],
    torch.optim.SGD: [
        {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}, {},
    ],
}  # fmt: skip
_SIZES = (5, 13, 1024, 4096 + 5, 4096 + 13)  # with all kinds of rests after whole vectors


class OnePass:
    """Steps weights of one param group, each in one pass over its memory."""

    def __init__(self, optimizer: Optimizer, settings: dict[str, Any]) -> None:
        self._type: Any = type(optimizer)
        self._settings = settings
        # the optimizer of ours whose passes these are; None where steps are left to the optimizer's own code
        self._cls: type[HostOptimizer] | None = None
        is_fused = settings.get("fused", False) and not settings.get("amsgrad") and not settings["maximize"]
        if isinstance(optimizer, HostOptimizer):
            self._cls = type(optimizer)
        elif is_fused and find_spec("numba"):
            self._cls = _OURS.get(self._type)  # torch would run its fused kernel

    def takes(self, work: Work) -> bool:
        """Tell whether it can step a weight. A step that makes torch's state is left to torch."""
        weight, gradient, state, copy, scaling = work
        if self._cls is None or scaling is None or not fills_memory(weight):
            return False
        if not _lies_like(weight, gradient, weight.dtype, torch.bfloat16):
            return False
        if copy is not None and not (weight.dtype == torch.float32 and _lies_like(weight, copy, torch.bfloat16)):
            return False
        if self._cls is self._type:
            return True
        moments = [state.get(name) for name in self._cls.moments_of(self._settings)]
        return has_torchs_bits(self._type, weight.dtype) and all(_lies_like(weight, m, weight.dtype) for m in moments)

    def step(self, works: Sequence[Work]) -> None:
        """Step weights, and count the step."""
        assert self._cls is not None
        run(self._cls.passes_of(self._settings, works))


def scaling_of(factors: Sequence[float | Tensor], limit: float | None, dtype: torch.dtype) -> Scaling | None:
    """Return what is done to gradients of weights of a dtype: at most two factors, one after the other, and a limit."""
    if len(factors) > 2:
        return None
    first, then = [*(np.float32(float(factor)) for factor in factors), ONE, ONE][:2]
    if limit is None:
        return Scaling(first, then)
    return Scaling(first, then, np.float32(torch.tensor(limit, dtype=dtype, device="cpu").item()))


def _lies_like(weight: Tensor, other: Tensor | None, *dtypes: torch.dtype) -> bool:
    return (
        isinstance(other, Tensor)
        and other.device.type == "cpu"
        and other.dtype in dtypes
        and other.shape == weight.shape
        and other.stride() == weight.stride()
    )


@cache
def has_torchs_bits(cls: Any, dtype: torch.dtype) -> bool:
    """Try whether an optimizer's fused kernels and ours round alike on this CPU, over weights of a dtype."""
    random = torch.Generator("cpu").manual_seed(0)
    return dtype in (torch.float32, torch.bfloat16) and all(
        _agree(cls, options, torch.randn(4, size, generator=random, dtype=torch.float32, device="cpu").to(dtype))
        for options in _TRIED[cls]
        for size in _SIZES
    )


def _agree(cls: type[Optimizer], options: dict[str, Any], values: Tensor) -> bool:
    """Make the same step in both ways."""
    value, gradient, *moments = values
    gradient = gradient.bfloat16()
    theirs, ours = (nn.Parameter(value.clone()) for _ in range(2))
    optimizer, own = cls([theirs], fused=True, **options), _OURS[cls]  # type: ignore[call-arg]  # all of these have it
    settings, copy = optimizer.param_groups[0], torch.empty_like(gradient) if value.dtype == torch.float32 else None
    theirs.grad = gradient.to(value.dtype)
    names = own.moments_of(settings)
    states = [{name: m.abs() for name, m in zip(names, moments, strict=False)} for _ in range(2)]
    optimizer.state[theirs] = states[0] | {"step": torch.tensor(2.0, dtype=torch.float32, device="cpu")}
    optimizer.step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # without the hooks that others have for steps
    run([own.pass_of(settings, Work(ours, gradient, states[1], copy), 3.0)])
    return (
        torch.equal(theirs, ours)
        and (copy is None or torch.equal(copy, ours.bfloat16()))
        and all(torch.equal(optimizer.state[theirs][name], states[1][name]) for name in names)
    )
