"""Compiled units: `compile=True`, and what else is compiled around the engine.

[Note: what is in a graph]
`torch.compile` sees the call of a unit's module, hooks of the user included, and nothing of the engine: the gate is
around it. Weights are inputs of the graph. So units that are alike share one graph, and a weight that moves, or a new
arrangement, costs no compilation.

[Note: one function for each kind of unit]
torch counts graphs for each code object, and runs a function as it is, uncompiled, once that count has reached a limit
(8). Modules compiled with `module.compile()` share a code object when their class does, so a few stages of different
width use that up. Here each kind of unit has a code object of its own.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sp_lightning.pipeline._private import call_before_compiling, hide_from_dynamo, without_compile
from sp_lightning.pipeline.transfer.backend import Backend

_ENGINE = "sp_lightning.pipeline."
_by_kind: dict[Any, Callable[..., Any]] = {}
_at_work: weakref.WeakSet[Backend] = weakref.WeakSet()


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """The call of a module, to be compiled when it first happens; None where that is not for us to do, or pointless.

    What the user compiled stays as it is. A lone layer of torch (an embedding, a head, an LSTM) is one operation: there
    is nothing to fuse.
    """
    is_lone_layer = type(module).__module__.startswith("torch.nn.") and not any(module.children())
    if is_lone_layer or without_compile(module) is not module or isinstance(module, torch.jit.ScriptModule):
        return None
    kind = _kind(module)
    if kind not in _by_kind:
        own_code = types.FunctionType(_call.__code__.replace(co_name=type(module).__name__), globals())
        _by_kind[kind] = torch.compile(own_code)
    return types.MethodType(_by_kind[kind], module)


@functools.cache
def keep_out_of_graphs() -> None:
    """`torch.compile` of what is around a gate leaves the engine out, but for `_call` below, which is compiled."""
    own = (__name__, __package__)  # to hide a package is to hide all that lies beside it
    hide_from_dynamo(name for name in list(sys.modules) if name.startswith(_ENGINE) and name not in own)


def finish_before_compiling(backend: Backend) -> None:
    """Whatever torch compiles from now on, it does so while nothing is stepped in the backend's thread."""
    _watch_compiling()
    _at_work.add(backend)


@functools.cache
def _watch_compiling() -> None:
    call_before_compiling(_finish_work)


def _finish_work() -> None:
    for backend in list(_at_work):
        backend.drain()


def run_uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run something as if nothing in it, and nothing around it, were compiled."""

    def run() -> Any:
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **kwargs)

    return torch.compiler.disable(run)()  # type: ignore[no-untyped-call]


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules of the same classes with weights of the same shapes."""
    classes = tuple((name, type(inner)) for name, inner in module.named_modules())
    shapes = tuple((name, weight.shape, weight.dtype) for name, weight in module.named_parameters())
    return classes, shapes
