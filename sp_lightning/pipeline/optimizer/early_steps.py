"""Stepping units while backward runs, as soon as all gradients of a group have landed.

A scope around the backward pass vouches for two things: `optimizer.step()` will follow, with the settings that the
optimizer has now, and nobody looks at gradients in between. Whoever does gets an error (`check_not_used`).
A group is stepped only if nothing holds one of its weights on the device any more: no node of the graph, no checkpoint.

Three things end at different times: the scope, with the user's `with`; the arrival of a group's gradients, with the
backward pass; a step that was begun early, with `step()`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.buffers import Shipment
from sp_lightning.pipeline.gradients.scaling import Scaling
from sp_lightning.pipeline.optimizer.host_steps import HostSteps, Share
from sp_lightning.pipeline.optimizer.stepping import has_state
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import post_accumulate_hooks
from sp_lightning.pipeline.weights.group import Group
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


@dataclass(eq=False)
class EarlyStep:
    """A step of an optimizer that begins before its `step()` is called.

    Attributes:
        optimizer: The optimizer.
        param_group_of: The index of the param group of each of its weights.
        look_up_settings: Returns its param groups as they are now, without parameters.
        clamp: Value to clip gradients to, plus and minus; None not to clip them.
        keeps_gradients: Whether gradients are kept after the step.
        settings: The param groups as they were when the first unit was stepped, and not when the scope began: hooks
            before backward may change them.
        stepped: Weights that have taken the step.
    """

    optimizer: Optimizer
    param_group_of: Mapping[Weight, int]
    look_up_settings: Callable[[], list[dict[str, Any]]]
    clamp: float | None
    keeps_gradients: bool
    settings: list[dict[str, Any]] | None = None
    stepped: set[Weight] = field(default_factory=set)

    def shares(self, gradients: Mapping[Weight, Tensor]) -> list[Share]:
        """Divide these weights among the param groups."""
        if self.settings is None:
            self.settings = self.look_up_settings()
        shares, scaling = [], Scaling(clamp=self.clamp)
        for index, settings in enumerate(self.settings):
            own = {weight: gradient for weight, gradient in gradients.items() if self.param_group_of[weight] == index}
            if own:
                shares.append(Share(self.optimizer, settings, scaling, own))
        return shares

    def steps_with_state(self, weight: Weight) -> bool:
        """Tell whether the optimizer steps a weight, and makes no state of it."""
        index = self.param_group_of.get(weight)
        return index is not None and has_state(self.optimizer, self.optimizer.param_groups[index], weight.master)

    def check_settings(self) -> None:
        """Check, when `step()` is called, that the settings are those that units were stepped with.

        Raises:
            RuntimeError: They were changed in between.
        """
        if self.settings is None or _equal(self.settings, self.look_up_settings()):
            return
        raise RuntimeError(
            f"{type(self.optimizer).__name__} has stepped units in backward, and its param groups were changed after "
            "that, before `step()`. Set learning rates and the like before backward or after the step, or train with "
            "`overlap_optimizer=False`."
        )


class EarlyStepper:
    """Steps units while backward runs; the `Stepper` of the gradients.

    Args:
        steps: Gives steps to the thread.
        take_back: Called with each shipment that was not used after all.
        stats: Counters.
        is_nested: Tells whether the gradient that autograd has just finished may not be the last one for its weight.
    """

    def __init__(
        self,
        steps: HostSteps,
        take_back: Callable[[Shipment], None],
        stats: Stats,
        is_nested: Callable[[], bool],
    ) -> None:
        self._steps = steps
        self._take_back = take_back
        self._stats = stats
        self._is_nested = is_nested
        self._current: EarlyStep | None = None
        self._arriving: dict[Group, list[Shipment]] = {}
        self._awaiting_step: list[EarlyStep] = []

    # ------------------------------------------------------------------------------------- around backward and `step`

    @contextmanager
    def scope(self, step: EarlyStep) -> Iterator[None]:
        """Let units be stepped in the backward pass that runs in this scope."""
        self._current = step
        try:
            yield
        finally:
            self._current = None

    def conclude(self, optimizer: Optimizer, weights: Iterable[Weight], why_not: str | None) -> set[Weight]:
        """Conclude the early steps of an optimizer whose `step()` was called.

        Args:
            optimizer: The optimizer.
            weights: The weights that it is to step.
            why_not: The reason why it cannot step unit by unit now; None if it can.

        Returns:
            The weights that have been stepped already.

        Raises:
            RuntimeError: A promise of the scope was broken.
        """
        own = [step for step in self._awaiting_step if step.optimizer is optimizer]
        others = [step for step in self._awaiting_step if step.optimizer is not optimizer]
        for other in others:
            if not other.stepped.isdisjoint(weights):
                raise RuntimeError(
                    f"{type(optimizer).__name__} is to step weights that another optimizer, "
                    f"{type(other.optimizer).__name__}, has stepped in backward although its own `step()` was not "
                    "called yet. Train with `overlap_optimizer=False`."
                )
        if own and why_not is not None:
            raise RuntimeError(
                f"Units were stepped in backward, but now {why_not}. Train with `overlap_optimizer=False`."
            )
        for step in own:
            step.check_settings()
        self._awaiting_step = others
        return set[Weight]().union(*(step.stepped for step in own))

    def abandon(self) -> None:
        """Finish the steps that were given to the thread, and begin no other, after an exception."""
        with contextlib.suppress(Exception):  # its error was raised already, or is due to the exception
            self._steps.settle()
        for step in self._awaiting_step:
            left = sum(weight.master.requires_grad for weight in step.param_group_of) - len(step.stepped)
            if left > 0:
                warnings.warn(
                    f"The exception came while the optimizer was stepping in backward: {len(step.stepped)} weights "
                    f"have taken this step, {left} have not. Continue from a checkpoint, or train with "
                    "`overlap_optimizer=False`.",
                    stacklevel=2,
                )
        self._current = None
        self._arriving.clear()
        self._awaiting_step.clear()

    # ------------------------------------------------------------------------------------------- while backward runs

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are kept after the optimizer has used them."""
        return self._current is not None and self._current.keeps_gradients

    def wants(self, unit: Unit) -> bool:
        """Tell whether the unit's complete gradients should go to the optimizer right away."""
        if self._current is None or unit.resident or self._is_nested():
            return False
        return all(
            self._current.steps_with_state(weight)
            and not weight.is_aliased
            and not post_accumulate_hooks(weight.master)  # they are called when backward has ended
            for weight in _trainable(unit.group)
        )

    def has_stepped(self, weight: Weight) -> bool:
        """Tell whether the weight was stepped already, so that another gradient of it would come too late."""
        return self.awaits_step(weight)

    def step_in_backward(self, shipment: Shipment) -> None:
        """Take note of gradients on their way to the optimizer; step the unit's group if they are its last."""
        group = shipment.unit.group
        for other in [other for other in self._arriving if other is not group]:
            self._give_back(other)  # backward has moved on, and there are few landing buffers
        shipments = self._arriving.setdefault(group, [])
        shipments.append(shipment)
        gradients = {w: g for s in shipments for w, g in zip(s.weights, s.arrived, strict=True)}
        if len(gradients) < len(_trainable(group)):
            return
        if group.handles or any(weight.twin.is_aliased for weight in group.weights):
            self._give_back(group)
            return
        assert self._current is not None
        if self._current not in self._awaiting_step:
            self._awaiting_step.append(self._current)
        shares = self._current.shares(gradients)
        del self._arriving[group]
        self._current.stepped.update(gradients)
        self._steps.begin(group, shares, [s.ticket for s in shipments], shipments)
        self._stats.overlapped_steps += group.unit_count
        self._stats.steps_in_backward += group.unit_count

    def end_of_backward(self) -> None:
        """Give back the gradients of groups that could not be stepped in backward."""
        for group in list(self._arriving):
            self._give_back(group)

    def _give_back(self, group: Group) -> None:
        for shipment in self._arriving.pop(group):
            self._take_back(shipment)

    # ------------------------------------------------------------------------------------------------- after backward

    @property
    def is_concluded(self) -> bool:
        """Whether no step begun in backward awaits its `step()`."""
        return not self._awaiting_step

    def awaits_step(self, weight: Weight) -> bool:
        """Tell whether a weight was stepped in backward, and `step()` of its optimizer is still to come."""
        return any(weight in step.stepped for step in self._awaiting_step)

    def check_not_used(self, weight: Weight) -> None:
        """Check that a gradient that somebody reads or sets was not used in backward.

        Raises:
            RuntimeError: It was used already, so changing it now would have no effect.
        """
        if self.awaits_step(weight):
            raise RuntimeError(
                f"The gradient of weight {weight.name!r} was used in backward already: its unit was stepped there, "
                "because nobody was expected to read or change gradients before `step()`. Train with "
                "`overlap_optimizer=False`."
            )


def _trainable(group: Group) -> list[Weight]:
    return [weight for weight in group.weights if weight.master.requires_grad]


def _equal(left: Any, right: Any) -> bool:
    """Tell whether two settings, which may contain tensors, are equal."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left is right or bool(left == right)
