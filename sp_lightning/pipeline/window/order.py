"""The order in which units are used: recorded as it happens, used to fetch ahead, never trusted.

The uses of each step are recorded. The next step follows the record of the last one that began with the same use. Where
it leaves that path, the order looks for it further on in the record (a layer was dropped, another branch was taken). If
no record knows a use, the next ones are expected in the order of the modules. A wrong prediction costs a wait, never a
wrong number: any code that needs a unit makes sure that it is there.
"""

from __future__ import annotations

import enum

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
        self._longest = _RECORDED_PER_MEMBER * members
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
        if len(self._recording) < self._longest:
            self._recording.append(use)
        record, position = self._followed, self._position
        try:
            self._position = record.index(use, 0 if position is None else position + 1)
        except ValueError:
            self._position = record.index(use) if use in record else None

    def upcoming(self, count: int) -> list[int]:
        """Return the uses that are expected next, in order."""
        record, position = self._followed, self._position
        if position is None:  # no record knows the next use: modules are expected in their own order
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
