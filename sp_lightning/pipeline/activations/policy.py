"""The one place that decides, for each call of a unit, what happens to the tensors that autograd saves.

They are kept, or dropped and recomputed (recompute.py), or offloaded to the host (offload.py), or recomputed from
inputs that were offloaded. The numbers are the same whatever is chosen.

[Note: auto]
`"auto"` chooses one of these for each unit. Nobody knows in advance whether what a model saves will fit. So units
recompute at first, which takes the least memory that is possible without copies. The first step warms things up, and
makes memory that stays. In the second one, units are measured: what a call saves is there when it ends, and its second
forward is timed. A call with larger inputs than any that was measured recomputes as well, and is measured. Policies
are chosen between steps (see ways.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_lightning.pipeline.activations.offload import UNITS_THAT_STAY, Offloader
from sp_lightning.pipeline.activations.recompute import SecondForwards, UnitCall
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.activations.ways import (
    OFFLOADING,
    RECOMPUTING,
    WITHOUT_RECOMPUTING,
    Footprint,
    Link,
    Policy,
    Way,
    choose_ways,
    peak,
)
from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.options import ActivationPolicy
from sp_lightning.pipeline.stats import Stats, readable_bytes
from sp_lightning.pipeline.torch_private import in_backward
from sp_lightning.pipeline.weights.operands import tensors_in
from sp_lightning.pipeline.weights.units import Member

_HOST_ROOM = 2  # offload only if the host has this many times as much memory free as would be offloaded
_BACKWARD_PER_FORWARD = 2.0  # how many times as long as its forward a unit's backward takes


@dataclass
class _Measured:
    """Measurements of one member while it recomputes."""

    unit: str  # the name of the unit that it belongs to
    weights: int  # bytes of weights that travel for that unit
    size: int = 0  # bytes of the inputs of its largest call
    most: Footprint | None = None  # what its calls took in the pass in which they took most
    this_pass: Footprint | None = None  # what they have taken since a backward has ended
    seconds: float = 0.0  # how long its second forwards took in the step that was measured last


class AutoPolicy:
    """Measures units and chooses a policy for each."""

    def __init__(self, second_forwards: SecondForwards, *, warns: bool = True) -> None:
        self._second_forwards = second_forwards
        self._meter = second_forwards.saved.meter
        self._backend = second_forwards.backend
        self._warns = warns
        self._link: Link | None = None
        self._units: dict[str, _Measured] = {}  # in the order of the forward
        self._chosen: dict[str, Policy] = {}
        self._measuring: set[str] = set()  # in this step
        self._passes = self._passes_before = 0  # backward passes that have ended, in all and before this step
        self._operations = 0  # bytes that operations take besides what is saved
        self.must_choose = False  # before the next step
        self.in_use: dict[str, Policy] = {}  # the policy that each member has in this step, if it was called
        self._has_turned = False  # in this pass
        self.turn_bytes = 0  # the most that was taken at the turn, after the last unit's forward: by a loss, say
        self.outside_bytes = 0  # the most that was saved outside of units elsewhere: by a norm between them, say

    # --------------------------------------------------------------------------------------------- what planners read

    def ways(self) -> dict[str, list[Way]]:
        """Return the ways that are open to each measured member, in the order of the forward."""
        seconds: dict[str, float] = {}  # of the last step's second forwards, if it had a backward
        for name, begin, end in self._second_forwards.times if self._passes > self._passes_before else ():
            seconds[name] = seconds.get(name, 0.0) + self._backend.seconds(begin, end)
        self._second_forwards.times.clear()
        for name in seconds.keys() & self._units.keys():
            self._units[name].seconds = seconds[name]
        link = self._link_for_offloading()
        staying = list(dict.fromkeys(unit.unit for unit in self._units.values()))[-UNITS_THAT_STAY:]
        ways = {}
        for number, (name, unit) in enumerate(self._units.items()):
            if unit.most is not None:
                took = unit.most._replace(
                    working=unit.most.working + self._operations,
                    repeatable=unit.most.repeatable and name not in self._second_forwards.kept,
                )
                copies = None if unit.unit in staying else link
                backward = _BACKWARD_PER_FORWARD * unit.seconds
                ways[name] = took.ways(copies, unit.weights, unit.seconds, backward, inputs_stay=number == 0)
        return ways

    def prescribe(self, policies: Mapping[str, Policy]) -> None:
        """Use these policies for all members that were measured, until something is measured again."""
        self.must_choose = False
        self._chosen = {name: policies.get(name, "keep") for name in self._units}

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs of each member's largest measured call, in total."""
        return sum(unit.size for unit in self._units.values())

    # ------------------------------------------------------------------------------------------------------- in a step

    def begin_step(self) -> None:
        """Begin a step."""
        self._passes_before, self._has_turned = self._passes, False
        self._measuring.clear()
        self._second_forwards.timed = False
        self._second_forwards.times.clear()
        for unit in self._units.values():
            unit.this_pass = None
        self.in_use = {}

    def policy(self, member: Member, size: int, inputs: Iterable[Tensor]) -> Policy:
        """Return the policy for a call with these inputs, of so many bytes; note whether the call is measured."""
        name, unit = member.name, self._units.get(member.name)
        policy: Policy = "recompute"
        if unit is None or unit.most is None or size > unit.size or name in self._measuring:
            if self._passes_before:
                if not self._measuring:
                    self._second_forwards.timed = True
                    self._meter.measure(inputs)
                self._measuring.add(name)
        else:
            policy = self._chosen.get(name, "recompute")
            if not unit.most.repeatable or name in self._second_forwards.kept:
                policy = WITHOUT_RECOMPUTING.get(policy, policy)
        self.in_use[name] = policy
        return policy

    def note(self, member: Member, size: int, call: Footprint) -> None:
        """Record the footprint of a call that recomputes."""
        if member.name in self._measuring:
            assert member.unit is not None
            weights = sum(weight.compute_bytes for weight in member.unit.weights)
            unit = self._units.setdefault(member.name, _Measured(member.unit_name, weights))
            unit.this_pass = call if unit.this_pass is None else unit.this_pass.combined_with(call)
            unit.size = max(unit.size, size)
            self.must_choose = True

    def end_call(self) -> None:
        """Note that a unit's forward or backward has run."""
        if self._meter.counts:
            self._operations = max(self._operations, self._meter.end_stretch().operations)

    def reach(self) -> None:
        """Note that backward has reached a unit: the first time, the stretch of the turn ends."""
        if self._has_turned or not self._meter.counts:
            self.end_call()
            return
        self._has_turned = True
        turn = self._meter.end_stretch()
        self.turn_bytes = max(self.turn_bytes, turn.saved + turn.operations)
        if self.in_use.keys() == self._measuring:
            calls = [unit.this_pass for unit in self._units.values() if unit.this_pass is not None]
            held = sum(each.held + each.saved * (not each.repeatable) for each in calls)
            self.outside_bytes = max(self.outside_bytes, turn.before - held)

    def end_backward(self) -> None:
        """End the last stretch together with backward: between steps users reset memory statistics, too."""
        self._passes += 1
        for unit in self._units.values():
            if unit.this_pass is not None:
                of_passes = [unit.this_pass] if unit.most is None else [unit.most, unit.this_pass]
                unit.most, unit.this_pass = max(of_passes, key=lambda calls: calls.held + calls.saved), None
        if self._has_turned:
            self.end_call()
        self._has_turned = False

    # ------------------------------------------------------------------------------------------------------- the choice

    def choose(self, limit: int) -> None:
        """Choose a policy for each member that was measured, between steps, with room for so many bytes."""
        ways = self.ways()
        chosen = choose_ways([*ways.values()], limit - self.outside_bytes, self.turn_bytes)
        self.prescribe({name: way.policy for name, way in zip(ways, chosen, strict=True)})
        needed = peak(chosen, self.turn_bytes) + self.outside_bytes
        if needed > limit and self._warns:
            self._warns = False
            warnings.warn(
                f"`activations='auto'`: activations take at least {readable_bytes(needed)} on the device, and there is "
                f"room for {readable_bytes(max(0, limit))}. Use smaller batches, or a larger `memory_budget`.",
                stacklevel=2,
            )

    def _link_for_offloading(self) -> Link | None:
        """Return the speed of copies; None if there is nothing to offload, or no room for it on the host."""
        large = sum(unit.most.large for unit in self._units.values() if unit.most is not None)
        room = available_host_memory()
        if not large or (room is not None and room < _HOST_ROOM * large):
            return None
        if self._link is None:
            self._link = Link.measured(self._backend)
        return self._link


