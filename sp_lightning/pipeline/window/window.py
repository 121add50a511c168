"""The window: which groups are on the device. It loads, evicts and prefetches them.

[Note: when a group may be evicted]
A group gives up its place when no call is inside of it, and, for a prefetch, only if it is not expected to be used
before the group that wants the place. In backward, "no call is inside" means that backward has reached another unit:
autograd runs nodes in the reverse order of their creation, so by then the nodes of later units have run. The handles in
`saved.py` heal the exceptions.

[Note: while masters are being stepped]
The optimizer may still be stepping a group's masters when the group is needed again. Its H2D copy then begins when they
have been stepped, and nothing reads the masters before the step is done. Other copies do not wait for that: the
optimizer steps groups in another order than that in which they were asked for.

[Note: while copies read the masters]
Computing waits for a copy to the device, but the host goes on: when a forward returns, copies that it has asked for may
not have begun. Until such a copy is done, nothing may write to what it reads. Steps come after it, whoever else writes
waits for it, and guards stay until then.

[Note: writes on the device]
A forward may write to its weights (`nn.Embedding(max_norm=...)`), so may a checkpoint within it that backward runs
again, a hook, and code outside of units through a view. The masters get that when the device's copy is to be
discarded, when the step ends, or when somebody looks at them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set

import torch

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.units.unit import Group, Residency
from sp_lightning.pipeline.weights.buffers import as_bytes
from sp_lightning.pipeline.weights.segment import NOTHING, written_by_follower
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.window.order import Order

_USES_AHEAD = 16  # that a prefetch looks at; more would cost more than they help
_GROUPS_AHEAD = 3


class Window:
    """Brings groups to the device and evicts others to make room."""

    def __init__(
        self,
        groups: Sequence[Group],
        group_of_member: Sequence[Group],
        order: Order,
        backend: Backend,
        stats: Stats,
    ) -> None:
        self.groups = groups
        self._group_of_member = list(group_of_member)
        self.order = order
        self.backend = backend
        self.stats = stats
        self.settled = True  # whether no copy has been asked for, and no step begun, since all were waited for
        self._outdated: dict[Group, None] = {}  # that nothing else takes the place of: fetched as soon as possible
        self._lying: set[Group] = set()  # the groups of the arena that were loaded last, each into its place
        most = max(Counter(map(id, group_of_member)).values(), default=0)
        self._horizon = max(_USES_AHEAD, _GROUPS_AHEAD * most)

    def begin_step(self) -> None:
        """Start copying what the step needs first: resident weights, and the groups that are used first."""
        for group in self.groups:
            if group.resident:
                self._verify(group)
                if group.residency is Residency.ABSENT:
                    self._load(group)
        self.prefetch()

    def end_step(self) -> None:
        """Remember samples of what stays on the device, so that edits past versions show in the next step."""
        self.write_back_all()
        for group in self.groups:
            if group.residency is not Residency.ABSENT and not self._is_being_stepped(group):
                for segment in group.segments:
                    segment.take_sample()

    def edited(self) -> list[str]:
        """Return the first weight of each segment whose masters were changed, not by a step, since this was asked."""
        self.suspect_all()
        names = []
        for group in self.groups:
            self._verify(group)
            for segment in group.segments:
                if segment.is_edited:
                    names.append(segment.weights[0].name)
                    segment.is_edited = False
        return names

    def note_edited(self, names: Sequence[str]) -> None:
        """Note that another process has changed masters of segments, which `edited` has named there."""
        for group in self.groups:
            for segment in group.segments:
                if segment.weights[0].name in names:
                    self.finish_optimizer(group)  # whose end would be noted after this, as if it had come later
                    group.suspect = True
                    segment.note_change()

    def suspect_all(self) -> None:
        """Check every group for changed masters before it is used again."""
        for group in self.groups:
            group.suspect = True

    def note_write(self, group: Group) -> None:
        """Treat this group's masters as changed: someone may be about to write to them."""
        group.suspect = True
        for segment in group.segments:
            segment.note_change()

    def abandon(self) -> None:
        """After an exception: treat every group as absent, with no call inside."""
        for group in self.groups:
            for weight in group.weights:
                weight.twin.note_unchanged()
            group.users, group.suspect = 0, True
            group.residency = Residency.ABSENT
            group.uploads.clear()
            for segment in group.segments:
                segment.lying = NOTHING

    def is_blocked(self, group: Group) -> bool:
        """Tell whether the group is absent and cannot be loaded, because a call is inside of a group in its place."""
        if group.residency is not Residency.ABSENT:
            return False
        return any(other.users and other.residency is not Residency.ABSENT for other in group.conflicts & self._lying)

    def bring(self, group: Group) -> None:
        """Make the group's weights readable for everything that is launched on the device from now on."""
        if group.suspect:
            self._verify(group)
        if group.residency is Residency.READABLE:
            return
        if group.residency is Residency.ABSENT:
            self.stats.misses += 1
            self._load(group)
        for ticket in group.uploads:
            self.backend.trace.wait(ticket, "weights")
        group.residency = Residency.READABLE

    def prefetch(self, in_use: Sequence[Group] = ()) -> None:
        """Start copies for upcoming uses, as far as there is room.

        Groups `in_use` are read by backward, although no call is inside of them, and not to be reloaded now.
        """
        needed = set(in_use)
        for member in self.order.upcoming(self._horizon):
            group = self._group_of_member[member]
            if group in needed:
                continue
            if group.suspect and not group.users:  # a call inside has what it began with, though a step ends meanwhile
                self._verify(group)
            if group.residency is Residency.ABSENT:
                # other processes, without which it is not stepped, may wait for this one, which would for its place
                awaits_others = group.is_ahead and self._is_being_stepped(group)
                if awaits_others or not self._may_take_place(group, needed):
                    break
                self._load(group)
            needed.add(group)
        for group in list(self._outdated):
            if group not in in_use:
                del self._outdated[group]
                if group.residency is Residency.ABSENT:
                    self._load(group)

    def _may_take_place(self, group: Group, needed: Set[Group]) -> bool:
        """Tell whether an absent group may be fetched ahead; see [Note: when a group may be evicted]."""
        for other in group.conflicts & self._lying:
            if other.residency is Residency.ABSENT:
                continue
            awaits_step = other.residency is Residency.COMING and self._is_being_stepped(other)
            if awaits_step or other.users or other in needed:
                return False
        return True

    def outdate(self, group: Group, stepped: Set[Weight]) -> None:
        """Discard what the device has of these weights: an optimizer is about to step their masters."""
        self.settled = False
        self._discard(group)
        if not group.conflicts:
            self._outdated[group] = None
        for segment in group.segments:
            if group.suspect:
                segment.check()
            if not stepped.isdisjoint(segment.weights):
                segment.note_change()
        group.suspect = False
        for other in group.apart:
            self.note_write(other)

    def finish_optimizer(self, group: Group) -> None:
        """Wait until the optimizer is done with the group's masters; an error of its step is raised here."""
        work = group.being_stepped
        if work is None:
            return
        self.stats.optimizer_waits += not work.done
        try:
            self.backend.trace.join(work, "optimizer")
        finally:
            if work.done:  # not if an interrupt has ended the wait
                group.being_stepped = None

    def copies_of(self, groups: Iterable[Group]) -> list[Ticket]:
        """Return the tickets of copies that may still read these groups' masters, used or not."""
        # weights that were made resident are copied by themselves
        readers = [reader for group in groups for reader in (group, *group.apart)]
        return [ticket for reader in readers for ticket in reader.uploads if not ticket.done]

    def finish_copies(self, groups: Iterable[Group]) -> None:
        """Wait until no copy reads these groups' masters: somebody may write to them."""
        copies = self.copies_of(groups)
        self.stats.host_syncs += bool(copies)
        for ticket in copies:
            ticket.join()

    def _is_being_stepped(self, group: Group) -> bool:
        if group.being_stepped is not None and group.being_stepped.done:
            self.finish_optimizer(group)
        return group.being_stepped is not None

    def _verify(self, group: Group) -> None:
        """If the group's masters may have changed since they were last checked, check; discard an outdated copy."""
        if not group.suspect or self._is_being_stepped(group):
            return
        group.suspect = is_outdated = False
        for segment in group.segments:
            segment.check()
            is_outdated |= segment.lying != segment.epoch
        if is_outdated and group.residency is not Residency.ABSENT:
            self._discard(group)

    def _discard(self, group: Group) -> None:
        """Treat what the device has of a group as gone."""
        if group.residency is Residency.READABLE:
            self.write_back(group.weights)
        elif group.residency is Residency.COMING:  # nobody has waited, and copies need not keep their order
            for ticket in group.uploads:
                self.backend.trace.wait(ticket, "weights")
        group.residency = Residency.ABSENT

    def _load(self, group: Group) -> None:
        self.settled = False
        for other in group.conflicts & self._lying:
            self._evict(other)
        if group.conflicts:
            self._lying.add(group)
        group.uploads = [ticket for ticket in group.uploads if not ticket.done]
        step = group.being_stepped if self._is_being_stepped(group) else None
        for segment in group.segments:
            if segment.lying == segment.epoch:
                continue  # it still lies there: only the others were stepped
            if step is None:
                segment.refresh_copies()
            for place, source in segment.pieces():
                upload = self.backend.trace.copy(Kind.LOAD, group.name, self.backend.upload, place, source, step)
                self.stats.bytes_to_device += source.nbytes
                group.uploads.append(upload)
            segment.lying = segment.epoch
        group.residency = Residency.COMING
        if not group.resident:
            self.stats.loads += len(group.units)

    def _evict(self, group: Group) -> None:
        """Give a group's place away."""
        if group.residency is not Residency.ABSENT:
            if group.users:
                raise RuntimeError(
                    "superpipeline: a backward pass inside of a unit's forward needs the place of that very unit. Use "
                    "a larger `k`, or name the inner module in `resident`."
                )
            if group.residency is Residency.COMING and self._is_being_stepped(group):
                self.finish_optimizer(group)
            for unit in group.units:
                if unit.is_reached:
                    unit.leave(is_over=False)
            self._discard(group)
            if self.backend.poison:
                self.backend.invalidate(group.place)
        self._lying.discard(group)
        for segment in group.segments:
            segment.lying = NOTHING

    # ------------------------------------------------------------------------------------- what the device has written

    def write_back_all(self) -> None:
        """Write back what was written to any weights on the device."""
        for group in self.groups:
            if group.residency is Residency.READABLE:
                self.write_back(group.weights)

    def write_back(self, weights: Iterable[Weight]) -> None:
        """Copy those of the weights that were written to on the device to their masters."""
        for weight in weights:
            twin = weight.twin
            if not twin.is_touched():
                continue
            if twin.group.residency is not Residency.READABLE:
                raise RuntimeError(
                    f"Weight {weight.name!r} was changed in backward after the optimizer had stepped it there, "
                    "which this change should have preceded. Train with `overlap_optimizer=False`."
                )
            self._write_to_master(weight)

    def _write_to_master(self, weight: Weight) -> None:
        twin = weight.twin
        with torch.inference_mode(False), torch.no_grad(), without_torch_function():
            arrived = torch.empty_like(weight.host, dtype=weight.compute_dtype)
            self.backend.download(as_bytes(arrived), as_bytes(twin.data)).join()
            self.finish_optimizer(weight.unit.group)
            self.stats.host_syncs += 1
            if torch.equal(as_bytes(arrived), as_bytes(weight.host.to(arrived.dtype))):  # clamped to where it was
                twin.note_unchanged()
                return
            assert not weight.lowered, "what writes to a weight gets it as it is"
            if weight.unit.group.is_followed:
                raise written_by_follower(weight)
            weight.master.copy_(arrived)  # as torch counts it
        twin.note_unchanged()
        twin.write_backs += 1
        self.stats.write_backs += 1
        if not twin.group.suspect:  # else a change of another weight, which is still to be found, would look checked
            for segment in twin.group.segments:
                if not segment.sends_copies:
                    segment.note_written_back()
