"""Units: weights that stream together, and the modules whose calls need them.

A *unit* enters and leaves the device as a whole: a layer, a block, several small layers, or `k_prime` such neighbors.
Its *presence* says where its bytes are: asked for, readable on the device, or gone; and whether they are those of the
masters. Its *members* are the modules whose calls enter it. `finder.py` finds units in a module tree.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.operations import untracked
from sp_lightning.pipeline.weights.segment import NOTHING, Segment
from sp_lightning.pipeline.weights.weight import USES_TO_WATCH, Life, Twin, Weight, become

_NUMBERS_IN_ROW = 1024  # a fingerprint adds up the numbers of each row, and of each column


class Residency(enum.Enum):
    """Whether a unit's bytes are on the device; only `Presence.become` changes it."""

    ABSENT = enum.auto()
    """The unit's place holds nothing, or another unit's bytes, or some that are out of date."""
    COMING = enum.auto()
    """The engine has asked for copies to the device; computing has yet to wait for their tickets."""
    READABLE = enum.auto()
    """Computing waits for the copy, so everything computed from now on sees the bytes."""


# pairs, as a set would call Python code to hash an enum's members
_TRANSITIONS = (
    (Residency.ABSENT, Residency.COMING),
    (Residency.COMING, Residency.READABLE),
    (Residency.COMING, Residency.ABSENT),
    (Residency.READABLE, Residency.ABSENT),
)


class Presence:
    """The part of a unit that is on the device.

    Attributes:
        place: The device memory that the unit is copied to.
        residency: Whether its bytes are there.
        uploads: The copies to the device, which may still be under way.
        suspect: Whether the masters may have changed since they were last checked.
        fingerprint: A digest of the bytes before the call inside; None unless the engine looks for writes that torch
            does not count.
    """

    place: Tensor

    def __init__(self, unit: str) -> None:
        self.residency = Residency.ABSENT
        self.uploads: list[Ticket] = []
        self.suspect = False
        self.fingerprint: Tensor | None = None
        self._unit = unit

    @property
    def is_valid(self) -> bool:
        """Whether weights on the device have their values, so that no copy is needed."""
        return self.residency is Residency.READABLE and not self.suspect

    def become(self, residency: Residency) -> None:
        """Note that the bytes are asked for, can be read, or are gone."""
        assert (self.residency, residency) in _TRANSITIONS, f"{self._unit}: {self.residency} to {residency}"
        self.residency = residency

    def abandon(self) -> None:
        """Treat the bytes as absent, whatever is there: after an exception, or for another place."""
        self.residency = Residency.ABSENT
        self.suspect = True
        self.uploads.clear()
        self.fingerprint = None

    def set_place(self, place: Tensor) -> None:
        """Have the unit copied to this device memory."""
        assert self.residency is Residency.ABSENT, self._unit
        self.place = place

    def watch(self) -> None:
        """Notice changes of the bytes until `has_changed` is asked."""
        assert self.residency is Residency.READABLE, self._unit
        if self.fingerprint is None and self.place.nbytes:
            self.fingerprint = _fingerprint(self.place)

    def has_changed(self, goes_on: bool) -> bool:
        """Tell whether the bytes have changed while they were watched; watch on if asked."""
        if self.fingerprint is None:
            return False
        before, after = self.fingerprint, _fingerprint(self.place)
        self.fingerprint = after if goes_on else None
        return not torch.equal(before, after)


def _fingerprint(memory: Tensor) -> Tensor:
    """Return sums of memory, as whole numbers, over rows and over columns: changes within a row show in columns."""
    with untracked():
        numbers = memory.view(torch.int32)
        count_in_rows = numbers.numel() // _NUMBERS_IN_ROW * _NUMBERS_IN_ROW
        rows = numbers[:count_in_rows].view(-1, _NUMBERS_IN_ROW)
        return torch.cat([rows.sum(0), rows.sum(1), numbers[count_in_rows:]])


@dataclass
class Readers:
    """The code besides a unit's calls that may still read its weights on the device, or in their masters."""

    handles: int = 0  # saved tensors of live graphs that are its weights, or views of them
    calls_to_come: int = 0  # calls of live graphs that no backward has reached yet
    # whether code has an alias of a master that was taken in this step
    has_aliases: bool = False
    # whether a custom Function was applied in a call in this step, and may read its weights in backward
    has_raw_readers: bool = False

    @property
    def are_in_graphs(self) -> bool:
        """Whether a backward that is still to come may read the weights."""
        return self.handles > 0 or self.calls_to_come > 0


class StepOnDevice(Protocol):
    """A step of a unit on the device, which begins when a part of the engine asks for it (optimizer/visit.py)."""

    def begin(self, in_place: bool = True) -> Ticket:
        """Begin the step, and return the ticket of the new weights; `in_place` has it put them in the unit's place."""


