"""Calls of modules whose pipeline has not been used yet: they are noticed in `nn.Module.__call__`.

Until then modules keep their own classes (see [Note: users who ask for a class] in gates.py). This is no way for good:
`torch.compile` would look into what stands there for every module of a graph.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn

from sp_lightning.pipeline.torch_private import explain_graph_break
from sp_lightning.pipeline.weights.gates import Gatekeeper, keeper_of

_unused: set[Gatekeeper] = set()
_plain_call: Any = nn.Module.__call__


def watch_for_first_call(keeper: Gatekeeper) -> None:
    """Route calls of modules that are registered for `keeper` to it, though they are no gates."""
    global _plain_call
    _unused.add(keeper)
    if nn.Module.__call__ is not _call:
        _plain_call, nn.Module.__call__ = nn.Module.__call__, _call  # type: ignore[method-assign]


def stop_watching_for_first_call(keeper: Gatekeeper) -> None:
    """Undo `watch_for_first_call`. Idempotent."""
    _unused.discard(keeper)
    if not _unused and nn.Module.__call__ is _call:
        nn.Module.__call__ = _plain_call  # type: ignore[method-assign]


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    plain_call = types.MethodType(_plain_call, self)
    found = keeper_of(self)
    # Whoever has kept this function (`torch.compile`, another patch) may get here at any time, also through a gate.
    if found is None or found[1].running_calls:
        return plain_call(*args, **kwargs)
    keeper, member = found
    return keeper.call(member, plain_call, args, kwargs)


explain_graph_break(_call, "superpipeline moves weights before and after a unit computes; compile its units")
