"""Units: weights that stream together, and the modules whose calls need them.

A *unit* enters and leaves the device as a whole: a layer, a block, several small layers, or `k_prime` such neighbors.
It knows what of it is on the device. Its *members* are the modules whose calls enter it. `finder.py` finds units in a
module tree.
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
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.departed import DepartedLeaf
from sp_lightning.pipeline.weights.segment import NOTHING, Segment
from sp_lightning.pipeline.weights.weight import USES_TO_WATCH, Twin, Weight

_NUMBERS_IN_ROW = 1024  # a fingerprint adds memory up in rows of so many numbers


class Residency(enum.Enum):
    """Whether a unit's bytes are on the device; `Unit.become` alone changes it."""

    ABSENT = enum.auto()
    """The unit's place holds nothing, or another unit's bytes, or some that are out of date."""
    COMING = enum.auto()
    """Copies to the device have been asked for; computing has yet to wait for their tickets."""
    READABLE = enum.auto()
    """Computing waits for the copy, so everything computed from now on sees the bytes."""


# pairs, as a set would call Python code to hash an enum's members
_TRANSITIONS = (
    (Residency.ABSENT, Residency.COMING),
    (Residency.COMING, Residency.READABLE),
    (Residency.COMING, Residency.ABSENT),
    (Residency.READABLE, Residency.ABSENT),
)


@dataclass
class Readers:
    """Who may still read a unit's weights where they lie on the device, or in their masters, besides its calls."""

    handles: int = 0  # saved tensors of live graphs that are its weights, or views of them
    calls_to_come: int = 0  # calls of live graphs that no backward has reached yet
    # whether somebody has an alias of a master that was taken in this step
    has_aliases: bool = False
    # whether a custom Function was given one of its weights in this step, and may read it in backward
    has_raw_readers: bool = False

    @property
    def are_in_graphs(self) -> bool:
        """Whether a backward that is still to come may read the weights."""
        return self.handles > 0 or self.calls_to_come > 0


class StepOnDevice(Protocol):
    """A step of a unit on the device, which begins when somebody asks for it (optimizer/visit.py)."""

    def begin(self, in_place: bool = True) -> Ticket:
        """Begin the step, and return the ticket of the new weights; `in_place` has it put them in the unit's place."""


class Unit:
    """Weights that stream together, or all resident weights, which stay once they are on the device."""

    place: Tensor  # the device memory that the unit is copied to

    def __init__(self, name: str, resident: bool = False) -> None:
        self.name = name
        self.resident = resident
        self.weights: list[Weight] = []  # weights that are copied to the device
        # all weights of a unit that stays on the device with its state: its `weights` is empty
        self.weights_on_device: list[Weight] = []
        self.members: list[Member] = []
        # number of the unit in the window, in expected order; -1 for a single weight
        self.index = -1

        # where it lies
        self.segments: Sequence[Segment] = []  # the host memory that the unit is copied from
        self.nbytes = 0  # bytes that the unit takes on the device
        # units whose places overlap this one's; a unit without any is loaded only when its masters have changed
        self.conflicts: frozenset[Unit] = frozenset()
        self.split_off: list[Unit] = []  # weights of this unit that were made resident, each a unit of its own
        # whether another process owns and steps the masters, and this process has them, too
        self.is_followed = False

        # what is there at the moment
        self.residency = Residency.ABSENT
        # forward calls that are inside of the unit now; it is not evicted while there are any
        self.users = 0
        self.is_reached = False  # whether backward has reached the unit, so that its modules hold twins
        self.uploads: list[Ticket] = []  # copies to the device, which may still be under way
        # the bytes before the call inside, in short; None unless writes that torch does not count are looked for
        self.fingerprint: Tensor | None = None
        self.suspect = False  # whether the masters may have changed since they were last checked
        self.readers = Readers()

        # its optimizer step
        # an optimizer's work on the masters; None if there is none, or once it is known to be done
        self.being_stepped: Ticket | None = None
        # whether optimizer steps are made on the device, to which state comes for them
        self.updates_on_device = False
        # a step on the device that has not begun: it brings new weights if it begins as the unit is loaded
        self.pending_device_step: StepOnDevice | None = None
        # whether the unit was stepped in backward, and `step()` is still to be called: nobody can read its weights
        self.is_used_up = False
        # whether it was so with the gradients of other processes
        self.is_ahead = False

    @property
    def is_valid(self) -> bool:
        """Whether its weights on the device have their values: nobody has to bring it."""
        return self.residency is Residency.READABLE and not self.suspect

    @property
    def every_weight(self) -> list[Weight]:
        """All of its weights, wherever they live."""
        return self.weights + self.weights_on_device

    def become(self, residency: Residency) -> None:
        """Note that its bytes are asked for, can be read, or are gone."""
        assert (self.residency, residency) in _TRANSITIONS, f"{self.name}: {self.residency} to {residency}"
        self.residency = residency

    def abandon(self) -> None:
        """Treat it as absent, with no call inside, whatever is there: after an exception, or for another place."""
        self.residency = Residency.ABSENT
        self.users = 0
        self.suspect = True
        self.uploads.clear()
        self.fingerprint = None
        for segment in self.segments:
            segment.epoch_on_device = NOTHING

    def set_place(self, place: Tensor) -> None:
        """Have it copied to this device memory, and its weights' twins lie there."""
        assert self.residency is Residency.ABSENT, self.name
        self.place = place
        self.fingerprint = None
        begin = 0
        for segment in self.segments:
            segment.place = place[begin : begin + segment.nbytes]
            begin += segment.nbytes
            for weight, data in segment.views():
                weight.twin.set_place(self, data)

    def leave_place(self) -> None:
        """Let go of the device memory; nothing is left there, nor in what twins graphs have besides."""
        assert self.residency is Residency.ABSENT, self.name
        self.place = torch.empty(0, dtype=torch.uint8, device="cpu")
        for segment in self.segments:
            segment.place = self.place
        for weight in self.weights:
            weight.leave_device(self)

    def set_segments(self, segments: Sequence[Segment], pin: bool = True) -> None:
        """Have the unit copied from this host memory, pinned if that is possible."""
        for segment in segments:
            segment.prepare(pin)
        self.segments = segments
        self.nbytes = sum(segment.nbytes for segment in segments)
        self.is_followed = any(segment.is_followed for segment in segments)

    def watch(self) -> None:
        """Notice changes of its bytes until it is asked for them."""
        assert self.residency is Residency.READABLE, self.name
        if self.fingerprint is None and self.nbytes:
            self.fingerprint = _fingerprint(self.place)

    def has_changed(self) -> bool:
        """Tell whether its bytes have changed while it was watched, which goes on if a call is inside of it."""
        if self.fingerprint is None:
            return False
        before, after = self.fingerprint, _fingerprint(self.place)
        self.fingerprint = after if self.users else None
        return not torch.equal(before, after)

    def leave(self, is_over: bool) -> None:
        """Put the masters back after backward has reached it, but for its calls that are running.

        Those of resident weights only when backward is over: another unit that it has reached may share them.
        """
        self.is_reached = False
        for member in self.members:
            if not member.running_calls:
                member.put_back_masters(resident_too=is_over)


