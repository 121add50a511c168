"""The updates of AdamW, Adam and SGD, ours and torch's: their numbers for kernels, and torch's code for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from sp_lightning.optim.layout import State, count_in, laid_like, make_state, moment_in
from sp_lightning.optim.rules import ADAM, MOMENTUM, NO_SCALING, Memory, Pass, Rule, Scaling, Update


class Work(NamedTuple):
    """What is to be done for a weight."""

    weight: Tensor
    gradient: Tensor  # as it arrived; it is only read
    state: State  # the optimizer's, of the weight; empty before it is made, and if there is none
    copy: Tensor | None = None  # a copy of the weight in bf16, to be written
    # what is done to the gradient before; None if that is too much
    scaling: Scaling | None = NO_SCALING


@dataclass(frozen=True)
class AdamUpdate:
    """Adam's, whose weight decay is added to the gradient unless it is decoupled."""

    is_decoupled: bool

    def moments(self, group: dict[str, Any]) -> list[str]:
        """Both, always."""
        return ["exp_avg", "exp_avg_sq"]

    def rule(self, group: dict[str, Any], step: float) -> Rule:
        """Return the numbers of a step."""
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        return Rule.of(
            ADAM,
            lr=lr / (1 - beta1**step),
            decay=1 - lr * weight_decay if self.is_decoupled else 1,
            penalty=0 if self.is_decoupled else weight_decay,
            first_rate=1 - beta1,
            second_decay=beta2,
            second_rate=1 - beta2,
            correction=math.sqrt(1 - beta2**step),
            eps=group["eps"],
        )

    def step(
        self, group: dict[str, Any], step: float, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor]
    ) -> None:
        """Make it by torch's fused kernel, which counts the step itself."""
        first, second = moments
        count = torch.full((), step - 1, dtype=torch.float32, device=weight.device)
        adam(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [count],
            fused=True,
            decoupled_weight_decay=self.is_decoupled,
            amsgrad=False,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class MomentumUpdate:
    """That of torch's SGD without Nesterov's momentum, from its second step on: the first one begins the momentum."""

    def moments(self, group: dict[str, Any]) -> list[str]:
        """One, if there is momentum."""
        return ["momentum_buffer"] if group["momentum"] != 0 else []

    def rule(self, group: dict[str, Any], step: float) -> Rule:
        """Return the numbers of a step."""
        return Rule.of(
            MOMENTUM,
            lr=group["lr"],
            penalty=group["weight_decay"],
            first_decay=group["momentum"],
            first_rate=1 - group["dampening"],
        )

    def step(
        self, group: dict[str, Any], step: float, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor]
    ) -> None:
        """Make it by torch's fused kernel."""
        sgd(
            [weight],
            [gradient],
            list(moments) or [None],
            fused=True,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=group["dampening"],
            nesterov=False,
            maximize=False,
        )


def passes_of(update: Update, group: dict[str, Any], works: Sequence[Work]) -> list[Pass]:
    """Count the step that follows, the first of which makes the state of ours; return its passes."""
    if "moments" in group:  # torch's make their state themselves
        for work in works:
            if not work.state:
                work.state.update(make_state(work.weight, group, update.moments(group)))
    steps = count_in([work.state for work in works])
    return [_pass_of(update, group, work, step) for work, step in zip(works, steps, strict=True)]


def _pass_of(update: Update, group: dict[str, Any], work: Work, step: float) -> Pass:
    weight, gradient, state, copy, scaling = work
    assert scaling is not None
    low = state.get("low")
    moments = [moment_in(state, name) for name in update.moments(group)]
    kept = [tensor for tensor in (low, *(moment for moment, _ in moments)) if tensor is not None]
    if any(tensor.stride() != weight.stride() for tensor in kept):
        raise RuntimeError("a parameter lies in memory in another order than its optimizer state: make it anew")
    nothing = (None, None)
    (first, first_scale), (second, second_scale) = [*moments, nothing, nothing][:2]
    memory = Memory(weight, low, laid_like(gradient, weight), first, second, copy, first_scale, second_scale)
    return Pass(update, group, step, memory, scaling)
