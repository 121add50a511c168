"""The plan of a pipeline, in numbers and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sp_lightning.pipeline.engine import Engine
from sp_lightning.pipeline.placing.places import WindowPlan
from sp_lightning.pipeline.stats import readable_bytes


@dataclass(frozen=True)
class Summary:
    """The plan of a pipeline, and the memory that it takes at the moment; `str()` of it is a table."""

    device: str  # the device that forward and backward run on
    units: int  # the number of units, each of `k_prime` neighbors
    k: int  # units on the device at once
    parameters: int  # elements of all weights
    model_bytes: int  # bytes of all weights in their own dtypes
    # device memory for slots, resident weights, units that stay there with all their state, and updates on the device
    device_bytes: int
    gradient_bytes: int  # device memory for gradients on their way to the host
    host_bytes: int  # host memory for weights, and for the copies of them that are sent
    host_gradient_bytes: int  # host memory for gradients that has been allocated so far
    optimizer_bytes: int  # host memory for optimizer state
    lowered: int  # weights that are sent in autocast's dtype
    pinned: bool  # whether all memory that is sent is pinned
    # names of units, of resident weights, of units that stay on the device, and of units that are updated there
    unit_names: tuple[str, ...]
    resident: tuple[str, ...]
    living: tuple[str, ...]
    visiting: tuple[str, ...]
    plan: WindowPlan | None  # the planner's choice and its prediction; None if nothing was planned

    @classmethod
    def of(cls, engine: Engine) -> Summary:
        """Return the summary of an engine."""
        arrangement, memory = engine.arrangement, engine.memory
        layout = arrangement.layout
        weights = [weight for unit in arrangement.all_units for weight in unit.every_weight]
        own_memory = sum(segment.memory.nbytes for segment in arrangement.segments)
        gradients = memory.nbytes_for("gradients") + memory.nbytes_for("sums")
        return cls(
            device=str(engine.device),
            units=len(arrangement.units),
            k=layout.window.k,
            parameters=sum(weight.master.numel() for weight in weights),
            model_bytes=sum(weight.nbytes for weight in weights),
            device_bytes=layout.device_bytes + engine.visits.nbytes(),
            gradient_bytes=engine.stream.routes.staging.nbytes(),
            host_bytes=own_memory + memory.nbytes_for("copies"),
            host_gradient_bytes=engine.stream.routes.landing.nbytes() + gradients,
            optimizer_bytes=engine.optimizers.states.nbytes([weight.master for weight in arrangement.weights]),
            lowered=sum(weight.lowered for weight in weights),
            pinned=arrangement.is_pinned,
            unit_names=tuple(unit.name for unit in arrangement.units),
            resident=tuple(weight.name for weight in arrangement.resident.weights),
            living=tuple(unit.name for unit in layout.units_on_device),
            visiting=tuple(unit.name for unit in arrangement.in_window if unit.update.is_on_device),
            plan=engine.plan if layout.window is engine.plan else None,
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as pairs of a name and a value."""
        place = "the GPU" if self.device != "cpu" else "the CPU, as if it were a GPU"
        streamed = f"all stay on {place}" if self.k >= self.units else f"{self.k} at a time on {place}"
        pinned = ", pinned" if self.pinned else ""
        updates = "on the CPU"
        if self.living or self.visiting:
            updates = (
                f"{len(self.living)} stay on the GPU, {len(self.visiting)} are updated there, the others on the CPU"
            )
        return [
            ("device", self.device),
            ("units", f"{self.units}: {streamed}"),
            ("GPU memory for weights", f"{readable_bytes(self.device_bytes)} of {readable_bytes(self.model_bytes)}"),
            ("CPU memory for weights", f"{readable_bytes(self.host_bytes)}{pinned}"),
            ("optimizer updates", updates),
        ]

    def __str__(self) -> str:
        return as_table(self.rows())


def as_table(rows: Sequence[tuple[str, str]]) -> str:
    """Format names and values as aligned lines of text."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
