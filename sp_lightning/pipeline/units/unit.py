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
from sp_lightning.pipeline.weights.segment import Segment
from sp_lightning.pipeline.weights.weight import USES_TO_WATCH, Twin, Weight

_ROW = 1024  # numbers in a row of what a fingerprint is made of


class Residency(enum.Enum):
    """Whether a unit's bytes are on the device."""

    ABSENT = enum.auto()
    """Its place holds nothing, or another unit's bytes, or some that are out of date."""
    COMING = enum.auto()
    """Copies to the device have been asked for; computing has yet to wait for their tickets."""
    READABLE = enum.auto()
    """Computing waits for the copy, so everything computed from now on sees the bytes."""


class StepOnDevice(Protocol):
    """A step of a unit that is made on the device when somebody has it begin (optimizer/visit.py)."""

    def begin(self, in_place: bool = True) -> Ticket:
        """Begin it, and return the ticket of the new weights, which it puts in the unit's place if it is asked to."""


class Unit:
    """Weights that stream together, or all resident weights, which stay once they are on the device."""

    place: Tensor  # the device memory that it is copied to

    def __init__(self, name: str, resident: bool = False) -> None:
        self.name = name
        self.resident = resident
        self.weights: list[Weight] = []  # those that the engine manages
        # all weights of a unit that lives on the device, whose `weights` is empty
        self.weights_on_device: list[Weight] = []
        self.members: list[Member] = []
        self.is_reached = False  # whether backward has reached it, so that its modules hold twins

        # where it lies
        # its number among the units of the window, in expected order; -1 for a single weight
        self.index = -1
        self.segments: Sequence[Segment] = []  # the host memory that it is copied from
        self.nbytes = 0  # bytes it takes on the device
        # units whose places overlap its own; if there are none, it is loaded only when its masters have changed
        self.conflicts: frozenset[Unit] = frozenset()
        self.split_off: list[Unit] = []  # weights of it that were made resident, each a unit of its own
        # whether another process owns and steps its masters, and this one has them, too
        self.is_followed = False

        # what is there at the moment
        # forward calls that are inside of it now; while there are any, it may not be evicted
        self.users = 0
        self.residency = Residency.ABSENT  # whether its bytes are on the device
        self.uploads: list[Ticket] = []  # copies to the device, which may still be under way
        # of its bytes before the call inside of it, if that is watched for writes that torch does not count
        self.fingerprint: Tensor | None = None
        self.suspect = False  # whether its masters may have changed since they were last checked
        # whether somebody has an alias of a master that was taken in this step, and may read it
        self.has_aliases = False
        # whether a custom Function was given one of its weights in this step, and may read it in backward
        self.has_raw_readers = False
        self.handles = 0  # how many saved tensors of live graphs are its weights, or views of them
        self.calls_to_come = 0  # how many calls of live graphs no backward has reached yet
        # an optimizer's work on its masters; None if there is none, or once it is known to be done
        self.being_stepped: Ticket | None = None
        # whether its optimizer steps are made on the device, where state visits for them
        self.updates_on_device = False
        # such a step that has not begun: it brings new weights if it begins as the unit is loaded
        self.pending_device_step: StepOnDevice | None = None
        # whether it was stepped in backward, with the gradients of other processes, and `step()` is still to be called
        self.is_ahead = False
        # whether it was stepped in backward, and `step()` is still to be called: nobody can read its weights meanwhile
        self.is_used_up = False

    @property
    def is_valid(self) -> bool:
        """Whether its weights on the device have their values: nobody has to bring it."""
        return self.residency is Residency.READABLE and not self.suspect

    @property
    def every_weight(self) -> list[Weight]:
        """All of its weights, wherever they live."""
        return self.weights + self.weights_on_device

    def set_place(self, place: Tensor) -> None:
        """Have it copied to this device memory, and its weights' twins lie there."""
        self.place, begin = place, 0
        self.fingerprint = None
        for segment in self.segments:
            segment.place = place[begin : begin + segment.nbytes]
            begin += segment.nbytes
            for weight, data in segment.views():
                weight.twin.set_place(self, data)

    def leave_place(self) -> None:
        """Let go of the device memory; nothing is left there, nor in what twins graphs have besides."""
        self.place = torch.empty(0, dtype=torch.uint8, device="cpu")
        for segment in self.segments:
            segment.place = self.place
        for weight in self.weights:
            weight.leave_device(self)

    def set_segments(self, segments: Sequence[Segment], pin: bool = True) -> None:
        """Have it copied from this host memory, pinned if that is possible."""
        for segment in segments:
            segment.prepare(pin)
        self.segments = segments
        self.nbytes = sum(segment.nbytes for segment in segments)
        self.is_followed = any(segment.is_followed for segment in segments)

    def watch(self) -> None:
        """Notice changes of its bytes, which can be read, until it is asked for them."""
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
        even = numbers.numel() // _ROW * _ROW
        rows = numbers[:even].view(-1, _ROW)
        return torch.cat([rows.sum(0), rows.sum(1), numbers[even:]])


@dataclass
class Entry:
    """An entry of a module's `_parameters` that is a weight."""

    parameters: dict[str, nn.Parameter | None]
    key: str
    weight: Weight
    has_leaf: bool = False  # whether a leaf was put there, and is to be replaced by the master again

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
        # the name of its unit, or its own if it has none that streams
        self.unit_name = name
        self.is_streamed = False  # whether its unit streams
        self.index = -1  # its number among the members of streamed units; -1 for others
        self.every_entry: list[Entry] = []  # that holds a weight which its call may use
        self.entries: list[Entry] = []  # those of weights that do not live on the device
        # RNN modules at or below it, with the weights in their own list (`_flat_weights`)
        self.recurrent: list[tuple[nn.RNNBase, list[Weight]]] = []
        self.needed: list[Unit] = []  # units that have to be on the device for its call
        self.called_in: set[Unit] = set()  # units of other calls that its calls were inside of
        self.running_calls = 0  # how many of its calls are under way
        self.entered = 0  # how many times it has been called since it was attached
        # how many more calls are watched for writes that torch does not count, in evaluation and in training
        self.calls_to_watch = {False: USES_TO_WATCH, True: USES_TO_WATCH}
        # the dtype that autocast casts to in its calls, for which its weights were placed; None without autocast
        self.autocast: torch.dtype | None = None
        # the compiled function that runs its forward; None if `compile=True` does not apply to it
        self.compiled: Callable[..., Any] | None = None

    def put_in_twins(self, prepare: Callable[[Twin], None]) -> None:
        """Put twins in place of the masters. Masters are read, so the guard must not look.

        First, `prepare` gets each twin whose `requires_grad` is not the master's (freezing callbacks, GAN toggles).
        """
        for entry in self.entries:
            twin, master = entry.weight.twin, entry.weight.master
            if twin.parameter.requires_grad != master.requires_grad:
                prepare(twin)
            # else `functional_call` has put another tensor there
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
                # as its unit is still reached by backward
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
    streamed_members: list[Member]  # of these units, in the order of the tree
    callers: list[Member]  # members without a unit: modules around units, whose calls open a step
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
