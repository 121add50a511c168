"""The optimizer's step over weights that travel together, in one pass over host memory.

An optimizer steps its parameters one by one, with one pass over memory for each operation. Here the code of the user's
optimizer runs on memory of our choice. Weights that lie side by side are one tensor, a *run*. If there is a cast or a
copy to do besides the update, or torch has no fused kernel, a run is cut into parts that stay in the cache from one
operation to the next. All bits are as after `optimizer.step()`.

    gradient (bf16) -> cast -> scale, clamp -> update of master and state -> copy for the device (bf16)
                       `-------------- for one part after the other, in the cache --------------'

`optimizer.state` keeps its plain form, one tensor per parameter and kind of state; those of a run lie side by side.
What does not (yet), as in a first step or after state was loaded, is stepped weight by weight.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.unit_gradients import Scaling
from sp_lightning.pipeline.optimizer.kinds import BY_ELEMENT, State, keeps_state
from sp_lightning.pipeline.torch_private import StepCode
from sp_lightning.pipeline.weights.buffers import tensor_in

VECTOR_MULTIPLE = 64
"""Weights are joined with others, and cut, at multiples of this many elements only.

It is the most that torch's CPU loops take at once: two vectors of 64 bytes, at two bytes an element. The elements left
over at the end of a tensor are computed one by one and may round differently, because vectors use fused multiply-adds.
So the position of an element in its tensor decides its bits; the address of the tensor does not.
"""

_PART = 1 << 18  # elements for each thread: so many of a gradient, a master and a copy stay in its cache
_STAGGER = 17 * 64  # large buffers begin at the same offset in their pages: an update would hit the same cache sets


class Part(NamedTuple):
    """One parameter in the eyes of the optimizer's code: a weight, several weights, or a part of them."""

    parameter: Tensor  # memory of masters
    gradient: Tensor  # as it arrived
    copy: Tensor | None  # the lowered copy to write
    state: State  # which the code changes


class UnitStep:
    """Steps the weights of one param group that travel together. What can be stepped as one is decided once."""

    def __init__(
        self,
        kind: type[Optimizer],
        masters: Sequence[Tensor],
        homes: Sequence[Tensor],
        copies: Sequence[Tensor | None],
    ) -> None:
        self._masters = list(masters)
        self._copies = list(copies)
        self._runs: list[_Run] = []
        self._whole: list[int] = []
        begin = 0
        for index, home in enumerate(homes):
            if kind not in BY_ELEMENT or home.dim() == 0 or home.numel() == 0:
                self._whole.append(index)
                begin = index + 1
            elif index + 1 == len(homes) or not _are_joined(homes, copies, index):
                self._runs.append(_Run(begin, homes[begin : index + 1], copies[begin : index + 1]))
                begin = index + 1

    def run(
        self,
        optimizer: Optimizer,
        settings: dict[str, Any],
        scaling: Scaling,
        gradients: Sequence[Tensor | None],
        states: Sequence[State],
    ) -> None:
        """Update masters and state as `optimizer.step()` would.

        The caller turns gradients, inference mode and overrides of torch functions off.

        Args:
            optimizer: The user's optimizer.
            settings: The param group without its parameters, as it was when the user's `step` was called.
            scaling: Unscaling and clipping of the gradients before the update.
            gradients: For each weight, a gradient, or None to leave the weight as it is. One in the weight's dtype is
                scaled in place; one in a lower dtype is not changed.
            states: The optimizer's state of each weight, which is updated; empty if there is none.
        """
        stepped = [m for m, g in zip(self._masters, gradients, strict=True) if g is not None]
        does_more = any(copy is not None for copy in self._copies) or any(
            g is not None and g.dtype != m.dtype for m, g in zip(self._masters, gradients, strict=True)
        )
        # parts for two threads at least: in smaller ones the time that Python takes between them would show
        limit = _PART * max(2, torch.get_num_threads()) if does_more or not settings.get("fused") else sys.maxsize
        keeps = keeps_state(optimizer, settings)
        whole = list(self._whole)
        parts: list[Part] = []
        for run in self._runs:
            own = slice(run.first, run.end)
            whole += run.cut(self._masters[own], gradients[own], states[own], keeps, limit, parts)
        for index in whole:
            gradient = gradients[index]
            if gradient is not None:
                parts.append(Part(self._masters[index].data, gradient, self._copies[index], states[index]))
        _update(StepCode(optimizer, settings.copy()), scaling.without_ones(), parts, limit)
        for run in self._runs:
            run.finish(states[run.first : run.end])
        increment_version(stepped)


