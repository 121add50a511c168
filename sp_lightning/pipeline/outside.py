"""Weights used outside of their unit, and accesses to masters while a step runs.

The guard (guard.py) notices accesses to masters; this module responds. A weight that is used outside of its unit's
calls, or in another dtype than the one it is sent in, gets memory of its own on the device at once, so that this step
is right. The next arrangement makes the former resident, and sends the latter in its own dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from sp_lightning.pipeline.backward import BackwardPass
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.gradients.unit_gradients import State
from sp_lightning.pipeline.layout.arrangement import Arrangement, Learned
from sp_lightning.pipeline.torch_private import in_backward, in_transform
from sp_lightning.pipeline.weights.graphs import Graphs
from sp_lightning.pipeline.weights.guard import EngineAtWork, Guard
from sp_lightning.pipeline.weights.units import Member, Residency
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.weights.window import Window


class Settles(Protocol):
    """What finishes everything that is under way."""

    def settle(self) -> None:
        """Wait until gradients have landed and optimizer steps are done."""


class OutsideUse(Guard):
    """Decides what follows from accesses to an arrangement's masters."""

    def __init__(
        self,
        settles: Settles,
        arrangement: Arrangement,
        learned: Learned,
        graphs: Graphs,
        window: Window,
        stream: GradientStream,
        backward: BackwardPass,
        at_work: EngineAtWork,
    ) -> None:
        super().__init__(arrangement.weights)
        self.device = window.backend.device
        self._settles = settles
        self._arrangement = arrangement
        self._learned = learned
        self._graphs = graphs
        self._stats = window.stats
        self._at_work = at_work
        self._window = window
        self._stream = stream
        self._backward = backward

    @property
    def graph_number(self) -> int:
        """The number of the graph that is being built."""
        return self._graphs.current.number

    # -------------------------------------------------------------------------------------------- what the guard asks

    def serve(self, weight: Weight) -> nn.Parameter:
        """Return the weight on the device in its own dtype, for an operation outside of its unit."""
        with self._at_work:
            self._window.finish_optimizer(weight.unit.group)
            self._arrangement.unused_in_step = False
            self._graphs.has_served |= torch.is_grad_enabled() and weight.master.requires_grad and not in_backward()
            if weight.lowered:
                self.keep_as_is(weight)
            if weight.twin.parameter.requires_grad != weight.master.requires_grad:
                self._backward.follow_requires_grad(weight.twin)
            group = weight.twin.group
            is_there = group.residency is not Residency.ABSENT and (group.users > 0 or weight.unit.is_reached)
            if not (group.resident or is_there):
                self._keep_on_device(weight)
            self._window.bring(weight.twin.group)
            return weight.twin.parameter

    def unblock(self, member: Member) -> None:
        """Make a member's weights resident if their group cannot be brought, as a running call occupies its place."""
        for group in member.groups:
            if self._window.is_blocked(group):
                for weight in {entry.weight: None for entry in member.entries if entry.weight.twin.group is group}:
                    self._keep_on_device(weight)

    def _keep_on_device(self, weight: Weight) -> None:
        self._make_resident(weight)
        self._learned.touched_outside.append(weight)

    def before_access(self, weight: Weight) -> None:
        """Finish what is under way with a master, because code outside of the engine reads it, or writes to it."""
        if self.in_step:
            with self._at_work:
                self._window.finish_optimizer(weight.unit.group)
                self._window.finish_copies([weight.unit.group])
                self._window.write_back([weight])
        else:
            self._settles.settle()

    def before_gradient(self, weight: Weight, reads: bool) -> None:
        """Put a master's gradient into its `.grad`, because somebody reads it; else drop it, because it is replaced.

        Raises:
            RuntimeError: If it is on its way, or if its weight was stepped in backward, and `step()` is still to come.
        """
        gradient = self._stream.of[weight]
        unit = gradient.unit
        if unit.state is State.EMPTY:
            return
        if unit.state is State.CONSUMED or (reads and self._backward.running):
            with self._at_work:
                self._backward.forget_failed()
        if unit.state is State.CONSUMED:
            raise RuntimeError(
                f"The gradient of weight {weight.name!r} was used in backward already: its unit was stepped there, "
                "because nobody was expected to read or change gradients before `step()`. Train with "
                "`overlap_optimizer=False`."
            )
        if not reads:
            unit.forget([gradient])
            return
        if gradient in self._stream.arrived:
            raise RuntimeError(
                f"The gradient of weight {weight.name!r} is on its way to the host, and cannot be read before backward "
                "has ended. Read it in `on_after_backward`, or in a hook on the weight: "
                "`register_post_accumulate_grad_hook`, or `register_hook` to change it."
            )
        with self._at_work:
            if gradient.host is not None:
                self._window.finish_optimizer(weight.unit.group)
                unit.show(gradient)

    def note_write(self, weight: Weight) -> None:
        """Note that a master may be written to: its copies on the device are checked before next use."""
        for group in (weight.twin.group, weight.unit.group):
            self._window.note_write(group)

    # --------------------------------------------------------------------------------------------------- autocast

    def note_cast(self, weight: Weight) -> None:
        """Note that autocast casts a weight; if that is all that it is used for, it is sent lowered from then on."""
        self._learned.lowered.add(id(weight.master))

    def keep_as_is(self, weight: Weight) -> None:
        """Send a weight in its own dtype from the next arrangement on; if it is lowered now, make it resident."""
        self._learned.used_as_is.add(id(weight.master))
        if weight.lowered:
            self._make_resident(weight)

    def _make_resident(self, weight: Weight) -> None:
        """Give a weight memory of its own on the device until the next arrangement, which is due.

        Raises:
            RuntimeError: Within a transform of `torch.func`, where new memory would belong to the transform.
        """
        if in_transform():
            raise RuntimeError(
                f"Weight {weight.name!r} is used outside of its module, within a transform of `torch.func`. Name it in "
                "`resident=`."
            )
        self._window.finish_optimizer(weight.unit.group)  # it is sent at once
        self._window.write_back([weight])
        self._stats.promotions += 1
        self._arrangement.make_resident(weight)
        self._learned.outdated = True
