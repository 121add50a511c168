"""How units travel with a given choice: which of them stream, and which are sent with one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sp_lightning.pipeline.window.places import travel_together
from sp_lightning.planning.cost import Choice, UnitWork, Workload
from sp_lightning.planning.memory import alone_in


@dataclass(frozen=True)
class Window:
    """The units as they travel: neighbors that do so together are one."""

    in_order: list[UnitWork]  # all, in the order of the forward
    streams: list[bool]  # whether each of these shares the arena
    streamed: list[UnitWork]  # those that do
    kept: list[UnitWork]


def window_of(workload: Workload, choice: Choice) -> Window:
    """Return the units of a choice as they travel."""
    units = workload.units
    alone = alone_in(workload, choice)
    parts = travel_together(range(len(units)), choice.k_prime, alone)
    in_order = [_joined([units[number] for number in numbers]) for numbers in parts]
    streams = [numbers[0] not in alone for numbers in parts]
    streamed = [unit for unit, shares in zip(in_order, streams, strict=True) if shares]
    return Window(in_order, streams, streamed, [units[number] for number in choice.kept])


def _joined(units: Sequence[UnitWork]) -> UnitWork:
    """Return the work of units that are sent with one copy."""
    if len(units) == 1:
        return units[0]
    visits = all(unit.visit_up for unit in units)
    return UnitWork(
        units[0].name,
        weight_bytes=sum(unit.weight_bytes for unit in units),
        gradient_bytes=sum(unit.gradient_bytes for unit in units),
        step_bytes=sum(unit.step_bytes for unit in units),
        forward_seconds=sum(unit.forward_seconds for unit in units),
        backward_seconds=sum(unit.backward_seconds for unit in units),
        bytes_after_step=sum(unit.bytes_after_step for unit in units),
        # they visit together or not at all
        visit_up=sum(unit.visit_up for unit in units) if visits else 0,
        visit_down=sum(unit.visit_down for unit in units) if visits else 0,
    )


class Course:
    """Units as they compute one after another: each when it is there, and loaded when a place is free for it."""

    def __init__(self, slots: int, begin: float = 0.0, sent: float = 0.0) -> None:
        self.computed = begin
        self._sent = sent  # when the lane to the device will have nothing more to do
        self._slots = slots
        self._freed: list[float] = []  # when each unit that streams had computed

    def add(self, seconds: float, load: float, streams: bool, ready: float = 0.0) -> None:
        """Have a unit compute for so many seconds, once it is ready, and a load has brought it that takes so long.

        A load that waits for the host holds up no other one.
        """
        arrived = ready
        if load:
            begin = self._sent
            if streams and len(self._freed) >= self._slots:
                begin = max(begin, self._freed[-self._slots])
            self._sent = begin + load
            arrived = max(self._sent, ready + load)
        self.computed = max(self.computed, arrived) + seconds
        if streams:
            self._freed.append(self.computed)
