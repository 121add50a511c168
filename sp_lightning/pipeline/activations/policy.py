"""The one place that decides, for each call of a unit, what happens to the tensors that autograd saves.

They are kept, or dropped and recomputed (recompute.py), or offloaded to the host (offload.py), or recomputed from
inputs that were offloaded. `"auto"` chooses one of these for each unit (auto.py). The numbers are the same whatever is
chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sp_lightning.pipeline.activations.auto import AutoPolicy
from sp_lightning.pipeline.activations.recompute import SecondForwards, UnitCall
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.activations.ways import OFFLOADING, RECOMPUTING, Policy
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.options import ActivationPolicy
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import in_backward
from sp_lightning.pipeline.weights.operands import tensor_bytes, tensors_in
from sp_lightning.pipeline.weights.units import Member


class Activations:
    """Decides, for each call of a unit, what happens to the tensors that autograd saves.

    Attributes:
        chooses: Whether the choice is left to `auto`.
        auto: Chooses a policy for each unit; None if the user has chosen, or if there is no limit to choose by and
            everything is kept.
        second_forwards: Runs forwards again.
        backward_passes: How many backward passes have ended.
        watched_peak: The most device memory in use at the end of a backward pass; None while nobody watches.
    """

    def __init__(
        self, policy: ActivationPolicy, saved: SavedTensors, backend: Backend, stats: Stats, checks: bool = False
    ) -> None:
        self.auto: AutoPolicy | None = None
        self.chooses = policy == "auto"
        self.second_forwards = SecondForwards(saved, backend, stats, checks)
        self.backward_passes = 0
        self.watched_peak: int | None = None
        self._policy: Policy = "keep" if policy == "auto" else policy
        self._saved = saved
        self._call: _CallUnderWay | None = None

    def conclude_step(self) -> None:
        """Draw conclusions from the last step, while no graph waits for its backward."""
        if self.auto is not None:
            self.auto.conclude_step()

    def begin_step(self) -> None:
        """Begin a step that builds a new graph; the one before was concluded."""
        if self.auto is not None:
            self.auto.begin_step()

    def manages(self, member: Member) -> bool:
        """Tell whether a call is to be surrounded by `begin` and `end`: it builds a graph, and its units' are ours.

        Within a unit's call, the outermost call decides. Within a user's checkpoint, the checkpoint's hooks are on top.
        """
        return (
            (self.auto is not None or self._policy in RECOMPUTING)
            and member.is_streamed
            and self._call is None
            and torch.is_grad_enabled()
            and not in_backward()
            and self._saved.are_alone()
            and all(entry.is_in_place for entry in member.entries)  # what `functional_call` lends is gone in backward
        )

    @property
    def may_offload(self) -> bool:
        """Whether the activations of any call may be offloaded."""
        return self.auto is not None or self._policy in OFFLOADING

    @property
    def offloads(self) -> bool:
        """Whether activations of the current call, all or its inputs, are offloaded."""
        policy = self._policy if self._call is None else self._call.policy
        return policy in OFFLOADING

    def begin(self, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of a unit under the policy that is chosen for it."""
        size, policy = 0, self._policy
        if self.auto is not None:
            inputs = tensors_in((args, kwargs))
            size = sum(map(tensor_bytes, inputs))
            policy = self.auto.policy(member, size, inputs)
        elif self.second_forwards.passes_over(member):
            policy = "offload" if policy == "recompute_offload" else "keep"
        self._call = _CallUnderWay(member, policy, size)
        if policy in RECOMPUTING:
            call = self._call.recorded = self._saved.recording = self.second_forwards.record(member, args, kwargs)
            if policy == "recompute":
                call.pack_inputs()

    def pack_inputs(self) -> None:
        """Pack the inputs of the current call, whose unit was entered, if they are offloaded: its unit sends them."""
        call = self._call
        if call is not None and call.recorded is not None and not call.recorded.is_packed:
            call.recorded.pack_inputs()

    def conclude(self, output: Any) -> None:
        """Decide about what the current call, which is over, has saved."""
        call, self._saved.recording = self._call, None
        if call is not None and call.recorded is not None:
            self.second_forwards.conclude(call.recorded, output, warns=self.auto is None)
            if self.auto is not None and call.recorded.footprint is not None:
                self.auto.note(call.member, call.input_bytes, call.recorded.footprint)

    def end(self) -> None:
        """End the current call, also after an exception."""
        call, self._call, self._saved.recording = self._call, None, None
        if self.auto is not None and call is not None:
            self.auto.end_call()

    def begin_backward(self) -> None:
        """Note that backward has begun, at the end of the graph."""
        if self.auto is not None:
            self.auto.begin_backward()

    def reach(self) -> None:
        """Note that backward has reached a unit."""
        if self.auto is not None:
            self.auto.reach()

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        self.backward_passes += 1
        if self.watched_peak is not None:
            self.watched_peak = max(self.watched_peak, self.second_forwards.backend.peak_since_reset() or 0)
        if self.auto is not None:
            self.auto.end_backward()


@dataclass
class _CallUnderWay:
    """The outermost call of a unit that is under way."""

    member: Member
    policy: Policy
    input_bytes: int
    recorded: UnitCall | None = None
