"""Whose gradients are averaged next: what processes tell each other before they send anything.

[Note: whose turn it is]
What one process sends, all others have to wait for, and it must belong to the same weights everywhere. But each
follows a backward pass of its own: a layer may be left out in one of them, or a weight may have left its unit. So
before gradients are averaged, the processes tell each other which weights they have gradients of. This is a small
message between hosts, which runs ahead of the devices. They agree on one of these sets; who has no gradient of a
weight in it adds zero, and may come to it later: then it has another turn, and cannot be stepped before backward ends.
Who has ended its backward pass takes part until nobody has any gradient left. The last message tells, too, what else
there is to average when backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_HEAD = 2  # what stands in front of the numbers
_READY, _LATE = 1, 2


class Message(NamedTuple):
    """What a process says of itself.

    Attributes:
        moment: How many optimizer steps it has taken.
        goes_on: Whether its backward pass goes on, and may bring more.
        ready: Numbers of the weights that it has gradients of, in ascending order.
        late: Numbers of what else it has, to be averaged when backward is over everywhere.
    """

    moment: int
    goes_on: bool
    ready: Sequence[int]
    late: Sequence[int] = ()

    def encoded(self, count: int) -> Tensor:
        """As numbers, of which all processes send equally many.

        Args:
            count: How many things have a number.
        """
        message = torch.zeros(_HEAD + count, dtype=torch.int32, device="cpu")
        message[0], message[1] = self.moment, self.goes_on
        message[[_HEAD + number for number in self.ready]] = _READY
        message[[_HEAD + number for number in self.late]] += _LATE
        return message

    @classmethod
    def decoded(cls, message: Tensor) -> Message:
        """What somebody has sent."""
        moment, goes_on = message[:_HEAD].tolist()
        ready, late = ((message[_HEAD:] & flag).nonzero().flatten().tolist() for flag in (_READY, _LATE))
        return cls(moment, bool(goes_on), ready, late)


class Turn(NamedTuple):
    """What processes have agreed on.

    Attributes:
        weights: Whose gradients are averaged now; nobody's when no process has any left.
        open: Those of them that a process may still come to.
        late: What there is to average when nobody has any gradient left.
    """

    weights: list[int]
    open: set[int]
    late: list[int]


def take_turns(messages: Sequence[Message]) -> Turn:
    """Agree: every process comes to the same, from what all have said.

    Raises:
        RuntimeError: The processes are not at the same moment of the training.
    """
    moments = [message.moment for message in messages]
    if len(set(moments)) > 1:
        raise RuntimeError(
            f"The processes have taken different numbers of optimizer steps ({moments}) when they average "
            "gradients. Every process has to run backward as often as the others between two steps; a "
            "`training_step` that returns None in one of them does not."
        )
    # backward came to its first layer last; where that is a later one, others are as far or further
    turn = max((message.ready for message in messages), key=lambda numbers: numbers[0] if numbers else -1)
    missing = (set(turn).difference(message.ready) for message in messages if message.goes_on)
    late = set[int]().union(*(message.late for message in messages))
    return Turn(list(turn), set[int]().union(*missing), sorted(late))


class Agreement:
    """Agrees with other processes, again and again, in one backward pass after the other.

    Args:
        count: How many things have a number.
        moment: What has to be the same in all processes: a number of steps.
        exchange: Gives a message to all processes, and returns what each of them has said.
    """

    def __init__(self, count: int, moment: Callable[[], int], exchange: Callable[[Tensor], Iterable[Tensor]]) -> None:
        self._count = count
        self._moment = moment
        self._exchange = exchange
        self._open: set[int] = set()

    def next_turn(self, ready: Iterable[int], late: Iterable[int] = (), *, goes_on: bool) -> Turn:
        """Say what this process has, and hear what is averaged next.

        Args:
            ready: The weights that it has gradients of.
            late: What else it has; told in the end.
            goes_on: Whether its backward pass goes on.
        """
        mine = Message(self._moment(), goes_on, sorted(ready), sorted(late))
        answers = self._exchange(mine.encoded(self._count))
        turn = take_turns([Message.decoded(answer) for answer in answers])
        self._open |= turn.open
        return turn

    def is_final(self, weights: Iterable[int]) -> bool:
        """Whether no process can come to these any more in this backward pass, once their turn has come."""
        return self._open.isdisjoint(weights)

    def end(self) -> None:
        """The backward pass is over in all processes, or in none that goes on."""
        self._open.clear()
