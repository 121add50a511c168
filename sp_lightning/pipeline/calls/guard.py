"""The guard intercepts access to a weight outside its unit: it finishes the weight, or serves it on the device.

Masters have a class with `__torch_function__` from attach to detach, and the guard has two verbs.

*Between steps, settle.* After a backward or an optimizer step, gradients may still be on their way, and the optimizer
may still update weights. The first access to any master waits for all of it, so no code sees half a step, and only code
that looks has to wait.

*In a step, serve.* `F.linear(x, self.emb.weight)`, an L2 penalty over `self.parameters()`, a parent that reads a weight
of its child, `module.forward(x)` called past `__call__`: none of these enters a unit, so the module tree holds masters,
which are on the host. An operation on one gets the weight on the device, in memory of its own, so that this step is
right. Once weights are placed again, that weight is a device parameter. The same goes for a weight that autocast lowers
and that is used in its own dtype, too (autocast.py): it is sent in that dtype from then on. Operations that read
attributes or write in place (`p.grad`, `p.data.clamp_()`, `p.copy_()`) still mean the master, and so do all operations
while an optimizer steps. But while the module tree has the leaf in place of the master, the leaf is the weight,
whatever is done with the master ([Note: one weight, two Parameters] in leaf.py).

*In backward, refuse late reads.* The optimizer may update a unit there as soon as its gradients are complete. The
weights of this step are gone then, so reading them raises an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.calls.backward import BackwardPass
from sp_lightning.pipeline.graphs import Graphs
from sp_lightning.pipeline.lanes.at_work import FORKED, EngineAtWork, optimizer_steps
from sp_lightning.pipeline.optimizer.unit_steps import UnitSteps
from sp_lightning.pipeline.placing.arrangement import Arrangement
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.torch_private import in_backward, in_transform, zeroing
from sp_lightning.pipeline.units.presence import Residency
from sp_lightning.pipeline.units.unit import Member
from sp_lightning.pipeline.weights.weight import Life, Twin, Weight, become, form_of


class Guard:
    """Guards the masters of an engine's weights, and decides what an access to them leads to."""

    def __init__(
        self,
        at_work: EngineAtWork,
        graphs: Graphs,
        backward: BackwardPass,
        arrangement: Arrangement,
        steps: UnitSteps,
        device: torch.device,
        processes: Processes | None,
    ) -> None:
        # Whether a step or a backward pass is under way: operations on masters get the weights on the device then.
        self.in_step = False
        self.window = steps.window
        self._stream = steps.stream
        self.device = device
        self._at_work = at_work
        self._graphs = graphs
        self._backward = backward
        self.arrangement = arrangement
        self._steps = steps
        self._processes = processes
        # The weights that were used outside of their modules in this step.
        self._served: list[Weight] = []

    def before_access(self, weight: Weight, writes: bool) -> None:
        """Finish work that uses a master, because code outside of the engine reads it, or writes to it."""
        window, unit = self.window, weight.unit
        if self._at_work.is_forked:
            self._check_in_fork(weight)
            return
        self.refuse_if_stepped(weight)
        if self.in_step:
            with self._at_work:
                window.finish_optimizer(unit)
                window.finish_copies([unit])
                window.write_back([weight])
        elif not window.settled:
            with self._at_work:
                self._steps.settle_all()
        # Code with an alias may write to it later. So the weight is sent again before the next use.
        if writes:
            for copied_from in {unit, weight.twin.unit}:
                window.note_write(copied_from)
            if self.in_step:
                unit.readers.has_aliases = True

    def before_conversion(self, weight: Weight, values: Tensor) -> None:
        """Make the gradient the user's before a master gets values of another form, to which it could not be given."""
        if form_of(values) != form_of(weight.master):
            with self._at_work:
                self._stream.gradient_of[weight].show()

    def refuse_if_stepped(self, weight: Weight) -> None:
        """Raise if a weight is read after it was stepped in the backward pass that is under way."""
        gradient = self._stream.gradient_of.get(weight)
        if gradient is not None and gradient.of_segment.is_consumed and not optimizer_steps.depth:
            raise RuntimeError(
                f"Weight {weight.name!r} is used in backward after the optimizer has updated it there. Weights are "
                "updated in backward as soon as their gradients are complete. Train with `overlap_optimizer=False`."
            )

    def _check_in_fork(self, weight: Weight) -> None:
        """Raise unless a fork of the process has the value of a weight."""
        update = weight.unit.update
        has_begun = update.to_begin is None
        if update.ticket is not None and has_begun:
            update.ticket.join()  # a step that was under way fails in the fork
        # Memory that is sent to an accelerator is hidden from forks; memory that processes share changes during reads.
        is_own = self.device.type == "cpu" and self._processes is None
        if not (is_own and has_begun) or weight.twin.is_touched():
            raise RuntimeError(f"Weight {weight.name!r} cannot be read here. {FORKED}")

    def before_gradient(self, weight: Weight, reads: bool) -> None:
        """Put a master's gradient into its `.grad` if code reads that; otherwise drop it, because it is replaced."""
        stream = self._stream
        gradient = stream.gradient_of[weight]
        is_there = gradient.tensor is not None or gradient in stream.pending
        if not (is_there or gradient.of_segment.is_consumed or weight.has_used_gradient):
            return
        # True if the gradient is set to None, False if it is zeroed, None if it is read.
        to_none = zeroing() if reads else True
        if reads and gradient in stream.pending:
            raise RuntimeError(
                f"The gradient of weight {weight.name!r} is on its way to CPU memory, and cannot be "
                "read before backward has ended. Read it in `on_after_backward`, or in a hook on "
                "the weight: `register_post_accumulate_grad_hook`, or `register_hook` to change it."
            )
        if to_none is not None:
            gradient.zero(to_none)
            return
        gradient.check_readable()
        with self._at_work:
            self.window.finish_optimizer(weight.unit)
            gradient.show()

    # ------------------------------------------------------------------------------------------ weights on the device

    def serve(self, weight: Weight) -> nn.Parameter:
        """Return the weight on the device in its own dtype, for an operation outside of its unit."""
        self.refuse_if_stepped(weight)
        with self._at_work:
            self.window.finish_optimizer(weight.unit)
            self.arrangement.unused_in_step = False
            self._graphs.has_served |= torch.is_grad_enabled() and weight.master.requires_grad and not in_backward()
            if weight.lowered:
                self.arrangement.learned.casts.note_as_is(weight)
                self.make_resident(weight)
            self._backward.follow_requires_grad(weight.twin)
            unit = weight.twin.unit
            is_there = unit.presence.residency is not Residency.ABSENT and (unit.users > 0 or weight.unit.is_reached)
            if not (unit.resident or is_there):
                self._keep_on_device(weight)
            unit = weight.twin.unit
            unit.presence.suspect |= not self.in_step
            self.window.bring(unit)
            training = self.arrangement.module.training
            if weight.uses_to_watch[training] and unit.presence.fingerprint is None:
                weight.uses_to_watch[training] -= 1
                unit.presence.watch()
            if weight.twin.life is Life.DEPARTED:
                become(Life.IN_USE, [weight.twin])
                self._served.append(weight)
            return weight.twin.parameter

    def end_step(self) -> None:
        """Serve no more weights, and end the use of leaves outside of their modules: they stand for masters now."""
        self.in_step = False
        become(Life.DEPARTED, [weight.twin for weight in self._served if not weight.leaf_count])
        self._served.clear()

    def unblock(self, member: Member) -> None:
        """Make a member's weights resident if their unit cannot be brought, as a running call occupies its place."""
        for unit in member.needed:
            if self.window.is_blocked(unit):
                for entry in member.entries:
                    if entry.weight.twin.unit is unit:
                        self._keep_on_device(entry.weight)

    def _keep_on_device(self, weight: Weight) -> None:
        self.make_resident(weight)
        self.arrangement.learned.touched_outside.append(weight)

    def bring(self, twin: Twin) -> None:
        """Have a twin that is not in the module tree collect gradients, and bring its unit."""
        with self._at_work:
            self._backward.follow_requires_grad(twin)
            self.window.bring(twin.weight.unit)

    def make_resident(self, weight: Weight) -> None:
        """Give a weight memory of its own on the device until weights are placed next, which is due."""
        if in_transform():  # new memory would belong to the transform
            raise RuntimeError(
                f"Weight {weight.name!r} is used outside of its module, within a transform of "
                "`torch.func`. Name it in `resident=`."
            )
        self.window.finish_optimizer(weight.unit)  # the weight is sent at once
        self.window.write_back([weight])
        self.arrangement.make_resident(weight)
        self.arrangement.learned.outdated = True
