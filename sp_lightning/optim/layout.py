"""The layout of masters and moments in memory: the state of a parameter is made, and found again.

A bf16 weight is the upper half of its fp32 master, whose lower half is state, `low`: the same numbers, 4 bytes in all.

[Note: names] A moment has the name that torch gives it only if torch would read it as it is. The codes of an `exp_avg`
are `exp_avg_codes`, next to their `exp_avg_scale`; an `exp_avg_sq` whose sign tells how a tie was rounded is
`exp_avg_sq_with_ties`. So code that looks for state by torch's names finds none, and cannot misread it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

MOMENTS = ("fp32", "int8")
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
GROUP = 128
"""The number of elements of a moment in 8 bits that share a scale."""
BLOCK = 8 * GROUP
"""Threads share work in multiples of this number of elements."""
LARGEST_SECOND = 2.0**128 - 2.0**104
"""The largest second moment in codes: the largest number of fp32.

The elements of a group share a scale, so an infinite one would stop the others for good.
"""
LARGEST_FIRST = 2.0**64
"""The largest first moment in codes: about the root of the largest second one, so that their ratio stays small."""
LANES = 8
"""The number of elements on which torch's fused CPU kernels work at once; twice as many in bf16."""

State: TypeAlias = dict[str, Any]
"""The state of a parameter, by names."""

ParamGroup: TypeAlias = dict[str, Any]
"""The options of a param group, and its parameters."""

fills_memory: Callable[[Tensor], bool] = torch.ops.aten.is_non_overlapping_and_dense
"""Tell whether a tensor has no gaps in memory; a view of one column of a matrix has gaps."""


def check_group(group: ParamGroup) -> None:
    """Raise if an option is unknown, or a parameter cannot be stepped."""
    if group["moments"] not in MOMENTS:
        expected = " or ".join(map(repr, MOMENTS))
        raise ValueError(f"`moments={group['moments']!r}` must be {expected}.")
    for number, p in enumerate(group["params"]):
        name = group["param_names"][number] if "param_names" in group else f"parameter {number} of its group"
        if p.is_meta or p.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{name} is {p.dtype} on {p.device}, but sp_lightning.optim updates FP32 and BF16 parameters on the "
                "CPU or an accelerator. Give it to an optimizer of torch.optim."
            )
        if not fills_memory(p):
            raise ValueError(f"{name} is not contiguous. Call `.contiguous()` on it.")


def make_state(p: Tensor, group: ParamGroup, moments: int = 2) -> State:
    """Return the state of a parameter before its first step, on its device, with one moment or two.

    Steps are counted on the host, which would wait for a device that does it.
    Torch's default dtype and device are the user's: Lightning sets the former to bf16 around a `training_step`.
    """
    state: State = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    if p.dtype == torch.bfloat16:
        state["low"] = torch.zeros_like(p, dtype=torch.int16)
    for name in MOMENT_NAMES[:moments]:
        is_second = name == "exp_avg_sq"
        if group["moments"] == "int8":
            codes = torch.uint8 if is_second else torch.int8
            state[f"{name}_codes"] = torch.zeros_like(p, dtype=codes)
            groups = math.ceil(p.numel() / GROUP)
            state[f"{name}_scale"] = torch.zeros(groups, dtype=torch.float32, device=p.device)
        else:
            has_ties = is_second and "low" in state
            state[f"{name}_with_ties" if has_ties else name] = torch.zeros_like(p, dtype=torch.float32)
    return state


def moment_in(state: State, name: str) -> tuple[Tensor | None, Tensor | None]:
    """Return a moment, however it is kept, and the scales of its codes, or None; see [Note: names]."""
    if f"{name}_codes" in state:
        return state[f"{name}_codes"], state[f"{name}_scale"]
    return state.get(name, state.get(f"{name}_with_ties")), None


def is_compact(state: State) -> bool:
    """Tell whether torch's optimizers cannot read state: of half a master, in codes, or of one moment."""
    has_one_moment = "exp_avg" in state and "exp_avg_sq" not in state
    return has_one_moment or any(name == "low" or name.endswith("_codes") for name in state)


def lies_like(tensor: Tensor, like: Tensor) -> bool:
    """Tell whether a tensor has the shape, the layout in memory and the device of another one."""
    return tensor.shape == like.shape and tensor.stride() == like.stride() and tensor.device == like.device


def flat(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor without gaps, in their order in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
