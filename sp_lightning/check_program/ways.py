"""The ways in which a program is streamed: the places of its units and their updates, and policies of activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import cycle
from typing import Any, get_args

from typing_extensions import override

from sp_lightning.check_program.observer import Counts
from sp_lightning.pipeline import Engine, PipelineOptions, Planner, WindowPlan
from sp_lightning.pipeline.options import ActivationPolicy, Policy
from sp_lightning.planning import AutoPlanner
from sp_lightning.strategy import SuperpipelineMixin


class Placement(Enum):
    """The place of units, and the place where the optimizer updates them."""

    AFTER_BACKWARD = "updated on the CPU, after backward"
    IN_BACKWARD = "updated on the CPU, in backward"
    UPDATED_ON_GPU = "updated on the GPU"
    HALF_STAY = "every second unit stays on the GPU"
    CHOSEN = "placed as the planner chooses"
    CONFIGURED = "as configured"


@dataclass(frozen=True)
class Way:
    """One way to stream a program."""

    placement: Placement
    options: PipelineOptions

    def __str__(self) -> str:
        return f"{self.placement.value}, activations={self.options.activations!r}"

    @property
    def hides_gradients(self) -> bool:
        """Whether no code may read gradients, because units would be updated after backward otherwise."""
        return self.placement is not Placement.AFTER_BACKWARD

    def why_not_exercised(self, counts: Counts) -> str:
        """Say why no unit was placed or updated in this way; the text is empty if one was."""
        if self.placement is Placement.IN_BACKWARD and not counts.stats.steps_in_backward:
            return "no unit was updated in backward, because gradients are read or clipped, or updates need all weights"
        if self.placement is Placement.UPDATED_ON_GPU and not counts.stats.visits:
            return "without a GPU, only fused AdamW and Adam are updated this way"
        if self.placement is Placement.HALF_STAY and not counts.summary.living:
            return "no unit stayed on the GPU, as this optimizer updates weights together"
        return ""


def all_ways(options: PipelineOptions, budget: int) -> Iterator[Way]:
    """Yield the ways to stream a model, with all other options as the user has set them.

    Args:
        options: The user's options.
        budget: Device memory for the planner, which measures only if there is a limit.
    """
    window = options.k_prime  # as few units at once as there may be
    # random delays and poison in free memory show a copy that was not waited for
    common = replace(
        options,
        k="auto",
        memory_budget=None,
        overlap_optimizer="auto",
        optimizer_on="auto",
        debug=True,
    )
    placed = {
        Placement.AFTER_BACKWARD: replace(common, k=window, optimizer_on="host"),
        Placement.IN_BACKWARD: replace(common, k=2 * window, optimizer_on="host"),
        Placement.UPDATED_ON_GPU: common,
        Placement.HALF_STAY: common,
    }
    for placement, given in placed.items():
        for activations in get_args(ActivationPolicy):
            yield Way(placement, replace(given, activations=activations))
    chosen = replace(common, activations="auto", memory_budget=budget, debug=False)
    yield Way(Placement.CHOSEN, chosen)
    yield Way(Placement.CONFIGURED, options)


class FixedPlanner(Planner):
    """Places all units in one way from the second step on, when the optimizer has state."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    @override
    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        names = tuple(unit.name for unit in engine.arrangement.units)
        options = engine.options
        k = 2 if options.slots == "auto" else options.slots
        # if policies are left to the planner, the units have each of them in turn
        policies = dict(zip(names, cycle(get_args(Policy)), strict=False))
        placed = names if engine.stats.steps else ()
        visiting = placed if self._placement is Placement.UPDATED_ON_GPU else ()
        on_device = placed[::2] if self._placement is Placement.HALF_STAY else ()
        return WindowPlan(k, on_device=on_device, visiting=visiting, policies=policies)


class PlacedStrategy(SuperpipelineMixin):
    """The part of our strategy that a check replaces; `way` is set before the run."""

    way: Way
    reads_gradients = False

    @override
    def make_planner(self) -> Planner:
        if self.way.placement in (Placement.CHOSEN, Placement.CONFIGURED):
            return AutoPlanner()
        return FixedPlanner(self.way.placement)

    @override
    def _looks_at_gradients(self, callbacks: list[Any]) -> list[str]:
        reasons = ["`sp-lightning check` reads them"] if self.reads_gradients else []
        return [*reasons, *super()._looks_at_gradients(callbacks)]
