"""Steps of units on the thread for work on host memory: planned once per optimizer, handed over, waited for.

They are handed over when `step()` is called, or while backward runs (`EarlyStep`), as soon as all gradients of a unit
have landed. A scope around that backward pass vouches for two things: `optimizer.step()` will follow, with the settings
that the optimizer has now, and nobody looks at gradients in between. Whoever does gets an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from sp_lightning.optim.host import Work
from sp_lightning.pipeline.gradients.buffers import HostGradients
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.gradients.unit_gradients import IS_TRAINED, Gradient, Scaling, Shipment, State, UnitGradients
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
from sp_lightning.pipeline.optimizer.kinds import makes_state, settings_of
from sp_lightning.pipeline.optimizer.unit_step import Update, update_weights
from sp_lightning.pipeline.processes.box import SharedMemory
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.quantized import QuantizedWeight
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.window.window import Window


class Plan:
    """What is decided once for an optimizer, as long as its param groups have the same parameters."""

    def __init__(self, optimizer: Optimizer, weights: Mapping[int, Weight], stream: GradientStream) -> None:
        # the gradients of its weights, in the order of its parameters, with the numbers of the param groups
        self.gradients: dict[Gradient, int] = {}
        self.others: list[list[nn.Parameter]] = []  # for each param group, the parameters that are no weights of ours
        for number, param_group in enumerate(optimizer.param_groups):
            self.others.append([])
            for parameter in param_group["params"]:
                weight = weights.get(id(parameter))
                if weight is None or isinstance(weight, QuantizedWeight):  # nobody trains these
                    self.others[-1].append(parameter)
                else:
                    self.gradients[stream.of[weight]] = number
        units = {gradient.weight.unit for gradient in self.gradients}
        # the units that its weights are in, first the one that the next forward needs first
        self.units = sorted(units, key=lambda unit: (not unit.resident, unit.index))


class GroupSteps:
    """Gives steps to the thread, and waits for them."""

    def __init__(self, window: Window, stream: GradientStream) -> None:
        self.window = window
        self.stream = stream
        # whether to take torch's fused kernels where the user left the choice to torch; as in plain training on the CPU
        self.fused = window.backend.device.type != "cpu"

    def begin(
        self,
        unit: Unit,
        optimizer: Optimizer,
        plan: Plan,
        settings: Sequence[dict[str, Any]],
        gradients: Mapping[Gradient, Tensor],
        buffers: Sequence[HostGradients] = (),
    ) -> None:
        """Have the thread step a unit when its gradients have landed, and then release the buffers that they lie in.

        Weights without a gradient stay as they are.
        """
        updates: dict[int, list[Update]] = {}  # by the numbers of param groups
        tickets: dict[Weight, Ticket | None] = {}  # of the weights that are stepped, what brings their gradients
        moved = 0
        for segment in unit.segments:
            for weight, copy in zip(segment.weights, segment.copies, strict=True):
                gradient = self.stream.of[weight]
                if (tensor := gradients.get(gradient)) is not None:
                    # state is looked up at once: `optimizer.state` may be cleared before the thread begins
                    state = optimizer.state.get(weight.master, {})
                    work = Work(weight.master.data, tensor, state, copy)
                    updates.setdefault(plan.gradients[gradient], []).append((work, gradient.scaling))
                    tickets[weight] = gradient.unit.ticket
                    moved += 2 * weight.home.nbytes + tensor.nbytes
        if not tickets:
            self.end(unit, plan)
            return
        counted = self._count(unit, plan)

        def step() -> None:
            with torch.inference_mode(False), torch.no_grad(), without_torch_function():
                for segment in unit.segments:
                    segment.refresh_copies(tickets.keys())
                for number, of_group in updates.items():
                    update_weights(optimizer, settings[number], of_group)
                _note_stepped(unit, tickets.keys())
                for memory, count in counted:
                    memory.reach(count)

        def release_buffers() -> None:
            for buffer in buffers:
                buffer.release()

        landed = [ticket for ticket in dict.fromkeys(tickets.values()) if ticket is not None]
        self._submit(unit, step, tickets.keys(), landed, moved, release_buffers)
        self.window.stats.overlapped_steps += len(unit.parts)

    def _submit(
        self,
        unit: Unit,
        job: Callable[[], None],
        weights: Set[Weight],
        after: Iterable[Ticket],
        moved: int = 0,
        cleanup: Callable[[], None] | None = None,
    ) -> None:
        self.window.finish_optimizer(unit)
        self.window.outdate(unit, weights)
        rank = 0 if unit.resident else unit.index + 1  # first what the next forward needs first
        after = [*self.window.copies_of([unit]), *after]
        unit.being_stepped = self.window.backend.work(job, after, moved, cleanup, rank)
        self.window.backend.trace.moved(Kind.STEP, unit.name, moved, unit.being_stepped)
        if unit.apart:  # weights made resident are in units that do not wait for this one's step
            self.window.finish_optimizer(unit)

    def end(self, unit: Unit, plan: Plan) -> None:
        """Count a step that changes no weight of a unit here; the thread waits for the process that steps them."""
        counted = self._count(unit, plan)
        if counted and unit.is_followed:
            weights = {weight for weight in unit.weights if self.stream.of[weight] in plan.gradients}
            stepped = [memory.reached(number) for memory, number in counted]
            self._submit(unit, partial(_note_stepped, unit, weights), weights, stepped)
        elif counted:
            self.window.finish_optimizer(unit)
            for segment in unit.segments:  # the optimizer's own code may have stepped them
                segment.check()
                segment.refresh_copies()
            for memory, number in counted:
                memory.reach(number)

    def _count(self, unit: Unit, plan: Plan) -> list[tuple[SharedMemory, int]]:
        """Count a step of weights that other processes have, too, whether or not it changes them; once."""
        counted: list[tuple[SharedMemory, int]] = []
        if unit.is_ahead:
            return counted
        for segment in unit.segments:
            memory = segment.memory.shared
            if memory is not None and any(self.stream.of[weight] in plan.gradients for weight in segment.weights):
                memory.begun += 1
                counted.append((memory, memory.begun))
        return counted

    def finish(self, units: Iterable[Unit]) -> None:
        """Wait until no step reads or writes the memory of these units any more.

        Raises:
            Exception: The first error of a step, when all have ended; the others mostly have the same cause.
        """
        errors = []
        for unit in units:
            try:
                self.window.finish_optimizer(unit)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def settle(self) -> None:
        """Wait until every step is done, and no copy to the device reads a master: others may write to them."""
        try:
            self.finish(self.window.units)
        finally:
            self.window.finish_copies(self.window.units)


def _note_stepped(unit: Unit, weights: Set[Weight]) -> None:
    with torch.inference_mode(False), without_torch_function():
        increment_version(weight.master for weight in weights)
        for segment in unit.segments:
            segment.note_stepped()


class EarlyStep:
    """A step of an optimizer that begins before its `step()` is called; takes gradients as they arrive.

    A unit is stepped only if no node of the graph holds one of its weights on the device any more.
    """

    def __init__(
        self, optimizer: Optimizer, plan: Plan, steps: GroupSteps, clamp: float | None, keeps_gradients: bool
    ) -> None:
        self.optimizer = optimizer
        self.keeps_gradients = keeps_gradients  # whether gradients are kept after the step
        self.plan = plan  # what is decided for it
        self.stepped: list[UnitGradients] = []  # the units that have taken the step
        self._steps = steps
        self._scaling = Scaling(clamp=clamp)
        # as they are when the first unit is stepped, not when the scope began: hooks before backward may change them
        self._settings: list[dict[str, Any]] | None = None
        self._shipments: list[Shipment] = []
        # those whose state this step makes, in this process; it stands in the order in which torch would make it
        trained = [g for g in plan.gradients if IS_TRAINED(g) and not g.weight.unit.is_followed]
        settings = optimizer.param_groups
        self.new = [g for g in trained if makes_state(optimizer, g.weight.master, settings[plan.gradients[g]])]
        optimizer.state.update({g.weight.master: {} for g in self.new})

    def wants(self, gradients: UnitGradients) -> bool:
        """Tell whether these gradients, which are complete, should go to the optimizer right away."""
        unit = gradients.unit
        if unit.resident or (gradients.sums is not None and unit.apart):  # the latter cannot wait for other processes
            return False
        return all(g in self.plan.gradients and not g.weight.other_twins for g in gradients.trained)

    def take(self, shipment: Shipment) -> None:
        """Step the unit when its last gradients have landed; if it is still needed, when backward leaves it."""
        unit = shipment.unit.unit
        if self._shipments and self._shipments[0].unit.unit is not unit:
            self.finish_backward()  # backward has moved on, and there are few landing buffers
        self._shipments.append(shipment)
        # an inner checkpoint holds frozen weights without a handle, and may read them after the others had gradients
        if all(weight.master.requires_grad for weight in unit.weights) and self._is_complete(unit):
            self._step(unit)

    def finish_backward(self) -> None:
        """Step the unit whose gradients arrived last, as backward has left it, or give them back if it is needed."""
        if self._shipments and self._is_complete(unit := self._shipments[0].unit.unit):
            self._step(unit)
        for shipment in self._shipments:
            self._steps.stream.take_back(shipment)
        self._shipments = []

    def _is_complete(self, unit: Unit) -> bool:
        """Tell whether all trained weights of a unit have their gradients, and no node holds a weight any more."""
        trained = sum(weight.master.requires_grad for weight in unit.weights)
        return not unit.handles and trained == sum(len(shipment.gradients) for shipment in self._shipments)

    def _step(self, unit: Unit) -> None:
        shipments, self._shipments = self._shipments, []
        if self._settings is None:
            self._settings = settings_of(self.optimizer, self._steps.fused)
        arrived = {g: tensor for s in shipments for g, tensor in zip(s.gradients, s.arrived, strict=True)}
        for gradient in arrived:
            gradient.scaling = self._scaling
        for shipment in shipments:
            self._steps.stream.pass_on(shipment.unit)
        if unit.is_followed:
            self._steps.end(unit, self.plan)
        else:
            buffers = [shipment.buffer for shipment in shipments if shipment.buffer is not None]
            self._steps.begin(unit, self.optimizer, self.plan, self._settings, arrived, buffers)
        unit.is_ahead = any(shipment.unit.sums is not None for shipment in shipments)
        if not unit.is_ahead and not arrived.keys().isdisjoint(self.new):
            self._steps.finish([unit])  # how state is made depends on torch's default dtype, which may change
        for shipment in shipments:
            shipment.unit.state = State.CONSUMED
            self.stepped.append(shipment.unit)
            if not self.keeps_gradients:
                shipment.unit.forget(shipment.gradients)
        self._steps.window.stats.steps_in_backward += len(unit.parts)

    def finish(self) -> None:
        """Take the units that were stepped for what they are: the optimizer's `step()` was called."""
        if self.new:  # other processes, which backward could not wait for, have ended theirs
            self._steps.finish([unit.unit for unit in self.stepped])
        for unit in self.stepped:
            unit.unit.is_ahead = False
            unit.state = State.HELD if self.keeps_gradients else State.EMPTY
        for master in [gradient.weight.master for gradient in self.new]:
            if not self.optimizer.state.get(master):
                self.optimizer.state.pop(master, None)  # it got no gradient

    def abandon(self) -> None:
        """Finish, and warn if not all weights have been stepped: the optimizer's `step()` will not be called."""
        for unit in self.plan.units:
            self._steps.end(unit, self.plan)
        self.finish()
        trained = sum(gradient.weight.master.requires_grad for gradient in self.plan.gradients)
        stepped = sum(len(unit.trained) for unit in self.stepped)
        if 0 < stepped < trained:
            warnings.warn(
                f"The exception came while the optimizer was stepping in backward: {stepped} weights have taken this "
                f"step, {trained - stepped} have not. Continue from a checkpoint, or train with "
                "`overlap_optimizer=False`.",
                stacklevel=2,
            )

    def check(self, optimizer: Optimizer, plan: Plan, why_not: str | None) -> None:
        """Check what the scope has vouched for, as the `step()` of an optimizer is called."""
        name = type(self.optimizer).__name__
        if optimizer is not self.optimizer:
            if any(gradient in plan.gradients for unit in self.stepped for gradient in unit.trained):
                raise RuntimeError(
                    f"{type(optimizer).__name__} is to step weights that another optimizer, {name}, has stepped in "
                    "backward although its own `step()` was not called yet. Train with `overlap_optimizer=False`."
                )
        elif why_not is not None:
            raise RuntimeError(
                f"Units were stepped in backward, but now {why_not}. Train with `overlap_optimizer=False`."
            )
        elif self._settings not in (None, settings_of(optimizer, self._steps.fused)):
            raise RuntimeError(
                f"{name} has stepped units in backward, and its param groups were changed after that, before `step()`. "
                "Set learning rates and the like before backward or after the step, or train with "
                "`overlap_optimizer=False`."
            )
