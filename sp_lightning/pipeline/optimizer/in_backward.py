"""Stepping units while backward runs: as soon as all of a group's gradients have landed.

Somebody vouches for it, with a scope around the backward pass: the optimizer's `step()` will follow with the settings
that it has, and nobody looks at gradients in between. Who does it all the same is told so (`check_unseen`).
A group is stepped when nothing holds one of its weights on the device any more: no node of the graph, no checkpoint.

Three things end at different times: the scope, with the user's `with`; groups whose gradients are arriving, with the
backward pass; what has been stepped, with `step()`.
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

from sp_lightning.pipeline._private import users_of_storage
from sp_lightning.pipeline.gradients.landing import Shipment
from sp_lightning.pipeline.gradients.scaling import Scaling
from sp_lightning.pipeline.optimizer.host_steps import HostSteps, Share
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.device import Group
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight

_OWN_USERS = 2  # of a master's memory: the master, and the tensor that its weight holds it by


@dataclass(eq=False)
class EarlyStep:
    """A step of an optimizer that begins before its `step()` is called.

    Attributes:
        optimizer: The optimizer.
        param_group_of: Its weights, each with the number of its param group.
        look_up_settings: Its param groups as they are now, without parameters.
        clamp: Gradients are clipped to plus and minus this value.
        keeps_gradients: Whether gradients that arrive in a lower dtype are kept when they have been used.
        settings: The param groups as they were when the first unit was stepped: hooks before backward may change them.
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
        """What each param group has of these weights."""
        if self.settings is None:
            self.settings = self.look_up_settings()
        shares, scaling = [], Scaling(clamp=self.clamp)
        for index, settings in enumerate(self.settings):
            own = {weight: gradient for weight, gradient in gradients.items() if self.param_group_of[weight] == index}
            if own:
                shares.append(Share(self.optimizer, settings, scaling, own))
        return shares

    def check_settings(self) -> None:
        """Called when `step()` has come.

        Raises:
            RuntimeError: Its settings are not those that units were stepped with.
        """
        if self.settings is None or _same(self.settings, self.look_up_settings()):
            return
        raise RuntimeError(
            f"{type(self.optimizer).__name__} has stepped units in backward, and its param groups were changed after "
            "that, before `step()`. Set learning rates and the like before backward or after the step, or train with "
            "`overlap_optimizer=False`."
        )


