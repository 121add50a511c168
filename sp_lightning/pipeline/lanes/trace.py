"""What each lane was busy with, and when, as it is recorded on request (`Trace` in backend.py).

    compute     forward and backward of units, and stalls, in which computing waits for a copy
    to device   weights, and activations that come back
    to host     gradients, and activations that leave
    host        optimizer steps of units, and accumulation of gradients

Timeline, planner and callback read the result.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple


class Lane(enum.Enum):
    """One of the resources that work side by side."""

    COMPUTE = "compute"
    TO_DEVICE = "to device"
    TO_HOST = "to host"
    HOST = "host"


class Kind(enum.Enum):
    """The purpose that a span of time was spent on, and the lane that it occupies."""

    FORWARD = "forward", Lane.COMPUTE
    BACKWARD = "backward", Lane.COMPUTE
    STALL = "stall", Lane.COMPUTE
    LOAD = "load", Lane.TO_DEVICE
    FETCH = "fetch", Lane.TO_DEVICE
    GRADIENTS = "gradients", Lane.TO_HOST
    OFFLOAD = "offload", Lane.TO_HOST
    STEP = "step", Lane.HOST
    ADD = "add", Lane.HOST

    lane: Lane

    def __new__(cls, value: str, lane: Lane) -> Kind:
        """Make a member whose value is its name alone."""
        made = object.__new__(cls)
        made._value_, made.lane = value, lane
        return made


class Span(NamedTuple):
    """One piece of work on a lane, in seconds since the start of the recording.

    Its name is that of the unit that it was for; of a stall, what computing waited for.
    """

    lane: Lane
    kind: Kind
    name: str
    begin: float
    end: float
    nbytes: int = 0


@dataclass
class Recording:
    """The course of a few steps; complete once the scope of `Pipeline.record` is left.

    Attributes:
        spans: All pieces of work, sorted by when they began. Stalls lie within forwards and backwards, or between them.
        steps: When each step began and ended. A step's work may end in the next step: they overlap.
    """

    spans: list[Span] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
