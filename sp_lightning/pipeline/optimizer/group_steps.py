"""Steps of groups on the thread for work on host memory: planned once per optimizer, handed over, waited for.

They are handed over when `step()` is called, or while backward runs (`EarlyStep`), as soon as all gradients of a group
have landed. A scope around that backward pass vouches for two things: `optimizer.step()` will follow, with the settings
that the optimizer has now, and nobody looks at gradients in between. Whoever does gets an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.buffers import LandingBuffer
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.gradients.unit_gradients import NO_SCALING, Gradient, Scaling, Shipment, State, UnitGradients
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Kind, Ticket
from sp_lightning.pipeline.optimizer.kinds import keeps_state, settings_of
from sp_lightning.pipeline.optimizer.unit_step import UnitStep
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.quantized import QuantizedWeight
from sp_lightning.pipeline.weights.units import Group
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.weights.window import Window


class PlannedStep(NamedTuple):
    """The weights of one group that are in one param group, given by its number, and what steps them."""

    param_group: int
    gradients: list[Gradient]
    unit_step: UnitStep


class Plan:
    """What is decided once for an optimizer, as long as its param groups have the same parameters."""

    def __init__(self, optimizer: Optimizer, weights: Mapping[int, Weight], stream: GradientStream) -> None:
        self._parameters = [list(param_group["params"]) for param_group in optimizer.param_groups]
        # the gradients of its weights, in the order of its parameters, with the numbers of the param groups
        self.gradients: dict[Gradient, int] = {}
        self.others: list[list[nn.Parameter]] = []  # for each param group, the parameters that are no weights of ours
        groups: set[Group] = set()
        for number, parameters in enumerate(self._parameters):
            self.others.append([])
            for parameter in parameters:
                weight = weights.get(id(parameter))
                if weight is None or isinstance(weight, QuantizedWeight):  # nobody trains these
                    self.others[-1].append(parameter)
                else:
                    self.gradients[stream.of(weight)] = number
                    groups.add(weight.unit.group)
        # the steps of each group, first of the group that the next forward needs first
        self.steps = {
            group: self._steps_of(group, type(optimizer), stream)
            for group in sorted(groups, key=lambda group: (not group.resident, group.index))
        }

    def _steps_of(self, group: Group, kind: type[Optimizer], stream: GradientStream) -> list[PlannedStep]:
        in_order = list(zip(map(stream.of, group.weights), chain(*(s.copies for s in group.segments)), strict=True))
        steps = []
        for number in dict.fromkeys(self.gradients[g] for g, _ in in_order if g in self.gradients):
            chosen = [(g, copy) for g, copy in in_order if self.gradients.get(g) == number]
            weights = [gradient.weight for gradient, _ in chosen]
            unit_step = UnitStep(kind, [w.master for w in weights], [w.home for w in weights], [c for _, c in chosen])
            steps.append(PlannedStep(number, [gradient for gradient, _ in chosen], unit_step))
        return steps

    def is_for(self, optimizer: Optimizer) -> bool:
        """Tell whether the optimizer has the parameters that this was decided for."""
        groups = optimizer.param_groups
        return len(groups) == len(self._parameters) and all(
            len(group["params"]) == len(known) and all(map(is_, group["params"], known))
            for group, known in zip(groups, self._parameters, strict=True)
        )


class GroupSteps:
    """Gives steps to the thread, and knows which are under way."""

    def __init__(self, window: Window, backend: Backend, stream: GradientStream, stats: Stats, fused: bool) -> None:
        self.stream = stream
        self.stats = stats
        self._window = window
        self._backend = backend
        self._fused = fused
        self._under_way: list[Group] = []

    def settings(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return a copy of each param group as it is now, without its parameters."""
        return [settings_of(param_group, optimizer, self._fused) for param_group in optimizer.param_groups]

    def begin(
        self,
        group: Group,
        optimizer: Optimizer,
        steps: Sequence[PlannedStep],
        settings: Sequence[dict[str, Any]],
        gradients: Mapping[Gradient, Tensor],
        buffers: Sequence[LandingBuffer] = (),
    ) -> None:
        """Have the thread step a group when its gradients have landed; weights without one stay as they are.

        Args:
            group: The group.
            optimizer: The optimizer.
            steps: Its plan for the group.
            settings: Its param groups without their parameters.
            gradients: The gradients of these weights, and maybe of others.
            buffers: Landing buffers that gradients lie in, which are released after the step.
        """
        weights: set[Weight] = set()
        landing: dict[Ticket | None, None] = {}
        moved = 0
        for gradient in [gradient for step in steps for gradient in step.gradients if gradient in gradients]:
            weights.add(gradient.weight)
            landing[gradient.unit.ticket] = None
            moved += 2 * gradient.weight.home.nbytes + gradients[gradient].nbytes
        if not weights:
            return
        self._window.finish_optimizer(group)
        runs = [run for step in steps for run in _runs(optimizer, step, settings[step.param_group], gradients)]

        def step() -> None:
            with torch.inference_mode(False), torch.no_grad(), without_torch_function():
                for segment in group.segments:
                    segment.refresh_copies(weights)
                for run in runs:
                    run()
                for segment in group.segments:
                    segment.note_stepped()

        def release_buffers() -> None:
            for buffer in buffers:
                buffer.release()

        self._window.outdate(group, weights)
        after = [*self._window.copies_of([group]), *filter(None, landing)]
        rank = 0 if group.resident else group.index + 1
        group.being_stepped = self._backend.work(step, after, moved, release_buffers, rank=rank)
        self._backend.trace.moved(Kind.STEP, group.name, moved, group.being_stepped)
        self._under_way.append(group)
        self.stats.overlapped_steps += len(group.units)
        if group.apart:
            # weights made resident are in groups that do not wait for this one's step
            self.finish([group])

    def finish(self, groups: Iterable[Group] | None = None) -> None:
        """Wait until no step reads or writes the memory of these groups any more, by default of all.

        Raises:
            Exception: The first error of a step. All other steps have ended by then, and their errors are dropped: they
                mostly have the same cause.
        """
        errors = []
        waiting = list(self._under_way if groups is None else groups)
        for group in waiting:
            try:
                self._window.finish_optimizer(group)
            except Exception as error:
                errors.append(error)
                waiting += self._under_way if len(errors) == 1 else []
        self._under_way = [group for group in self._under_way if group.being_stepped is not None]
        if errors:
            raise errors[0]

    def settle(self) -> None:
        """Wait until every step is done, and no copy to the device reads a master: others may write to them.

        Raises:
            Exception: The first error of a step.
        """
        try:
            self.finish()
        finally:
            self._window.finish_copies(self._window.groups)

    def note_finished(self) -> bool:
        """Note which steps are over, and tell whether none is under way any more; does not wait."""
        self.finish([g for g in self._under_way if g.being_stepped is not None and g.being_stepped.done])
        return not self._under_way