@dataclass
class UnitUpdate:
    """An optimizer's update of a unit, and where it is made."""

    # whether updates run on the device, and the state is copied there for them
    is_on_device: bool = False
    # an optimizer's work on the masters; None if there is none, or once it is known to be done
    ticket: Ticket | None = None
    # an update on the device that has not begun: it brings new weights if it begins as the unit is loaded
    pending_visit: StepOnDevice | None = None
    # whether it ran in backward, and `step()` is still to be called: the weights cannot be read until then
    is_stepped_in_backward: bool = False
    # whether such an early update has used the gradients of other processes
    is_early_in_all_processes: bool = False


class Unit:
    """Weights that stream together, or all resident weights, which stay once they are on the device."""

    def __init__(self, name: str, resident: bool = False) -> None:
        self.name = name
        self.resident = resident
        # number of the unit in the window, in expected order; -1 for a single weight
        self.index = -1

        # its parts
        self.weights: list[Weight] = []  # weights that are copied to the device
        # all weights of a unit that stays on the device with its state: its `weights` is empty
        self.weights_on_device: list[Weight] = []
        # weights of this unit that were made resident, each a unit of its own
        self.split_off: list[Unit] = []
        self.members: list[Member] = []
        self.segments: Sequence[Segment] = []  # the host memory that the unit is copied from

        # its part on the device
        self.presence = Presence(name)
        # units whose places overlap this one's; a unit without any is loaded only when its masters have changed
        self.conflicts: frozenset[Unit] = frozenset()

        # its users
        # forward calls that are inside of the unit now; it is not evicted while there are any
        self.users = 0
        # whether backward has reached the unit, so that its modules hold twins
        self.is_reached = False
        self.readers = Readers()
        self.update = UnitUpdate()

    @property
    def every_weight(self) -> list[Weight]:
        """All of its weights, wherever they are."""
        return self.weights + self.weights_on_device

    @property
    def nbytes(self) -> int:
        """The bytes that the unit takes on the device."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def is_stepped_elsewhere(self) -> bool:
        """Whether another process owns and updates the masters, and this process shares them."""
        return any(segment.is_stepped_elsewhere for segment in self.segments)

    def lose_bytes(self) -> None:
        """Treat it as absent, whatever is there: after an exception, or for another place."""
        self.presence.abandon()
        for segment in self.segments:
            segment.epoch_on_device = NOTHING

    def set_place(self, place: Tensor) -> None:
        """Have it copied to this device memory, and place its weights' twins there."""
        self.presence.set_place(place)
        begin = 0
        for segment in self.segments:
            segment.place = place[begin : begin + segment.nbytes]
            begin += segment.nbytes
            for weight, data in segment.views():
                weight.twin.set_place(self, data)

    def leave_place(self) -> None:
        """Let go of the device memory, and of that of the other twins that graphs have."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.presence.set_place(nothing)
        for segment in self.segments:
            segment.place = nothing
        for weight in self.weights:
            weight.leave_device()

    def leave(self, is_over: bool) -> None:
        """Put the masters back after backward has reached the unit, except in its calls that are running.

        The masters of resident weights follow only when backward is over: another unit that it reached may share them.
        """
        self.is_reached = False
        for member in self.members:
            if not member.running_calls:
                member.put_back_masters(resident_too=is_over)


@dataclass
class Entry:
    """An entry of a module's `_parameters` that is a weight of the engine's."""

    parameters: dict[str, nn.Parameter | None]
    key: str
    weight: Weight
    has_leaf: bool = False  # whether it holds a leaf, which the master is to replace again

    @property
    def is_in_place(self) -> bool:
        """Whether the module has its master or twin there, and not a tensor that `functional_call` lends."""
        current = self.parameters.get(self.key)
        return current is self.weight.master or current is self.weight.twin.parameter


class Member:
    """A module whose call enters a unit (or, without a unit, only opens a step)."""

    def __init__(self, name: str, module: nn.Module, unit: Unit | None) -> None:
        self.name = name
        self.module = module
        self.unit = unit
        # name of the unit, if that streams; else of the member
        self.unit_name = name
        self.is_streamed = False  # whether the unit streams
        self.index = -1  # number among the members of streamed units; -1 for others
        self.every_entry: list[Entry] = []  # entries whose weights a call may use
        self.entries: list[Entry] = []  # entries whose weights do not stay on the device
        # RNN modules at or below the module, with the weights in their own list (`_flat_weights`)
        self.recurrent: list[tuple[nn.RNNBase, list[Weight]]] = []
        self.needed: list[Unit] = []  # units that have to be on the device for a call
        self.called_in: set[Unit] = set()  # units of other members whose calls have called this one
        self.running_calls = 0  # calls under way
        self.entered = 0  # calls since the module was attached
        # calls that are still to be watched for writes that torch does not count, in evaluation and in training
        self.calls_to_watch = {False: USES_TO_WATCH, True: USES_TO_WATCH}
        # dtype to which autocast casts in calls, for which weights were placed; None without autocast
        self.autocast: torch.dtype | None = None
        # compiled function that runs the forward; None if `compile=True` does not apply
        self.compiled: Callable[..., Any] | None = None

    def put_in_twins(self, prepare: Callable[[Twin], None]) -> None:
        """Put twins in place of the masters. This reads masters, so the guard must be off.

        First, `prepare` gets each twin whose `requires_grad` is not the master's (freezing callbacks, GAN toggles).
        """
        for entry in self.entries:
            twin, master = entry.weight.twin, entry.weight.master
            if twin.parameter.requires_grad != master.requires_grad:
                prepare(twin)
            # a tensor that `functional_call` has put there stays
            if entry.parameters.get(entry.key) is master:
                entry.has_leaf = True  # an interrupt may come before the next line
                entry.parameters[entry.key] = twin.parameter
                entry.weight.leaf_count += 1
        become(Life.IN_USE, [entry.weight.twin for entry in self.entries if entry.has_leaf])
        for module, weights in self.recurrent:
            present = {entry.weight: entry.parameters.get(entry.key) for entry in self.every_entry}
            module._flat_weights = [present[weight] for weight in weights]

    def put_back_masters(self, resident_too: bool = True) -> None:
        """Put the masters back; a tensor that is neither a twin nor a master is the user's and stays."""
        leaving = [
            entry for entry in self.entries if entry.has_leaf and (resident_too or not entry.weight.twin.unit.resident)
        ]
        for entry in leaving:
            weight = entry.weight
            current = entry.parameters.get(entry.key)
            if current is weight.twin.parameter or any(current is twin.parameter for twin in weight.twins_in_graphs):
                entry.parameters[entry.key] = weight.master
            entry.has_leaf = False
            weight.leaf_count -= 1
        become(Life.DEPARTED, [entry.weight.twin for entry in leaving if not entry.weight.leaf_count])
        for module, weights in self.recurrent:
            module._flat_weights = [weight.master for weight in weights]

    @contextmanager
    def computing_with(self, twins: Sequence[Twin]) -> Iterator[None]:
        """Have calls in the block compute with these twins, one for each entry; other twins may have replaced some."""
        replaced = [
            (entry, twin) for entry, twin in zip(self.entries, twins, strict=True) if twin.life is Life.IN_GRAPHS
        ]
        for entry, twin in replaced:
            entry.parameters[entry.key] = twin.parameter
        self.needed = list(dict.fromkeys([*self.needed, *(twin.unit for _, twin in replaced)]))
        try:
            yield
        finally:
            self.find_needed()
            for entry, twin in replaced:
                # a unit that backward has reached still holds the twin that stands for the weight now
                if entry.parameters.get(entry.key) is twin.parameter:
                    weight = entry.weight
                    entry.parameters[entry.key] = weight.twin.parameter if entry.has_leaf else weight.master

    def find_needed(self) -> None:
        """Determine which weights have to be on the device for its call, and with them which units."""
        self.entries = [entry for entry in self.every_entry if not entry.weight.stays_on_device]
        self.needed = list(dict.fromkeys(entry.weight.twin.unit for entry in self.entries))


