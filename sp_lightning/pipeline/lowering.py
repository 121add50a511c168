"""Which weights autocast lowers, so that they can be sent already lowered.

Under `bf16-mixed` autocast casts each Linear or Conv weight to bf16 and keeps every copy until its region ends:
streaming would save nothing. A weight that is only ever used through such a cast gives the same bits when the cast
happens once on the host, and half the bytes travel. Which weights those are is seen, not listed: a dispatch mode
watches each unit's first forward. A weight that is also used as it is (a tied embedding, a norm) stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sp_lightning.pipeline._private import storage_key
from sp_lightning.pipeline.weights import Twin, Weight


class LoweringSpy(TorchDispatchMode):
    """Watches operations on weights during a forward under autocast.

    Args:
        twins: Twins by the identity of their memory.
        device_type: The device whose autocast is watched.
    """

    def __init__(self, twins: dict[int, Twin], device_type: str) -> None:
        super().__init__()
        self._twins = twins
        self._dtype = torch.get_autocast_dtype(device_type)
        self.lowered: dict[Weight, torch.dtype] = {}
        self.used_as_is: set[Weight] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note casts and other uses of weights; the operation itself is left alone."""
        kwargs = kwargs or {}
        if not _is_view(func):
            for tensor in _tensors(args):
                twin = self._twins.get(storage_key(tensor))
                if twin is not None:
                    self._note(twin.weight, func, kwargs)
        return func(*args, **kwargs)

    def _note(self, weight: Weight, func: Any, kwargs: dict[str, Any]) -> None:
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is self._dtype
        if is_cast and weight.master.dtype is torch.float32:
            self.lowered[weight] = self._dtype
        else:
            self.used_as_is.add(weight)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else []
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
