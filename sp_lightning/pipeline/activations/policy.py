"""The one place that decides, for each call of a unit, what happens to the tensors that autograd saves.

They are kept, or dropped and recomputed (recompute.py), or offloaded to the host (offload.py), or recomputed from
inputs that were offloaded. `"auto"` chooses one of these for each unit (auto.py). The numbers are the same whatever is
chosen.
"""

from __future__ import annotations

from typing import Any

import torch

from sp_lightning.pipeline.activations.auto import AutoPolicy
from sp_lightning.pipeline.activations.offload import Offloader
from sp_lightning.pipeline.activations.recompute import SecondForwards, UnitCall
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.activations.ways import OFFLOADING, RECOMPUTING, WITHOUT_RECOMPUTING, Policy
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.options import ActivationPolicy
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import in_backward
from sp_lightning.pipeline.weights.operands import tensor_bytes, tensors_in
from sp_lightning.pipeline.weights.units import Member


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
        self._may_offload = auto is not None or self._policy in OFFLOADING

    def begin_step(self) -> None:
        """Draw conclusions from the last step, and begin another; no graph waits for its backward."""
        if self.auto is not None:
            self.auto.begin_step()
        if self._may_offload:
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
            size = sum(map(tensor_bytes, inputs))
            policy = self.auto.policy(member, size, inputs)
        elif not self.second_forwards.may_run(member.name):
            policy = WITHOUT_RECOMPUTING.get(policy, policy)
        self._policy_of_call = policy
        if policy in RECOMPUTING:
            self._recorded = UnitCall(self.second_forwards, member, args, kwargs)
            self._recorded.input_bytes = size
            self._saved.recording = self._recorded

    def enter(self, member: Member) -> None:
        """Note that a call has begun, with its weights on the device: what it saves belongs to its unit."""
        if self._may_offload:
            self._offloader.enter(member, (self._policy_of_call or self._policy) in OFFLOADING)
        if self._recorded is not None:
            self._recorded.pack_inputs()

    def leave(self) -> None:
        """Note that the call that was entered last is left."""
        if self._may_offload:
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
        if self.watched_peak is not None:
            self.watched_peak = max(self.watched_peak, self.second_forwards.backend.peak_since_reset() or 0)
        if self.auto is not None:
            self.auto.end_backward()
        if self._may_offload:
            self._offloader.end_backward()