def _are_joined(homes: Sequence[Tensor], copies: Sequence[Tensor | None], index: int) -> bool:
    """Tell whether a weight and the next one can be stepped as one."""
    (home, after), (copy, copy_after) = homes[index : index + 2], copies[index : index + 2]
    if after.dim() == 0 or after.numel() == 0 or (home.numel() | after.numel()) % VECTOR_MULTIPLE:
        return False
    if copy is None or copy_after is None:
        return copy is copy_after and side_by_side([home, after])
    return side_by_side([home, after]) and side_by_side([copy, copy_after])


class _Run:
    """Weights that lie side by side, and are stepped as one flat weight where all else of theirs does, too.

    Attributes:
        first: The number of its first weight.
        end: The number after that of its last weight.
    """

    def __init__(self, first: int, homes: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
        self.first, self.end = first, first + len(homes)
        self._homes = homes
        self._starts = list(accumulate((home.numel() for home in homes), initial=0))
        self._memory = flat(homes)
        present = [copy for copy in copies if copy is not None]
        self._copy = flat(present) if present else None
        self._state: dict[str, Tensor] = {}  # that of all weights, but for what is one number for each
        self._placed: list[State] = [{} for _ in homes]  # what `optimizer.state` has where state lies in that
        self._cuts: list[tuple[int, int, State]] = []

    def cut(
        self,
        masters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        states: Sequence[State],
        keeps_state: bool,
        limit: int,
        parts: list[Part],
    ) -> list[int]:
        """Add parts to step; return the numbers of weights that have to be stepped as they are."""
        self._cuts.clear()
        whole, ready = [], []
        for index, (master, gradient, state) in enumerate(zip(masters, gradients, states, strict=True)):
            if gradient is None:
                continue
            home, placed = self._homes[index], self._placed[index]
            if (
                master.data_ptr() == home.data_ptr()
                and (gradient.layout, gradient.shape) == (home.layout, home.shape)
                and gradient.stride() == home.stride()
                and (bool(state) or not keeps_state)
                and _is_in(state, placed)
            ):
                ready.append((index, gradient))
            else:
                whole.append(self.first + index)
        present = [gradient for _, gradient in ready]
        if len(ready) == len(states) and side_by_side(present) and _numbers_agree(states):
            parts += self._parts(0, len(states), flat(present), states[0], limit)
        else:
            for index, gradient in ready:
                parts += self._parts(index, index + 1, flat([gradient]), states[index], limit)
        return whole

    def _parts(self, begin: int, end: int, gradient: Tensor, state: State, limit: int) -> Iterator[Part]:
        first, last = self._starts[begin], self._starts[end]
        own: State = {}
        for start in range(first, last, limit):
            part = slice(start, min(start + limit, last))
            # the code changes a number such as `step` once for each parameter: each part has its own
            own = {k: self._state[k][part] if k in self._state else v.clone() for k, v in state.items()}
            copy = None if self._copy is None else self._copy[part]
            yield Part(self._memory[part], gradient[part.start - first : part.stop - first], copy, own)
        self._cuts.append((begin, end, own))

    def finish(self, states: Sequence[State]) -> None:
        """Give each weight the numbers of the last of its parts, and have all state lie side by side."""
        for begin, end, stepped in self._cuts:
            for state in states[begin:end]:
                for key, value in stepped.items():
                    if value.dim() == 0:
                        state[key].copy_(value)
        self._cuts.clear()
        if not all(map(_is_in, states, self._placed)):
            self._place(states)

    def _place(self, states: Sequence[State]) -> None:
        """Move state that was made or loaded to where it lies side by side, if it is like the weights.

        The memory that it leaves is not used again: whoever has set other state may hold the former, to set it again.
        """
        made = next(filter(None, states), State())
        for state, home in zip(states, self._homes, strict=True):
            if state.keys() not in (made.keys(), {}.keys()):
                return
            if not all(_is_usual(value, made[key], home) for key, value in state.items()):
                return
        self._state = {}
        for number, (key, like) in enumerate(made.items(), 1):
            if like.dim() == 0:
                continue
            apart = _STAGGER * number
            memory = torch.empty(apart + self._starts[-1] * like.itemsize, dtype=torch.uint8)[apart:]
            self._state[key] = memory.view(like.dtype)
            for state, home, start in zip(states, self._homes, self._starts, strict=False):
                if state:
                    state[key] = tensor_in(memory, start * like.itemsize, home, like.dtype).copy_(state[key])
        self._placed = [dict(state) for state in states]


def _is_usual(value: Any, like: Any, home: Tensor) -> bool:
    """Tell whether a kind of state has a number for a weight, or one for each element, on the host."""
    if not (isinstance(value, Tensor) and isinstance(like, Tensor) and value.device.type == "cpu"):
        return False
    return value.dtype == like.dtype and value.shape == (home.shape if like.dim() else ())


def _is_in(state: State, placed: State) -> bool:
    return len(state) == len(placed) and all(placed.get(key) is value for key, value in state.items())


def _numbers_agree(states: Sequence[State]) -> bool:
    """Tell whether numbers such as `step` are the same for all weights."""
    numbers = [[float(value) for value in state.values() if value.dim() == 0] for state in states]
    return all(each == numbers[0] for each in numbers)


def _has_values(state: State) -> bool:
    return any(value is not None for value in state.values())


def _update(code: StepCode, scaling: Scaling, parts: Sequence[Part], limit: int) -> None:
    """Cast and scale gradients, run the optimizer's code, and write copies, in batches that stay in the cache."""
    batch: list[Part] = []
    size = 0
    scratch: dict[torch.dtype, Tensor] = {}  # the same memory for one batch after the other: it stays cached
    for part in parts:
        # first steps apart: the fused kernel of SGD wants momentum buffers for all of its parameters, or for none
        if batch and (size + part.parameter.numel() > limit or _has_values(part.state) != _has_values(batch[0].state)):
            _update_batch(code, scaling, batch, limit, scratch)
            batch, size = [], 0
        batch.append(part)
        size += part.parameter.numel()
    if batch:
        _update_batch(code, scaling, batch, limit, scratch)


def _update_batch(
    code: StepCode, scaling: Scaling, parts: Sequence[Part], limit: int, scratch: dict[torch.dtype, Tensor]
) -> None:
    used = 0
    for parameter, arrived, _, _ in parts:
        gradient, dtype = arrived, parameter.dtype
        if arrived.dtype != dtype and used + arrived.numel() <= limit:
            if dtype not in scratch:
                scratch[dtype] = torch.empty(limit, dtype=dtype)
            gradient = scratch[dtype].as_strided(arrived.size(), arrived.stride(), used).copy_(arrived)
            used += arrived.numel()
        elif arrived.dtype != dtype:
            gradient = arrived.to(dtype)
        scaling.apply_(gradient)
        parameter.grad = gradient
    code.run({part.parameter: part.state for part in parts})
    for part in parts:
        if part.copy is not None:
            part.copy.copy_(part.parameter)


def side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Tell whether each of these tensors begins where the one before it ends, in the same dtype."""
    address, dtype = tensors[0].data_ptr(), tensors[0].dtype
    for tensor in tensors:
        if tensor.data_ptr() != address or tensor.dtype != dtype:
            return False
        address += tensor.nbytes
    return True


def flat(neighbors: Sequence[Tensor]) -> Tensor:
    """Return a flat tensor over dense tensors that lie side by side; it does not keep their memory alive.

    Each of them has a storage of its own, so no view of one covers them all.
    """
    nbytes = sum(tensor.nbytes for tensor in neighbors)
    memory = (ctypes.c_char * nbytes).from_address(neighbors[0].data_ptr())
    return torch.frombuffer(memory, dtype=neighbors[0].dtype)