class Activations:
    """Decides, for each call of a unit, what happens to the tensors that autograd saves."""

    def __init__(
        self, policy: ActivationPolicy, saved: SavedTensors, offloader: Offloader, backend: Backend, stats: Stats
    ) -> None:
        self.chooses = policy == "auto"  # whether the choice is left to `auto`
        self.second_forwards = SecondForwards(saved, backend, stats)
        self.backward_passes = 0  # that have ended
        self.watched_peak: int | None = None  # the most memory in use as one ends; None while nobody watches
        self._policy: Policy = "keep" if policy == "auto" else policy
        self._saved = saved
        self._offloader = offloader
        self._policy_of_call: Policy | None = None  # of the outermost call of a unit that is under way
        self._recorded: UnitCall | None = None  # that call, if its forward may run again
        self.choose_by(None)

    def choose_by(self, auto: AutoPolicy | None) -> None:
        """Have policies chosen from now on, or not: the user has chosen, or there is no limit to choose by."""
        self.auto = auto
        self.are_kept = auto is None and self._policy == "keep"  # all, so that nobody has to tell of calls

    def begin_step(self) -> None:
        """Begin a step; no graph waits for its backward."""
        if self.auto is not None:
            self.auto.begin_step()
        self._offloader.begin_step()
        self._saved.meter.begin_step()

    def manages(self, member: Member) -> bool:
        """Tell whether a call is to be surrounded by `begin` and `end`: it builds a graph, and its units' are ours.

        Within a unit's call, the outermost call decides. Within a user's checkpoint, the checkpoint's hooks are on top.
        """
        return (
            (self.auto is not None or self._policy in RECOMPUTING)
            and member.is_streamed
            and self._policy_of_call is None
            and torch.is_grad_enabled()
            and not in_backward()
            and self._saved.are_alone()
            and all(entry.is_in_place for entry in member.entries)  # what `functional_call` lends is gone in backward
        )

    def begin(self, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of a unit under the policy that is chosen for it."""
        size, policy = 0, self._policy
        if self.auto is not None:
            inputs = tensors_in((args, kwargs))
            size = sum(t.numel() * t.element_size() for t in inputs)  # sparse ones have no `nbytes`
            policy = self.auto.policy(member, size, inputs)
        elif member.name in self.second_forwards.kept:
            policy = WITHOUT_RECOMPUTING.get(policy, policy)
        self._policy_of_call = policy
        if policy in RECOMPUTING:
            self._recorded = UnitCall(self.second_forwards, member, args, kwargs)
            self._recorded.input_bytes = size
            self._saved.recording = self._recorded

    def enter(self, member: Member) -> None:
        """Note that a call has begun, with its weights on the device: what it saves belongs to its unit."""
        self._offloader.enter(member, (self._policy_of_call or self._policy) in OFFLOADING)
        if self._recorded is not None:
            self._recorded.pack_inputs()

    def leave(self) -> None:
        """Note that the call that was entered last is left."""
        self._offloader.leave()

    def conclude(self, output: Any) -> None:
        """Decide about what the current call, which is over, has saved."""
        call, self._saved.recording = self._recorded, None
        if call is not None:
            call.conclude(output, warns=self.auto is None)
            if self.auto is not None and call.footprint is not None:
                self.auto.note(call.member, call.input_bytes, call.footprint)

    def end(self) -> None:
        """End the current call, also after an exception."""
        self._policy_of_call = self._recorded = self._saved.recording = None
        if self.auto is not None:
            self.auto.end_call()

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        self.backward_passes += 1
        if self.watched_peak is not None and (memory := self.second_forwards.backend.memory()) is not None:
            self.watched_peak = max(self.watched_peak, memory.peak)
        if self.auto is not None:
            self.auto.end_backward()
        if not self.are_kept:
            self._offloader.end_backward()
