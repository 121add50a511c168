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

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from sp_lightning.pipeline.calls.backward import GRADIENT, BackwardPass, differentiate, edges_of
from sp_lightning.pipeline.graphs import Graphs
from sp_lightning.pipeline.lanes.at_work import FORKED, EngineAtWork, optimizer_steps
from sp_lightning.pipeline.operations import (
    ABOUT,
    Args,
    Kwargs,
    Meaning,
    Operation,
    instances_in,
    meaning_of,
    replace_instances,
)
from sp_lightning.pipeline.optimizer.unit_steps import UnitSteps
from sp_lightning.pipeline.placing.arrangement import Arrangement
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.torch_private import (
    in_backward,
    in_transform,
    storage_key,
    without_torch_function,
    zeroing,
)
from sp_lightning.pipeline.units.unit import Member, Residency
from sp_lightning.pipeline.weights.autocast import LoweredParameter, Lowering
from sp_lightning.pipeline.weights.leaf import CopiedPlainly, EagerLeaf, TwinParameter, see_all_uses
from sp_lightning.pipeline.weights.quantized import QuantizedWeight
from sp_lightning.pipeline.weights.weight import DepartedLeaf, GradientLife, Life, Twin, Weight, become, form_of


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
        elif not window.has_nothing_in_flight:
            with self._at_work:
                self._steps.settle_all()
        # Code with an alias may write to it later. So the weight is sent again before the next use.
        if writes:
            for copied_from in {unit, weight.twin.unit}:
                window.note_write(copied_from)
            if self.in_step:
                unit.readers.has_aliases = True
            elif not optimizer_steps.depth:
                for segment in unit.segments:
                    segment.hide_edits()

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
        has_begun = update.pending_visit is None
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
        is_spent = weight.gradient_life is GradientLife.SPENT
        if not (is_there or is_spent or gradient.of_segment.is_consumed):
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
        if is_spent and weight.unit.is_stepped_elsewhere and optimizer_steps.depth:
            return  # another process steps this weight; the optimizer's own code skips it here
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


# ------------------------------------------------------------------------------------------ the class of masters

# The guard and the weight of each master, by the master's identity.
_guarded: dict[int, tuple[Guard, Weight]] = {}
_guards: WeakSet[Guard] = WeakSet()  # the guards of all attached models


class HostParameter(CopiedPlainly):
    """The class of masters: same object, same memory, and `isinstance(p, nn.Parameter)` holds.

    Copies and pickles are of `p.data`, which the guard sees.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Operation,
        types: Iterable[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Hand the operation to the guard of the first master among its arguments."""
        kwargs = kwargs or {}
        # mostly, an attribute is read or written
        master = args[0] if args and type(args[0]) is cls else next(iter(instances_in((args, kwargs), cls)), None)
        guard_and_weight = _guarded.get(id(master))
        if guard_and_weight is not None:
            guard, weight = guard_and_weight
            if getattr(func, "__self__", None) is not GRADIENT:
                return run(guard, func, args, kwargs)
            guard.before_gradient(weight, reads=func.__name__ == "__get__")
        with without_torch_function():
            return func(*args, **kwargs)


