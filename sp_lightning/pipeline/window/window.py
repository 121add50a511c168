"""The window: which units are on the device. It loads, evicts and prefetches them.

[Note: when a unit may be evicted]
A unit gives up its place when no call is inside of it, and, for a prefetch, only if it is not expected to be used
before the unit that wants the place. In backward, "no call is inside" means that backward has reached another unit:
autograd runs nodes in the reverse order of their creation, so by then the nodes of later units have run. The handles in
`saved.py` take care of the exceptions.

[Note: while masters are being stepped]
The optimizer may still be updating a unit's masters when the unit is needed again. The unit's H2D copy then begins when
that is done, and nothing reads the masters before. Other copies do not wait for it: the optimizer updates units in
another order than that in which they were asked for.

[Note: the order of units]
The order in which units are used is recorded as it happens, used to fetch ahead, and never trusted. The uses of each
step are recorded. The next step follows the record of the last one that began with the same use. Where it leaves that
path, the order looks for it further on in the record (a layer was dropped, another branch was taken). If no record
knows a use, the next ones are expected in the order of the modules. A wrong prediction costs a wait, never a wrong
number: any code that needs a unit makes sure that it is there.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import suppress

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Kind
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.units.unit import Residency, Unit
from sp_lightning.pipeline.weights.segment import NOTHING
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.window.master_access import MasterAccess

# Uses of a step that are recorded, so that generating a long text does not fill memory with its record
_RECORDED_PER_MEMBER = 16


class Pass(enum.IntEnum):
    """The kind of pass that uses a unit; each has an order of its own."""

    FORWARD = 0
    BACKWARD = 1
    INFERENCE = 2


class Order:
    """Records which members (modules whose calls enter a unit) are used, and predicts which are used next.

    A use has a number: that of the member, plus the number of all members for each pass before its own.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        # The expected uses where there is no record, in the order of the modules.
        self._training = [*range(members), *range(2 * members - 1, members - 1, -1)]
        self._inference = list(range(2 * members, 3 * members))
        self._records: dict[int, list[int]] = {}  # the uses of past steps, by their first use
        self._followed: list[int] = []  # the record that the step under way repeats
        # The index of the latest use in that record; None if it is not there.
        self._position: int | None = None
        self._last = -1  # the latest use; -1 if the next one cannot be predicted
        # The uses of the step under way; None before its first one.
        self._recording: list[int] | None = None

    def expect_first_use(self) -> None:
        """Note that the next use is the first one of a step."""
        if self._recording is not None:
            self._followed = self._recording
            self._records[self._recording[0]] = self._followed
            self._position = len(self._followed) - 1
            self._recording = None

    def record_use(self, member: int, direction: Pass) -> None:
        """Note that `member` is used now."""
        use = direction * self._members + member
        if use == self._last and direction is Pass.BACKWARD:
            return  # backward announces itself more than once for one call
        self._last = use
        if self._recording is None:
            self._recording = []
            self._followed = self._records.get(use, [])
            self._position = None
        if len(self._recording) < _RECORDED_PER_MEMBER * self._members:
            self._recording.append(use)
        record, position = self._followed, self._position
        try:
            self._position = record.index(use, 0 if position is None else position + 1)
        except ValueError:
            self._position = record.index(use) if use in record else None

    def upcoming(self, count: int) -> list[int]:
        """Return the uses that are expected next, in order."""
        record, position = self._followed, self._position
        # no record knows the next use: modules are expected in their own order
        if position is None:
            record = self._inference if self._last >= 2 * self._members else self._training
            position = record.index(self._last) if self._last >= 0 else -1
        # After the end of the record, a step like this one is expected.
        return (record[position + 1 :] + record)[:count]

    def used_members(self) -> list[int]:
        """Return the members that the step under way has used, or else the last one, in order of their first uses."""
        return list(dict.fromkeys(use % self._members for use in self._recording or ()))

    def forget_position(self) -> None:
        """Forget the position after an exception: the next use does not follow from the last one."""
        self._recording = None
        self._followed = []
        self._position = None
        self._last = -1


_USES_AHEAD = 16  # uses that a prefetch looks at; more would cost more time than they save
_UNITS_AHEAD = 3


