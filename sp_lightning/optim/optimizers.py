"""The optimizers: their arguments, and the numbers of their update."""

from __future__ import annotations

import math
from typing import Any

import torch
from typing_extensions import override

from sp_lightning.optim.compact import CompactOptimizer
from sp_lightning.optim.rules import ADAM, LION, MOMENTUM, NESTEROV, Rule


class AdamW(CompactOptimizer):
    """AdamW with a choice of how many bytes a parameter takes. The defaults are exact.

    Args:
        params: Parameters, fp32 or bf16, on the CPU or an accelerator, or param groups of them.
        lr: The learning rate.
        betas: Decay of the first and the second moment.
        eps: What is added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        amsgrad: Not supported.
        maximize: Step up the gradient, not down.
        foreach: A way of torch to step. All of them are one pass here.
        fused: As `foreach`.
        master: How bf16 parameters keep their fp32 weights: "fp32" copies, "split" (the 16 bits that bf16 has not; the
            same numbers), "split24" (8 more bits, rounded at random), or None. "auto" is "split"; fp32 parameters need
            none.
        moments: "fp32", or near: "bf16" or "int8".
    """

    first, second = "exp_avg", "exp_avg_sq"
    decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        master: str | None = "auto",
        moments: str = "fp32",
    ) -> None:
        if amsgrad:
            raise ValueError(f"amsgrad=True: use torch.optim.{type(self).__name__}, which has it")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, foreach, fused, master=master, moments=moments)

    @classmethod
    @override
    def rule(cls, group: dict[str, Any], step: float) -> Rule:
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        return Rule.of(
            ADAM,
            lr=lr / (1 - beta1**step),
            decay=1 - lr * weight_decay if cls.decoupled else 1,
            penalty=0 if cls.decoupled else weight_decay,
            first_rate=1 - beta1,
            second_decay=beta2,
            second_rate=1 - beta2,
            correction=math.sqrt(1 - beta2**step),
            eps=group["eps"],
        )


class Adam(AdamW):
    """Adam, as `AdamW` but for weight decay, which is added to the gradient."""

    decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        master: str | None = "auto",
        moments: str = "fp32",
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            maximize=maximize, foreach=foreach, fused=fused, master=master, moments=moments,
        )  # fmt: skip


class SGD(CompactOptimizer):
    """SGD with momentum and Nesterov's, with `master` and `moments` as `AdamW` has them."""

    checked_by = torch.optim.SGD
    first = "momentum_buffer"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        master: str | None = "auto",
        moments: str = "fp32",
    ) -> None:
        options = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, options, foreach, fused, master=master, moments=moments)

    @classmethod
    @override
    def moments_of(cls, group: dict[str, Any]) -> list[str]:
        return ["momentum_buffer"] if group["momentum"] != 0 else []

    @classmethod
    @override
    def rule(cls, group: dict[str, Any], step: float) -> Rule:
        return Rule.of(
            NESTEROV if group["nesterov"] else MOMENTUM,
            lr=group["lr"],
            penalty=group["weight_decay"],
            first_decay=group["momentum"],
            first_rate=1 if step == 1 else 1 - group["dampening"],  # it begins with the gradient
        )


class Lion(CompactOptimizer):
    """Lion (arXiv 2302.06675), with `master` and `moments` as `AdamW` has them."""

    first = "exp_avg"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        master: str | None = "auto",
        moments: str = "fp32",
    ) -> None:
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, foreach, fused, master=master, moments=moments)

    @classmethod
    @override
    def rule(cls, group: dict[str, Any], step: float) -> Rule:
        lr = float(group["lr"])
        beta1, beta2 = map(float, group["betas"])
        return Rule.of(
            LION,
            lr=lr,
            decay=1 - lr * float(group["weight_decay"]),
            first_decay=beta1,
            first_rate=1 - beta1,
            second_decay=beta2,
            second_rate=1 - beta2,
        )
