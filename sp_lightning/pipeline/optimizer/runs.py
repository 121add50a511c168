"""Weights of a unit that an optimizer can step as one: they lie side by side, and so do their gradients and copies.

To the optimizer's code a *run* is one flat weight, whole or cut into parts. The run of a large weight is cut where its
sections end (sections.py), and perhaps elsewhere. A weight that can be neither joined nor cut is a *single*: it is
stepped as in plain training, in its own shape and with its own state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline.optimizer.flat import VECTOR_MULTIPLE, FlatState, flat, side_by_side
from sp_lightning.pipeline.weights.buffers import is_dense
from sp_lightning.pipeline.weights.sections import cuts_in

State = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A weight that has a gradient.

    Attributes:
        index: Its index among the weights of the `UnitStep`.
        master: The user's Parameter.
        memory: The master as a plain tensor.
        gradient: Its gradient.
        copy: The lowered copy to write; None if there is none.
        state: The optimizer's state of it.
        is_first_step: Whether it has no state yet, and this step makes it.
        by_element: Whether the optimizer treats each element by itself.
        section: The number of the section that it begins in.
    """

    index: int
    master: Tensor
    memory: Tensor
    gradient: Tensor
    copy: Tensor | None
    state: State
    is_first_step: bool
    by_element: bool
    section: int

    @property
    def has_sections(self) -> bool:
        """Whether it is large enough to be cut into sections."""
        return len(cuts_in(self.memory.numel())) > 0

    @cached_property
    def state_signature(self) -> list[tuple[Any, ...]] | None:
        """Key, dtype and, if it is a scalar, value of each entry of its state; None if the weight must be a single."""
        if not self.by_element or self.memory.dim() == 0 or self.memory.numel() == 0 or not is_dense(self.memory):
            return None
        state_signature = []
        for key, value in self.state.items():
            if not isinstance(value, Tensor) or value.device.type != "cpu":
                return None
            if value.dim() and value.shape != self.memory.shape:
                return None
            state_signature.append((key, value.dtype, None if value.dim() else value.item()))
        return state_signature

    def joins(self, other: Candidate) -> bool:
        """Tell whether this weight and the next can be stepped as one."""
        mine, others = self._tensors(), other._tensors()
        return (
            len(mine) == len(others)
            and not (self.has_sections or other.has_sections)
            and all(side_by_side(pair) for pair in zip(mine, others, strict=True))
            and self.memory.numel() % VECTOR_MULTIPLE == other.memory.numel() % VECTOR_MULTIPLE == 0
            and self.state_signature is not None
            and self.state_signature == other.state_signature
        )

    def _tensors(self) -> list[Tensor]:
        return [self.memory, self.gradient] if self.copy is None else [self.memory, self.gradient, self.copy]


def group_neighbors(candidates: Iterable[Candidate]) -> Iterator[list[Candidate]]:
    """Yield lists of candidates that can be stepped as one, each of at least one candidate."""
    group: list[Candidate] = []
    for candidate in candidates:
        if group and not group[-1].joins(candidate):
            yield group
            group = []
        group.append(candidate)
    if group:
        yield group


class StepInputs(NamedTuple):
    """What a step has for each weight of a `UnitStep`.

    Attributes:
        gradients: A gradient, or None to leave the weight as it is. One in the weight's dtype is scaled in place; one
            in a lower dtype is not changed.
        states: The optimizer's state of the weight, which is updated; empty if there is none.
        copies: The lowered copy to write, or None.
    """

    gradients: Sequence[Tensor | None]
    states: Sequence[State]
    copies: Sequence[Tensor | None]


class Part(NamedTuple):
    """One parameter in the eyes of the optimizer's code: a weight, several weights, or a part of them.

    Attributes:
        parameter: Memory of masters.
        gradient: Its gradient, as it arrived.
        copy: The lowered copy to write; None if there is none.
        state: The optimizer's state, which its code changes.
        store_state: Stores the state that the code makes in a first step; None in any other step.
        section: The number of its section.
    """

    parameter: Tensor
    gradient: Tensor
    copy: Tensor | None
    state: State
    store_state: Callable[[], None] | None
    section: int

    @property
    def is_only_updated(self) -> bool:
        """Whether there is nothing to do but to scale in place and update."""
        return self.store_state is None and self.copy is None and self.gradient.dtype == self.parameter.dtype


class Single:
    """A weight that is stepped by itself, in its own shape.

    Args:
        candidate: The weight.

    Attributes:
        has_sections: Whether it is large enough for sections; it is stepped as a whole in the first of them.
    """

    def __init__(self, candidate: Candidate) -> None:
        self.has_sections = candidate.has_sections
        self._master = candidate.master
        self._index = candidate.index
        self._section = candidate.section
        self._is_first_step = candidate.is_first_step

    def part(self, inputs: StepInputs) -> Part:
        """Return the whole weight as a part."""
        gradient, state = inputs.gradients[self._index], inputs.states[self._index]
        assert gradient is not None
        store_state = None
        if self._is_first_step:
            made: State = {}
            state, store_state = made, partial(state.update, made)
        return Part(self._master.data, gradient, inputs.copies[self._index], state, store_state, self._section)


