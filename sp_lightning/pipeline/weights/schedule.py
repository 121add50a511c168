"""The order in which units are used: recorded as it happens, used to fetch ahead, never trusted.

What followed what is remembered per pair of uses ("after 3, then 4, came 5"), separately for forwards that build a
graph, backwards, and forwards without a graph. So a model whose path depends on its data, or that is used in
another order by validation, is relearned where it differs and nowhere else. A wrong guess costs a wait, never a
wrong number: whoever needs a unit makes sure that it is there.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from itertools import count


class Pass(enum.IntEnum):
    """In which of the three orders a unit is used."""

    FORWARD = 0
    BACKWARD = 1
    INFERENCE = 2


class Schedule:
    """Remembers and predicts which member (module that is called, of some unit) is used next.

    Uses are numbered. An expected use has the number that it will have if all before it come as expected; the first one
    that does not takes a number that none of them had. So what somebody has found out about expected uses, by their
    numbers, holds for as long as these numbers lie ahead, and need not be found out again at each use.

    Args:
        members: How many members there are; before anything is known they are expected to be used in their order.

    Attributes:
        now: The number of the use that was noted last.
    """

    def __init__(self, members: int) -> None:
        self.now = 0
        self._members = members
        self._next: dict[tuple[int, int], int] = {}
        self._previous = -1
        self._current = -1
        self._expected: deque[int] = deque()
        self._last_two = -1, -1  # of all uses, expected ones included

    def visit(self, member: int, direction: Pass) -> None:
        """Note that `member` is used now."""
        use = direction * self._members + member
        if use == self._current:
            return
        if self._current >= 0:
            self._next[self._previous, self._current] = use
        if self._expected and self._expected[0] == use:
            self._expected.popleft()
            self.now += 1
            self._previous, self._current = self._current, use
        else:
            self._turn_to(self._current, use)

    def expected(self, number: int) -> int:
        """The member that is expected to be used then.

        Args:
            number: Of the use; it is to come.
        """
        while len(self._expected) < number - self.now:
            self._expect_another()
        return self._expected[number - self.now - 1] % self._members

    def upcoming_before_the_turn(self) -> Iterator[int]:
        """Members in the order in which they are expected before another kind of pass begins; endless in a loop."""
        for ahead in count() if self._members else ():
            if ahead == len(self._expected):
                self._expect_another()
            direction, member = divmod(self._expected[ahead], self._members)
            if direction != self._current // self._members:
                return
            yield member

    def forget_position(self) -> None:
        """After an exception: what comes next does not follow from what came last."""
        self._turn_to(-1, -1)

    def _turn_to(self, previous: int, current: int) -> None:
        self.now += len(self._expected) + 1
        self._expected.clear()
        self._last_two = self._previous, self._current = previous, current

    def _expect_another(self) -> None:
        last = self._last_two[1]
        use = self._next.get(self._last_two)
        use = self._expected_after(last) if use is None else use
        self._last_two = last, use
        self._expected.append(use)

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