def _name_master(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Give a module the master where a forward assigns a leaf: the assignment outlives the call."""
    if isinstance(parameter, TwinParameter):
        return parameter.weight.master
    with without_torch_function():
        key = 0 if parameter is None else storage_key(parameter)
    for guard in _guards:
        twin = guard.arrangement.twins.get(key)
        if twin is not None:
            raise RuntimeError(
                f"A forward gives {type(module).__name__} a Parameter {name!r} over the memory of weight "
                f"{twin.weight.name!r} on the device. After the call, other weights get this memory. Make the "
                "Parameter from a clone: `nn.Parameter(weight.detach().clone())`."
            )
    return None


# This runs once in a process, when the engine is imported: code may bind torch's functions to names of its own.
see_all_uses((HostParameter, DepartedLeaf, LoweredParameter), (EagerLeaf, LoweredParameter, TwinParameter))
register_module_parameter_registration_hook(_name_master)  # type: ignore[arg-type]


def guard_masters(guard: Guard, weights: Iterable[Weight], lowering: Lowering) -> None:
    """Have a guard see all operations on the masters of weights."""
    _guards.add(guard)
    for weight in weights:
        if not isinstance(weight, QuantizedWeight):
            weight.lowering = lowering
            _guarded[id(weight.master)] = guard, weight
            weight.master.__class__ = HostParameter


def release_masters(guard: Guard) -> None:
    """Turn the masters that a guard sees back into ordinary Parameters. Idempotent."""
    _guards.discard(guard)
    for weight in [weight for other, weight in _guarded.values() if other is guard]:
        weight.master.__class__ = nn.Parameter
        weight.lowering = None
        del _guarded[id(weight.master)]


def run(guard: Guard, func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation that has masters among its arguments; this guard sees the first one."""
    meaning = meaning_of(func)
    if meaning is Meaning.DEVICE and guard.in_step and not optimizer_steps.depth:
        return func(torch.empty(0, device=guard.device), *args[1:])
    if meaning not in ABOUT:
        # There may be masters of several models, each with its own guard.
        guards_and_weights = [_guarded[id(master)] for master in instances_in((args, kwargs), HostParameter)]
        means_masters = _means_masters(meaning, args, kwargs)
        # Between steps, too, a graph may wait that was built on leaves of weights.
        of_graphs = func in (torch.autograd.grad, torch.autograd.backward)
        in_step = of_graphs or any(guard.in_step for guard, _ in guards_and_weights)
        in_step = in_step and not optimizer_steps.depth
        if in_step and not means_masters:
            return _run_on_device(func, args, kwargs)
        if in_step and any(weight.leaf_count for _, weight in guards_and_weights):
            return _run_on_leaves(func, args, kwargs)
        for guard, weight in guards_and_weights:
            guard.before_access(weight, means_masters)
    with without_torch_function():
        if meaning is Meaning.DATA:
            return _run_on_data(func, args)
        return func(*args, **kwargs)


def _means_masters(meaning: Meaning, args: Args, kwargs: Kwargs) -> bool:
    """Tell whether an operation means masters themselves, also in a step: it writes to them, or returns an alias."""
    if meaning in (Meaning.MEMORY, Meaning.ALIAS, Meaning.DATA):
        return True
    first = next(iter(args or kwargs.values()), None)  # torch.nn.init passes it by name
    results = first if meaning is Meaning.IN_PLACE else None, kwargs.get("out")
    return bool(instances_in(results, HostParameter))


def _run_on_data(func: Operation, args: Args) -> Any:
    """Read or set the `.data` of a master."""
    guard, weight = _guarded[id(args[0])]
    if func.__name__ == "__set__":
        guard.before_conversion(weight, args[1])
    elif weight.unit.is_stepped_elsewhere:
        return args[0].detach()  # this counts the process's writes, which are not allowed in a step
    return func(*args)


def _run_on_leaves(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation that means masters; some of them have leaves in the module tree."""
    if meaning_of(func) is Meaning.DATA:  # leaves have a property of their own for this attribute
        leaf = _leaf_in_tree(args[0])
        if func.__name__ == "__get__":
            return leaf.data
        leaf.data = args[1]
        return None
    with without_torch_function():
        args, kwargs = replace_instances((args, kwargs), HostParameter, _leaf_in_tree)
    return func(*args, **kwargs)


def _leaf_in_tree(master: HostParameter) -> nn.Parameter:
    _, weight = _guarded[id(master)]
    return weight.twin.parameter if weight.leaf_count else master


def _run_on_device(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    if func is torch.autograd.grad:
        args, kwargs = replace_instances((args, kwargs), HostParameter, lambda master: _guarded[id(master)][1])
        return differentiate(*args, **kwargs)
    if func is torch.autograd.backward:
        return func(*args, **{**kwargs, "inputs": in_graphs(kwargs["inputs"])})
    with without_torch_function():
        args, kwargs = replace_instances((args, kwargs), HostParameter, _served)
    return func(*args, **kwargs)


def _served(master: HostParameter) -> nn.Parameter:
    guard, weight = _guarded[id(master)]
    return guard.serve(weight)


def in_graphs(tensors: Iterable[Tensor]) -> list[Any]:
    """Return tensors, with each master replaced by the edges that stand for it in graphs."""
    inputs: list[Any] = []
    for tensor in tensors:
        if isinstance(tensor, HostParameter):
            inputs += edges_of(_guarded[id(tensor)][1])
        else:
            inputs.append(tensor)
    return inputs
