"""`activations="auto"`: measured in the first steps, chosen between steps (see choice.py for the choice itself).

Nobody knows beforehand whether what a model saves will fit. So units are measured while they recompute, which takes
the least memory that can be had without copies: what a call saves is there when it ends, and its second forward is
timed. A call with larger inputs than those that were measured recomputes, too, and is measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from sp_lightning.pipeline.activations.choice import Policy, Way, choose, peak
from sp_lightning.pipeline.activations.link import Link
from sp_lightning.pipeline.activations.measured import Measured
from sp_lightning.pipeline.activations.meter import Meter
from sp_lightning.pipeline.activations.offload import STAYING
from sp_lightning.pipeline.activations.recompute import Footprint
from sp_lightning.pipeline.activations.workspace import Workspace
from sp_lightning.pipeline.sizes import readable_bytes
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.weights.host import available_host_memory
from sp_lightning.pipeline.weights.units import Member

_ROOM = 2  # how many times what would be offloaded must be free on the host


class AutoPolicy:
    """Measures units and chooses for each.

    Args:
        backend: Whose memory and whose copies.
        meter: Counts what is held.
        budget: Tells how many bytes activations may take now.
        never_again: Members that must not recompute, as backward has shown.
        tells: Whether to say so if nothing fits. A planner may yet make room, and says so itself.

    Attributes:
        turn: The most bytes that were taken after the last unit: by a loss.
        outside: The most bytes that were saved outside of units besides: by a norm between them.
        reserve: Bytes that must stay free besides, for gradients of activations; 0 where the device tells what
            operations take, and each unit and the turn have their share of that.
    """

    def __init__(
        self, backend: Backend, meter: Meter, budget: Callable[[], int], never_again: Set[str], tells: bool = True
    ) -> None:
        self._backend = backend
        self._meter = meter
        self._budget = budget
        self._never_again = never_again
        self._link: Link | None = None
        self._step = self._pass = 0
        self._units: dict[str, Measured] = {}  # in the order of the forward
        self._chosen: dict[str, Policy] = {}
        self._in_use: dict[str, Policy] = {}  # in this step
        self._measuring: set[str] = set()  # in this step
        self._turn: int | None = None  # saved after the last unit in this step
        self._at_turn = 0  # what operations were seen to take there besides
        self._is_first = True  # step that is measured
        self._reached: str | None = None  # the member that backward has come to last
        self._second_forwards: list[tuple[Measured, int, Any, Any]] = []
        self._tells = tells
        self._choice_is_outdated = False
        self._workspace = Workspace(backend, meter)
        self.turn = 0
        self.outside = 0
        self.reserve = 0

    def begin_step(self) -> None:
        """Choose anew if the last step has measured anything, or if there is another amount of room."""
        self._workspace.end()
        if self._measuring and not self._pass:  # no backward came: half of it was not seen
            self.measure_again()
        if (self._measuring or self._choice_is_outdated) and self._units:
            self._choose()
        self._choice_is_outdated = False
        self._step += 1
        self._pass = 0
        self._turn = self._reached = None
        self._in_use = {}
        self._measuring.clear()

    def prescribe(self, policies: Mapping[str, Policy] | None) -> None:
        """Somebody has chosen for all members that were measured; what is measured later is chosen here again.

        Args:
            policies: What happens to the activations of each member; None to choose here, for what there is room now.
        """
        self._choice_is_outdated = policies is None
        if policies is not None:
            self._chosen = {name: policies.get(name, "keep") for name in self._units}

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs of the largest calls that were measured."""
        return sum(unit.size for unit in self._units.values())

    @property
    def counts_operations(self) -> bool:
        """Whether what operations take is part of what units and the turn are said to take."""
        return self._workspace.is_known

    @property
    def in_use(self) -> Mapping[str, Policy]:
        """What was done with the activations of each member that was called in the last step."""
        return self._in_use

    def ways(self) -> dict[str, list[Way]]:
        """What can happen to the activations of each member that was measured, in the order of the forward."""
        self._take_times()
        link = self._link_for_offloading()
        staying = list(dict.fromkeys(measured.unit for measured in self._units.values()))[-STAYING:]
        return {
            name: measured.ways(None if measured.unit in staying else link, name not in self._never_again)
            for name, measured in self._units.items()
        }

    def policy(self, member: Member, size: int) -> Policy:
        """What happens to the activations of a call with inputs of this many bytes."""
        unit = self._units.get(member.name)
        if unit is None or size > unit.size or not unit.is_measured:
            if not self._measuring:
                self._is_first = not self._units
                if not self._is_first:  # in the first step, what stays is made, too
                    self._workspace.begin()
            self._measuring.add(member.name)
        policy = "recompute" if member.name in self._measuring else self._chosen[member.name]
        self._in_use[member.name] = policy
        return policy

    def note(self, member: Member, size: int, call: Footprint) -> None:
        """A forward that can be recomputed has run."""
        if member.name in self._measuring:
            assert member.unit is not None
            weights = sum(weight.compute_bytes for weight in member.unit.weights)
            unit = self._units.setdefault(member.name, Measured(member.unit_name, weights))
            seen = 0 if self._is_first else size  # inputs as large as the first step's are looked at once more
            unit.add((self._step, self._pass), seen, call)

    def measure_again(self) -> None:
        """The last step begins anew, or is not finished, and what it has measured counts no more."""
        for unit in self._units.values():
            unit.forget(self._step)
        self._units = {name: unit for name, unit in self._units.items() if unit.passes}
        self._second_forwards.clear()
        self._choice_is_outdated = True

    def end_call(self, member: Member) -> None:
        """A unit's forward has run."""
        self._end_stretch(member.name)

    def begin_backward(self) -> None:
        """Backward has begun; what it has not come to is still held."""
        if self._turn is None:
            self._turn = self._meter.added

    def reach(self, member: Member) -> None:
        """Backward has come to a unit."""
        if self._workspace.is_measured:
            self._end_stretch(self._reached)
            self._reached = member.name

    def end_backward(self) -> None:
        """Backward has ended; now, because users count the device's memory anew between steps, too."""
        self._pass += 1
        if self._reached is not None:
            self._end_stretch(self._reached)
            self._reached = None

    def mark(self) -> Any:
        """This moment on the device."""
        return self._backend.mark()

    def note_second_forward(self, member: Member, begin: Any, end: Any) -> None:
        """It has run again, between these two moments."""
        if member.name in self._measuring:
            self._second_forwards.append((self._units[member.name], self._step, begin, end))

    def look(self) -> None:
        """Work out what the last step has shown of activations that are not a unit's."""
        working = max((unit.footprint.working for unit in self._units.values()), default=0)
        self.reserve = 0 if self._workspace.is_known else working
        if self._in_use:
            used = [self._used(name, ways) for name, ways in self.ways().items() if name in self._in_use]
            saved = self._turn or 0
            self.turn = max(self.turn, saved + self._at_turn)
            self.outside = max(self.outside, self._meter.step_peak - peak(used, saved))

    def _used(self, name: str, ways: Sequence[Way]) -> Way:
        """The way of a member that was in use, with nothing but what autograd saves."""
        of = {way.policy: way for way in ways}
        way = of.get(self._in_use[name], of["keep"])
        return replace(way, working=way.working - self._units[name].workspace)

    def _end_stretch(self, member: str | None) -> None:
        """What a member's forward or backward took shows now; or, if it is none, what passed between the two."""
        taken = self._workspace.end_stretch()
        if member in self._units:
            self._units[member].workspace = max(self._units[member].workspace, taken)
        else:
            self._at_turn = max(self._at_turn, taken)

    def _choose(self) -> None:
        self.look()
        ways = self.ways()
        limit = self._budget()
        apart = self.outside + self.reserve
        chosen = choose([*ways.values()], limit - apart, self.turn)
        self._chosen = {name: way.policy for name, way in zip(ways, chosen, strict=True)}
        needed = peak(chosen, self.turn) + apart
        is_measured = all(unit.is_measured for unit in self._units.values())
        if needed > limit and is_measured and self._tells:
            self._tells = False
            warnings.warn(
                f"`activations='auto'`: activations take {readable_bytes(needed)} on the device at least, and there is "
                f"room for {readable_bytes(max(0, limit))}. Use smaller batches, or a larger `memory_budget`.",
                stacklevel=2,
            )

    def _take_times(self) -> None:
        for unit, step, begin, end in self._second_forwards:
            unit.seconds[step] = unit.seconds.get(step, 0.0) + self._backend.seconds(begin, end)
        self._second_forwards.clear()

    def _link_for_offloading(self) -> Link | None:
        """How fast copies are; None if the host has no room for activations."""
        large = sum(unit.footprint.large for unit in self._units.values())
        room = available_host_memory()
        if not large or (room is not None and room < _ROOM * large):
            return None
        if self._link is None:
            self._link = Link.measured(self._backend)
        return self._link
