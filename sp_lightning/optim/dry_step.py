"""The state that an optimizer of torch would keep, found by a step that computes nothing: on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

# options of torch's optimizers that work on some devices only
_ON_META = {"fused": False, "foreach": False, "capturable": False}


class _AnyNumber(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers with a one where a step reads a number on the meta device, as Adafactor reads norms."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


def state_after_dry_step(kind: type[Optimizer], groups: Iterable[Mapping[str, Any]]) -> list[Tensor] | None:
    """Return state as the first step of an optimizer makes it, with any options of its param groups.

    The result is None if such a step cannot run: the optimizer needs a closure, or refuses these weights.
    """
    on_meta = [{**group, **_ON_META} for group in groups]
    for group in on_meta:
        group.pop("param_names", None)
        group["params"] = [torch.empty_like(weight, device="meta") for weight in group["params"]]
        for weight in group["params"]:
            weight.grad = torch.empty_like(weight)
    try:
        optimizer = kind(on_meta)  # type: ignore[call-arg]  # only the base class needs defaults
        with torch.no_grad(), _AnyNumber():  # type: ignore[no-untyped-call]
            # without global hooks, which are for real steps
            inspect.unwrap(type(optimizer).step)(optimizer)
    except Exception:
        return None
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]