def _fingerprint(memory: Tensor) -> Tensor:
    """Return sums of memory, as whole numbers, over rows and over columns: changes within a row show in columns."""
    with torch.inference_mode(False), torch.no_grad(), without_torch_function():
        numbers = memory.view(torch.int32)
        count_in_rows = numbers.numel() // _NUMBERS_IN_ROW * _NUMBERS_IN_ROW
        rows = numbers[:count_in_rows].view(-1, _NUMBERS_IN_ROW)
        return torch.cat([rows.sum(0), rows.sum(1), numbers[count_in_rows:]])


@dataclass
class Entry:
    """An entry of a module's `_parameters` that is a weight."""

    parameters: dict[str, nn.Parameter | None]
    key: str
    weight: Weight
    has_leaf: bool = False  # whether a leaf is there, which the master is to replace again

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
        """Put twins in place of the masters. Masters are read, so the guard must not look.

        First, `prepare` gets each twin whose `requires_grad` is not the master's (freezing callbacks, GAN toggles).
        """
        for entry in self.entries:
            twin, master = entry.weight.twin, entry.weight.master
            if twin.parameter.requires_grad != master.requires_grad:
                prepare(twin)
            # where `functional_call` has put another tensor, that stays
            if entry.parameters.get(entry.key) is master:
                entry.parameters[entry.key] = twin.parameter
                entry.has_leaf = True
                if entry.weight.leaf_count == 0 and entry.weight.leaf_departs:
                    twin.parameter.__class__ = entry.weight.leaf_class
                entry.weight.leaf_count += 1
        for module, weights in self.recurrent:
            present = {id(entry.weight): entry.parameters.get(entry.key) for entry in self.every_entry}
            module._flat_weights = [present[id(weight)] for weight in weights]

    def put_back_masters(self, resident_too: bool = True) -> None:
        """Put the masters back; what is neither a twin nor a master is the user's and stays."""
        for entry in self.entries:
            weight = entry.weight
            if not entry.has_leaf or (weight.twin.unit.resident and not resident_too):
                continue
            entry.has_leaf = False
            current = entry.parameters.get(entry.key)
            if current is weight.twin.parameter or any(current is twin.parameter for twin in weight.other_twins):
                entry.parameters[entry.key] = weight.master
            weight.leaf_count -= 1
            if weight.leaf_count == 0 and weight.leaf_departs:
                weight.twin.parameter.__class__ = DepartedLeaf
        for module, weights in self.recurrent:
            module._flat_weights = [weight.master for weight in weights]

    @contextmanager
    def computing_with(self, twins: Sequence[Twin]) -> Iterator[None]:
        """Have calls in the block compute with these twins, one for each entry, some of which others have replaced."""
        replaced = [(entry, twin) for entry, twin in zip(self.entries, twins, strict=True) if twin.is_replaced]
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
                    entry.parameters[entry.key] = entry.weight.twin.parameter

    def uses(self, weight: Weight) -> bool:
        """Tell whether its call may use a weight."""
        return any(entry.weight is weight for entry in self.entries)

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
    callers: list[Member]  # modules around units, which own no weights: their calls only open a step
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
