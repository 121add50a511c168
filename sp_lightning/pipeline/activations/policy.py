"""The one place that decides, for each call of a unit, what happens to the tensors that autograd saves.

They are kept, or dropped and recomputed (recompute.py), or offloaded to the host (offload.py). The numbers are the same
with any choice.

[Note: auto]
Under `"auto"` a planner chooses one of these for each unit, between steps. It cannot be known in advance whether a
model's activations will fit. So units recompute at first, which takes the least memory that is possible without copies.
The first step warms up, and allocates memory that stays. The second step measures units: all that a call saves is still
there when it ends. A call with larger inputs than any that was measured recomputes as well, and is measured.

[Note: the turn]
Backward begins with the call that was left last, and needs all that it has saved. So these tensors are dropped, or sent
to the host, only when something else comes first: another call, or backward through one. They are dropped at once where
half as much or more was saved at the last turn (by a loss over large logits), and under `"auto"`, which has planned the
turn.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from sp_lightning.pipeline.activations.offload import Bundle, Footprint, Offloader, Stretch
from sp_lightning.pipeline.activations.recompute import SecondForwards, UnitCall
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.operations import Args, Kwargs, tensors_in
from sp_lightning.pipeline.options import ActivationPolicy, Policy
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import in_backward
from sp_lightning.pipeline.units.unit import Member


class AutoPolicy:
    """Measures the memory of units' calls, and follows the policies that a planner has chosen for them."""

    def __init__(self, second_forwards: SecondForwards, policies: Mapping[str, Policy]) -> None:
        self.policies = policies  # by the names of units; others recompute
        # policies of the members that were called in this step
        self.in_use: dict[str, Policy] = {}
        # the most bytes that were taken at the turn, after the last unit's forward: by a loss, say
        self.turn_bytes = 0
        # the most bytes that were saved outside of units elsewhere: by a norm between them, say
        self.outside_bytes = 0
        self._second_forwards = second_forwards
        # whether calls that recompute are measured in this step, because one came that no measurement covers
        self._is_measuring = False
        # footprints of measured calls since a backward has ended
        self._this_pass: dict[str, Footprint] = {}
        # footprints in the pass in which calls took most, in the forward's order
        self._largest: dict[str, Footprint] = {}
        # bytes of the inputs of each member's largest measured call
        self._largest_inputs: dict[str, int] = {}
        self._had_backward = False  # whether a pass has ended
        self._is_warm = False  # whether a pass had ended before this step
        self._operation_bytes = 0  # bytes that operations take besides saved tensors
        self._call_input_bytes = 0  # bytes of the inputs of the call under way

    # --------------------------------------------------------------------------------------------- what planners read

    def footprints(self) -> dict[str, Footprint]:
        """Return the footprint of each measured member's calls, in the order of the forward."""
        return {
            name: calls._replace(working=calls.working + self._operation_bytes, repeatable=self._is_repeatable(name))
            for name, calls in self._largest.items()
        }

    def _is_repeatable(self, name: str) -> bool:
        return self._largest[name].repeatable and name not in self._second_forwards.unrepeatable

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs of each member's largest measured call, in total."""
        return sum(self._largest_inputs.values())

    # ------------------------------------------------------------------------------------------------------- in a step

    def begin_step(self) -> None:
        """Begin a step."""
        self._is_warm = self._had_backward
        self._is_measuring = False
        self._this_pass.clear()
        self.in_use = {}

    def begin_call(self, member: Member, inputs: Sequence[Tensor]) -> Policy:
        """Begin a call with these inputs, measure it if no measurement covers it, and return its policy."""
        # sparse tensors have no `nbytes`
        self._call_input_bytes = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        policy = self._policy_of(member)
        if policy is None and self._is_warm and not self._is_measuring:
            self._is_measuring = True
            self._second_forwards.saved.meter.measure(inputs)
        self.in_use[member.name] = policy or "recompute"
        return self.in_use[member.name]

    def _policy_of(self, member: Member) -> Policy | None:
        """Return the policy for the call under way; None if no measurement covers calls with such inputs."""
        name = member.name
        is_known = name in self._largest and name not in self._this_pass
        if not is_known or self._call_input_bytes > self._largest_inputs[name]:
            return None
        policy = self.policies.get(member.unit_name, "recompute")
        return "keep" if policy == "recompute" and not self._is_repeatable(name) else policy

    def end_call(self, call: UnitCall) -> None:
        """Note the memory of a call that may recompute, before any of its tensors is dropped."""
        if not self._is_measuring:
            return
        name = call.member.name
        footprint = call.footprint()
        earlier_calls = self._this_pass.get(name)
        self._this_pass[name] = footprint if earlier_calls is None else earlier_calls.combined_with(footprint)
        self._largest_inputs[name] = max(self._largest_inputs.get(name, 0), self._call_input_bytes)

    def end_stretch(self, stretch: Stretch, is_turn: bool) -> None:
        """Note the memory that a unit's forward or backward has taken, or the turn from one to the other."""
        if not is_turn:
            self._operation_bytes = max(self._operation_bytes, stretch.operations)
            return
        self.turn_bytes = max(self.turn_bytes, stretch.saved + stretch.operations)
        if self.in_use.keys() == self._this_pass.keys():  # all calls were measured
            outside = stretch.before
            for calls in self._this_pass.values():
                outside -= calls.held if calls.repeatable else calls.held + calls.saved
            self.outside_bytes = max(self.outside_bytes, outside)

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        self._had_backward = True
        for name, calls in self._this_pass.items():
            largest = self._largest.get(name)
            if largest is None or calls.held + calls.saved > largest.held + largest.saved:
                self._largest[name] = calls
        self._this_pass.clear()


