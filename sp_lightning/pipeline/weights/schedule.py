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
_NOTHING_USED = (-1, -1)


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
        self._last_two = _NOTHING_USED
        self._pairs = _Pairs(members)
        self._records: dict[Pass, _Record] = {}  # by the kind of pass that a step begins with
        self._record: _Record | None = None  # of the step under way, once it has used something
        self._forecast = _Forecast(self._last_two, self._pairs, None)

    def begin_step(self) -> None:
        """Note that the next use is the first one of a step."""
        if self._record is not None:
            self._record.end_step()
            self.horizon = max(self.horizon, len(self._record.uses))
            self._record = None

    def visit(self, member: int, direction: Pass) -> None:
        """Note that `member` is used now."""
        use = direction * self._members + member
        if use == self._last_two[1] and direction is Pass.BACKWARD:
            return  # backward announces itself more than once for one call
        if self._last_two != _NOTHING_USED:
            self._pairs.learn(self._last_two, use)
        self._last_two = self._last_two[1], use
        begins = self._record is None
        if self._record is None:
            self._record = self._records.setdefault(direction, _Record(_RECORDED_PER_MEMBER * self._members))
            self._record.begin_step()
        self._record.add(use)
        knows_better = begins and self._record.is_repeated and not self._forecast.follows_a_record
        if self._forecast.begins_with(use) and not knows_better:
            self._forecast.came_true()
            self.now += 1
        else:
            self._forecast_anew()

    def expected(self, number: int) -> int:
        """Return the member that is expected to be used then.

        Args:
            number: The number of a use that is still to come.
        """
        return self._forecast.use(number - self.now - 1) % self._members

    def upcoming_before_the_turn(self) -> Iterator[int]:
        """Yield members in expected order until another kind of pass begins; without an end in a loop."""
        for ahead in count() if self._members else ():
            direction, member = divmod(self._forecast.use(ahead), self._members)
            if direction != self._last_two[1] // self._members:
                return
            yield member

    def abandon(self) -> None:
        """After an exception: what comes next does not follow from what came last."""
        self._record = None
        self._last_two = _NOTHING_USED
        self._forecast_anew()

    def _forecast_anew(self) -> None:
        self.now += len(self._forecast) + 1
        self._forecast = _Forecast(self._last_two, self._pairs, self._record)


class _Record:
    """The uses of a step in their order, written over those of the last step that began with the same kind of pass.

    Args:
        longest: How many uses are recorded at most.

    Attributes:
        uses: Those of this step up to `position`, and of that other step beyond it.
        position: Where the latest use of this step is.
        is_repeated: Whether this step has equalled the other one so far.
    """

    def __init__(self, longest: int) -> None:
        self.uses: list[int] = []
        self.position = -1
        self.is_repeated = True
        self._longest = longest

    def begin_step(self) -> None:
        """Note that another step begins, in the same way."""
        self.position = -1
        self.is_repeated = True

    def add(self, use: int) -> None:
        """Note what is used now."""
        self.position += 1
        is_recorded = self.position < len(self.uses)
        self.is_repeated = self.is_repeated and is_recorded and self.uses[self.position] == use
        if is_recorded:
            self.uses[self.position] = use
        elif self.position < self._longest:
            self.uses.append(use)

    def end_step(self) -> None:
        """Forget what the other step used beyond the end of this one."""
        del self.uses[self.position + 1 :]

    def after(self, position: int) -> int | None:
        """Return the position that follows in a step like this, or in the next one; None if no more is recorded."""
        if position + 1 < len(self.uses):
            return position + 1
        return 0 if position + 1 == len(self.uses) < self._longest else None


class _Forecast:
    """What is expected to be used after the latest use, as far ahead as somebody has asked.

    Args:
        last_two: The two latest uses.
        pairs: Predicts as long as no record does.
        record: Predicts as long as the step that is under way repeats it.
    """

    def __init__(self, last_two: tuple[int, int], pairs: _Pairs, record: _Record | None) -> None:
        self._last_two = last_two  # predicted uses included
        self._pairs = pairs
        self._record = record if record is not None and record.is_repeated else None
        self._position = self._record.position if self._record is not None else 0  # of what was last taken from it
        self._uses: deque[int] = deque()

    def __len__(self) -> int:
        """Return how many uses have been predicted, and are still to come."""
        return len(self._uses)

    @property
    def follows_a_record(self) -> bool:
        """Whether the next prediction may come from a record."""
        return self._record is not None

    def begins_with(self, use: int) -> bool:
        """Return whether this use has been predicted to be the next."""
        return bool(self._uses) and self._uses[0] == use

    def came_true(self) -> None:
        """Note that the first predicted use has come."""
        self._uses.popleft()

    def use(self, index: int) -> int:
        """Return the predicted use that has `index` others before it."""
        while index >= len(self._uses):
            self._predict_another()
        return self._uses[index]

    def _predict_another(self) -> None:
        position = None if self._record is None else self._record.after(self._position)
        if self._record is None or position is None:
            self._record = None
            use = self._pairs.expected_after(self._last_two)
        else:
            self._position = position
            use = self._record.uses[position]
        self._last_two = self._last_two[1], use
        self._uses.append(use)


class _Pairs:
    """The use that comes after each pair of uses. One exception does not change it, two in a row do.

    Args:
        members: The number of members.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._after: dict[tuple[int, int], int] = {}
        self._doubted: set[tuple[int, int]] = set()

    def learn(self, pair: tuple[int, int], use: int) -> None:
        """Note that a use came after a pair."""
        if self._after.setdefault(pair, use) == use:
            self._doubted.discard(pair)
        elif pair in self._doubted:
            self._after[pair] = use
        else:
            self._doubted.add(pair)

    def expected_after(self, pair: tuple[int, int]) -> int:
        """Return what came after this pair, or what comes in the order of members if it has not been seen."""
        use = self._after.get(pair)
        return self._next_in_order(pair[1]) if use is None else use

    def _next_in_order(self, use: int) -> int:
        if use < 0:
            return 0
        direction, member = divmod(use, self._members)
        last = self._members - 1
        if direction == Pass.FORWARD:
            return use + 1 if member < last else Pass.BACKWARD * self._members + last
        if direction == Pass.BACKWARD:
            return use - 1 if member > 0 else 0
        return use + 1 if member < last else Pass.INFERENCE * self._members
