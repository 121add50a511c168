"""Units: weights that stream together, the groups in which they travel, and the modules whose calls need them.

A *unit* enters and leaves the device as a whole: a layer, a block, or several small layers. Its *members* are the
modules whose calls enter it. `finder.py` finds them in a module tree. Up to `k_prime` units travel together, as a
*group*, which knows what of it is on the device.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.weights.segment import Segment
from sp_lightning.pipeline.weights.weight import Twin, Weight


class Residency(enum.Enum):
    """Whether a group's bytes are on the device."""

    ABSENT = enum.auto()
    """Its place holds nothing, or another group's bytes, or some that are out of date."""
    COMING = enum.auto()
    """Copies to the device have been asked for; computing has yet to wait for their tickets."""
    READABLE = enum.auto()
    """Computing waits for the copy, so everything computed from now on sees the bytes."""


class Group:
    """Units that travel together (up to `k_prime`), or resident weights, which stay once they are on the device."""

    place: Tensor  # the device memory that it is copied to

    def __init__(self, index: int, units: Sequence[Unit], segments: Sequence[Segment], name: str = "") -> None:
        self.index = index  # its number among the streamed groups, in expected order
        self.units = list(units)  # none for a weight that was made resident
        for unit in units:
            unit.group = self
        self.segments = list(segments)  # the host memory that it is copied from
        # the weights, in the order in which they lie in its place
        self.weights: list[Weight] = [weight for segment in segments for weight in segment.weights]
        self.nbytes = sum(segment.nbytes for segment in segments)  # bytes it takes on the device
        self.resident = not units or units[0].resident
        self.name = name or ", ".join(unit.name for unit in units)  # for recordings
        # groups whose places overlap its own; if there are none, it is loaded only when its masters have changed
        self.conflicts: frozenset[Group] = frozenset()
        self.users = 0  # forward calls that are inside one of its units now; while there are any, it may not be evicted
        self.residency = Residency.ABSENT  # whether its bytes are on the device
        self.uploads: list[Ticket] = []  # copies to the device, which may still be under way
        self.suspect = False  # whether its masters may have changed since they were last checked
        self.handles = 0  # how many saved tensors of live graphs are its weights, or views of them
        # an optimizer's work on its masters; None if there is none, or once it is known to be done
        self.being_stepped: Ticket | None = None
        self.apart: list[Group] = []  # groups of single weights of it, which were made resident
        # whether another process owns and steps its masters, and this one has them, too
        self.is_followed = any(segment.is_followed for segment in segments)
        # whether it was stepped in backward, with the gradients of other processes, and `step()` is still to be called
        self.is_ahead = False

    def lie_in(self, place: Tensor) -> None:
        """Have it copied to this device memory."""
        self.place, begin = place, 0
        for segment in self.segments:
            segment.place = place[begin : begin + segment.nbytes]
            begin += segment.nbytes


@dataclass
class Entry:
    """An entry of a module's `_parameters` that is a weight."""

    parameters: dict[str, nn.Parameter | None]
    key: str
    weight: Weight

    @property
    def is_in_place(self) -> bool:
        """Whether the module has the weight there, as its master or its twin, and not what `functional_call` lends."""
        current = self.parameters.get(self.key)
        return current is self.weight.master or current is self.weight.twin.parameter