class Phase(enum.Enum):
    """Where a pass is; only `Activations` changes it."""

    FORWARD = enum.auto()
    """No backward has reached a unit's call yet."""
    BACKWARD = enum.auto()
    """Backward has turned: it has reached the call that it begins with."""


class LastCall:
    """The tensors of the call that was left last, until it is known whether backward begins with it.

    See [Note: the turn]. No call waits at first, and never more than one:

        a call is left -----> it waits -----> backward begins with it: its tensors stay
                                       -----> something else comes: its tensors are dropped, or sent to the host
    """

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._bundle: Bundle | None = None  # of the call that waits; None if none does
        self._to_drop: ref[UnitCall] | None = None  # that call, if its tensors are to be dropped

    def begin_to_wait(self, bundle: Bundle) -> None:
        """Have a call that was left wait."""
        assert self._bundle is None, "something has come after the call before"
        self._bundle = bundle

    def drop_later(self, call: UnitCall) -> None:
        """Drop the waiting call's tensors if backward does not begin with it."""
        self._to_drop = ref(call)

    def reach(self, bundle: Bundle) -> None:
        """Keep what the waiting call has saved if backward has reached that; otherwise let go of it."""
        if self._bundle is bundle:
            self._bundle = self._to_drop = None
        else:
            self.let_go()

    def let_go(self) -> None:
        """Drop or send the tensors of the waiting call, if there is one: something else comes."""
        bundle = self._bundle
        call = None if self._to_drop is None else self._to_drop()
        self._bundle = self._to_drop = None
        if call is not None:
            call.drop()
        if bundle is not None:
            self._offloader.send(bundle)


