"""The order in which units are used: recorded as it happens, used to fetch ahead, never trusted.

What followed what is remembered per pair of uses ("after 3, then 4, came 5"), separately for forwards that build a
graph, backwards, and forwards without a graph. So a model whose path depends on its data, or that is used in
another order by validation, is relearned where it differs and nowhere else. A wrong guess costs a wait, never a
wrong number: whoever needs a unit makes sure that it is there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from itertools import takewhile


class Pass(enum.IntEnum):
    """In which of the three orders a unit is used."""

    FORWARD = 0
    BACKWARD = 1
    INFERENCE = 2


class Schedule:
    """Remembers and predicts which member (module that is called, of some unit) is used next.

    Args:
        members: How many members there are; before anything is known they are expected to be used in their order.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._next: dict[tuple[int, int], int] = {}
        self._previous = -1
        self._current = -1

    def visit(self, member: int, direction: Pass) -> None:
        """Note that `member` is used now."""
        use = direction * self._members + member
        if use == self._current:
            return
        if self._current >= 0:
            self._next[self._previous, self._current] = use
        self._previous, self._current = self._current, use

    def upcoming(self) -> Iterator[int]:
        """Members in the order in which they are expected, from the next on; endless."""
        return (use % self._members for use in self._expected_uses())

    def upcoming_before_the_turn(self) -> Iterator[int]:
        """Those of them that are expected before another kind of pass begins; endless in a loop."""
        direction = self._current // self._members if self._members else 0
        uses = takewhile(lambda use: use // self._members == direction, self._expected_uses())
        return (use % self._members for use in uses)

    def forget_position(self) -> None:
        """After an exception: what comes next does not follow from what came last."""
        self._previous = self._current = -1

    def _expected_uses(self) -> Iterator[int]:
        previous, current = self._previous, self._current
        while self._members:
            previous, current = current, self._next.get((previous, current), self._expected_after(current))
            yield current

    def _expected_after(self, use: int) -> int:
        if use < 0:
            return 0
        direction, member = divmod(use, self._members)
        last = self._members - 1
        if direction == Pass.FORWARD:
            return use + 1 if member < last else Pass.BACKWARD * self._members + last
        if direction == Pass.BACKWARD:
            return use - 1 if member > 0 else 0
        return use + 1 if member < last else Pass.INFERENCE * self._members
