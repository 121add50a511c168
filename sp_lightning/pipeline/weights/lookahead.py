"""What prefetching has covered: which upcoming uses need no second look.

The window asks at every use of a unit what to fetch next. The cost of that must not grow with the number of groups, so
a prefetch goes on where the previous one stopped. A group that was covered and has been lost since is noted, and comes
first.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from sp_lightning.pipeline.weights.device import Group
from sp_lightning.pipeline.weights.schedule import Schedule

_NEVER = sys.maxsize


class Lookahead:
    """The upcoming uses of groups, by their numbers in the schedule, as far as prefetching has covered them.

    A use is *covered* when its group is on the device, or on its way there, and may stay until then.

    Args:
        schedule: Predicts uses.
        group_of_member: The group of each member, by the member's index in the schedule.
    """

    def __init__(self, schedule: Schedule, group_of_member: Sequence[Group]) -> None:
        self._schedule = schedule
        self._group_of_member = list(group_of_member)
        self._uses: dict[Group, deque[int]] = {}
        self._covered_up_to = 0
        self._lost: set[Group] = set()
        self._next_lost = _NEVER
        self._blocked: tuple[int, Group, Group] | None = None

    def uncovered(self, in_use: Collection[Group]) -> Iterator[tuple[int, Group]]:
        """Yield the number and the group of each use that is not covered yet, soonest first.

        Args:
            in_use: Groups that must not be reloaded now: if one of them was lost, it is left for a later prefetch.
        """
        if self._is_still_blocked(in_use):
            return
        if self._lost:
            yield from self._lost_uses(in_use)
            if not self._lost.issubset(in_use):  # loading these has evicted others, which come first the next time
                return
        schedule = self._schedule
        for number in range(max(self._covered_up_to, schedule.now) + 1, schedule.now + schedule.horizon + 1):
            yield number, self._group_of_member[schedule.expected(number)]

    def _is_still_blocked(self, in_use: Collection[Group]) -> bool:
        """Tell whether what stopped the last prefetch (see `block`) stops this one at the same use."""
        if self._blocked is None:
            return False
        number, group, by = self._blocked
        return number > self._schedule.now and bool(by.users or by in in_use) and group not in in_use

    def _lost_uses(self, in_use: Collection[Group]) -> Iterator[tuple[int, Group]]:
        """Yield the next use of each lost group, soonest first, up to the use of a group that is lost meanwhile."""
        self._lost = {group for group in self._lost if self.next_use(group) != _NEVER}
        self._next_lost = _NEVER
        for group in sorted(self._lost.difference(in_use), key=self.next_use):
            number = self.next_use(group)
            if number > self._next_lost:
                return
            yield number, group

    def block(self, number: int, group: Group, by: Group) -> None:
        """Note that nothing from this use on can be covered while `by`, which has the place of its group, is in use."""
        if not self._lost:
            self._blocked = number, group, by

    def cover(self, number: int, group: Group, is_there: bool) -> None:
        """Note that a use is covered; if its group is not there all the same, it counts as lost."""
        uses = self._upcoming(group)
        if not uses or uses[-1] < number:
            uses.append(number)
        self._covered_up_to = max(self._covered_up_to, number)
        (self._lost.discard if is_there else self._lost.add)(group)

    def next_use(self, group: Group) -> int:
        """Return the number of the group's next covered use; if there is none, one that is later than all others."""
        uses = self._upcoming(group)
        return uses[0] if uses and uses[0] <= self._covered_up_to else _NEVER

    def note_lost(self, group: Group) -> None:
        """Note that a group is not on the device any more, or that its weights may have changed."""
        self._blocked = None
        number = self.next_use(group)
        if number != _NEVER and group not in self._lost:
            self._lost.add(group)
            self._next_lost = min(self._next_lost, number)

    def forget(self) -> None:
        """Start over: no use is covered."""
        self._covered_up_to, self._blocked = 0, None
        self._lost.clear()

    def _upcoming(self, group: Group) -> deque[int]:
        uses = self._uses.setdefault(group, deque())
        while uses and uses[0] <= self._schedule.now:
            uses.popleft()
        return uses