class Activations:
    """Decides, for each call of a unit, what happens to the tensors that autograd saves: their route."""

    are_kept: bool  # whether all are, so that calls need not be reported

    def __init__(
        self,
        policy: ActivationPolicy,
        saved: SavedTensors,
        offloader: Offloader,
        backend: Backend,
        stats: Stats,
    ) -> None:
        # the object that follows a planner's policies; None if the user has chosen one, or if memory has no limit
        self.auto: AutoPolicy | None = None
        self.second_forwards = SecondForwards(saved, backend, stats)
        self._policy = policy
        self.saved = saved
        self._offloader = offloader
        # the route of the outermost call under way; None between managed calls
        self._route: Policy | None = None
        self._phase = Phase.FORWARD
        self._last_call = LastCall(offloader)
        self._last_bundle: Bundle | None = None  # of the call of this step that was left last
        # bytes that were saved after the last call, at the turn before; unknown at first
        self._saved_at_turn = math.inf

    def measure_anew(self, has_limit: bool) -> None:
        """Under `"auto"`, measure calls again, as they may take more than before. The planned policies stay."""
        if self._policy == "auto" and has_limit:
            policies = {} if self.auto is None else self.auto.policies
            self.auto = AutoPolicy(self.second_forwards, policies)
        self.are_kept = self.auto is None and self._policy in ("keep", "auto")

    def begin_step(self, counts: bool) -> None:
        """Begin a step; no graph waits for its backward. With `counts`, the meter counts the memory that is held."""
        self._phase = Phase.FORWARD
        self._last_bundle = None
        if self.auto is not None:
            self.auto.begin_step()
        self.saved.meter.begin_step(counts)

    # ------------------------------------------------------------------------------------- the outermost call of a unit

    def manages(self, member: Member) -> bool:
        """Tell whether a call is to be surrounded by `begin` and `end`: it builds a graph, and its units' are ours.

        Within a unit's call, the outermost call decides. Within a user's checkpoint, the checkpoint's hooks are on top.
        """
        return (
            (self.auto is not None or self._policy == "recompute")
            and member.is_streamed
            and self._route is None
            and torch.is_grad_enabled()
            and not in_backward()
            and self.saved.are_alone()
            # a tensor that `functional_call` lends to a module is gone in backward
            and all(entry.is_in_place for entry in member.entries)
        )

    def begin(self, member: Member, args: Args, kwargs: Kwargs) -> None:
        """Begin a call of a unit, and choose its route."""
        assert self._route is None, "the outermost call decides"
        if self.auto is not None:
            self._route = self.auto.begin_call(member, tensors_in((args, kwargs)))
        else:  # the user wants units to recompute
            self._route = "keep" if member.name in self.second_forwards.unrepeatable else "recompute"
        if self._route == "recompute":
            self._last_call.let_go()  # or its tensors would count for this call
            self.saved.recording = UnitCall(self.second_forwards, member, args, kwargs)

    def conclude(self, output: Any) -> None:
        """Decide about the tensors that the current call, which is over, has saved."""
        call = self.saved.recording
        if not isinstance(call, UnitCall):
            return
        call.conclude(output, warns=self.auto is None)
        if self.auto is not None:
            self.auto.end_call(call)
        elif 2 * self._saved_at_turn <= call.footprint().saved:
            self._last_call.drop_later(call)
            return
        call.drop()

    def end(self) -> None:
        """End the current call, also after an exception."""
        self._route = None
        self.saved.recording = None
        self._end_stretch()

    # ------------------------------------------------------------------------------- any call, and backward through one

    def enter(self, member: Member) -> None:
        """Note that a call has begun, with its weights on the device: the tensors that it saves belong to its unit."""
        bundle = None
        if not in_backward():  # backward uses the tensors of a recomputation at once
            self._last_call.let_go()
            if torch.is_grad_enabled():
                bundle = Bundle(member.unit_name, leaves=(self._route or self._policy) == "offload")
        self._offloader.open.append(bundle)

    def leave(self) -> None:
        """Note that the call that was entered last is left."""
        bundle = self._offloader.open.pop()
        if bundle is not None:
            bundle.before = self._last_bundle
            self._last_bundle = bundle
            self._offloader.release_sent()
            self._last_call.let_go()  # a call within this one
            self._last_call.begin_to_wait(bundle)

    @property
    def open_bundle(self) -> Bundle | None:
        """The bundle of the call that was entered last and is not left yet; None if its tensors are not recorded."""
        return self._offloader.open[-1] if self._offloader.open else None

    def reach(self, bundle: Bundle | None) -> None:
        """Note that backward is about to run the nodes of a call."""
        self._end_stretch(is_turn=self._phase is Phase.FORWARD)
        self._phase = Phase.BACKWARD
        if bundle is None:
            return
        self._last_call.reach(bundle)
        self._offloader.reach(bundle)

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        if self._phase is Phase.BACKWARD:
            self._end_stretch()  # between steps users reset memory statistics, too
        self._phase = Phase.FORWARD
        if self.auto is not None:
            self.auto.end_backward()
        self._offloader.release_sent()

    def _end_stretch(self, is_turn: bool = False) -> None:
        stretch = self.saved.meter.end_stretch()
        if self.auto is not None:
            self.auto.end_stretch(stretch, is_turn)
        elif is_turn:
            self._saved_at_turn = stretch.saved
