"""Findings that a pipeline makes while it runs, each of which improves the next arrangement.

The step in which something is found is right without it; the parts that find it see to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


@dataclass(frozen=True)
class WindowPlan:
    """A planner's choice for the window, and what it is expected to cost."""

    k: int  # units on the device at once, not counting those in `kept` and `on_device`
    k_prime: int  # units that travel together
    # names of units that have a place of their own: they are sent only when their weights have changed
    kept: tuple[str, ...] = ()
    on_device: tuple[str, ...] = ()  # names of units that live on the device, with their gradients and optimizer state
    on_device_bytes: int = 0  # device memory that `on_device` units take
    step_seconds: float = 0.0  # expected duration of a step
    bottleneck: Lane = Lane.COMPUTE  # the lane that has most to do
    device_bytes: int = 0  # expected device memory for weights, gradients on their way to the host and activations
    activation_bytes: int = 0  # the part of it that activations take
    # what becomes of each unit's activations, by the unit's name, if that was left to the planner
    policies: Mapping[str, Policy] = field(default_factory=dict)

    @property
    def window(self) -> tuple[object, ...]:
        """What units are arranged by."""
        return self.k, self.k_prime, self.kept, self.on_device


class Learned:
    """Findings that a pipeline makes while it runs, for the next arrangement; parameters are known by identity."""

    def __init__(self) -> None:
        self.used_outside: set[int] = set()  # weights that are used outside of their unit
        # names of units in the order in which the first step called them; None before that
        self.order: list[str] | None = None
        self.divided: list[nn.Module] = []  # modules that are not called themselves; only their children are
        self.lowered: set[int] = set()  # masters that autocast lowers
        self.used_as_is: set[int] = set()  # masters that are used in their own dtype
        self._sent_lowered: set[int] = set()  # those that could be sent lowered when that was last concluded
        self.plan: WindowPlan | None = None  # the planner's choice for the window
        # weights that were used outside of their unit since the arrangement was made
        self.touched_outside: list[Weight] = []
        self.outdated = False  # whether something was learned that calls for another arrangement
        self._trained: set[int] = set()  # parameters that have required a gradient in some step

    def note_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note, as a step with gradients begins, which parameters it trains.

        If there are new ones (a user unfreezes layers), units take more memory than the arrangement was made for.
        """
        known = len(self._trained)
        for parameter in parameters:
            if parameter.requires_grad:
                self._trained.add(id(parameter))
        self.outdated |= 0 < known < len(self._trained)

    def forget_all_but(self, alive: set[int]) -> None:
        """Forget all but these parameters: new objects may reuse the others' ids."""
        for known in (self.used_outside, self.lowered, self.used_as_is, self._sent_lowered, self._trained):
            known.intersection_update(alive)

    def conclude(self, units: Sequence[Unit], called: Sequence[str]) -> bool:
        """Draw the conclusions for the next arrangement; called between steps.

        Args:
            units: The streamed units of the present arrangement, in the expected order.
            called: Names of those that the first step called, in the order of their first calls.

        Returns:
            Whether another arrangement is called for.
        """
        if self.order is None and called:
            self.order = list(dict.fromkeys(called))
            # Consecutive units must not share a place, or the later one cannot be fetched ahead.
            self.outdated |= self.order != [unit.name for unit in units if unit.name in called]
        lowered = self.lowered - self.used_as_is
        self.outdated |= not lowered <= self._sent_lowered
        self._sent_lowered = lowered
        if not self.outdated:
            return False
        members = [member for unit in units for member in unit.members]
        for weight in self.touched_outside:
            users = [member for member in members if any(entry.weight is weight for entry in member.entries)]
            never_called = [m.module for m in users if m.entered == 0 and any(m.module.children())]
            if never_called:  # a mere container: its parent calls its children
                self.divided += never_called
            else:
                self.used_outside.add(id(weight.master))
        self.touched_outside.clear()
        self.outdated, self.plan = False, None  # which was made for other units
        return True
