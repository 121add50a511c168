"""A step with all operations around the update as one pass: of our optimizers, and torch's AdamW and Adam.

Under mixed precision a gradient is cast, scaled and clipped before the update, and the weight is copied to bf16 after
it. In torch each of these is a pass over memory. Here all are one pass with the same bits, because the kernels have the
bits of torch's fused ones. Torch's may round differently on another CPU, so each kind is tried once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.optim.layout import MOMENT_NAMES, ParamGroup, State, fills_memory, lies_like, make_state
from sp_lightning.optim.optimizers import Adam, AdamW
from sp_lightning.optim.passes import Work, count, passes_of, run, step_weights
from sp_lightning.optim.rules import Memory, Pass, Scaling, Update

_OF_TORCH = (torch.optim.AdamW, torch.optim.Adam)
_KNOWN = {"lr", "betas", "eps", "weight_decay", "fused", "foreach", "decoupled_weight_decay"}
_OFF = {"amsgrad", "maximize", "capturable", "differentiable"}  # options that a pass does not have
_TRIED: list[ParamGroup] = [
    {"betas": (0.9, 0.999), "weight_decay": 0.1},
    {"betas": (0.4, 0.95), "weight_decay": 0.0},
]
MOST_FACTORS = 2
"""The number of factors of a gradient that a pass applies.

They are the inverse of a loss scale, and one that clips.
"""
_SIZES = (5, 13, 1024, 4096 + 5, 4096 + 13)  # with all kinds of rests after whole vectors


class OnePass:
    """Steps weights of one param group, each in one pass over its memory.

    Attributes:
        is_possible: Whether it can step weights at all; the optimizer's own code steps them otherwise.
    """

    _update: Update

    def __init__(self, optimizer: Optimizer, settings: ParamGroup) -> None:
        self._settings = settings
        self._is_torchs = type(optimizer) in _OF_TORCH
        self.is_possible = isinstance(optimizer, AdamW)
        if isinstance(optimizer, AdamW):
            self._update = optimizer.update
        elif self._is_torchs:
            # this option decides how torch's Adam and AdamW decay weights, and not the class
            self._update = AdamW.update if settings["decoupled_weight_decay"] else Adam.update
            # whether torch would run its fused kernel, and every option is one that a pass knows
            is_known = optimizer.defaults.keys() <= _KNOWN | _OFF
            self.is_possible = is_known and bool(settings.get("fused")) and not any(map(settings.get, _OFF))

    def takes(self, work: Work) -> bool:
        """Tell whether it can step a weight. A step that makes torch's state is left to torch.

        If the work has no gradient, or no copy, only the rest is checked.
        """
        weight, gradient, state, copy, scaling, _ = work
        dtype = weight.dtype
        if not self.is_possible or scaling is None or not fills_memory(weight):
            return False
        if gradient is not None and not _lies_like(weight, gradient, dtype, torch.bfloat16):
            return False
        if copy is not None and not (dtype == torch.float32 and _lies_like(weight, copy, torch.bfloat16, dtype)):
            return False
        if not self._is_torchs:
            return True
        lie_alike = all(_lies_like(weight, state.get(name), dtype) for name in MOMENT_NAMES)
        return lie_alike and has_torchs_bits(self._update, dtype)

    def make_state(self, weight: Tensor) -> State:
        """Return the state of a weight before its first step, on its device."""
        if not self._is_torchs:
            return make_state(weight, self._settings, self._update.moments)
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        return {"step": step, **{name: torch.zeros_like(weight) for name in MOMENT_NAMES}}

    def passes_of(self, works: Sequence[Work]) -> list[Pass]:
        """Return the passes that step weights, and count the step."""
        passes = passes_of(self._update, [work._replace(group=self._settings) for work in works])
        count(works)
        return passes

    def step(self, works: Sequence[Work]) -> None:
        """Step weights, and count the step."""
        step_weights(self._update, [work._replace(group=self._settings) for work in works])


def scaling_of(factors: Iterable[float | Tensor]) -> Scaling | None:
    """Return the scaling of gradients: at most two factors that are not one; None if there are more."""
    numbers = [np.float32(number) for number in map(float, factors) if number != 1]
    return Scaling(*numbers) if len(numbers) <= MOST_FACTORS else None


def _lies_like(weight: Tensor, other: Tensor | None, *dtypes: torch.dtype) -> bool:
    return isinstance(other, Tensor) and other.dtype in dtypes and lies_like(other, weight)


@cache
def has_torchs_bits(update: Update, dtype: torch.dtype) -> bool:
    """Try whether torch's fused kernels and ours round alike on this CPU, over weights of a dtype."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    random = torch.Generator("cpu").manual_seed(0)
    for options, size in product(_TRIED, _SIZES):
        values = torch.randn(4, size, generator=random, dtype=torch.float32, device="cpu")
        if not _agree(update, {"lr": 1e-3, "eps": 1e-8, **options}, values.to(dtype)):
            return False
    return True


def _agree(update: Update, group: ParamGroup, values: Tensor) -> bool:
    """Make the same step in both ways."""
    gradient = values[0].bfloat16()
    copy = None if values.dtype == torch.bfloat16 else torch.empty_like(gradient)
    weight, first, second = ours = values[1], values[2], values[3].abs()
    theirs = [value.clone() for value in ours]
    step = 3.0
    update.by_torch(group, step, theirs[0], gradient.to(values.dtype), *theirs[1:])
    run([Pass(update, group, step, Memory(weight, None, gradient, first, second, copy))])
    is_copied = copy is None or torch.equal(copy, weight.bfloat16())
    return is_copied and all(map(torch.equal, ours, theirs))
