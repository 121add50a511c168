"""The optimizer's step over weights that travel together, in one pass over host memory.

An optimizer steps its parameters one by one, with one pass over memory for each operation. Here the code of the user's
optimizer runs on memory of our choice. Weights that lie side by side are one tensor, a *run*. If there is a cast or a
copy to do besides the update, or torch has no fused kernel, a run is cut into parts that stay in the cache from one
operation to the next. All bits are as after `optimizer.step()`.

    gradient (bf16) -> cast -> scale, clamp -> update of master and state -> copy for the device (bf16)
                       `-------------- for one part after the other, in the cache --------------'

`optimizer.state` keeps its plain form, one tensor per parameter and kind of state; those of a run lie side by side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.scaling import Scaling
from sp_lightning.pipeline.optimizer.update import BY_ELEMENT, VECTOR_MULTIPLE, Part, State, Update
from sp_lightning.pipeline.weights.buffers import is_dense, tensor_in

_STAGGER = 17 * 64  # large buffers begin at the same offset in their pages: an update would hit the same cache sets


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
        self._singles: list[int] = []
        for index, (home, copy) in enumerate(zip(homes, copies, strict=True)):
            if kind not in BY_ELEMENT or home.dim() == 0 or home.numel() == 0 or not is_dense(home):
                self._singles.append(index)
            elif self._runs and self._runs[-1].is_before(index, home, copy):
                self._runs[-1].add(home, copy)
            else:
                self._runs.append(_Run(index, home, copy))

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
        update = Update(optimizer, settings, scaling)
        afterwards: list[Callable[[], None]] = []
        update.run(self._parts(update, gradients, states, afterwards))
        for action in afterwards:
            action()
        increment_version([m for m, g in zip(self._masters, gradients, strict=True) if g is not None])

    def _parts(
        self,
        update: Update,
        gradients: Sequence[Tensor | None],
        states: Sequence[State],
        afterwards: list[Callable[[], None]],
    ) -> Iterator[Part]:
        singles = list(self._singles)
        for run in self._runs:
            if all(gradient is None for gradient in gradients[run.first : run.end]):
                continue
            own = states[run.first : run.end]
            if run.is_home(self._masters[run.first : run.end]) and run.settle(own):
                yield from run.parts(update, gradients[run.first : run.end], own, afterwards)
            else:
                singles += range(run.first, run.end)
        for index in singles:
            gradient, state = gradients[index], states[index]
            if gradient is None:
                continue
            store_state = None
            if update.keeps_state and not _has_values(state):
                made: State = {}
                state, store_state = made, partial(state.update, made)
            yield Part(self._masters[index].data, gradient, self._copies[index], state, store_state)


class _Run:
    """Weights that lie side by side, and are stepped as one flat weight where their gradients do, too.

    Attributes:
        first: The number of its first weight.
    """

    def __init__(self, first: int, memory: Tensor, copy: Tensor | None) -> None:
        self.first = first
        self._memories = [memory]
        self._copies = [] if copy is None else [copy]
        self._starts = [0, memory.numel()]
        self._memory = flat([memory])
        self._copy = None if copy is None else flat([copy])
        self._forget_state()

    @property
    def end(self) -> int:
        """The number after that of its last weight."""
        return self.first + len(self._memories)

    def is_home(self, masters: Sequence[Tensor]) -> bool:
        """Tell whether all masters lie where they lay."""
        return all(m.data_ptr() == memory.data_ptr() for m, memory in zip(masters, self._memories, strict=True))

    def is_before(self, index: int, memory: Tensor, copy: Tensor | None) -> bool:
        """Tell whether a weight can be joined."""
        return (
            index == self.end
            and self._memories[-1].numel() % VECTOR_MULTIPLE == memory.numel() % VECTOR_MULTIPLE == 0
            and side_by_side([self._memories[-1], memory])
            and (copy is None) == (not self._copies)
            and (copy is None or side_by_side([self._copies[-1], copy]))
        )

    def add(self, memory: Tensor, copy: Tensor | None) -> None:
        """Join the next weight."""
        self._memories.append(memory)
        self._starts.append(self._starts[-1] + memory.numel())
        self._memory = flat(self._memories)
        if copy is not None:
            self._copies.append(copy)
            self._copy = flat(self._copies)
        self._forget_state()

    # -------------------------------------------------------------------------------------------------- state

    def _forget_state(self) -> None:
        self._by_element: dict[str, Tensor] = {}
        self._by_weight: dict[str, Tensor] = {}
        self._places: list[State] = [{} for _ in self._memories]

    def settle(self, states: Sequence[State]) -> bool:
        """Have all state lie side by side: that which was loaded, or set by hand, moves.

        Memory that was left is not used again: whoever has set other state may hold the former, to set it again.

        Returns:
            Whether that is possible: it is like the weights, or one number for each.
        """
        if all(map(_is_in, states, self._places)):
            return True
        for state, memory in zip(states, self._memories, strict=True):
            for value in state.values():
                is_usual = isinstance(value, Tensor) and value.device.type == "cpu"
                if value is not None and not (is_usual and (value.dim() == 0 or value.shape == memory.shape)):
                    return False
        self._forget_state()
        for index, state in enumerate(states):
            for key, value in state.items():
                if value is not None:
                    place = self._place(index, key, value)
                    if place is None:
                        self._forget_state()
                        return False
                    state[key] = place.copy_(value)
        return True

    def _place(self, index: int, key: str, like: Tensor) -> Tensor | None:
        """Make the place of one weight's state; None if others have such state in another dtype."""
        each, dtype = like.dim() == 0, like.dtype
        buffers = self._by_weight if each else self._by_element
        if key in (self._by_element if each else self._by_weight) or (key in buffers and buffers[key].dtype != dtype):
            return None
        if key not in buffers:
            count = len(self._memories) if each else self._starts[-1]
            apart = _STAGGER * (1 + len(self._by_element) + len(self._by_weight))
            buffers[key] = torch.empty(apart + count * dtype.itemsize, dtype=torch.uint8)[apart:].view(dtype)
        memory = buffers[key].view(torch.uint8)
        start = index if each else self._starts[index]
        place = tensor_in(memory, start * dtype.itemsize, like if each else self._memories[index], dtype)
        self._places[index][key] = place
        return place

    def _store_state(self, begin: int, end: int, start: int, made: State) -> None:
        """Copy the state that the code has made for a part to where the weights' state lies from now on."""
        for key, value in made.items():
            if start == self._starts[begin]:
                for index in range(begin, end):
                    self._place(index, key, value)
            if value.dim():
                self._by_element[key][start : start + value.numel()].copy_(value)
            else:
                self._by_weight[key][begin:end].fill_(value)

    # -------------------------------------------------------------------------------------------------- parts

    def parts(
        self,
        update: Update,
        gradients: Sequence[Tensor | None],
        states: Sequence[State],
        afterwards: list[Callable[[], None]],
    ) -> Iterator[Part]:
        """Yield the parts to step; what is to be done when they have been stepped is added to `afterwards`."""
        count = len(gradients)
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) == count and side_by_side(present) and self._is_alike(states):
            yield from self._cut(update, 0, count, flat(present), states, afterwards)
            return
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                yield from self._cut(update, index, index + 1, flat([gradient]), states, afterwards)

    def _is_alike(self, states: Sequence[State]) -> bool:
        """Tell whether all weights have the same kinds of state, and the same numbers such as `step`."""
        keys = states[0].keys()
        return all(state.keys() == keys for state in states) and all(
            bool((numbers == numbers[0]).all()) for numbers in self._by_weight.values()
        )

    def _cut(
        self,
        update: Update,
        begin: int,
        end: int,
        gradient: Tensor,
        states: Sequence[State],
        afterwards: list[Callable[[], None]],
    ) -> Iterator[Part]:
        first, last = self._starts[begin], self._starts[end]
        makes_state = update.keeps_state and not _has_values(states[begin])
        does_more = makes_state or self._copy is not None or gradient.dtype != self._memory.dtype
        size = update.limit if does_more or not update.is_fused else last - first
        keys = self._places[begin]
        state: State = {}
        for start in range(first, last, size):
            stop = min(start + size, last)
            store_state = None
            if makes_state:
                state = {}
                store_state = partial(self._store_state, begin, end, start, state)
            else:
                state = {key: values[start:stop] for key, values in self._by_element.items() if key in keys}
                # the code changes a number such as `step` once for each parameter: each part has its own
                state.update({key: numbers[begin].clone() for key, numbers in self._by_weight.items() if key in keys})
            copy = None if self._copy is None else self._copy[start:stop]
            yield Part(self._memory[start:stop], gradient[start - first : stop - first], copy, state, store_state)
        afterwards.append(partial(self._finish, begin, end, state, states if makes_state else ()))

    def _finish(self, begin: int, end: int, state: State, made_for: Sequence[State]) -> None:
        """Keep the numbers of the last part for each weight, and enter state that was made."""
        for key, numbers in self._by_weight.items():
            if key in state:
                numbers[begin:end].fill_(state[key])
        for index in range(begin, end) if made_for else ():
            made_for[index].update(self._places[index])


def _has_values(state: State) -> bool:
    return any(value is not None for value in state.values())


def _is_in(state: State, places: State) -> bool:
    return len(state) == len(places) and all(places.get(key) is value for key, value in state.items())


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
