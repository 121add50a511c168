"""The one place that decides, for each call of a unit, what happens to the tensors that autograd saves.

They are kept, or dropped and recomputed (recompute.py), or offloaded to the host (offload.py). The numbers are the same
whatever is chosen.

[Note: auto]
Under `"auto"` a planner chooses one of these for each unit, between steps. Nobody knows in advance whether what a model
saves will fit. So units recompute at first, which takes the least memory that is possible without copies. The first
step warms things up, and makes memory that stays. In the second one, units are measured: what a call saves is there
when it ends. A call with larger inputs than any that was measured recomputes as well, and is measured.

[Note: the turn]
Backward begins with the call that was left last, and needs all that it has saved. So that is dropped, or sent to the
host, only when something else comes first: another call, or backward through one. It is dropped at once where half as
much or more was saved at the last turn (by a loss over large logits), and under `"auto"`, which has planned the turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from sp_lightning.pipeline.activations.memory import Footprint, Stretch
from sp_lightning.pipeline.activations.offload import Bundle, Offloader
from sp_lightning.pipeline.activations.recompute import SecondForwards, UnitCall
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.options import ActivationPolicy, Policy
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.tensors_in import tensors_in
from sp_lightning.pipeline.torch_private import in_backward
from sp_lightning.pipeline.units.unit import Member


class AutoPolicy:
    """Measures what units' calls take, and follows the policies that a planner has chosen for them."""

    def __init__(self, second_forwards: SecondForwards, policies: Mapping[str, Policy]) -> None:
        self.policies = policies  # by the names of units; others recompute
        # the policy that each member has in this step, if it was called
        self.in_use: dict[str, Policy] = {}
        # the most that was taken at the turn, after the last unit's forward: by a loss, say
        self.turn_bytes = 0
        # the most that was saved outside of units elsewhere: by a norm between them, say
        self.outside_bytes = 0
        self._second_forwards = second_forwards
        # whether calls that recompute are measured in this step, as one was that nothing was known of
        self._is_measuring = False
        # what these calls have taken since a backward has ended
        self._this_pass: dict[str, Footprint] = {}
        # the same in the pass in which they took most, in the forward's order
        self._most: dict[str, Footprint] = {}
        # bytes of the inputs of each member's largest measured call
        self._largest_inputs: dict[str, int] = {}
        self._had_backward = False  # whether a pass has ended
        self._is_warm = False  # whether one had ended before this step
        self._operation_bytes = 0  # what operations take besides what is saved
        self._bytes_given = 0  # to the call under way, as inputs

    # --------------------------------------------------------------------------------------------- what planners read

    def footprints(self) -> dict[str, Footprint]:
        """Return what calls of each measured member take, in the order of the forward."""
        footprints = {}
        for name, calls in self._most.items():
            working = calls.working + self._operation_bytes
            footprints[name] = calls._replace(working=working, repeatable=self._is_repeatable(name))
        return footprints

    def _is_repeatable(self, name: str) -> bool:
        return self._most[name].repeatable and name not in self._second_forwards.unrepeatable

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
        """Begin a call with these inputs: measure it if nothing is known of such a call, and return its policy."""
        # sparse ones have no `nbytes`
        self._bytes_given = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        policy = self._policy_of(member)
        if policy is None and self._is_warm and not self._is_measuring:
            self._is_measuring = True
            self._second_forwards.saved.meter.measure(inputs)
        self.in_use[member.name] = policy or "recompute"
        return self.in_use[member.name]

    def _policy_of(self, member: Member) -> Policy | None:
        """Return the policy for the call under way; None if nothing is known of calls with such inputs."""
        name = member.name
        is_known = name in self._most and name not in self._this_pass
        if not is_known or self._bytes_given > self._largest_inputs[name]:
            return None
        policy = self.policies.get(member.unit_name, "recompute")
        return "keep" if policy == "recompute" and not self._is_repeatable(name) else policy

    def end_call(self, call: UnitCall) -> None:
        """Note what a call has taken that may recompute, and of which nothing was dropped yet."""
        if self._is_measuring:
            name, footprint = call.member.name, call.footprint()
            calls = self._this_pass.get(name)
            self._this_pass[name] = footprint if calls is None else calls.combined_with(footprint)
            self._largest_inputs[name] = max(self._largest_inputs.get(name, 0), self._bytes_given)

    def end_stretch(self, stretch: Stretch, is_turn: bool) -> None:
        """Note what a unit's forward or backward has taken, or the turn from one to the other."""
        if not is_turn:
            self._operation_bytes = max(self._operation_bytes, stretch.operations)
            return
        self.turn_bytes = max(self.turn_bytes, stretch.saved + stretch.operations)
        if self.in_use.keys() == self._this_pass.keys():  # all were measured
            outside = stretch.before
            for calls in self._this_pass.values():
                outside -= calls.held if calls.repeatable else calls.held + calls.saved
            self.outside_bytes = max(self.outside_bytes, outside)

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        self._had_backward = True
        for name, calls in self._this_pass.items():
            most = self._most.get(name)
            if most is None or calls.held + calls.saved > most.held + most.saved:
                self._most[name] = calls
        self._this_pass.clear()


