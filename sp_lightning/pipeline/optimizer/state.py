"""The state of optimizers of any class: whether it can be moved, to where, and how large it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from sp_lightning.pipeline.optimizer.kinds import STEP_BY_WEIGHT, parameters_of
from sp_lightning.pipeline.torch_private import without_torch_function

_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, type, Optimizer, *_FUNCTIONS)
# of the length of all weights, beside LBFGS's history: directions, gradients and weights of a line search
_VECTORS_OF_LBFGS = 6


def can_be_moved(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer keeps all tensors, but for parameters and numbers, in its state.

    There they can be moved, unlike those in attributes, and in objects of other classes.
    """
    if type(optimizer) in STEP_BY_WEIGHT:
        return True
    known = set(map(id, parameters_of(optimizer)))
    attributes = [value for name, value in vars(optimizer).items() if name != "state"]
    return _is_plain(attributes, known) and _is_plain(list(optimizer.state.values()), None)


def _is_plain(value: Any, tensors: Set[int] | None) -> bool:
    """Tell whether an object is made of plain values, and tensors: any, or numbers and those of these identities."""
    if isinstance(value, Tensor):
        return tensors is None or id(value) in tensors or value.dim() == 0
    if isinstance(value, dict):
        return all(_is_plain(each, tensors) for each in value.values())
    if type(value) in (list, tuple, set):
        return all(_is_plain(each, tensors) for each in value)
    return value is None or isinstance(value, _PLAIN)


def move_state(optimizer: Optimizer, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move the optimizer's state of parameters to a device, as `Optimizer.load_state_dict` does."""
    moving = set(map(id, parameters))
    # looking state up by a guarded weight would wait for its gradient
    with without_torch_function():
        for group in optimizer.param_groups:
            counts_there = device.type == "cpu" or group.get("fused") or group.get("capturable")
            for parameter in [p for p in group["params"] if id(p) in moving]:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if key != "step" or counts_there:
                        state[key] = tree_map_only(Tensor, partial(torch.Tensor.to, device=device), value)


def state_bytes(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes that the optimizer's state of parameters takes."""
    nbytes = 0
    with without_torch_function():
        for parameter in parameters:
            # a list, because the thread that steps may add state at the same time
            leaves = tree_leaves(list(optimizer.state.get(parameter, {}).values()))
            nbytes += sum(value.nbytes for value in leaves if isinstance(value, Tensor))
    return nbytes


def most_state_bytes(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> int:
    """Return the bytes that the optimizer's state of parameters takes at most: LBFGS's history grows."""
    if not isinstance(optimizer, LBFGS):
        return state_bytes(optimizer, parameters)
    (group,) = optimizer.param_groups
    own = set(map(id, group["params"]))
    vectors = 2 * group["history_size"] + _VECTORS_OF_LBFGS
    return int(vectors * sum(parameter.nbytes for parameter in parameters if id(parameter) in own))
