"""How far ahead the groups that will be used are there: what a prefetch has seen to, and need not look at again.

The window asks at every use of a unit what comes next. What that costs must not grow with the number of groups, so it
goes on where it ended the last time. What it has seen to and is not there any more is noted, and comes first.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from sp_lightning.pipeline.weights.device import Group
from sp_lightning.pipeline.weights.schedule import Schedule

_NEVER = sys.maxsize


class Lookahead:
    """The uses that are expected next, by their numbers in the schedule, as far as they have been seen to.

    Args:
        schedule: Expects them.
        group_of_member: The group of each member, by its index in the schedule.
    """

    def __init__(self, schedule: Schedule, group_of_member: Sequence[Group]) -> None:
        self._schedule = schedule
        self._group_of_member = list(group_of_member)
        self._uses: dict[Group, deque[int]] = {}
        self._seen_to = 0
        self._lost: set[Group] = set()
        self._next_loss = _NEVER
        self._held_up: tuple[int, Group, Group] | None = None

    def unseen(self, left_alone: Collection[Group]) -> Iterator[tuple[int, Group]]:
        """Uses that have to be seen to, the next one first: each with its number and its group.

        Args:
            left_alone: Groups that are not to be seen to now if they were lost.
        """
        schedule, last = self._schedule, self._schedule.now + 2 * len(self._group_of_member)
        if self._held_up is not None:
            number, group, by = self._held_up
            if number > schedule.now and (by.users or by in left_alone) and group not in left_alone:
                return
        if self._lost:
            self._lost = {group for group in self._lost if self.next_use(group) != _NEVER}
            self._next_loss = _NEVER
            for group in sorted(self._lost.difference(left_alone), key=self.next_use):
                number = self.next_use(group)
                if number > self._next_loss:  # another one had to go for one of these, and would be used before this
                    return
                yield number, group
            if not self._lost.issubset(left_alone):
                return
        for number in range(max(self._seen_to, schedule.now) + 1, last + 1):
            yield number, self._group_of_member[schedule.expected(number)]

    def hold_up(self, number: int, group: Group, by: Group) -> None:
        """Nothing from this use on can be seen to for as long as a group is in use that has the place of its group."""
        if not self._lost:
            self._held_up = number, group, by

    def see(self, number: int, group: Group, is_there: bool) -> None:
        """A use has been seen to; if its group is not there all the same, that is still to be done."""
        uses = self._coming(group)
        if not uses or uses[-1] < number:
            uses.append(number)
        self._seen_to = max(self._seen_to, number)
        (self._lost.discard if is_there else self._lost.add)(group)

    def next_use(self, group: Group) -> int:
        """The number of the group's next use, if that has been seen to; else later than all others."""
        uses = self._coming(group)
        return uses[0] if uses and uses[0] <= self._seen_to else _NEVER

    def lose(self, group: Group) -> None:
        """A group is not there any more, or may have changed."""
        self._held_up = None
        number = self.next_use(group)
        if number != _NEVER and group not in self._lost:
            self._lost.add(group)
            self._next_loss = min(self._next_loss, number)

    def begin_anew(self) -> None:
        """Nothing counts of what has been seen to."""
        self._seen_to, self._held_up = 0, None
        self._lost.clear()

    def _coming(self, group: Group) -> deque[int]:
        uses = self._uses.setdefault(group, deque())
        while uses and uses[0] <= self._schedule.now:
            uses.popleft()
        return uses
