"""The guard: what follows from accesses to masters (guard.py), and from weights used outside of their unit.

A weight that is used outside of its unit's calls, or in another dtype than the one it is sent in, gets memory of its
own on the device at once, so that this step is right. The next arrangement makes the former resident, and sends the
latter in its own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sp_lightning.pipeline.calls.graphs import CastCache
from sp_lightning.pipeline.calls.guard import HostParameter, differentiate, means_the_master, stand_ins
from sp_lightning.pipeline.gradients.unit_gradients import State
from sp_lightning.pipeline.lanes.at_work import optimizer_steps
from sp_lightning.pipeline.lanes.forks import FORKED
from sp_lightning.pipeline.operands import ON_DEVICE, instances_in, is_metadata, name_of, replace_instances
from sp_lightning.pipeline.torch_private import graph_task, in_backward, in_transform, without_torch_function
from sp_lightning.pipeline.units.unit import Member, Residency
from sp_lightning.pipeline.weights.leaf import guarded
from sp_lightning.pipeline.weights.quantized import QuantizedWeight
from sp_lightning.pipeline.weights.weight import Weight

if TYPE_CHECKING:
    from sp_lightning.pipeline.engine import Engine


class Guard:
    """Guards the masters of an engine's arrangement, and decides what follows from accesses to them."""

    def __init__(self, engine: Engine) -> None:
        # whether a step or a backward pass is under way, so that operations on masters get the device's weights
        self.in_step = False
        self.window = engine.window
        self._casts = CastCache(engine.device)
        self._engine = engine
        self._weights = [weight for weight in engine.arrangement.weights if not isinstance(weight, QuantizedWeight)]

    def install(self) -> None:
        """Guard the masters."""
        for weight in self._weights:
            guarded[id(weight.master)] = self, weight
        self._give_class(HostParameter)

    def remove(self) -> None:
        """Turn the masters back into ordinary Parameters. Idempotent."""
        self._give_class(nn.Parameter)
        for weight in self._weights:
            guarded.pop(id(weight.master), None)

    def _give_class(self, cls: type[nn.Parameter]) -> None:
        for weight in self._weights:
            weight.master.__class__ = cls

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that has masters among its arguments."""
        name = name_of(func)
        if name in ON_DEVICE and self.in_step and not optimizer_steps.depth:
            return func(torch.empty(0, device=self._engine.device), *args[1:])
        if not is_metadata(name):
            # of several models there may be, each with its own guard
            found = [guarded[id(master)] for master in instances_in((args, kwargs), HostParameter)]
            means_masters = means_the_master(name, args, kwargs)
            if not (means_masters or optimizer_steps.depth) and any(guard.in_step for guard, _ in found):
                return _run_on_device(func, args, kwargs)
            for guard, weight in found:
                guard.before_access(weight, means_masters)
        with without_torch_function():
            return func(*args, **kwargs)

    def before_access(self, weight: Weight, writes: bool = False) -> None:
        """Finish what is under way with a master, because code outside of the engine reads it, or writes to it."""
        if self._engine.at_work.is_forked:
            self._check_in_fork(weight)
        elif self.in_step:
            window, unit = self.window, weight.unit
            with self._engine.at_work:
                window.finish_optimizer(unit)
                window.finish_copies([unit])
                window.write_back([weight])
            if writes:  # or gets an alias to write to: what is on the device is checked before next use
                for copied_from in {unit, weight.twin.unit}:
                    window.note_write(copied_from)
        elif not self.window.settled:
            self._engine.settle()

    def _check_in_fork(self, weight: Weight) -> None:
        """Raise unless a fork of the process has the value of a weight."""
        engine, step = self._engine, weight.unit.being_stepped
        if step is not None:
            step.join()  # it has failed if it was under way
        # Memory that is sent to an accelerator is hidden from forks; what processes share changes while one reads it.
        if engine.device.type != "cpu" or engine.processes is not None or weight.twin.is_touched():
            raise RuntimeError(f"Weight {weight.name!r} cannot be read here. {FORKED}")

    def before_gradient(self, weight: Weight, reads: bool) -> None:
        """Put a master's gradient into its `.grad`, because somebody reads it; else drop it, because it is replaced."""
        gradient = self._engine.stream.of[weight]
        unit = gradient.unit
        if unit.state is State.EMPTY:
            return
        if unit.state is State.CONSUMED or (reads and self._engine.backward.running):
            with self._engine.at_work:
                self._engine.backward.forget_failed()
        if unit.state is State.CONSUMED:
            raise RuntimeError(
                f"The gradient of weight {weight.name!r} was used in backward already: its unit was stepped there, "
                "because nobody was expected to read or change gradients before `step()`. Train with "
                "`overlap_optimizer=False`."
            )
        stream = self._engine.stream
        if not reads:
            stream.exchange.drop([gradient])
            return
        if gradient in stream.pending:
            raise RuntimeError(
                f"The gradient of weight {weight.name!r} is on its way to the host, and cannot be read before backward "
                "has ended. Read it in `on_after_backward`, or in a hook on the weight: "
                "`register_post_accumulate_grad_hook`, or `register_hook` to change it."
            )
        with self._engine.at_work:
            if gradient.host is not None:
                self.window.finish_optimizer(weight.unit)
                stream.exchange.show(gradient)

    # ------------------------------------------------------------------------------------------ weights on the device

    def serve(self, weight: Weight) -> nn.Parameter:
        """Return the weight on the device in its own dtype, for an operation outside of its unit."""
        engine = self._engine
        with engine.at_work:
            self.window.finish_optimizer(weight.unit)
            engine.arrangement.unused_in_step = False
            engine.graphs.has_served |= torch.is_grad_enabled() and weight.master.requires_grad and not in_backward()
            if weight.lowered:
                self.keep_as_is(weight)
            if weight.twin.parameter.requires_grad != weight.master.requires_grad:
                engine.backward.follow_requires_grad(weight.twin)
            unit = weight.twin.unit
            is_there = unit.residency is not Residency.ABSENT and (unit.users > 0 or weight.unit.is_reached)
            if not (unit.resident or is_there):
                self._keep_on_device(weight)
            unit = weight.twin.unit
            unit.suspect |= not self.in_step
            self.window.bring(unit)
            if not self.in_step:  # but in another model's: no step of this one's looks for changes from now on
                for segment in unit.segments:
                    segment.take_sample()
            return weight.twin.parameter

    def unblock(self, member: Member) -> None:
        """Make a member's weights resident if their unit cannot be brought, as a running call occupies its place."""
        for unit in member.needed:
            if self.window.is_blocked(unit):
                for weight in {entry.weight: None for entry in member.entries if entry.weight.twin.unit is unit}:
                    self._keep_on_device(weight)

    def _keep_on_device(self, weight: Weight) -> None:
        self._make_resident(weight)
        self._engine.learned.touched_outside.append(weight)

    def note_cast(self, weight: Weight, dtype: torch.dtype, builds_graph: bool) -> bool:
        """Note that autocast casts a weight: if that is all that it is used for, it is sent lowered from then on.

        Its gradients are at once: they have come out of a cast, and have all their bits in that dtype. Tell whether the
        graph that is being built has no other cast of it: autocast's cache may have the first one.
        """
        learned = self._engine.learned
        if builds_graph:
            again = in_backward()
            graph = graph_task() if again else self._engine.graphs.current.number
            filling = self._casts.filling()
            earlier, filled = weight.cast_in.get(again, (None, None))
            weight.cast_in[again] = graph, filling
            if graph == earlier:
                return filling is not None and filling == filled
            adds_up = not again and self._engine.graphs.is_waiting(earlier)  # with gradients of another cast
            weight.cast_to = None if adds_up or id(weight.master) in learned.used_as_is else dtype
        if builds_graph or not weight.master.requires_grad:
            learned.lowered.add(id(weight.master))
        return True

    def keep_as_is(self, weight: Weight) -> None:
        """Send a weight in its own dtype from the next arrangement on; if it is lowered now, make it resident."""
        self._engine.learned.used_as_is.add(id(weight.master))
        weight.cast_to = None
        if weight.lowered:
            self._make_resident(weight)

    def _make_resident(self, weight: Weight) -> None:
        """Give a weight memory of its own on the device until the next arrangement, which is due."""
        if in_transform():  # to which new memory would belong
            raise RuntimeError(
                f"Weight {weight.name!r} is used outside of its module, within a transform of `torch.func`. Name it in "
                "`resident=`."
            )
        self.window.finish_optimizer(weight.unit)  # it is sent at once
        self.window.write_back([weight])
        self._engine.arrangement.make_resident(weight)
        self._engine.learned.outdated = True


def _run_on_device(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is torch.autograd.grad:
        return differentiate(*args, **kwargs)
    if func is torch.autograd.backward:
        return func(*args, **{**kwargs, "inputs": [edge for each in kwargs["inputs"] for edge in stand_ins(each)]})
    with without_torch_function():
        args, kwargs = replace_instances((args, kwargs), HostParameter, _serve)
    return func(*args, **kwargs)


def _serve(master: HostParameter) -> nn.Parameter:
    guard, weight = guarded[id(master)]
    return guard.serve(weight)
