"""The optimizers: their arguments, the numbers of their update, and torch's own kernel where numba is not there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sp_lightning.optim.host import HostOptimizer
from sp_lightning.optim.rules import AdamRule, LionRule, SgdRule


class AdamW(HostOptimizer):
    """AdamW with a choice of how many bytes a parameter takes. The defaults are exact.

    Args:
        params: Parameters in host memory, fp32 or bf16, or param groups of them.
        lr: The learning rate.
        betas: Decay of the first and the second moment.
        eps: What is added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        amsgrad: Not supported.
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
        master: str | None = "auto",
        moments: str = "fp32",
    ) -> None:
        if amsgrad:
            raise ValueError(f"amsgrad=True: use torch.optim.{type(self).__name__}, which has it")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, master, moments)

    @classmethod
    @override
    def rule(cls, group: dict[str, Any], step: float) -> AdamRule:
        return AdamRule.make(group, step, cls.decoupled)

    @override
    def step_by_torch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        states = [self.state[p] for p in params]
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        kernel(
            params,
            [p.grad for p in params if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=group["maximize"],
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
        master: str | None = "auto",
        moments: str = "fp32",
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, master=master, moments=moments)


class SGD(HostOptimizer):
    """SGD with momentum and Nesterov's, with `master` and `moments` as `AdamW` has them."""

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
        master: str | None = "auto",
        moments: str = "fp32",
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("nesterov=True takes a momentum, and no dampening")
        own = {"lr": lr, "momentum": momentum, "dampening": dampening}
        super().__init__(params, {**own, "weight_decay": weight_decay, "nesterov": nesterov}, master, moments)

    @classmethod
    @override
    def moments_of(cls, group: dict[str, Any]) -> list[str]:
        return ["momentum_buffer"] if group["momentum"] != 0 else []

    @classmethod
    @override
    def rule(cls, group: dict[str, Any], step: float) -> SgdRule:
        return SgdRule.make(group, is_first_step=step == 1)

    @override
    def step_by_torch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            state = self.state[p]
            assert p.grad is not None
            torch._fused_sgd_(
                [p],
                [p.grad],
                [state["momentum_buffer"]] if group["momentum"] != 0 else [],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=float(group["lr"]),
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                is_first_step=bool(state["step"] == 1),
            )


class Lion(HostOptimizer):
    """Lion (arXiv 2302.06675), with `master` and `moments` as `AdamW` has them. It needs numba."""

    first = "exp_avg"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        master: str | None = "auto",
        moments: str = "fp32",
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, master, moments)

    @classmethod
    @override
    def rule(cls, group: dict[str, Any], step: float) -> LionRule:
        return LionRule.make(group)

    def _torch_can_step(self, p: Tensor, group: dict[str, Any]) -> bool:
        return False
