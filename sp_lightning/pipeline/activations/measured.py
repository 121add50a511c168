"""Measurements of one member while it recomputes, and the ways to have its activations that follow from them."""

from __future__ import annotations

from sp_lightning.pipeline.activations.footprint import Footprint
from sp_lightning.pipeline.activations.link import Link
from sp_lightning.pipeline.activations.ways import OFFLOADING, Way

_STEPS_TO_MEASURE = 2  # the first one also warms things up
_BACKWARD_PER_FORWARD = 2.0  # how many times as long as its forward a unit's backward takes


class Measured:
    """Measurements of one member.

    Attributes:
        unit: The name of the unit that it belongs to.
        weights: Bytes of weights that travel for that unit.
        size: Bytes of the inputs of its largest call, those of the first step left out.
        workspace: The most that operations took besides what is saved, in its forward or backward.
        passes: What its calls took between a forward and its backward, by step and number of the pass in it.
        seconds: How long its second forwards took in each step.
    """

    def __init__(self, unit: str, weights: int) -> None:
        self.unit = unit
        self.weights = weights
        self.size = 0
        self.workspace = 0
        self.passes: dict[tuple[int, int], Footprint] = {}
        self.seconds: dict[int, float] = {}

    def add(self, at: tuple[int, int], size: int, call: Footprint) -> None:
        """Add a call to the pass `at`."""
        before = self.passes.get(at)
        self.passes[at] = call if before is None else before.combined_with(call)
        self.size = max(self.size, size)

    def forget(self, step: int) -> None:
        """Discard what it took in this step."""
        self.passes = {at: call for at, call in self.passes.items() if at[0] != step}

    @property
    def is_measured(self) -> bool:
        """Whether it was measured in enough steps."""
        return len({step for step, _ in self.passes}) >= _STEPS_TO_MEASURE

    def ways(self, link: Link | None, may_recompute: bool, inputs_stay: bool = False) -> list[Way]:
        """Return the ways that are open to it; offloading only if there is a link.

        Args:
            link: The speed of copies; None if nothing can be offloaded.
            may_recompute: Whether its forwards may run again.
            inputs_stay: Whether its inputs stay on the device whatever is done, because others hold them.
        """
        took = self.footprint
        took = took._replace(working=took.working + self.workspace, repeatable=may_recompute and took.repeatable)
        if inputs_stay:
            took = took._replace(large=max(0, took.large - took.large_inputs), large_inputs=0)
        forward = min(self.seconds.values(), default=0.0)
        ways = took.ways(link, self.weights, forward, _BACKWARD_PER_FORWARD * forward)
        return [way for way in ways if way.leaving or way.policy not in OFFLOADING]  # else it is equal to another

    @property
    def footprint(self) -> Footprint:
        """What it took in the pass in which it took most."""
        return max(self.passes.values(), key=lambda call: call.held + call.saved)
