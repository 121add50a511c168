"""How processes agree on whose gradients are averaged next, before they send any.

[Note: whose turn it is]
A collective operation makes every process wait for the others, and must be for the same weights in all of them. But
each process runs a backward pass of its own: one of them may skip a layer, or have a weight that has left its unit. So
before gradients are averaged, the processes tell each other which weights they have gradients of. This takes a small
message between hosts, which run ahead of the devices. They agree on one of these sets. A process that has no gradient
for a weight in it contributes zero. If it may still compute one, the weight can have another turn, and is not stepped
before backward ends. A process whose backward pass has ended takes part until nobody has any gradient left. The last
message also says what else is averaged when backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_HEADER = 2  # entries before the flags: `steps_taken` and `goes_on`
_READY, _DEFERRED = 1, 2


class Message(NamedTuple):
    """A process's report to the others.

    Attributes:
        steps_taken: Number of optimizer steps that the process has taken.
        goes_on: Whether its backward pass is still running, and may bring more gradients.
        ready: Numbers of the weights that it has gradients of, in ascending order.
        deferred: Numbers of everything else that it has to average when backward is over in all processes.
    """

    steps_taken: int
    goes_on: bool
    ready: Sequence[int]
    deferred: Sequence[int] = ()

    def encoded(self, count: int) -> Tensor:
        """Encode the message as a tensor, which has the same size in all processes.

        Args:
            count: How many weights and other parameters have a number.
        """
        message = torch.zeros(_HEADER + count, dtype=torch.int32, device="cpu")
        message[0], message[1] = self.steps_taken, self.goes_on
        message[[_HEADER + number for number in self.ready]] = _READY
        message[[_HEADER + number for number in self.deferred]] += _DEFERRED
        return message

    @classmethod
    def decoded(cls, message: Tensor) -> Message:
        """Decode what a process has sent."""
        steps_taken, goes_on = message[:_HEADER].tolist()
        ready, deferred = ((message[_HEADER:] & flag).nonzero().flatten().tolist() for flag in (_READY, _DEFERRED))
        return cls(steps_taken, bool(goes_on), ready, deferred)


class Turn(NamedTuple):
    """The decision that all processes have come to.

    Attributes:
        weights: Numbers of the weights whose gradients are averaged now; empty when no process has any left.
        not_final: Those of them that some process may still compute a gradient for.
        deferred: Numbers of everything else, to be averaged once no process has a gradient left.
    """

    weights: list[int]
    not_final: set[int]
    deferred: list[int]


def take_turns(messages: Sequence[Message]) -> Turn:
    """Decide whose turn it is; given the same messages, every process decides the same.

    Raises:
        RuntimeError: The processes have taken different numbers of optimizer steps.
    """
    steps_taken = [message.steps_taken for message in messages]
    if len(set(steps_taken)) > 1:
        raise RuntimeError(
            f"The processes have taken different numbers of optimizer steps ({steps_taken}) when they average "
            "gradients. Every process has to run backward equally often between two steps: `training_step` may not "
            "return None in some of them only."
        )
    # backward runs from the last layer to the first: the process whose set begins at the latest layer is least far
    turn = max((message.ready for message in messages), key=lambda numbers: numbers[0] if numbers else -1)
    missing = (set(turn).difference(message.ready) for message in messages if message.goes_on)
    deferred = set[int]().union(*(message.deferred for message in messages))
    return Turn(list(turn), set[int]().union(*missing), sorted(deferred))


class Agreement:
    """Agrees with the other processes on one turn after another, in every backward pass.

    Args:
        count: How many weights and other parameters have a number.
        steps_taken: Returns the number of optimizer steps taken, which must be the same in all processes.
        exchange: Sends a message to all processes, and returns the message of each of them.
    """

    def __init__(
        self, count: int, steps_taken: Callable[[], int], exchange: Callable[[Tensor], Iterable[Tensor]]
    ) -> None:
        self._count = count
        self._steps_taken = steps_taken
        self._exchange = exchange
        self._not_final: set[int] = set()

    def next_turn(self, ready: Iterable[int], deferred: Iterable[int] = (), *, goes_on: bool) -> Turn:
        """Announce what this process has, and return what is averaged next.

        Args:
            ready: Numbers of the weights that it has gradients of.
            deferred: Numbers of everything else that it has to average when backward is over.
            goes_on: Whether its backward pass is still running.
        """
        mine = Message(self._steps_taken(), goes_on, sorted(ready), sorted(deferred))
        answers = self._exchange(mine.encoded(self._count))
        turn = take_turns([Message.decoded(answer) for answer in answers])
        self._not_final |= turn.not_final
        return turn

    def is_final(self, weights: Iterable[int]) -> bool:
        """Tell whether no process can bring more gradients of weights that have had their turn in this pass."""
        return self._not_final.isdisjoint(weights)

    def end(self) -> None:
        """Reset, as the backward pass is over in all processes, or was abandoned in this one."""
        self._not_final.clear()
