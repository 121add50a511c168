"""Which optimizers can step units one by one, with the bits of a plain step, and with which settings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from sp_lightning.pipeline.torch_private import has_foreign_step_hooks, step_is_replaced

BY_ELEMENT = (Adam, AdamW, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, ASGD, Adadelta, Rprop)
"""Optimizers that treat each element by itself: exactly these classes, as subclasses may do anything."""

BY_WEIGHT = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers that treat each weight by itself, but as a whole."""

HAVE_FUSED_KERNELS = (Adam, AdamW, SGD, Adagrad)
"""Optimizers with a fused CPU kernel."""

State = dict[str, Any]


def why_not_by_unit(optimizer: Optimizer) -> str | None:
    """Return why units cannot be stepped one by one, with the bits of a plain step; None if they can."""
    name = type(optimizer).__name__
    if getattr(optimizer, "found_inf", None) is not None:
        return "a GradScaler has left it to the optimizer's own kernel to skip steps"
    if has_foreign_step_hooks(optimizer):
        return f"a step hook may look at everything that {name} steps"
    if type(optimizer) not in BY_ELEMENT + BY_WEIGHT:
        return f"{name} is not one of torch's optimizers that treat each weight by itself"
    if step_is_replaced(optimizer):
        return f"`step` of {name} was replaced"
    if type(optimizer) in BY_WEIGHT and torch.is_autocast_enabled("cpu"):
        return f"autocast is on, which casts the matrix products of {name} only in the thread that calls `step()`"
    for flag in ("capturable", "differentiable"):
        if any(group.get(flag) for group in optimizer.param_groups):
            return f"{name} has {flag}=True"
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
    settings = {k: v.clone() if isinstance(v, Tensor) else v for k, v in param_group.items() if k != "params"}
    undecided = settings.get("fused", False) is None and settings.get("foreach") is None
    if fused and undecided and type(optimizer) in HAVE_FUSED_KERNELS:
        # up to torch 2.13 SGD's kernel silently leaves weights in half precision as they are (pytorch#191763)
        is_half = any(parameter.itemsize < 4 for parameter in param_group["params"])
        settings["fused"] = None if type(optimizer) is SGD and is_half else True
    return settings