@dataclass
class Division:
    """A module divided into units, as returned by `find_units`."""

    units: list[Unit]  # streamed units in expected order
    resident: Unit  # all resident weights as one unit; its members are modules that own some
    streamed_members: list[Member]  # members of streamed units, in the order of the tree
    # modules around units, which own no weights: their calls only open a step
    callers: list[Member]
    # parameters that cannot be pointed to other memory (tensor subclasses, those of scripted modules, those that share
    # memory with others); they are moved to the device
    unmanaged: dict[str, nn.Parameter]

    def make_resident(self, names: Collection[str]) -> None:
        """Have weights of these names be resident; their units go on without them."""
        for unit in self.units:
            for weight in [weight for weight in unit.weights if weight.name in names]:
                unit.weights.remove(weight)
                weight.unit = self.resident
                self.resident.weights.append(weight)

    def put_in_order(self, names: Sequence[str]) -> None:
        """Expect units in the order of these names, and then those that are not named."""
        ranks = {name: rank for rank, name in enumerate(names)}
        self.units.sort(key=lambda unit: ranks.get(unit.name, len(ranks)))

    def all_units(self) -> list[Unit]:
        """Return the streamed units, and then the resident one if it holds anything."""
        return self.units + ([self.resident] if self.resident.every_weight else [])