def _runs(
    optimizer: Optimizer, step: PlannedStep, settings: dict[str, Any], gradients: Mapping[Gradient, Tensor]
) -> Iterator[Callable[[], None]]:
    """Yield what runs a step, once for each scaling of its gradients.

    State is looked up at once: `optimizer.state` may be cleared or replaced before the thread begins.
    """
    states, scalings = [], {}
    for gradient in step.gradients:
        states.append(optimizer.state.get(gradient.weight.master, {}))
        if gradient in gradients:
            scalings[id(gradient.scaling)] = gradient.scaling
    for scaling in scalings.values():
        own = [gradients.get(gradient) if gradient.scaling is scaling else None for gradient in step.gradients]
        yield partial(step.unit_step.run, optimizer, settings, scaling, own, states)


class EarlyStep:
    """A step of an optimizer that begins before its `step()` is called; takes gradients as they arrive.

    A group is stepped only if no node of the graph holds one of its weights on the device any more.
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

    def wants(self, unit: UnitGradients) -> bool:
        """Tell whether the unit's complete gradients should go to the optimizer right away."""
        if unit.unit.group.resident:
            return False
        groups, state = self.optimizer.param_groups, self.optimizer.state
        for gradient in unit.trained:
            weight, number = gradient.weight, self.plan.gradients.get(gradient)
            if number is None or weight.lowered_leaves:
                return False
            if keeps_state(self.optimizer, groups[number]) and not state.get(weight.master):
                return False
        return True

    def take(self, shipment: Shipment) -> None:
        """Step the unit's group when its last gradients have landed; if it is still needed, when backward leaves it."""
        group = shipment.unit.unit.group
        if self._shipments and self._shipments[0].unit.unit.group is not group:
            self.finish_backward()  # backward has moved on, and there are few landing buffers
        self._shipments.append(shipment)
        # an inner checkpoint holds frozen weights without a handle, and may read them after the others had gradients
        if all(weight.master.requires_grad for weight in group.weights) and self._is_complete(group):
            self._step(group)

    def finish_backward(self) -> None:
        """Step the group whose gradients arrived last, as backward has left it, or give them back if it is needed."""
        if self._shipments and self._is_complete(group := self._shipments[0].unit.unit.group):
            self._step(group)
        for shipment in self._shipments:
            self._steps.stream.take_back(shipment)
        self._shipments = []

    def _is_complete(self, group: Group) -> bool:
        """Tell whether all trained weights of a group have their gradients, and no node holds a weight any more."""
        trained = sum(weight.master.requires_grad for weight in group.weights)
        return not group.handles and trained == sum(len(shipment.gradients) for shipment in self._shipments)

    def _step(self, group: Group) -> None:
        shipments, self._shipments = self._shipments, []
        if self._settings is None:
            self._settings = self._steps.settings(self.optimizer)
        arrived = {g: tensor for s in shipments for g, tensor in zip(s.gradients, s.arrived, strict=True)}
        for gradient in arrived:
            gradient.scaling = self._scaling
        buffers = [shipment.buffer for shipment in shipments if shipment.buffer is not None]
        self._steps.begin(group, self.optimizer, self.plan.steps[group], self._settings, arrived, buffers)
        for unit in [shipment.unit for shipment in shipments]:
            unit.state = State.CONSUMED
            self.stepped.append(unit)
        for gradient, tensor in arrived.items():
            if not self.keeps_gradients:
                gradient.forget()
            elif tensor.dtype == gradient.weight.dtype:  # these are clipped in place
                gradient.scaling = NO_SCALING
        self._steps.stats.steps_in_backward += len(group.units)

    def finish(self) -> None:
        """Take the units that were stepped for what they are: the optimizer's `step()` was called."""
        for unit in self.stepped:
            unit.state = State.LANDED
            if not self.keeps_gradients:
                self._steps.stream.consume(unit.trained)

    def abandon(self) -> None:
        """Finish, and warn if not all weights have been stepped: the optimizer's `step()` will not be called."""
        self.finish()
        trained = sum(gradient.weight.master.requires_grad for gradient in self.plan.gradients)
        stepped = sum(len(unit.trained) for unit in self.stepped)
        if stepped < trained:
            warnings.warn(
                f"The exception came while the optimizer was stepping in backward: {stepped} weights have taken this "
                f"step, {trained - stepped} have not. Continue from a checkpoint, or train with "
                "`overlap_optimizer=False`.",
                stacklevel=2,
            )

    def check(self, optimizer: Optimizer, plan: Plan, why_not: str | None) -> None:
        """Check what the scope has vouched for, as the `step()` of an optimizer is called.

        Raises:
            RuntimeError: Units have been stepped that the optimizer would step again, or with other settings.
        """
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
        elif self._settings is not None and not _are_equal(self._settings, self._steps.settings(optimizer)):
            raise RuntimeError(
                f"{name} has stepped units in backward, and its param groups were changed after that, before `step()`. "
                "Set learning rates and the like before backward or after the step, or train with "
                "`overlap_optimizer=False`."
            )


def _are_equal(left: Any, right: Any) -> bool:
    """Tell whether two settings, which may contain tensors, are equal."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_are_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(_are_equal, left, right))
    return left is right or bool(left == right)