class Member:
    """A module whose call enters a unit (or, without a unit, only opens a step)."""

    def __init__(self, name: str, module: nn.Module, unit: Unit | None) -> None:
        self.name = name
        self.module = module
        self.unit = unit
        self.unit_name = name  # the name of its unit, or its own if it has none that streams
        self.is_streamed = False  # whether its unit streams
        self.index = -1  # its number among the members of streamed units; -1 for others
        self.entries: list[Entry] = []  # every entry that holds a weight which its call may use
        # RNN modules at or below it, with the weights in their own list (`_flat_weights`)
        self.recurrent: list[tuple[nn.RNNBase, list[Weight]]] = []
        self.groups: list[Group] = []  # groups that have to be on the device for its call
        self.called_in: set[Group] = set()  # groups of other calls that its calls were inside of
        self.running_calls = 0  # how many of its calls are under way
        self.entered = 0  # how many times it has been called since it was attached
        # the compiled function that runs its forward; None if `compile=True` does not apply to it
        self.compiled: Callable[..., Any] | None = None
        # parameters that its call may use and that live on the device
        self.parameters_on_device: list[nn.Parameter] = []

    def put_in_twins(self, prepare: Callable[[Twin], None]) -> None:
        """Put twins in place of the masters. Masters are read, so the guard must not look.

        First, `prepare` gets each twin whose `requires_grad` is not the master's (freezing callbacks, GAN toggles).
        """
        for entry in self.entries:
            twin, master = entry.weight.twin, entry.weight.master
            if twin.parameter.requires_grad != master.requires_grad:
                prepare(twin)
            if entry.parameters.get(entry.key) is master:  # else `functional_call` has put another tensor there
                entry.parameters[entry.key] = twin.parameter
        for module, weights in self.recurrent:
            present = {id(entry.weight): entry.parameters.get(entry.key) for entry in self.entries}
            module._flat_weights = [present[id(weight)] for weight in weights]

    def put_back_masters(self, resident_too: bool = True) -> None:
        """Put the masters back; what is neither a twin nor a master is the user's and stays."""
        for entry in self.entries:
            weight, current = entry.weight, entry.parameters.get(entry.key)
            if current is None or current is weight.master or (weight.twin.group.resident and not resident_too):
                continue
            if current is weight.twin.parameter or any(current is leaf for leaf in weight.lowered_leaves):
                entry.parameters[entry.key] = weight.master
        for module, weights in self.recurrent:
            module._flat_weights = [weight.master for weight in weights]

    @contextmanager
    def computing_with(self, twins: Sequence[Twin]) -> Iterator[None]:
        """Have calls in the block compute with these twins, one for each entry, some of which others have replaced."""
        replaced = [(entry, twin) for entry, twin in zip(self.entries, twins, strict=True) if twin.is_replaced]
        for entry, twin in replaced:
            entry.parameters[entry.key] = twin.parameter
        self.groups = list(dict.fromkeys([*self.groups, *(twin.group for _, twin in replaced)]))
        try:
            yield
        finally:
            self.find_groups()
            for entry, twin in replaced:
                if entry.parameters.get(entry.key) is twin.parameter:  # as its unit is still reached by backward
                    entry.parameters[entry.key] = entry.weight.twin.parameter

    def find_groups(self) -> None:
        """Determine which groups have to be on the device for its call."""
        self.groups = list(dict.fromkeys(entry.weight.twin.group for entry in self.entries))


@dataclass(eq=False)
class Unit:
    """Weights that stream together, or all resident weights."""

    name: str
    resident: bool = False
    weights: list[Weight] = field(default_factory=list, repr=False)  # those that the engine manages
    # all weights of a unit that lives on the device, whose `weights` is empty
    weights_on_device: list[Weight] = field(default_factory=list, repr=False)
    members: list[Member] = field(default_factory=list, repr=False)
    group: Group = field(init=False, repr=False)
    # whether backward has reached it, so that its modules hold twins
    is_reached: bool = field(default=False, repr=False)

    def leave(self, is_over: bool) -> None:
        """Put the masters back after backward has reached it, but for its calls that are running.

        Those of resident weights only when backward is over: another unit that it has reached may share them.
        """
        self.is_reached = False
        for member in self.members:
            if not member.running_calls:
                member.put_back_masters(resident_too=is_over)

    @property
    def every_weight(self) -> list[Weight]:
        """All of its weights, wherever they live."""
        return [*self.weights, *self.weights_on_device]


@dataclass
class Division:
    """A module divided into units, as returned by `find_units`."""

    units: list[Unit]  # streamed units in expected order
    resident: Unit  # all resident weights as one unit; its members are modules that own some
    callers: list[Member]  # members without a unit: modules around units, whose calls open a step
    # parameters that cannot be pointed to other memory (tensor subclasses, those of scripted modules, those that share
    # memory with others); they are moved to the device
    unmanaged: dict[str, nn.Parameter]

    def put_in_order(self, names: Sequence[str]) -> None:
        """Expect units in the order of these names, and units that are not named after them."""
        number = {name: number for number, name in enumerate(names)}
        self.units.sort(key=lambda unit: number.get(unit.name, len(number)))
        members = [(unit, member) for unit in self.units for member in unit.members]
        for index, (unit, member) in enumerate(members):
            member.index, member.is_streamed, member.unit_name = index, True, unit.name

    def leave_on_device(self, units: Collection[Unit]) -> None:
        """Stop managing the weights of these units, and manage only their calls."""
        left = {id(weight) for unit in units for weight in unit.weights}
        for unit in units:
            unit.weights_on_device, unit.weights = unit.weights, []
        for member in [*(member for unit in self.all_units() for member in unit.members), *self.callers]:
            member.parameters_on_device = [entry.weight.master for entry in member.entries if id(entry.weight) in left]
            member.entries = [entry for entry in member.entries if id(entry.weight) not in left]
            member.recurrent = [
                (module, weights) for module, weights in member.recurrent if not any(id(w) in left for w in weights)
            ]

    def all_units(self) -> list[Unit]:
        """Return the streamed units, and then the resident one if it holds anything."""
        return [*self.units, *([self.resident] if self.resident.weights else [])]
