"""Compiled units: `compile=True`, and code around the engine that users compile.

[Note: what is in a graph]
`torch.compile` sees the call of a unit's module, including the user's hooks, and nothing of the engine, because the
gate is around it. Weights are inputs of the graph. So units that are alike share one graph, and neither a weight that
moves nor a new arrangement costs a compilation.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.torch_private import call_before_compiling, hide_from_dynamo, without_compile
from sp_lightning.pipeline.weights import autocast, leaf

_ENGINE = "sp_lightning.pipeline."
_backends: weakref.WeakSet[Backend] = weakref.WeakSet()


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the module's call, to be compiled when it first runs; None where that is not for us to do, or pointless.

    It is what `module.compile()` would leave on the module. What the user compiled stays as it is. A lone layer of
    torch (an embedding, a head, an LSTM) is one operation, with nothing to fuse.
    """
    is_lone_layer = type(module).__module__.startswith("torch.nn.") and not any(module.children())
    if is_lone_layer or without_compile(module) is not module or isinstance(module, torch.jit.ScriptModule):
        return None
    return torch.compile(module._call_impl)


def keep_out_of_graphs(backend: Backend) -> None:
    """Have `torch.compile` leave the engine's code alone, and drain a backend before it compiles anything."""
    _prepare_to_be_compiled()
    _backends.add(backend)


@functools.cache
def _prepare_to_be_compiled() -> None:
    # in graphs of units and of hooks; hiding a package would hide all modules in it
    visible = (autocast.__name__, leaf.__name__, leaf.__package__)
    hide_from_dynamo(name for name in list(sys.modules) if name.startswith(_ENGINE) and name not in visible)
    call_before_compiling(_drain_backends)


def _drain_backends() -> None:
    """Finish work on the host: nothing may be stepped meanwhile."""
    for backend in list(_backends):
        backend.drain()
