"""The guard: whoever touches a weight outside of its unit finds it finished, or gets it on the device.

Masters have a class with `__torch_function__` from attach to detach, and the guard has two verbs.

*Between steps, settle.* After a backward or an optimizer step, gradients may still be on their way, and weights still
be stepped. The first access to any master waits for all of it, so nobody sees half a step, and only code that looks has
to wait.

*In a step, serve.* `F.linear(x, self.emb.weight)`, an L2 penalty over `self.parameters()`, a parent that reads a weight
of its child, `module.forward(x)` called past `__call__`: none of these enters a unit, so the module tree holds masters,
which lie on the host. An operation on one gets the weight on the device, in memory of its own, so that this step is
right; from when weights are placed next it is a device parameter. The same goes for a weight that autocast lowers and
that is used in its own dtype, too (autocast.py): it is sent in that from then on. Reading attributes and
writing in place (`p.grad`, `p.data.clamp_()`, `p.copy_()`) still mean the master, so does all that happens while an
optimizer steps. But while the module tree has the leaf in place of the master, the leaf is the weight, whatever is done
with the master ([Note: one weight, two Parameters] in leaf.py).

*In backward, refuse what is too late.* A unit may be stepped there as soon as its gradients are complete. Nobody can
read the weights of this step any more then: it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.calls.backward import BackwardPass
from sp_lightning.pipeline.calls.graphs import Graphs, differentiate, edges_of
from sp_lightning.pipeline.calls.masters import (
    HostParameter,
    guarded,
    guards,
    means_the_master,
    run_on_leaves,
)
from sp_lightning.pipeline.lanes.at_work import FORKED, EngineAtWork, optimizer_steps
from sp_lightning.pipeline.operands import ON_DEVICE, instances_in, is_metadata, name_of, replace_instances
from sp_lightning.pipeline.optimizer.unit_steps import UnitSteps
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.torch_private import (
    in_backward,
    in_transform,
    without_torch_function,
    zeroing,
)
from sp_lightning.pipeline.units.presence import Residency
from sp_lightning.pipeline.units.unit import Member
from sp_lightning.pipeline.weights.departed import DepartedLeaf
from sp_lightning.pipeline.weights.leaf import EagerLeaf
from sp_lightning.pipeline.weights.quantized import QuantizedWeight
from sp_lightning.pipeline.weights.weight import Weight, form_of
from sp_lightning.pipeline.window.arrangement import Arrangement

_OF_GRAPHS = (torch.autograd.grad, torch.autograd.backward)


class Guard:
    """Guards the masters of an engine's weights, and decides what follows from accesses to them."""

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
        self.twins_by_memory = arrangement.twins  # all twins, by the identity of their memory
        self._stream = steps.stream
        self._device = device
        self._at_work = at_work
        self._graphs = graphs
        self._backward = backward
        self._arrangement = arrangement
        self._steps = steps
        self._processes = processes
        self._weights: list[Weight] = []
        # The weights that were used outside of their modules in this step.
        self._served: list[Weight] = []

    def install(self, weights: Iterable[Weight]) -> None:
        """Guard the masters of weights."""
        guards.add(self)
        self._weights = [weight for weight in weights if not isinstance(weight, QuantizedWeight)]
        for weight in self._weights:
            weight.guard = self
            guarded[id(weight.master)] = self, weight
            weight.master.__class__ = HostParameter

    def remove(self) -> None:
        """Turn the masters back into ordinary Parameters. Idempotent."""
        guards.discard(self)
        for weight in self._weights:
            weight.master.__class__ = nn.Parameter
            weight.guard = None
            guarded.pop(id(weight.master), None)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that has masters among its arguments."""
        name = name_of(func)
        if name in ON_DEVICE and self.in_step and not optimizer_steps.depth:
            return func(torch.empty(0, device=self._device), *args[1:])
        if not is_metadata(name):
            # There may be masters of several models, each with its own guard.
            guards_and_weights = [guarded[id(master)] for master in instances_in((args, kwargs), HostParameter)]
            means_masters = means_the_master(name, args, kwargs)
            # Between steps, too, a graph may wait that was built on leaves of weights.
            in_step = func in _OF_GRAPHS or any(guard.in_step for guard, _ in guards_and_weights)
            in_step = in_step and not optimizer_steps.depth
            if in_step and not means_masters:
                return _run_on_device(func, args, kwargs)
            if in_step and any(weight.leaf_count for _, weight in guards_and_weights):
                return run_on_leaves(func, args, kwargs)
            for guard, weight in guards_and_weights:
                guard.before_access(weight, means_masters)
            if name == "data" and func.__name__ == "__set__":
                guard, weight = guards_and_weights[0]
                guard.before_conversion(weight, args[1])
        with without_torch_function():
            if name == "data" and len(args) == 1 and guarded[id(args[0])][1].unit.is_followed:
                return args[0].detach()  # counts what this process writes, which it may not do in a step
            return func(*args, **kwargs)

    def before_access(self, weight: Weight, writes: bool = False) -> None:
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
        if self._stream.is_used_up(weight) and not optimizer_steps.depth:
            raise RuntimeError(
                f"Weight {weight.name!r} is used in backward after the optimizer has updated it there. Weights are "
                "updated in backward as soon as their gradients are complete. Train with `overlap_optimizer=False`."
            )

    def _check_in_fork(self, weight: Weight) -> None:
        """Raise unless a fork of the process has the value of a weight."""
        step = weight.unit.update.ticket
        if step is not None:
            step.join()  # a step that was under way fails in the fork
        # Memory that is sent to an accelerator is hidden from forks; what processes share changes while one reads it.
        if self._device.type != "cpu" or self._processes is not None or weight.twin.is_touched():
            raise RuntimeError(f"Weight {weight.name!r} cannot be read here. {FORKED}")

    def before_gradient(self, weight: Weight, reads: bool) -> None:
        """Put a master's gradient into its `.grad` if code reads that; otherwise drop it, because it is replaced."""
        stream = self._stream
        gradient = stream.gradient_of[weight]
        is_there = gradient.tensor is not None or gradient in stream.pending
        if not (is_there or gradient.of_segment.is_consumed or weight.has_used_gradient):
            return
        self._backward.forget_failed()
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
            self._arrangement.unused_in_step = False
            self._graphs.has_served |= torch.is_grad_enabled() and weight.master.requires_grad and not in_backward()
            if weight.lowered:
                self.keep_as_is(weight)
            if weight.twin.parameter.requires_grad != weight.master.requires_grad:
                self._backward.follow_requires_grad(weight.twin)
            unit = weight.twin.unit
            is_there = unit.presence.residency is not Residency.ABSENT and (unit.users > 0 or weight.unit.is_reached)
            if not (unit.resident or is_there):
                self._keep_on_device(weight)
            unit = weight.twin.unit
            unit.presence.suspect |= not self.in_step
            self.window.bring(unit)
            training = self._arrangement.module.training
            if weight.uses_to_watch[training] and unit.presence.fingerprint is None:
                weight.uses_to_watch[training] -= 1
                unit.presence.watch()
            leaf = weight.twin.parameter
            if isinstance(leaf, DepartedLeaf):
                leaf.__class__ = weight.leaf_class  # type: ignore[assignment]
                self._served.append(weight)
            return leaf

    def end_step(self) -> None:
        """End the use of leaves outside of their modules: they stand for their masters now."""
        for weight in self._served:
            if not weight.leaf_count:
                weight.twin.parameter.__class__ = DepartedLeaf
        self._served.clear()

    def unblock(self, member: Member) -> None:
        """Make a member's weights resident if their unit cannot be brought, as a running call occupies its place."""
        for unit in member.needed:
            if self.window.is_blocked(unit):
                for entry in member.entries:
                    if entry.weight.twin.unit is unit:
                        self._keep_on_device(entry.weight)

    def _keep_on_device(self, weight: Weight) -> None:
        self._make_resident(weight)
        self._arrangement.learned.touched_outside.append(weight)

    def note_cast(self, weight: Weight, builds_graph: bool) -> nn.Parameter:
        """Note that autocast casts a weight, and return the leaf that it is to cast (`Casts.note_cast`)."""
        graphs = self._graphs
        if builds_graph:
            if weight.cast_in != graphs.current.number and not graphs.earlier_waiting():
                # No backward adds the gradients of earlier casts to those of this one.
                weight.casts = {}
            weight.cast_in = graphs.current.number
        leaf = self._arrangement.learned.casts.note_cast(weight, builds_graph, self._backward.follow_requires_grad)
        # Autocast used the lowered values before the weight was used in its own dtype, and still does.
        if leaf is not weight.twin.parameter:
            with self._at_work:
                self.window.bring(weight.unit)
        return leaf

    def as_is(self, weight: Weight, leaf: nn.Parameter) -> nn.Parameter:
        """Note that a weight is used in its own dtype, and return what has that: the leaf, unless it is lowered."""
        self.keep_as_is(weight)
        return leaf if leaf.dtype is weight.dtype else self.serve(weight)

    def keep_as_is(self, weight: Weight) -> None:
        """Send a weight in its own dtype from when it is placed next; if it is lowered now, make it resident."""
        self._arrangement.learned.casts.used_as_is.add(id(weight.master))
        if weight.lowered:
            self._make_resident(weight)

    def keep_as_is_for_now(self, weight: Weight) -> None:
        """Have a lowered weight be in its own dtype until weights are placed next: autocast is off for its module."""
        if weight.cast_in == self._graphs.current.number:
            self.keep_as_is(weight)  # earlier casts in the graph stay as they are
        else:
            weight.leaf_class = EagerLeaf  # its uses are not watched without autocast
            self._make_resident(weight)

    def _make_resident(self, weight: Weight) -> None:
        """Give a weight memory of its own on the device until weights are placed next, which is due."""
        if in_transform():  # new memory would belong to the transform
            raise RuntimeError(
                f"Weight {weight.name!r} is used outside of its module, within a transform of "
                "`torch.func`. Name it in `resident=`."
            )
        self.window.finish_optimizer(weight.unit)  # the weight is sent at once
        self.window.write_back([weight])
        self._arrangement.make_resident(weight)
        self._arrangement.learned.outdated = True


def _run_on_device(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is torch.autograd.grad:
        args, kwargs = replace_instances((args, kwargs), HostParameter, lambda master: guarded[id(master)][1])
        return differentiate(*args, **kwargs)
    if func is torch.autograd.backward:
        return func(*args, **{**kwargs, "inputs": in_graphs(kwargs["inputs"])})
    with without_torch_function():
        args, kwargs = replace_instances((args, kwargs), HostParameter, _serve)
    return func(*args, **kwargs)


def _serve(master: HostParameter) -> nn.Parameter:
    guard, weight = guarded[id(master)]
    return guard.serve(weight)


def in_graphs(tensors: Iterable[Tensor]) -> list[Any]:
    """Return tensors, with each master replaced by the edges that stand for it in graphs."""
    inputs: list[Any] = []
    for tensor in tensors:
        if isinstance(tensor, HostParameter):
            inputs += edges_of(guarded[id(tensor)][1])
        else:
            inputs.append(tensor)
    return inputs
