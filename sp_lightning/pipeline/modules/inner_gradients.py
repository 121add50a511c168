"""Gradients with respect to guarded weights: those of their leaves on the device.

`torch.autograd.grad` and, in newer versions of torch, `backward(inputs=...)` consult `__torch_function__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sp_lightning.pipeline._private import tensor_hooks
from sp_lightning.pipeline.modules.operands import replace_instances
from sp_lightning.pipeline.weights.weight import run_hooks

DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward)
Leaves = Callable[[Any], Sequence[Tensor]]


def differentiate(
    func: Callable[..., Any], kind: type, leaves_of: Leaves, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function that differentiates, with guarded weights among its arguments.

    Args:
        func: `torch.autograd.grad` or `torch.autograd.backward`.
        kind: The class of the weights.
        leaves_of: Returns the leaves that the graph of this step was built on: one, or two if the weight was lowered
            first, and then used as it is.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    if func is torch.autograd.grad:
        return _grad(kind, leaves_of, *args, **kwargs)
    inputs = [leaves_of(each) if isinstance(each, kind) else [each] for each in kwargs["inputs"]]
    return func(*args, **{**kwargs, "inputs": [leaf for each in inputs for leaf in each]})


def _grad(
    kind: type,
    leaves_of: Leaves,
    outputs: Any,
    inputs: Any,
    allow_unused: bool | None = None,
    **options: Any,
) -> Any:
    """Call `torch.autograd.grad`; return gradients in the dtypes that the weights have in plain training."""
    if isinstance(inputs, dict):
        found = _grad(kind, leaves_of, outputs, list(inputs.values()), allow_unused, **options)
        return dict(zip(inputs, found, strict=True))
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    leaves = [leaves_of(each) if isinstance(each, kind) else [each] for each in wanted]
    one_each = all(len(each) == 1 for each in leaves)
    grad: Any = torch.autograd.grad
    found = iter(
        grad(
            replace_instances(outputs, kind, lambda weight: leaves_of(weight)[0]),
            [leaf for each in leaves for leaf in each],
            allow_unused=allow_unused if one_each else True,
            **options,
        )
    )
    gradients = [
        _run_hooks_of(each, own, _sum([next(found) for _ in own], each.dtype))
        for each, own in zip(wanted, leaves, strict=True)
    ]
    if not one_each and not allow_unused and any(gradient is None for gradient in gradients):
        raise RuntimeError("One of the differentiated tensors was not used in the graph; see `allow_unused=True`.")
    return tuple(gradients)


def _sum(parts: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """Add up the gradients of a weight's leaves, in the weight's dtype; None if none of them has one."""
    found = [part.to(dtype) for part in parts if part is not None]
    return functools.reduce(torch.add, found) if found else None


def _run_hooks_of(tensor: Tensor, leaves: Sequence[Tensor], gradient: Tensor | None) -> Tensor | None:
    """Run the user's hooks on a weight that is not in the graph itself; autograd runs those on what is."""
    if gradient is None or any(leaf is tensor for leaf in leaves):
        return gradient
    return run_hooks(tensor_hooks(tensor), gradient)
