"""AdamW, Adam and Lion with fewer bytes for each parameter: their options, a step on several threads, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from sp_lightning.optim.layout import GROUP, ParamGroup, State, check_group, is_compact, make_state
from sp_lightning.optim.on_device import load_weight
from sp_lightning.optim.passes import Work, step_weights
from sp_lightning.optim.rules import SignUpdate, Update

COMPACT = "compact"
"""The key that only the last param group of a checkpoint of compact state has.

Its value explains that to a reader.
"""

_BESIDE_OPTIONS = {
    "params", "param_names", "name",
    "initial_lr", "lr_scale", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum",
}  # fmt: skip
"""Param groups have these beside options: parameters, labels, and notes of the schedulers of torch and timm."""


class AdamW(Optimizer):
    """AdamW over FP32 and BF16 parameters. BF16 ones are the upper halves of FP32 weights: the numbers are exact.

    Args:
        params: Parameters, FP32 or BF16, on the CPU or an accelerator, or param groups of them.
        lr: The learning rate.
        betas: Decay of the first and the second moment.
        eps: The number that is added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        moments: "fp32", or "int8", whose results are close to those.
    """

    update: ClassVar[Update] = Update(is_decoupled=True)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: str = "fp32",
        **unknown: Any,
    ) -> None:
        _refuse(unknown, self)
        # torch's Adam accepts and refuses the same options
        torch.optim.Adam([torch.empty(0, device="cpu")], lr, betas, eps, weight_decay)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "moments": moments}
        super().__init__(params, options)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a param group. Options of torch's optimizers may be in it if they are off."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        unknown = group.keys() - self.defaults.keys() - _BESIDE_OPTIONS
        off = {name for name in unknown if group[name] is None or group[name] is False}
        try:
            _refuse(unknown - off, self)
            check_group(group)
        except Exception:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; on the CPU on as many threads as torch uses."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [
            (p, group)
            for group in self.param_groups
            for p in group["params"] if p.grad is not None
        ]  # fmt: skip
        if any(p.grad.is_sparse for p, _ in stepped):
            raise RuntimeError("A gradient is sparse. Use `Embedding(sparse=False)`, or an optimizer of torch.optim.")
        works = [Work(p, p.grad, self.state[p], group=group) for p, group in stepped]
        step_weights(self.update, works)
        increment_version([p for p, _ in stepped])
        return loss

    def compile_updates(self, device: torch.device, lowered: Collection[torch.dtype]) -> None:
        """Compile the kernels that update weights on an accelerator, as far as possible, before a step needs them.

        Args:
            device: The accelerator.
            lowered: The dtypes of copies of FP32 weights, with which autocast computes. Gradients of such weights come
                in that dtype, or in FP32, where they add up.
        """
        for group in self.param_groups if device.type != "cpu" else ():
            for dtype in {parameter.dtype for parameter in group["params"] if parameter.requires_grad}:
                weight = torch.zeros(2 * GROUP, dtype=dtype, device=device)
                works = [Work(weight, torch.zeros_like(weight), {}, group=group)]
                for other in lowered if dtype == torch.float32 else ():
                    copy = torch.zeros_like(weight, dtype=other)
                    gradients = torch.zeros_like(weight), torch.zeros_like(copy)
                    works += [Work(weight, gradient, {}, copy, group=group) for gradient in gradients]
                step_weights(self.update, works)

    def state_bytes(self, group: ParamGroup) -> int:
        """Return the bytes of state that a first step makes of the parameters of a group."""
        trained = [p for p in group["params"] if p.requires_grad]
        made = [make_state(p.to("meta"), group, self.update.moments) for p in trained]
        return sum(value.nbytes for state in made for value in state.values())

    def master(self, p: Tensor) -> Tensor:
        """Return the fp32 weight of a parameter."""
        state = self.state.get(p, {})
        return load_weight(p.detach(), state.get("low"), state.get("exp_avg_sq_with_ties")).clone()

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint. Compact state comes with one more param group, so that torch's optimizers refuse it.

        They ignore state whose name they do not know, and would otherwise go on without it.
        """
        saved = super().state_dict()
        if any(map(is_compact, saved["state"].values())):
            words = (
                f"this is state of sp_lightning.optim.{type(self).__name__}, in fewer bytes than torch's. "
                "Load it into an optimizer of that class"
            )
            saved["param_groups"].append({"params": [], COMPACT: words})
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of an optimizer like this one."""
        saved_groups = [group for group in state_dict["param_groups"] if COMPACT not in group]
        for number, own in enumerate(self.param_groups[: len(saved_groups)]):
            saved = saved_groups[number]
            _check_options(saved, own, self.update.is_decoupled)
            saved_groups[number] = {**own, **saved}
        # all of it before any is taken; torch refuses other numbers of groups and parameters
        loaded = {
            # state that is there already may be on a drive, for which RAM has no room
            p: _loaded(state_dict["state"][number], self.state.get(p) or make_state(p, group, self.update.moments))
            for group, saved in zip(self.param_groups, saved_groups, strict=False)
            for p, number in zip(group["params"], saved["params"], strict=False)
            if state_dict["state"].get(number)
        }
        # torch would cast all state to the dtype of the weight
        super().load_state_dict({**state_dict, "param_groups": saved_groups, "state": {}})
        self.state.update(loaded)


def _refuse(unknown: Iterable[str], optimizer: Optimizer) -> None:
    for name in unknown:
        raise TypeError(
            f"`sp_lightning.optim.{type(optimizer).__name__}` has no argument `{name}`, because "
            "its step is always fused. docs/optimizers.md lists its arguments."
        )


def _check_options(saved: ParamGroup, own: ParamGroup, is_decoupled: bool) -> None:
    # torch's Adam would go on as AdamW, whose checkpoint it is, and torch's AdamW as itself
    if saved.get("decoupled_weight_decay") and saved["weight_decay"] and not is_decoupled:
        raise ValueError(
            "The checkpoint has decoupled weight decay, but sp_lightning.optim.Adam has none. "
            "Load it into sp_lightning.optim.AdamW."
        )
    moments = saved.get("moments", "fp32")  # torch's
    master, maximize = saved.get("master", "auto"), saved.get("maximize")
    if master not in ("auto", "split") or moments == "bf16" or maximize:
        raise ValueError(
            "The checkpoint has options that sp_lightning.optim no longer supports "
            f"(master={master!r}, moments={moments!r}, maximize={maximize!r}). Load it with "
            "sp_lightning 0.1.0, whose `optimizer.export()` returns FP32 weights and torch's state."
        )
    if moments != own["moments"]:
        raise ValueError(
            f"The checkpoint has moments={moments!r}, but this optimizer has moments={own['moments']!r}. "
            "Make the optimizer with the value of the checkpoint."
        )


def _loaded(saved: State, state: State) -> State:
    """Copy saved state into state."""
    if saved.keys() != state.keys():
        raise ValueError(
            f"The checkpoint has {', '.join(saved)}, but this optimizer keeps {', '.join(state)}. "
            "Load it into an optimizer of the class that saved it."
        )
    for name, number_or_tensor in saved.items():
        value = torch.as_tensor(number_or_tensor)  # old versions of torch count steps by integers
        if name == "low":
            value = value.view(torch.int16)  # it was kept as uint16
        if value.numel() != state[name].numel():
            saved_shape, shape = tuple(value.shape), tuple(state[name].shape)
            raise ValueError(f"The checkpoint's {name} has the shape {saved_shape}, but the parameter has {shape}.")
        state[name].copy_(value)
    return state


class Adam(AdamW):
    """Adam: like `AdamW`, except that weight decay is added to the gradient."""

    update = Update(is_decoupled=False)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        moments: str = "fp32",
        **unknown: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, moments=moments, **unknown)


class Lion(AdamW):
    """Lion, as `AdamW` with one moment, and decoupled weight decay: 8 bytes for each parameter, 5 with int8 moments."""

    update = SignUpdate(is_decoupled=True)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        moments: str = "fp32",
        **unknown: Any,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay=weight_decay, moments=moments, **unknown)