class InBackward:
    """Steps units while backward runs; the `Stepper` of the gradients.

    Args:
        steps: Has them done.
        keep: Takes gradients back that were not needed.
        stats: Counters.
        spent: Weights whose gradients were not kept, by identity; kept from one arrangement to the next.
        is_nested: Whether the gradient that autograd has just finished may not be the last one for its weight.
    """

    def __init__(
        self,
        steps: HostSteps,
        keep: Callable[[Shipment], None],
        stats: Stats,
        spent: set[int],
        is_nested: Callable[[], bool],
    ) -> None:
        self._steps = steps
        self._keep_shipment = keep
        self._stats = stats
        self._spent = spent
        self._is_nested = is_nested
        self._now: EarlyStep | None = None
        self._arriving: dict[Group, list[Shipment]] = {}
        self._begun: list[EarlyStep] = []

    # ------------------------------------------------------------------------------------- around backward and `step`

    @contextmanager
    def scope(self, step: EarlyStep) -> Iterator[None]:
        """Around a backward pass in which units may be stepped."""
        self._now = step
        try:
            yield
        finally:
            self._now = None

    def conclude(self, optimizer: Optimizer, weights: Iterable[Weight], why_not: str | None) -> set[Weight]:
        """The optimizer's `step()` has come.

        Args:
            optimizer: The optimizer.
            weights: What it is to step.
            why_not: Why it cannot step unit by unit now; None if it can.

        Returns:
            What of it has been stepped already.

        Raises:
            RuntimeError: What was vouched for is not so.
        """
        own = [step for step in self._begun if step.optimizer is optimizer]
        others = [step for step in self._begun if step.optimizer is not optimizer]
        for other in others:
            if not other.stepped.isdisjoint(weights):
                raise RuntimeError(
                    f"{type(optimizer).__name__} is to step weights that another optimizer, "
                    f"{type(other.optimizer).__name__}, has stepped in backward, before its own `step()` was called. "
                    "Train with `overlap_optimizer=False`."
                )
        if own and why_not is not None:
            raise RuntimeError(
                f"Units were stepped in backward, and now {why_not}. Train with `overlap_optimizer=False`."
            )
        for step in own:
            step.check_settings()
        self._begun = others
        return set[Weight]().union(*(step.stepped for step in own))

    def abandon(self) -> None:
        """After an exception: what was given to the thread is finished, nothing else is."""
        with contextlib.suppress(Exception):  # it has been told of, or belongs to what failed
            self._steps.settle()
        for step in self._begun:
            left = sum(weight.master.requires_grad for weight in step.param_group_of) - len(step.stepped)
            if left > 0:
                warnings.warn(
                    f"The exception came while the optimizer was stepping in backward: {len(step.stepped)} weights "
                    f"have taken this step, {left} have not. Go on from a checkpoint, or train with "
                    "`overlap_optimizer=False`.",
                    stacklevel=2,
                )
        self._now = None
        self._arriving.clear()
        self._begun.clear()
        self._spent.clear()

    # ------------------------------------------------------------------------------------------- while backward runs

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients that arrive in a lower dtype are kept when the optimizer has used them."""
        return self._now is not None and self._now.keeps_gradients

    def wants(self, unit: Unit) -> bool:
        """Whether the unit's complete gradients should go to the optimizer right away."""
        if self._now is None or unit.resident or self._is_nested():
            return False
        trainable = _trainable(unit.group)
        return self._steps.has_begun(self._now.optimizer, trainable) and all(
            weight in self._now.param_group_of and not is_aliased(weight) for weight in trainable
        )

    def has_stepped(self, weight: Weight) -> bool:
        """Whether a gradient of this weight would come too late."""
        return self.awaits_step(weight) or self.has_spent(weight)

    def step_in_backward(self, shipment: Shipment) -> None:
        """Gradients of a unit are on their way; step its group if they are the last ones."""
        group = shipment.unit.group
        for other in [other for other in self._arriving if other is not group]:
            self._keep(other)  # backward has moved on, and there are few slots
        shipments = self._arriving.setdefault(group, [])
        shipments.append(shipment)
        gradients = {w: g for s in shipments for w, g in zip(s.weights, s.arrived, strict=True)}
        if len(gradients) < len(_trainable(group)):
            return
        if group.handles or any(weight.twin.is_aliased for weight in group.host.weights):
            self._keep(group)
            return
        assert self._now is not None
        if self._now not in self._begun:
            self._begun.append(self._now)
        shares = self._now.shares(gradients)
        del self._arriving[group]
        self._now.stepped.update(gradients)
        self._steps.begin(group, shares, [s.ticket for s in shipments], shipments)
        self._spent.update(id(w.master) for s in shipments if s.slot is not None for w in s.weights)
        self._stats.overlapped_steps += group.units
        self._stats.steps_in_backward += group.units

    def end_of_backward(self) -> None:
        """Groups that could not be stepped in backward keep their gradients."""
        for group in list(self._arriving):
            self._keep(group)

    def _keep(self, group: Group) -> None:
        for shipment in self._arriving.pop(group):
            self._keep_shipment(shipment)

    def finish_step(self, group: Group) -> None:
        """Wait until no step reads or writes what belongs to a group any more."""
        self._steps.finish_step(group)

    # ----------------------------------------------------------------------------------------- for who asks afterwards

    @property
    def is_concluded(self) -> bool:
        """Whether it makes no difference to anybody that units were stepped in backward."""
        return not self._begun and not self._spent

    def awaits_step(self, weight: Weight) -> bool:
        """Whether a weight was stepped in backward, and the `step()` in which it would have been has not come yet."""
        return any(weight in step.stepped for step in self._begun)

    def has_spent(self, weight: Weight) -> bool:
        """Whether a weight's gradient was used as it arrived, and not kept."""
        return id(weight.master) in self._spent

    def forget_spent(self, weight: Weight) -> None:
        """Nobody misses a weight's gradient any more: `.grad` was set, as `zero_grad` does."""
        self._spent.discard(id(weight.master))

    def check_unseen(self, weight: Weight) -> None:
        """Called when somebody reads or sets a gradient.

        Raises:
            RuntimeError: It was used already, and what is done to it now would have no effect.
        """
        if self.awaits_step(weight):
            raise RuntimeError(
                f"The gradient of weight {weight.name!r} was used in backward already: its unit was stepped there, as "
                "nobody was expected to look at gradients, or to change them, before `step()`. Train with "
                "`overlap_optimizer=False`."
            )


def is_aliased(weight: Weight) -> bool:
    """Whether others hold a master's memory, so that nobody would notice who looks at it."""
    return users_of_storage(weight.host) > _OWN_USERS


def _trainable(group: Group) -> list[Weight]:
    return [weight for weight in group.host.weights if weight.master.requires_grad]


def _same(left: Any, right: Any) -> bool:
    """Whether two settings are equal, where some are tensors."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(_same, left, right))
    return left is right or bool(left == right)
