"""The order in which units are used: recorded as it happens, used to fetch ahead, never trusted.

[Note: how the next use is predicted]
The uses of the last step are recorded in order. As long as a step repeats the last one that began in the same way, its
record says what comes next, however often units are called. Once a step takes another path, the two most recent uses
decide ("after 3, then 4, comes 5"). So a model whose path depends on its data is relearned where it differs and nowhere
else; one exception (a layer that was dropped) is not enough for that, two in a row are. Forwards that build a graph,
backwards and forwards without a graph are told apart, so validation in another order does not disturb training. A wrong
prediction costs a wait, never a wrong number: whoever needs a unit makes sure that it is there.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from itertools import count

_RECORDED_PER_MEMBER = 16  # uses of a step, so that generating a long text does not fill memory with its record


class Pass(enum.IntEnum):
    """The kind of pass that uses a unit; each has an order of its own."""

    FORWARD = 0
    BACKWARD = 1
    INFERENCE = 2


class Schedule:
    """Records which members (modules whose calls enter a unit) are used, and predicts which is used next.

    Uses are numbered. A predicted use has the number that it will have if all before it come as predicted; the first
    one that does not takes a number that none of them had. So whatever was found out about predicted uses, by number,
    stays true while these numbers lie ahead, and need not be found out again at each use.

    Args:
        members: The number of members. Until more is known they are expected to be used in order.

    Attributes:
        now: The number of the most recent use.
        horizon: How many uses ahead are worth a look: a whole step, as a group may be used only once in it.
    """

    def __init__(self, members: int) -> None:
        self.now = 0
        self.horizon = 2 * members
        self._members = members
        self._recorded_at_most = _RECORDED_PER_MEMBER * members
        self._previous = self._current = -1
        self._pairs = _Pairs()
        self._records: dict[int, list[int]] = {}  # by the kind of pass that a step begins with
        self._record: list[int] = []  # this step's uses up to `_position`, the recorded step's beyond it
        self._position = -1
        self._repeats = False  # whether this step has equalled the recorded one so far
        self._predicted: deque[int] = deque()
        self._last_two = -1, -1  # uses, predicted ones included
        self._followed: list[int] = []  # the record that predictions are taken from
        self._last_position: int | None = None  # of the last prediction in that record; None if pairs predict

    def begin_step(self) -> None:
        """Note that the next use is the first one of a step."""
        del self._record[self._position + 1 :]
        self.horizon = max(self.horizon, len(self._record))
        self._record, self._position = [], -1

    def visit(self, member: int, direction: Pass) -> None:
        """Note that `member` is used now."""
        use = direction * self._members + member
        if use == self._current and direction is Pass.BACKWARD:
            return  # backward announces itself more than once for one call
        if self._current >= 0:
            self._pairs.learn((self._previous, self._current), use)
        self._compare_with_record(use, direction)
        knows_better = self._position == 0 and self._repeats and self._last_position is None
        if self._predicted and self._predicted[0] == use and not knows_better:
            self._predicted.popleft()
            self.now += 1
            self._previous, self._current = self._current, use
        else:
            self._turn_to(self._current, use)

    def expected(self, number: int) -> int:
        """Return the member that is expected to be used then.

        Args:
            number: The number of a use that is still to come.
        """
        while len(self._predicted) < number - self.now:
            self._predict_another()
        return self._predicted[number - self.now - 1] % self._members

    def upcoming_before_the_turn(self) -> Iterator[int]:
        """Yield members in expected order until another kind of pass begins; without an end in a loop."""
        for ahead in count() if self._members else ():
            if ahead == len(self._predicted):
                self._predict_another()
            direction, member = divmod(self._predicted[ahead], self._members)
            if direction != self._current // self._members:
                return
            yield member

    def abandon(self) -> None:
        """After an exception: what comes next does not follow from what came last."""
        self._record, self._position, self._repeats = [], -1, False
        self._turn_to(-1, -1)

    def _compare_with_record(self, use: int, direction: Pass) -> None:
        if self._position < 0:
            self._record, self._repeats = self._records.setdefault(direction, []), True
        self._position += 1
        recorded = self._position < len(self._record)
        self._repeats = self._repeats and recorded and self._record[self._position] == use
        if recorded:
            self._record[self._position] = use
        elif self._position < self._recorded_at_most:
            self._record.append(use)

    def _turn_to(self, previous: int, current: int) -> None:
        self.now += len(self._predicted) + 1
        self._predicted.clear()
        self._last_two = self._previous, self._current = previous, current
        self._followed = self._record
        self._last_position = self._position if self._repeats else None

    def _predict_another(self) -> None:
        record, position = self._followed, self._last_position
        if position is not None and position + 1 == len(record) < self._recorded_at_most:
            position = -1  # the step ends here, and another one like it begins
        if position is not None and position + 1 < len(record):
            self._last_position = position + 1
            use = record[position + 1]
        else:
            self._last_position = None
            use = self._expected_after_two()
        self._last_two = self._last_two[1], use
        self._predicted.append(use)

    def _expected_after_two(self) -> int:
        use = self._pairs.after.get(self._last_two)
        return self._expected_after(self._last_two[1]) if use is None else use

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


class _Pairs:
    """The use that comes after each pair of uses. One exception does not change it, two in a row do.

    Attributes:
        after: That use, by the pair.
    """

    def __init__(self) -> None:
        self.after: dict[tuple[int, int], int] = {}
        self._doubted: set[tuple[int, int]] = set()

    def learn(self, pair: tuple[int, int], use: int) -> None:
        """Note that a use came after a pair."""
        if self.after.setdefault(pair, use) == use:
            self._doubted.discard(pair)
        elif pair in self._doubted:
            self.after[pair] = use
        else:
            self._doubted.add(pair)
