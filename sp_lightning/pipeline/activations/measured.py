"""What was measured of one member while it recomputed, and the ways that its activations can go."""

from __future__ import annotations

from sp_lightning.pipeline.activations.choice import Way
from sp_lightning.pipeline.activations.link import Link
from sp_lightning.pipeline.activations.recompute import Footprint

_STEPS = 2  # that are measured; the first one also warms things up
_BACKWARD = 2.0  # how much longer than its forward a unit's backward takes


class Measured:
    """What was measured of one member.

    Attributes:
        unit: The name of the unit that it belongs to.
        weights: Bytes of weights that travel for that unit.
        size: Bytes of the inputs of its largest call, but for those of the first step.
        workspace: The most that operations were seen to take beside what is saved, in its forward or backward.
        passes: What its calls took between a forward and its backward, by step and number of the pass in it.
        seconds: How long its second forwards took, for each step in which it was measured.
    """

    def __init__(self, unit: str, weights: int) -> None:
        self.unit = unit
        self.weights = weights
        self.size = 0
        self.workspace = 0
        self.passes: dict[tuple[int, int], Footprint] = {}
        self.seconds: dict[int, float] = {}

    def add(self, at: tuple[int, int], size: int, call: Footprint) -> None:
        """One more call, in this pass."""
        before = self.passes.get(at)
        self.passes[at] = call if before is None else before.combined_with(call)
        self.size = max(self.size, size)

    def forget(self, step: int) -> None:
        """What it took in this step counts no more."""
        self.passes = {at: call for at, call in self.passes.items() if at[0] != step}

    @property
    def is_measured(self) -> bool:
        """Whether it was measured in enough steps."""
        return len({step for step, _ in self.passes}) >= _STEPS

    def ways(self, link: Link | None, may_recompute: bool) -> list[Way]:
        """What can happen to its activations, and what each costs; offloading, if it may and there is a link for it."""
        took = self.footprint
        everything, working = took.held + took.saved, took.working + self.workspace
        forward = min(self.seconds.values(), default=0.0)
        ways = [Way("keep", everything, working, 0.0)]
        if may_recompute and took.repeatable:
            ways.append(Way("recompute", took.held, working, forward))
        if link is not None and took.large:
            seconds = link.offload_seconds(took.large, self.weights, forward, _BACKWARD * forward)
            ways.append(Way("offload", everything - took.large, working, seconds, leaving=took.large))
        return ways

    @property
    def footprint(self) -> Footprint:
        """What it took in the pass in which it took most."""
        return max(self.passes.values(), key=lambda call: call.held + call.saved)
