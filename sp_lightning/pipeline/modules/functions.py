"""Custom autograd functions applied to guarded weights: torch does not consult `__torch_function__` there."""

from __future__ import annotations

from typing import Any

import torch

from sp_lightning.pipeline._private import sees_torch_functions
from sp_lightning.pipeline.modules.guard import HostParameter
from sp_lightning.pipeline.modules.lowered import Served

_original_apply: Any = torch.autograd.Function.__dict__["apply"]


def watch_functions() -> None:
    """Redirect guarded weights that a `torch.autograd.Function` is applied to."""
    torch.autograd.Function.apply = classmethod(_apply)


def stop_watching_functions() -> None:
    """Undo `watch_functions`."""
    torch.autograd.Function.apply = _original_apply


def _apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    if sees_torch_functions():
        for value in args:
            if isinstance(value, HostParameter | Served):  # it calls this again, with what takes its place
                return value.__torch_function__(cls.apply, (type(value),), args, kwargs)
    return _original_apply.__get__(None, cls)(*args, **kwargs)


_apply.__name__ = "apply"  # torch.compile knows it by this name
