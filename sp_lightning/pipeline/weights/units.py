"""Units: weights that stream together, the groups in which they travel, and the modules whose calls need them.

A *unit* enters and leaves the device as a whole: a layer, a block, or several small layers. Its *members* are the
modules whose calls enter it. `finder.py` finds them in a module tree. Up to `k_prime` units travel together, as a
*group*, which knows what of it is on the device.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import storage_key
from sp_lightning.pipeline.weights.segment import Segment
from sp_lightning.pipeline.weights.weight import Twin, Weight

NOTHING = -1  # no epoch


class Residency(enum.Enum):
    """Whether a group's bytes are on the device."""

    ABSENT = enum.auto()
    """Its place holds nothing, or another group's bytes, or some that are out of date."""
    COMING = enum.auto()
    """Copies to the device have been asked for; computing has yet to wait for their tickets."""
    READABLE = enum.auto()
    """Computing waits for the copy, so everything computed from now on sees the bytes."""


class Group:
    """Units that travel together (up to `k_prime`), or resident weights, which stay once they are on the device.

    Attributes:
        index: Its number among the streamed groups, in expected order.
        units: The units; none for a weight that was made resident.
        unit_count: How many units travel in it.
        segments: The host memory that it is copied from.
        weights: The weights, in the order in which they lie in its place.
        offsets: Where each weight begins in its place.
        nbytes: Bytes it takes on the device.
        place: The device memory that it is copied to.
        resident: Whether it holds resident weights.
        name: The names of its units, for recordings.
        has_own_place: Whether it has a place of its own, so that it is loaded only when its masters have changed.
        conflicts: Groups whose places overlap its own.
        users: Forward calls that are inside one of its units now; while there are any, it may not be evicted.
        residency: Whether its bytes are on the device.
        lying: For each segment, its epoch when what lies in its place was sent.
        uploads: Copies to the device, which may still be under way.
        suspect: Whether its masters may have changed since they were last checked.
        handles: How many saved tensors of live graphs are its weights, or views of them.
        being_stepped: An optimizer's work on its masters; None if there is none, or once it is known to be done.
        apart: Groups of single weights of it, which were made resident.
    """

    place: Tensor

    def __init__(
        self,
        index: int,
        units: Sequence[Unit],
        segments: Sequence[Segment],
        *,
        resident: bool,
        has_own_place: bool = False,
        name: str = "",
    ) -> None:
        self.index = index
        self.units = list(units)
        self.unit_count = len(units)
        self.segments = list(segments)
        self.weights: list[Weight] = [weight for segment in segments for weight in segment.weights]
        self.starts: list[int] = []
        self.offsets: list[int] = []
        self.nbytes = 0
        for segment in segments:
            self.starts.append(self.nbytes)
            self.offsets += [self.nbytes + offset for offset in segment.offsets]
            self.nbytes += segment.nbytes
        self.resident = resident
        self.name = name
        self.has_own_place = resident or has_own_place
        self.conflicts: frozenset[Group] = frozenset()
        self.users = 0
        self.residency = Residency.ABSENT
        self.lying = [NOTHING] * len(segments)
        self.uploads: list[Ticket] = []
        self.suspect = False
        self.handles = 0
        self.being_stepped: Ticket | None = None
        self.apart: list[Group] = []

    @property
    def loaded(self) -> bool:
        """Whether its bytes are on the device or on their way."""
        return self.residency is not Residency.ABSENT

    @property
    def readable(self) -> bool:
        """Whether everything computed from now on sees its bytes."""
        return self.residency is Residency.READABLE

    def finish_step(self, stats: Stats) -> None:
        """Wait until the optimizer is done with the masters.

        Raises:
            Exception: Whatever the optimizer's step raised.
        """
        work = self.being_stepped
        if work is None:
            return
        stats.optimizer_waits += not work.done
        try:
            work.join()
        finally:
            if work.done:  # not if an interrupt has ended the wait
                self.being_stepped = None

    def is_outdated(self) -> bool:
        """Tell whether masters have changed since what lies in its place was sent."""
        return any(segment.epoch != epoch for segment, epoch in zip(self.segments, self.lying, strict=True))

    def place_of(self, segment_number: int, begin: int, nbytes: int) -> Tensor:
        """Return the part of its place that bytes of a segment go to."""
        start = self.starts[segment_number] + begin
        return self.place if nbytes == self.nbytes else self.place[start : start + nbytes]

    def clear_place(self) -> None:
        """Note that its place holds nothing of it any more."""
        self.lying = [NOTHING] * len(self.segments)

    def copies(self) -> list[Tensor | None]:
        """Return, for each weight, the copy that is sent, to write to; None where the master itself is sent."""
        return [copy for segment in self.segments for copy in segment.copies]

    def refresh_other_copies(self, stepped: Collection[Weight]) -> None:
        """Bring copies up to date, if they are not, of weights that are not stepped in the step under way."""
        for segment in self.segments:
            segment.refresh_other_copies(stepped)

    def note_stepped(self) -> None:
        """Note that masters, and the copies that are sent, are as an optimizer's step has left them."""
        for segment in self.segments:
            segment.note_stepped()

    def host_bytes(self) -> int:
        """Return the bytes of host memory held for its weights, without gradients."""
        return sum(segment.host_bytes() for segment in self.segments)

    def release_copies(self) -> None:
        """Let go of the copies that are sent."""
        for segment in self.segments:
            segment.release_copies()