class Window(MasterAccess):
    """Brings units to the device and evicts others to make room."""

    def __init__(
        self,
        units: Sequence[Unit],
        unit_of_member: Sequence[Unit],
        backend: Backend,
        stats: Stats,
    ) -> None:
        super().__init__(units, backend, stats)
        self._unit_of_use = [*unit_of_member] * len(Pass)
        self.order = Order(len(unit_of_member))
        # Whether no copy was issued, and no step begun, since all of them were waited for.
        self.has_nothing_in_flight = True
        # Outdated units that share their place with no other: they are fetched as soon as possible.
        self._outdated_units: dict[Unit, None] = {}
        # The units that occupy places in the arena: each was loaded last into its place.
        self._units_in_places: set[Unit] = set()
        most_members = max(Counter(unit_of_member).values(), default=0)
        self._horizon = max(_USES_AHEAD, _UNITS_AHEAD * most_members)

    def begin_next_step(self) -> None:
        """Count a step that begins, and expect its uses; no alias of a master was taken in it yet."""
        self.stats.steps += 1
        self.order.expect_first_use()
        for unit in self.units:
            unit.readers.has_aliases = unit.readers.has_raw_readers = False

    def load_first(self) -> None:
        """Start copying the weights that the step needs first: resident ones, and those of the first units."""
        for unit in self.units:
            if unit.resident:
                self._verify(unit)
                if unit.presence.residency is Residency.ABSENT:
                    self._load(unit)
        self.prefetch()

    def pop_edited_segments(self) -> list[str]:
        """Return the first weight of each segment whose masters were edited, not stepped, since the last call."""
        self.suspect_all()
        names = []
        for unit in self.units:
            is_being_stepped = self.is_being_stepped(unit)
            for segment in unit.segments:
                if not is_being_stepped:
                    segment.detect_changes()
                if segment.pop_edit():
                    names.append(segment.weights[0].name)
        return names

    def refuse_writes(self) -> None:
        """Raise if this process has written to masters that another one owns, in the step that ends."""
        for unit in self.units:
            if unit.is_stepped_elsewhere and not self.is_being_stepped(unit):
                for segment in unit.segments:
                    segment.detect_changes()
                    segment.check_shared()

    def adopt_edits(self, names: Set[str]) -> None:
        """Adopt edits by the process that owns the masters; `pop_edited_segments` has named the segments there."""
        for unit in self.units:
            for segment in unit.segments:
                if segment.weights[0].name in names:
                    # The end of a step under way would be noted after this edit, as if it had come later.
                    self.finish_optimizer(unit)
                    segment.share_edits()
                    segment.epoch += 1

    def suspect_all(self) -> None:
        """Check every unit for changed masters before it is used again."""
        for unit in self.units:
            unit.presence.suspect = True

    def note_write(self, unit: Unit) -> None:
        """Treat this unit's masters as changed: other code may be about to write to them."""
        unit.presence.suspect = True
        for segment in unit.segments:
            segment.note_edit()

    def mark_all_absent(self) -> None:
        """Treat every unit as absent, with no call inside: after an exception, or as units get other places."""
        self._units_in_places.clear()
        self._outdated_units.clear()
        for unit in self.units:
            for weight in unit.weights:
                weight.twin.note_unchanged()
            unit.users = 0
            unit.lose_bytes()

    def is_blocked(self, unit: Unit) -> bool:
        """Tell whether the unit is absent and cannot be loaded, because a call is inside of a unit in its place."""
        if unit.presence.residency is not Residency.ABSENT:
            return False
        in_the_way = unit.conflicts & self._units_in_places
        return any(other.users and other.presence.residency is not Residency.ABSENT for other in in_the_way)

    def bring(self, unit: Unit) -> None:
        """Make the unit's weights readable for everything that is launched on the device from now on."""
        if self.backend.stream_of_step is not None:
            self.backend.check_stream(f"Unit {unit.name!r}")
        if unit.presence.suspect:
            self._verify(unit)
        if unit.presence.residency is Residency.READABLE:
            return
        if unit.presence.residency is Residency.ABSENT:
            self.stats.misses += 1
            self._load(unit)
        self._await_uploads(unit)
        if unit.update.ticket is not None:
            unit.update.ticket.keeps_alive = ()
        unit.presence.become(Residency.READABLE)

    def prefetch(self, in_use: Sequence[Unit] = ()) -> None:
        """Start copies for upcoming uses, for as many as there is room.

        Backward reads the units `in_use`, although no call is inside of them, so they must not be reloaded now.
        """
        needed = set(in_use)
        for use in self.order.upcoming(self._horizon):
            unit = self._unit_of_use[use]
            if unit in needed:
                continue
            # A call inside computes with the values that it began with, even if a step ends meanwhile.
            if unit.presence.suspect and not unit.users:
                self._verify(unit)
            if unit.presence.residency is Residency.ABSENT:
                # Its step needs other processes. These may wait for this one, which must not wait for the place.
                awaits_others = unit.update.is_early_in_all_processes and self.is_being_stepped(unit)
                if awaits_others or not self._may_take_place(unit, needed):
                    break
                self._load(unit)
            needed.add(unit)
        for unit in list(self._outdated_units):
            if unit not in in_use:
                del self._outdated_units[unit]
                if unit.presence.residency is Residency.ABSENT:
                    self._load(unit)

    def _may_take_place(self, unit: Unit, needed: Set[Unit]) -> bool:
        """Tell whether an absent unit may be fetched ahead; see [Note: when a unit may be evicted]."""
        for other in unit.conflicts & self._units_in_places:
            if other.presence.residency is Residency.ABSENT:
                continue
            awaits_step = other.presence.residency is Residency.COMING and self.is_being_stepped(other)
            if awaits_step or other.users or other in needed:
                return False
        return True

    def outdate(self, unit: Unit, stepped: Set[Weight]) -> None:
        """Discard the device's copy of a unit: an optimizer is about to step masters of these weights."""
        self.has_nothing_in_flight = False
        if unit.presence.residency is not Residency.ABSENT:
            self._discard(unit)
        if unit.is_reached:
            unit.leave(is_over=False)  # modules must not read leaves over outdated memory
        if not unit.conflicts:
            self._outdated_units[unit] = None
        for segment in unit.segments:
            if unit.presence.suspect:
                segment.detect_changes()
                segment.share_edits()
            if not stepped.isdisjoint(segment.weights):
                segment.epoch += 1
        unit.presence.suspect = False
        for other in unit.split_off:
            other.presence.suspect = True
            for segment in other.segments:
                segment.epoch += 1

    def _verify(self, unit: Unit) -> None:
        """Check the unit's masters if they may have changed, and discard an outdated copy on the device."""
        if not unit.presence.suspect or self.is_being_stepped(unit):
            return
        unit.presence.suspect = False
        is_outdated = False
        for segment in unit.segments:
            segment.detect_changes()
            segment.check_shared()
            is_outdated |= segment.epoch_on_device != segment.epoch
        if is_outdated and unit.presence.residency is not Residency.ABSENT:
            self._discard(unit)

    def _discard(self, unit: Unit) -> None:
        """Treat the device's copy of a unit, which is not absent, as gone."""
        if unit.presence.residency is Residency.READABLE:
            self.write_back(unit.weights)
        else:
            # This copy was not waited for yet, and copies need not keep their order. If it comes after work that has
            # failed, the code that waits for that work gets the error.
            with suppress(Exception):
                self._await_uploads(unit)
        if unit.presence.residency is not Residency.ABSENT:
            unit.presence.become(Residency.ABSENT)

    def _await_uploads(self, unit: Unit) -> None:
        """Make computing wait for the copies of a unit. If one has failed, the unit is absent."""
        try:
            for ticket in unit.presence.uploads:
                self.backend.trace.wait(ticket, "weights")
        except BaseException:
            unit.lose_bytes()
            raise

    def _load(self, unit: Unit) -> None:
        self.has_nothing_in_flight = False
        for other in unit.conflicts & self._units_in_places:
            self._evict(other)
        if unit.conflicts:
            self._units_in_places.add(unit)
        unit.presence.uploads = [ticket for ticket in unit.presence.uploads if not ticket.done]
        step = None  # the host's step that copies of the unit follow
        visit = unit.update.pending_visit
        if visit is not None:  # it brings new weights itself
            unit.presence.uploads.append(visit.begin())
        elif self.is_being_stepped(unit):
            step = unit.update.ticket
        for segment in unit.segments:
            if segment.epoch_on_device == segment.epoch:
                continue  # the segment is still in its place: only others were stepped
            if step is None:
                segment.refresh_copies()
            for place, source in segment.transfers():
                upload = self.backend.trace.upload(Kind.LOAD, unit.name, place, source, step)
                self.stats.bytes_to_device += source.nbytes
                unit.presence.uploads.append(upload)
            segment.epoch_on_device = segment.epoch
        unit.presence.become(Residency.COMING)
        if not unit.resident:
            self.stats.loads += 1

    def _evict(self, unit: Unit) -> None:
        """Give a unit's place away."""
        if unit.presence.residency is not Residency.ABSENT:
            if unit.users:
                raise RuntimeError(
                    "superpipeline: a backward pass inside of a unit's forward needs the place of "
                    "that very unit. Use a larger `k`, or name the inner module in `resident`."
                )
            if unit.presence.residency is Residency.COMING and self.is_being_stepped(unit):
                self.finish_optimizer(unit)
            if unit.is_reached:
                unit.leave(is_over=False)
            self._discard(unit)
            self.backend.invalidate(unit.presence.place)
        self._units_in_places.discard(unit)
        for segment in unit.segments:
            segment.epoch_on_device = NOTHING
