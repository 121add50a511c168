"""Gradients with respect to guarded weights: those of their leaves on the device.

`torch.autograd.grad` and, in newer versions of torch, `backward(inputs=...)` consult `__torch_function__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sp_lightning.pipeline.torch_private import tensor_hooks, without_torch_function
from sp_lightning.pipeline.weights.operands import replace_instances
from sp_lightning.pipeline.weights.weight_hooks import run_hooks

DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward)
Leaves = Callable[[Any], Sequence[Tensor]]


def differentiate(
    func: Callable[..., Any], kind: type, leaves_of: Leaves, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function that differentiates, with guarded weights among its arguments.

    Guards stay in force meanwhile: backward runs checkpoints and hooks, which may use weights.

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
    with without_torch_function():
        inputs = [edge for each in kwargs["inputs"] for edge in _sought(each, kind, leaves_of)]
    return func(*args, **{**kwargs, "inputs": inputs})


def _grad(
    kind: type,
    leaves_of: Leaves,
    outputs: Any,
    inputs: Any,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **options: Any,
) -> Any:
    """Call `torch.autograd.grad`; return gradients in the dtypes that the weights have in plain training."""
    if isinstance(inputs, dict):
        found = _grad(kind, leaves_of, outputs, list(inputs.values()), allow_unused, materialize_grads, **options)
        return dict(zip(inputs, found, strict=True))
    wanted: list[Any] = [inputs] if isinstance(inputs, Tensor | GradientEdge) else list(inputs)
    with without_torch_function(), torch.enable_grad():
        outputs = replace_instances(outputs, kind, lambda weight: leaves_of(weight)[0].view_as(weight))
        sought = [_sought(each, kind, leaves_of) for each in wanted]
    may_be_unused = allow_unused or materialize_grads
    one_each = all(len(each) == 1 for each in sought)
    grad: Any = torch.autograd.grad
    edges = [edge for each in sought for edge in each]
    found = iter(grad(outputs, edges, allow_unused=may_be_unused if one_each else True, **options))
    gradients = [
        _whole(each, [next(found) for _ in own], leaves_of(each)) if isinstance(each, kind) else next(found)
        for each, own in zip(wanted, sought, strict=True)
    ]
    if not may_be_unused and any(gradient is None for gradient in gradients):
        raise RuntimeError("One of the differentiated tensors was not used in the graph; see `allow_unused=True`.")
    if materialize_grads:
        zeros = functools.partial(torch.zeros_like, requires_grad=options.get("create_graph", False))
        gradients = [
            zeros(each) if gradient is None else gradient for each, gradient in zip(wanted, gradients, strict=True)
        ]
    return tuple(gradients)


def _sought(each: Any, kind: type, leaves_of: Leaves) -> list[Any]:
    """Return what to differentiate with respect to: edges of the graph, at which no guard looks, for a weight."""
    if not isinstance(each, kind):
        return [each]
    return [get_gradient_edge(leaf) if leaf.requires_grad else leaf.detach() for leaf in leaves_of(each)]


def _whole(weight: Any, parts: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> Tensor | None:
    """Add up the gradients of a weight's leaves; None if no leaf has one.

    Then run the user's hooks on the weight, unless it is in the graph itself, so that autograd has run them.
    """
    found = [part.to(weight.dtype) for part in parts if part is not None]
    if not found:
        return None
    hooks = [] if any(leaf is weight for leaf in leaves) else tensor_hooks(weight)
    return run_hooks(hooks, functools.reduce(torch.add, found))