@dataclass
class Entry:
    """An entry of a module's `_parameters` that is a weight."""

    parameters: dict[str, nn.Parameter | None]
    key: str
    weight: Weight

    @property
    def current(self) -> nn.Parameter | None:
        """What the module has there now."""
        return self.parameters.get(self.key)

    @current.setter
    def current(self, parameter: nn.Parameter | None) -> None:
        self.parameters[self.key] = parameter

    @property
    def is_in_place(self) -> bool:
        """Whether that is the weight, as its master or its twin, and not what `functional_call` has put there."""
        current = self.current
        return current is self.weight.master or current is self.weight.twin.parameter


class Member:
    """A module whose call enters a unit (or, without a unit, only opens a step).

    Attributes:
        index: Its number among the members of streamed units; -1 for others.
        entries: Every entry that holds a weight which its call may use.
        recurrent: RNN modules at or below it, with the weights in their own list (`_flat_weights`).
        groups: Groups that have to be on the device for its call.
        twins: All twins of the arrangement, by the identity of their memory.
        called_in: Groups of other calls that its calls were inside of.
        running_calls: How many of its calls are under way.
        entered: How many times it has been called since it was attached.
        compiled: The compiled function that runs its forward; None if `compile=True` does not apply to it.
        looks_into: A member whose weights its forward inspects to choose a fast path (`nn.TransformerEncoder`).
        parameters_on_device: Parameters that its call may use and that live on the device.
    """

    def __init__(self, name: str, module: nn.Module, unit: Unit | None) -> None:
        self.name = name
        self.module = module
        self.unit = unit
        self.index = -1
        self.entries: list[Entry] = []
        self.recurrent: list[tuple[nn.RNNBase, list[Weight]]] = []
        self.groups: list[Group] = []
        self.twins: dict[int, Twin] = {}
        self.called_in: set[Group] = set()
        self.running_calls = 0
        self.entered = 0
        self.compiled: Callable[..., Any] | None = None
        self.looks_into: Member | None = None
        self.parameters_on_device: list[nn.Parameter] = []

    @property
    def is_streamed(self) -> bool:
        """Whether its unit streams."""
        return self.index >= 0

    @property
    def unit_name(self) -> str:
        """The name of its unit, or its own if it has none that streams."""
        return self.name if self.unit is None or self.unit.resident else self.unit.name

    def put_in_twins(self, prepare: Callable[[Twin], None]) -> None:
        """Put twins in place of the masters. Masters are read, so the guard must not look.

        Args:
            prepare: Called with each twin whose `requires_grad` is not the master's (freezing callbacks, GAN toggles).
        """
        for entry in self.entries:
            twin, master = entry.weight.twin, entry.weight.master
            if twin.parameter.requires_grad != master.requires_grad:
                prepare(twin)
            if entry.current is master:  # else `functional_call` has put another tensor there
                entry.current = twin.parameter
        for module, weights in self.recurrent:
            present = {id(entry.weight): entry.current for entry in self.entries}
            module._flat_weights = [present[id(weight)] for weight in weights]

    def put_back_masters(self) -> None:
        """Put the masters back; what is neither a twin nor a master is the user's and stays."""
        for entry in self.entries:
            current, master = entry.current, entry.weight.master
            if current is entry.weight.twin.parameter:
                entry.current = master
            elif current is not None and current is not master and storage_key(current) in self.twins:
                entry.current = master  # an earlier twin's, of a weight that is a device parameter by now
        for module, weights in self.recurrent:
            module._flat_weights = [weight.master for weight in weights]

    def find_groups(self) -> None:
        """Determine which groups have to be on the device for its call."""
        self.groups = list(dict.fromkeys(entry.weight.twin.group for entry in self.entries))


@dataclass(eq=False)
class Unit:
    """Weights that stream together, or all resident weights.

    Attributes:
        weights: The weights that the engine manages.
        weights_on_device: All weights of a unit that lives on the device, whose `weights` is empty.
        is_reached: Whether backward has reached it, so that its modules hold twins.
    """

    name: str
    resident: bool = False
    weights: list[Weight] = field(default_factory=list, repr=False)
    weights_on_device: list[Weight] = field(default_factory=list, repr=False)
    members: list[Member] = field(default_factory=list, repr=False)
    group: Group = field(init=False, repr=False)
    is_reached: bool = field(default=False, repr=False)

    def leave(self) -> None:
        """Put the masters back after backward has reached it, but for its calls that are running."""
        self.is_reached = False
        for member in self.members:
            if not member.running_calls:
                member.put_back_masters()

    @property
    def every_weight(self) -> list[Weight]:
        """All of its weights, wherever they live."""
        return [*self.weights, *self.weights_on_device]


@dataclass
class Division:
    """A module divided into units, as returned by `find_units`.

    Attributes:
        units: Streamed units in expected order.
        resident: All resident weights as one unit; its members are modules that own some.
        callers: Members without a unit: modules around units, whose calls open a step.
        unmanaged: Parameters that cannot be pointed to other memory (tensor subclasses, those of scripted modules,
            those that share memory with others); they are moved to the device.
    """

    units: list[Unit]
    resident: Unit
    callers: list[Member]
    unmanaged: dict[str, nn.Parameter]

    def put_in_order(self, names: Sequence[str]) -> None:
        """Expect units in the order of these names, and units that are not named after them."""
        number = {name: number for number, name in enumerate(names)}
        self.units.sort(key=lambda unit: number.get(unit.name, len(number)))
        for index, member in enumerate(member for unit in self.units for member in unit.members):
            member.index = index

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
