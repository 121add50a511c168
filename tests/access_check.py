"""In tests, every operation of a step under `debug=True` is checked for weights that are not where they should be.

On the emulated device, host and device are the same memory, so only this check notices an operation that mixes a master
with tensors on the "device"; on a GPU torch would raise. A read of a weight before its copy has landed goes unnoticed
without it on either.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from sp_lightning.pipeline.calls.calls import Calls
from sp_lightning.pipeline.engine import Engine
from sp_lightning.pipeline.lanes.at_work import optimizer_steps
from sp_lightning.pipeline.operands import instances_in
from sp_lightning.pipeline.torch_private import storage_key
from sp_lightning.pipeline.units.presence import Residency

# under a dispatch mode torch 2.9 compiles in each call anew, as guards on tensors do not hold there
_COMPILES_ANEW = torch.__version__ < "2.10"
UNCHECKED = Calls.step


@contextmanager
def steps_checked() -> Iterator[None]:
    """Check the steps of all pipelines with `debug=True`."""

    @contextmanager
    def checked(self: Calls, *args: Any, **kwargs: Any) -> Iterator[None]:
        engine = self._story._engine
        with UNCHECKED(self, *args, **kwargs):
            # not in inference: under a dispatch mode fused fast paths are off, and other kernels round otherwise
            is_checked = engine.options.debug and engine.graphs.scopes == 1 and torch.is_grad_enabled()
            is_checked &= not (engine.arrangement.compiled and _COMPILES_ANEW)
            with AccessCheck(engine) if is_checked else nullcontext():
                yield

    with patch.object(Calls, "step", checked):
        yield


class AccessCheck(TorchDispatchMode):
    """Raises when an operation reads a twin that is not on the device, or computes with a master."""

    supports_higher_order_operators = True  # `flex_attention` is one operation here

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled, and check what it runs."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (_is_view(func) or self._engine.at_work or optimizer_steps.depth):
            operands = [operand for operand in instances_in(args, Tensor) if operand.layout is torch.strided]
            self._check(func, [(operand, storage_key(operand)) for operand in operands])
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, operands: list[tuple[Tensor, int]]) -> None:
        arrangement = self._engine.arrangement
        twins = arrangement.twins
        for _, memory in operands:
            if memory in twins and twins[memory].unit.presence.residency is not Residency.READABLE:
                name = twins[memory].weight.name
                raise AssertionError(f"{func} reads weight {name!r}, whose copy to the device was not waited for.")
        if len(operands) < 2 or (not isinstance(func, HigherOrderOperator) and func._schema.is_mutable):
            return
        masters = {storage_key(weight.host): weight for weight in arrangement.weights}
        for living in arrangement.parameters_on_device:  # a user may have made views of one vector of all weights
            masters.pop(storage_key(living), None)
        mixed = [masters[memory].name for _, memory in operands if memory in masters]
        others = [operand for operand, memory in operands if memory not in masters and operand.dim() > 0]
        device = self._engine.device.type
        # or they are copies on a GPU's host
        if mixed and any(other.device.type == device for other in others):
            raise AssertionError(f"{func} mixes the master of {mixed[0]!r}, on the host, with a device tensor.")


@functools.cache
def _is_view(func: Any) -> bool:
    """Tell whether an operation only makes an alias of its operand."""
    if isinstance(func, HigherOrderOperator):
        return False
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
