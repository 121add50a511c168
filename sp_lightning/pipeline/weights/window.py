"""The window: which groups are on the device. It loads, evicts and prefetches them.

[Note: when a group may be evicted]
A group gives up its place when no call is inside of it, and, for a prefetch, only if it is not expected to be used
before the group that wants the place. In backward, "no call is inside" means that backward has reached another unit:
autograd runs nodes in the reverse order of their creation, so by then the nodes of later units have run. The handles in
`saved.py` heal the exceptions.

[Note: while masters are being stepped]
The optimizer may still be stepping a group's masters when the group is needed again. Its H2D copy then begins when they
have been stepped, section by section (sections.py), and nothing reads the masters before the step is done. Other copies
do not wait for that: the optimizer steps groups in another order than that in which they were asked for.

[Note: what still lies in its place]
An optimizer outdates a group on the device, but mostly not all of it: beside adapters lies a frozen base. If no other
group has come into its place until it is needed again, only what has changed is sent.

[Note: while copies read the masters]
Computing waits for a copy to the device, but the host goes on: when a forward returns, copies that it has asked for may
not have begun. Until such a copy is done, nothing may write to what it reads. Steps come after it, whoever else writes
waits for it if computing uses it, and guards stay until then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.lanes.trace import Kind
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.device import Group, Residency
from sp_lightning.pipeline.weights.lookahead import Lookahead
from sp_lightning.pipeline.weights.schedule import Schedule
from sp_lightning.pipeline.weights.weight import Weight


class Window:
    """Brings groups to the device and evicts others to make room.

    Args:
        groups: All groups, resident ones included; others may be added to this list.
        group_of_member: The group of each streamed member, by its index in the schedule.
        schedule: Predicts what is used next.
        backend: Makes the copies.
        stats: Counts them.
        on_evict: Called with a group before its place is given to another one.
        before_discard: Called with a group that computing can read, before its copy on the device is discarded
            because its masters have changed, or are about to.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        group_of_member: Sequence[Group],
        schedule: Schedule,
        backend: Backend,
        stats: Stats,
        on_evict: Callable[[Group], None],
        before_discard: Callable[[Group], None],
    ) -> None:
        self.groups = groups
        self._backend = backend
        self._stats = stats
        self._on_evict = on_evict
        self._before_discard = before_discard
        self._last_in_place: set[Group] = set()  # the groups that were loaded last, each into its place
        self._ahead = Lookahead(schedule, group_of_member)

    def begin_step(self) -> None:
        """Start copying what the step needs first: resident weights, and the groups that the schedule expects."""
        for group in [group for group in self.groups if group.resident]:
            self._verify(group)
            if not group.loaded:
                self._load(group)
        self.prefetch()

    def suspect_all(self) -> None:
        """Check every group for changed masters before it is used again."""
        self._ahead.forget()
        for group in self.groups:
            group.suspect = True

    def suspect(self, group: Group) -> None:
        """Check this group's masters before it is used again: someone may be about to write to them."""
        group.suspect, group.state, group.in_place = True, None, None
        self._ahead.note_lost(group)

    def abandon(self) -> None:
        """After an exception: treat every group as absent, with no call inside."""
        self._ahead.forget()
        for group in self.groups:
            group.users, group.suspect = 0, True
            group.residency, group.in_place = Residency.ABSENT, None
            group.tickets.clear()
            group.used_copies.clear()

    def is_blocked(self, group: Group) -> bool:
        """Tell whether the group is absent and cannot be loaded, because a call is inside of a group in its place."""
        return not group.loaded and any(other.users for other in self._in_the_way_of(group))

    def bring(self, group: Group) -> None:
        """Make the group's weights readable for everything that is launched on the device from now on."""
        self._verify(group)
        if not group.loaded:
            self._stats.misses += 1
            self._load(group)
        if not group.readable:
            used = [*group.used_copies, *group.tickets]
            self._wait_for_copies(group)
            group.used_copies = [ticket for ticket in used if not ticket.done]
            group.residency = Residency.READABLE

    def prefetch(self, in_use: Sequence[Group] = ()) -> None:
        """Start copies for upcoming uses, as far as there is room.

        Args:
            in_use: Groups that backward is reading, although no call is inside of them.
        """
        for number, group in self._ahead.uncovered(in_use):
            if group not in in_use:
                self._verify(group)
            if not group.loaded and group not in in_use:
                other = self._needed_before(number, group, in_use)
                if other is not None:
                    self._ahead.block(number, group, other)
                    return
                self._load(group)
            self._ahead.cover(number, group, group.loaded and not (group.suspect and group in in_use))

    def _needed_before(self, number: int, group: Group, in_use: Sequence[Group]) -> Group | None:
        """Return a group that cannot be evicted for this use; see [Note: when a group may be evicted]."""
        for other in self._in_the_way_of(group):
            if other.users or other in in_use or self._ahead.next_use(other) < number or self._awaits_step(other):
                return other
        return None

    def outdate(self, group: Group, weights: Collection[Weight]) -> None:
        """Discard the group's copy on the device: an optimizer is about to step the masters of these weights."""
        in_place = group.state if group.loaded else group.in_place
        group.suspect, group.state = False, None
        self._discard(group)
        if group.host.are_little(weights):
            group.in_place, group.outdated = in_place, frozenset(weights)

    def finish_optimizer(self, group: Group) -> None:
        """Wait until the optimizer is done with the group's masters.

        Raises:
            Exception: Whatever the optimizer's step raised.
        """
        work = group.being_stepped
        if work is None:
            return
        self._stats.optimizer_waits += not work.done
        try:
            work.join()
        finally:
            if work.done:  # not if an interrupt has ended the wait
                group.being_stepped = None

    def copies_of(self, group: Group) -> list[Ticket]:
        """Return the tickets of copies that may still read the group's masters, used or not."""
        return [
            ticket for reader in _readers(group) for ticket in (*reader.used_copies, *reader.tickets) if not ticket.done
        ]

    def finish_copies(self, group: Group) -> None:
        """Wait until no copy that computing uses reads the group's masters: somebody may write to them."""
        self._finish_used_copies(_readers(group))

    def settle(self) -> None:
        """Wait until no copy that computing uses reads any masters."""
        self._finish_used_copies(self.groups)

    def _finish_used_copies(self, groups: Iterable[Group]) -> None:
        copies = [ticket for group in groups for ticket in group.used_copies if not ticket.done]
        self._stats.host_syncs += bool(copies)
        for ticket in copies:
            self._backend.synchronize(ticket)

    @property
    def settled(self) -> bool:
        """Whether no copy that computing uses reads any masters."""
        return all(ticket.done for group in reversed(self.groups) for ticket in group.used_copies)

    def _is_being_stepped(self, group: Group) -> bool:
        if group.being_stepped is not None and group.being_stepped.done:
            self.finish_optimizer(group)
        return group.being_stepped is not None

    def _awaits_step(self, group: Group) -> bool:
        """Tell whether the group's copy to the device has not begun, as its masters are being stepped."""
        return group.residency is Residency.COMING and self._is_being_stepped(group)

    def _verify(self, group: Group) -> None:
        """If the group's masters may have changed since they were last checked, check; discard an outdated copy."""
        if not group.suspect or self._is_being_stepped(group):
            return
        group.suspect = False
        if not (group.loaded or group.host.sends_copies):
            group.state = None  # else other values may be loaded under it: an average, say, that is swapped in and out
            return
        if group.state is None or group.host.has_changed(group.state):
            group.state = None
            self._discard(group)

    def _discard(self, group: Group) -> None:
        if group.readable:
            self._before_discard(group)
        self._mark_absent(group)

    def _mark_absent(self, group: Group) -> None:
        group.residency, group.in_place = Residency.ABSENT, None
        self._ahead.note_lost(group)

    def _in_the_way_of(self, group: Group) -> list[Group]:
        """Return the groups on the device that occupy its place, or part of it."""
        return [other for other in group.conflicts & self._last_in_place if other.loaded]

    def _load(self, group: Group) -> None:
        for other in self._in_the_way_of(group):
            self._evict(other)
        self._wait_for_copies(group)
        for other in group.conflicts & self._last_in_place:
            self._wait_for_copies(other)  # if nobody has used them: copies to the device need not keep their order
            other.in_place = None
        if group.conflicts:
            self._last_in_place -= group.conflicts
            self._last_in_place.add(group)
        if self._is_being_stepped(group):
            self._upload_behind_step(group)
        else:
            if group.state is None:
                group.state = group.host.state()
            group.host.prepare(group.state)
            for begin, end in self._missing(group):
                self._upload(group, begin, end)
        group.residency, group.in_place = Residency.COMING, None
        if group.resident:
            self._stats.resident_loads += 1
        else:
            self._stats.loads += group.unit_count

    def _wait_for_copies(self, group: Group) -> None:
        while group.tickets:
            self._backend.trace.wait(group.tickets[0], "weights")
            del group.tickets[0]  # only now: a copy that failed has not come

    def _upload_behind_step(self, group: Group) -> None:
        """Send each section of the group when it has been stepped; see [Note: while masters are being stepped]."""
        assert group.being_stepped is not None
        missing = self._missing(group)
        for cut, first, last in group.host.sections:
            for begin, end in [(max(begin, first), min(end, last)) for begin, end in missing]:
                if begin < end:
                    self._upload(group, begin, end, group.being_stepped.until(cut))

    def _missing(self, group: Group) -> list[tuple[int, int]]:
        """Return which bytes of the group do not lie in its place; see [Note: what still lies in its place]."""
        if group.in_place is None:
            return [(0, group.nbytes)]
        return group.host.changed_ranges(group.in_place, group.state, group.outdated)

    def _upload(self, group: Group, begin: int, end: int, after: Ticket | None = None) -> None:
        source, place = group.host.source.bytes, group.place
        if end - begin < group.nbytes:
            source, place = source[begin:end], place[begin:end]
        group.tickets.append(self._backend.upload(place, source, after))
        self._backend.trace.moved(Kind.LOAD, group.name, source.nbytes, group.tickets[-1])
        self._stats.bytes_to_device += source.nbytes

    def _evict(self, group: Group) -> None:
        if group.users:
            raise RuntimeError(
                "superpipeline: a backward pass inside of a unit's forward needs the place of that very unit. Use a "
                "larger `k`, or name the inner module in `resident`."
            )
        if self._awaits_step(group):
            self.finish_optimizer(group)
        was_readable = group.readable
        self._on_evict(group)
        self._mark_absent(group)
        if was_readable:  # otherwise a copy into the place may still run, and only another copy is ordered after that
            self._backend.invalidate(group.place)


def _readers(group: Group) -> Iterable[Group]:
    """Return the group and all others that its masters are copied with: weights that were made resident."""
    return dict.fromkeys([group, *(weight.twin.group for weight in group.host.weights)])