class Activations:
    """Decides, for each call of a unit, what happens to the tensors that autograd saves: their route."""

    def __init__(
        self,
        policy: ActivationPolicy,
        saved: SavedTensors,
        offloader: Offloader,
        backend: Backend,
        stats: Stats,
    ) -> None:
        # None if the user has chosen, or if there is no limit to choose by
        self.auto: AutoPolicy | None = None
        self.are_kept = policy in ("keep", "auto")  # all, so that nobody has to tell of calls
        self.second_forwards = SecondForwards(saved, backend, stats)
        self._is_auto = policy == "auto"
        self._policy: Policy = "keep" if policy == "auto" else policy
        self.saved = saved
        self._offloader = offloader
        # of the outermost call under way; None between managed calls
        self._route: Policy | None = None
        self._left_last: Bundle | None = None  # of the call of this step that was left last
        self._pending: Bundle | None = None  # the same, until something comes after it
        # that call, if what it saved is to be dropped then
        self._to_drop: ref[UnitCall] | None = None
        self._has_turned = False  # in this pass
        # bytes that were saved after it, the last time; nobody knows at first
        self._saved_at_turn = math.inf

    def measure_anew(self, has_limit: bool) -> None:
        """Measure calls, under `"auto"`, as they may take more than before; what was planned for them holds."""
        if self._is_auto and has_limit:
            policies = {} if self.auto is None else self.auto.policies
            self.auto = AutoPolicy(self.second_forwards, policies)
        self.are_kept = self.auto is None and self._policy == "keep"

    def begin_step(self) -> None:
        """Begin a step; no graph waits for its backward."""
        self._has_turned = False
        self._left_last = None
        if self.auto is not None:
            self.auto.begin_step()
        self.saved.meter.begin_step()

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
            # what `functional_call` lends is gone in backward
            and all(entry.is_in_place for entry in member.entries)
        )

    def begin(self, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of a unit, and choose its route."""
        route = self._policy
        if self.auto is not None:
            route = self.auto.begin_call(member, tensors_in((args, kwargs)))
        elif member.name in self.second_forwards.unrepeatable:
            route = "keep"
        self._route = route
        if route == "recompute":
            self._let_pending_go()  # or what it holds would count for this call
            self.saved.recording = UnitCall(self.second_forwards, member, args, kwargs)

    def conclude(self, output: Any) -> None:
        """Decide about what the current call, which is over, has saved."""
        call, self.saved.recording = self.saved.recording, None
        if not isinstance(call, UnitCall):
            return
        call.conclude(output, warns=self.auto is None)
        if self.auto is not None:
            self.auto.end_call(call)
        elif 2 * self._saved_at_turn <= call.footprint().saved:
            self._to_drop = ref(call)
            return
        call.drop()

    def end(self) -> None:
        """End the current call, also after an exception."""
        self._route = self.saved.recording = None
        self._end_stretch()

    # ------------------------------------------------------------------------------- any call, and backward through one

    def enter(self, member: Member) -> None:
        """Note that a call has begun, with its weights on the device: what it saves belongs to its unit."""
        bundle = None
        if not in_backward():  # what a recomputation saves is used at once
            self._let_pending_go()
            if torch.is_grad_enabled():
                bundle = Bundle(member, leaves=(self._route or self._policy) == "offload")
        self._offloader.open.append(bundle)

    def leave(self) -> None:
        """Note that the call that was entered last is left."""
        bundle = self._offloader.open.pop()
        if bundle is not None:
            bundle.before = self._left_last
            self._left_last = bundle
            self._offloader.release_sent()
            self._let_pending_go()  # a call within this one
            self._pending = bundle

    @property
    def open_bundle(self) -> Bundle | None:
        """What the call saves that was entered last and is not left yet; None if nobody has to know."""
        return self._offloader.open[-1] if self._offloader.open else None

    def reach(self, bundle: Bundle | None) -> None:
        """Note that backward is about to run the nodes of a call."""
        self._end_stretch(is_turn=not self._has_turned)
        self._has_turned = True
        if bundle is None:
            return
        if bundle is self._pending:  # backward begins with it
            self._pending = self._to_drop = None
        self._let_pending_go()
        self._offloader.reach(bundle)

    def _let_pending_go(self) -> None:
        """Drop or send what the pending call has saved: backward does not begin with it ([Note: the turn])."""
        pending = self._pending
        call = None if self._to_drop is None else self._to_drop()
        self._pending = self._to_drop = None
        if call is not None:
            call.drop()
        if pending is not None:
            self._offloader.send(pending)

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        if self._has_turned:
            self._end_stretch()  # between steps users reset memory statistics, too
        self._has_turned = False
        if self.auto is not None:
            self.auto.end_backward()
        if not self.are_kept:
            self._offloader.release_sent()

    def abandon(self) -> None:
        """Return to idle after an exception, when no copy is under way."""
        self._offloader.abandon()

    def _end_stretch(self, is_turn: bool = False) -> None:
        stretch = self.saved.meter.end_stretch()
        if self.auto is not None:
            self.auto.end_stretch(stretch, is_turn)
        elif is_turn:
            self._saved_at_turn = stretch.saved