class Run:
    """Weights that are stepped as one flat weight.

    Args:
        candidates: The weights.
        states: The optimizer's state of each weight of the `UnitStep`.
        flat_state: Memory to move their state to, if it does not lie side by side.
    """

    def __init__(self, candidates: Sequence[Candidate], states: Sequence[State], flat_state: FlatState) -> None:
        self._indices = [candidate.index for candidate in candidates]
        self._flat_state = flat_state
        self._is_first_step = candidates[0].is_first_step
        self._section = candidates[0].section
        self._has_sections = candidates[0].has_sections
        self._memory = flat([candidate.memory for candidate in candidates])
        self._gradient = flat([candidate.gradient for candidate in candidates])
        copies = [candidate.copy for candidate in candidates if candidate.copy is not None]
        self._copy = flat(copies) if copies else None
        self._by_element: dict[str, Tensor] = {}
        self._by_weight: dict[str, Tensor] = {}
        self._part_numbers: dict[str, Tensor] = {}
        self._places: dict[str, list[Tensor]] = {}
        for key in candidates[0].state:
            self._hold(key, _gather_state(key, candidates, states, flat_state))

    @property
    def is_only_updated(self) -> bool:
        """Whether there is nothing to do but to scale in place and update."""
        return not self._is_first_step and self._copy is None and self._gradient.dtype == self._memory.dtype

    def numbers_agree(self) -> bool:
        """Tell whether each number that the optimizer keeps per weight, such as `step`, is the same for all weights."""
        return all(bool((numbers == numbers[0]).all()) for numbers in self._by_weight.values())

    def parts(self, size: int | None) -> Iterable[Part]:
        """Return the run in parts of `size` elements, or, if `size` is None, each of its sections as one part."""
        sizes, sections = self._divide(size)
        memories, gradients = torch.split(self._memory, sizes), torch.split(self._gradient, sizes)
        copies = repeat(None) if self._copy is None else torch.split(self._copy, sizes)
        states: list[State] = [{} for _ in memories]
        if self._is_first_step:
            starts = accumulate(sizes[:-1], initial=0)
            keeps = [partial(self._store_state, start, state) for start, state in zip(starts, states, strict=True)]
            return map(Part, memories, gradients, copies, states, keeps, sections)
        for key, values in self._by_element.items():
            for state, value in zip(states, torch.split(values, sizes), strict=True):
                state[key] = value
        for key, numbers in self._by_weight.items():
            # the code changes a number such as `step` once for each parameter: each part has its own
            self._part_numbers[key] = numbers[:1].repeat(len(states))
            for state, number in zip(states, self._part_numbers[key].unbind(), strict=True):
                state[key] = number
        return map(Part, memories, gradients, copies, states, repeat(None), sections)

    def _divide(self, size: int | None) -> tuple[list[int], list[int]]:
        """Return the elements of each part, and the number of the section that it lies in."""
        ends = [*(cuts_in(self._memory.numel()) if self._has_sections else []), self._memory.numel()]
        sizes, sections = [], []
        for section, (begin, end) in enumerate(pairwise([0, *ends]), self._section):
            most = size or end - begin
            for start in range(begin, end, most):
                sizes.append(min(most, end - start))
                sections.append(section)
        return sizes, sections

    def finish(self, states: Sequence[State]) -> None:
        """Update the state of the weights, when all parts have been stepped."""
        for key, places in self._places.items():
            for index, place in zip(self._indices, places, strict=True):
                states[index][key] = place
        for key, values in self._part_numbers.items():
            self._by_weight[key].fill_(values[-1])

    def _store_state(self, start: int, state: State) -> None:
        """Copy the state that the code has made for a part to where the weights' state lies from now on."""
        for key, value in state.items():
            if start == 0:
                self._places[key] = [self._flat_state.place(index, key, value) for index in self._indices]
                self._hold(key, self._places[key])
            if value.dim():
                self._by_element[key][start : start + value.numel()].copy_(value)
            else:
                self._by_weight[key].fill_(value)

    def _hold(self, key: str, tensors: list[Tensor]) -> None:
        held = self._by_element if tensors[0].dim() else self._by_weight
        held[key] = flat(tensors)


def _gather_state(
    key: str, candidates: Sequence[Candidate], states: Sequence[State], flat_state: FlatState
) -> list[Tensor]:
    """Return one kind of state of the weights as tensors side by side; move it there if it lies elsewhere."""
    tensors: list[Tensor] = [candidate.state[key] for candidate in candidates]
    as_weights = all(
        tensor.dim() == 0 or tensor.stride() == candidate.memory.stride()
        for tensor, candidate in zip(tensors, candidates, strict=True)
    )
    if as_weights and side_by_side(tensors):
        return tensors
    places = [
        flat_state.place(candidate.index, key, tensor) for tensor, candidate in zip(tensors, candidates, strict=True)
    ]
    for place, tensor, candidate in zip(places, tensors, candidates, strict=True):
        if place is not tensor:
            states[candidate.index][key] = place.copy_(tensor)
    return places
