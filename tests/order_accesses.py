"""What the work of the engine's jobs reads and writes, for the checker of ordering (order_check.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

from torch import Tensor
from torch.utils._pytree import tree_leaves

from sp_lightning.optim import passes
from sp_lightning.pipeline.gradients import routes
from sp_lightning.pipeline.lanes.lanes import Kind, do_nothing
from sp_lightning.pipeline.optimizer import clipping, state_ring, unit_steps, visit
from sp_lightning.pipeline.processes.averages import SharedSums
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import note_stepped

Accesses = tuple[list[Any], list[Any]]
"""Tensors that are read, and tensors that are written; None is among them where there is none."""


def accesses_of(action: Any) -> Accesses:
    """What the work of a job reads, and what it writes."""
    while hasattr(action, "__wrapped__"):  # timed, or slowed down
        action = action.__wrapped__
    function, args = getattr(action, "func", action), getattr(action, "args", ())
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    # copies that are measured are of memory that nobody else knows
    if isinstance(function, Mock) or function.__module__.startswith(("tests", "sp_lightning.planning")):
        return [], []
    assert function in _ACCESSES, f"tell tests/order_accesses.py what {function} reads and writes"
    return _ACCESSES[function](owner, *args)


def _nothing(*_: Any) -> Accesses:
    return [], []


def _of_step(_: None, unit: Unit, step: Any, updates: Any, *args: Any) -> Accesses:
    of_all = [update for of_group in updates.values() for update in of_group]
    reads = [each for _, gradient, _, _, factors in of_all for each in (gradient, *factors)]
    return reads, [each for weight, _, state, copy, _ in of_all for each in (weight, copy, *tree_leaves(state))]


def _of_request(_: Any, kind: Kind, memory: Tensor, piece: Any) -> Accesses:
    return ([], [memory]) if kind is Kind.READ else ([memory], [])


def _of_buffer(buffer: Any, passes: Any) -> Accesses:
    return [], [buffer.memory]  # the job of the unit, in which it runs, has all else


def _of_sums(_: None, sums: Any, dtype: object) -> Accesses:
    return [each for of in sums for each in (of.before, of.added)], [
        each for of in sums for each in (of.total, of.norm)
    ]


def _of_factor(_: None, norms: Any, most: float, factor: Tensor) -> Accesses:
    return [each for of in norms for each in (of.gradient if of.norm is None else of.norm, *of.factors)], [factor]


def _of_copies(_: visit.Visit, pairs: Any) -> Accesses:
    return [source for _, source in pairs], [target for target, _ in pairs]


def _of_return(late: routes.LateGradients) -> Accesses:
    return [*late.sources], [*late.landed.values()]


def _of_piece(update: visit.Visit, piece: Any, of_weights: Any, arrived: object) -> Accesses:
    gradients = [of_weights[part.number].memory.gradient for part in piece.parts if part.memory.gradient is None]
    start, sent = piece.sent
    place = update._segment.place[start : start + sent.nbytes]
    return gradients, [piece.buffer.bytes, *([place] if update._is_placed else [])]


def _of_shares(sums: SharedSums, number: int, measured: Any) -> Accesses:
    return [sums.sum_of[each] for each in measured], [sums.norms[each] for each in measured]


_ACCESSES: dict[Any, Callable[..., Accesses]] = {
    do_nothing: _nothing,
    note_stepped: _nothing,
    visit.Visit._begin_pieces: _nothing,
    visit.Visit._copy: _of_copies,
    visit.Visit._step: _of_piece,
    unit_steps._step_unit: _of_step,
    routes.LateGradients._issue_copy: _nothing,
    routes.LateGradients._send: _of_return,
    routes._add_up: _of_sums,
    clipping._find_factor: _of_factor,
    state_ring._Buffer.step: _of_buffer,
    state_ring.StateRing._move: _of_request,
    passes.add: lambda _, total, added: ([added], [total]),
    SharedSums.land: _of_shares,
}
