"""`activations="auto"`: units are measured in the first steps, and policies chosen between steps (see ways.py).

Nobody knows in advance whether what a model saves will fit. So units are measured while they recompute, which takes the
least memory that is possible without copies: what a call saves is there when it ends, and its second forward is timed.
A call with larger inputs than any that was measured recomputes as well, and is measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from sp_lightning.pipeline.activations.footprint import Footprint, Link, Measured
from sp_lightning.pipeline.activations.offload import UNITS_THAT_STAY
from sp_lightning.pipeline.activations.recompute import SecondForwards
from sp_lightning.pipeline.activations.ways import WITHOUT_RECOMPUTING, Policy, Way, choose_ways, peak
from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.sizes import readable_bytes
from sp_lightning.pipeline.weights.units import Member

_HOST_ROOM = 2  # offload only if the host has this many times as much memory free as would be offloaded


class AutoPolicy:
    """Measures units and chooses a policy for each.

    Attributes:
        turn_bytes: The most bytes that were taken at the turn, after the last unit's forward: by a loss, say.
        outside_bytes: The most bytes that were saved outside of units elsewhere: by a norm between them, say.
        reserve_bytes: Bytes that must stay free besides, for gradients of activations; 0 where the device tells what
            operations take, because units and the turn include it then.
        in_use: The policy that each member had in the last step, if it was called.
    """

    def __init__(
        self, second_forwards: SecondForwards, budget: Callable[[], int], *, pin: bool, warns: bool = True
    ) -> None:
        self._second_forwards = second_forwards
        self._meter = second_forwards.saved.meter
        self._backend = second_forwards.backend
        self._budget = budget
        self._pin = pin
        self._warns = warns
        self._link: Link | None = None
        self._has_had_backward = False  # in this step
        self._units: dict[str, Measured] = {}  # in the order of the forward
        self._chosen: dict[str, Policy] = {}
        self._choice_is_outdated = False
        self._measuring: set[str] = set()  # in this step
        self._is_first_step = True  # of those that are measured
        self._saved_at_turn: int | None = None  # in this step
        self._operations = self._operations_at_turn = 0  # bytes that they took besides what is saved
        self._has_turned = False  # in this pass
        self.in_use: dict[str, Policy] = {}
        self.turn_bytes = 0
        self.outside_bytes = 0
        self.reserve_bytes = 0

    # --------------------------------------------------------------------------------------------- what planners read

    def ways(self) -> dict[str, list[Way]]:
        """Return the ways that are open to each measured member, in the order of the forward."""
        return self._ways(self._operations)

    def prescribe(self, policies: Mapping[str, Policy] | None) -> None:
        """Use these policies for all members that were measured, until something is measured again.

        Args:
            policies: The policy of each member; None to choose here, for the room that there is now.
        """
        self._choice_is_outdated = policies is None
        if policies is not None:
            self._chosen = {name: policies.get(name, "keep") for name in self._units}

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs of each member's largest measured call, in total."""
        return sum(unit.size for unit in self._units.values())

    @property
    def counts_operations(self) -> bool:
        """Whether the memory that operations take is included in what units and the turn take."""
        return self._meter.knows_operations

    def update_peaks(self) -> None:
        """Update `turn_bytes`, `outside_bytes` and `reserve_bytes` from what the last step has shown."""
        working = max((unit.most.working for unit in self._units.values() if unit.most is not None), default=0)
        self.reserve_bytes = 0 if self.counts_operations else working
        if self.in_use:
            used = []
            for name, ways in self._ways(operations=0).items():
                if name in self.in_use:
                    of = {way.policy: way for way in ways}
                    used.append(of.get(self.in_use[name], of["keep"]))
            saved = self._saved_at_turn or 0
            self.turn_bytes = max(self.turn_bytes, saved + self._operations_at_turn)
            self.outside_bytes = max(self.outside_bytes, self._meter.step_peak - peak(used, saved))

    # ------------------------------------------------------------------------------------------------------- in a step

    def conclude_step(self) -> None:
        """Choose anew if the last step has measured anything, or if the room has changed."""
        self._take_times()
        if self._measuring and self._has_had_backward:
            for name in self._measuring & self._units.keys():
                self._units[name].steps += 1
        elif self._measuring:  # no backward came, so half of the step was not seen
            self._units = {name: unit for name, unit in self._units.items() if unit.most is not None}
        if (self._measuring or self._choice_is_outdated) and self._units:
            self._choose()
        self._choice_is_outdated = self._second_forwards.timed = False
        self._measuring.clear()

    def begin_step(self) -> None:
        """Begin a step, for which the one before was concluded."""
        for unit in self._units.values():
            unit.this_pass = None
        self._saved_at_turn = None
        self._has_turned = self._has_had_backward = False
        self.in_use = {}

    def policy(self, member: Member, size: int, inputs: Iterable[Tensor]) -> Policy:
        """Return the policy for a call, and note whether the call is measured.

        Args:
            member: The member that is called.
            size: The bytes of its inputs.
            inputs: The tensors among them.
        """
        unit = self._units.get(member.name)
        if unit is None or size > unit.size or not unit.is_measured:
            if not self._measuring:
                self._is_first_step = not self._units
                self._second_forwards.timed = True
                # the first step also allocates memory that stays
                self._meter.measure(inputs, operations=not self._is_first_step)
            self._measuring.add(member.name)
        if member.name in self._measuring:
            policy: Policy = "recompute"
        else:
            policy, most = self._chosen[member.name], self._units[member.name].most
            if not (most and most.repeatable and self._second_forwards.may_run(member.name)):
                policy = WITHOUT_RECOMPUTING[policy]
        self.in_use[member.name] = policy
        return policy

    def note(self, member: Member, size: int, call: Footprint) -> None:
        """Record the footprint of a call that recomputes."""
        if member.name in self._measuring:
            assert member.unit is not None
            weights = sum(weight.compute_bytes for weight in member.unit.weights)
            unit = self._units.setdefault(member.name, Measured(member.unit_name, weights))
            seen = 0 if self._is_first_step else size  # inputs as large as the first step's are measured once more
            unit.add(seen, call)

    def end_call(self) -> None:
        """Note that a unit's forward has run."""
        self._operations = max(self._operations, self._meter.end_stretch())

    def begin_backward(self) -> None:
        """Note how much was saved after the last unit; as backward only begins, all of it is still held."""
        if self._saved_at_turn is None:
            self._saved_at_turn = self._meter.added

    def reach(self) -> None:
        """Note that backward has reached a unit: the first time, the stretch of the turn ends."""
        if self._measuring:
            taken = self._meter.end_stretch()
            if self._has_turned:
                self._operations = max(self._operations, taken)
            else:
                self._operations_at_turn = max(self._operations_at_turn, taken)
            self._has_turned = True

    def end_backward(self) -> None:
        """End the last stretch together with backward: between steps users reset memory statistics, too."""
        self._has_had_backward = True
        for name in self._measuring & self._units.keys():
            self._units[name].end_pass()
        if self._has_turned:
            self.end_call()
        self._has_turned = False

    # ------------------------------------------------------------------------------------------------------- the choice

    def _choose(self) -> None:
        self.update_peaks()
        ways = self.ways()
        limit = self._budget()
        apart = self.outside_bytes + self.reserve_bytes
        chosen = choose_ways([*ways.values()], limit - apart, self.turn_bytes)
        self._chosen = {name: way.policy for name, way in zip(ways, chosen, strict=True)}
        needed = peak(chosen, self.turn_bytes) + apart
        is_measured = all(unit.is_measured for unit in self._units.values())
        if needed > limit and is_measured and self._warns:
            self._warns = False
            warnings.warn(
                f"`activations='auto'`: activations take at least {readable_bytes(needed)} on the device, and there is "
                f"room for {readable_bytes(max(0, limit))}. Use smaller batches, or a larger `memory_budget`.",
                stacklevel=2,
            )

    def _ways(self, operations: int) -> dict[str, list[Way]]:
        self._take_times()
        link = self._link_for_offloading()
        staying = list(dict.fromkeys(measured.unit for measured in self._units.values()))[-UNITS_THAT_STAY:]
        first = next(iter(self._units), None)  # is given the batch, which whoever runs the step holds
        return {
            name: measured.ways(
                None if measured.unit in staying else link,
                may_recompute=self._second_forwards.may_run(name),
                inputs_stay=name == first,
                operations=operations,
            )
            for name, measured in self._units.items()
            if measured.most is not None
        }

    def _take_times(self) -> None:
        """Take the times of the last step's second forwards, if it had a backward."""
        seconds: dict[str, float] = {}
        for name, begin, end in self._second_forwards.times:
            seconds[name] = seconds.get(name, 0.0) + self._backend.seconds(begin, end)
        self._second_forwards.times.clear()
        for name in seconds.keys() & self._units.keys() if self._has_had_backward else ():
            before = self._units[name].seconds
            self._units[name].seconds = seconds[name] if before is None else min(before, seconds[name])

    def _link_for_offloading(self) -> Link | None:
        """Return the speed of copies; None if there is nothing to offload, or no room for it on the host."""
        large = sum(unit.most.large for unit in self._units.values() if unit.most is not None)
        room = available_host_memory()
        if not large or (room is not None and room < _HOST_ROOM * large):
            return None
        if self._link is None:
            self._link = Link.measured(self._backend, self._pin)
        return self._link
