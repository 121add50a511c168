"""The plan of a pipeline, in numbers and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sp_lightning.pipeline.engine import Engine
from sp_lightning.pipeline.layout.learned import WindowPlan
from sp_lightning.pipeline.stats import readable_bytes


@dataclass(frozen=True)
class Summary:
    """The plan of a pipeline; `str()` of it is a table."""

    device: str  # that forward and backward run on
    units: int
    k: int  # units on the device at once
    k_prime: int  # units moved together
    model_bytes: int  # of all weights in their own dtypes
    # Of the device, for slots, resident weights, and everything that belongs to units which live there: never exceeded.
    device_bytes: int
    gradient_bytes: int  # of the device, for gradients on their way to the host
    resident: tuple[str, ...]  # names of resident weights
    resident_bytes: int  # of them, on the device
    host_bytes: int  # for weights and for the copies of them that are sent
    host_gradient_bytes: int  # for gradients, as far as it has been allocated
    optimizer_bytes: int  # for optimizer state on the host, as far as it exists
    host_activation_bytes: int  # for offloaded activations, as far as it has been allocated
    parameters: int  # elements of all weights
    unit_names: tuple[str, ...]
    unit_bytes: tuple[int, ...]  # sent for each unit
    lowered: int  # number of weights that are sent in autocast's dtype
    pinned: bool  # whether everything that is sent lies in pinned memory
    plan: WindowPlan | None = None  # the planner's choice and its prediction; None if nothing was planned

    @property
    def host_bytes_per_parameter(self) -> float:
        """Host memory for weights, gradients and optimizer state, divided by `parameters`."""
        in_all = self.host_bytes + self.host_gradient_bytes + self.optimizer_bytes
        return in_all / self.parameters if self.parameters else 0.0

    @property
    def saved(self) -> float:
        """The share of all weights' bytes by which `device_bytes` is smaller."""
        return max(0.0, 1 - self.device_bytes / self.model_bytes) if self.model_bytes else 0.0

    @property
    def living_on_device(self) -> str:
        """A description of the units that live on the device; empty if none do."""
        if self.plan is None or not self.plan.on_device:
            return ""
        count, nbytes = len(self.plan.on_device), readable_bytes(self.plan.on_device_bytes)
        return f"{count} of {self.units} units, with gradients and optimizer state: {nbytes}"

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as pairs of a name and a value."""
        streamed = "all stay on the device" if self.k >= self.units else "streamed"
        largest = max(self.unit_bytes, default=0)
        return [
            ("device", self.device),
            ("units", f"{self.units} ({streamed}), largest {readable_bytes(largest)}"),
            ("k, k_prime", f"{self.k}, {self.k_prime}"),
            ("resident", f"{len(self.resident)} weights, {readable_bytes(self.resident_bytes)}"),
            ("weights on the device", f"{readable_bytes(self.device_bytes)} of {readable_bytes(self.model_bytes)}"),
            ("device memory saved", f"{self.saved:.0%} of what all weights take"),
            ("weights on the host", readable_bytes(self.host_bytes) + (", page-locked" if self.pinned else "")),
            *([("live on the device", self.living_on_device)] if self.living_on_device else []),
        ]

    def __str__(self) -> str:
        return as_table(self.rows())


def summarize(engine: Engine) -> Summary:
    """Summarize the plan of the pipeline that these parts belong to."""
    arrangement = engine.arrangement
    every_weight = [weight for unit in arrangement.all_units for weight in unit.every_weight]
    return Summary(
        device=str(engine.device),
        units=len(arrangement.units),
        k=arrangement.k,
        k_prime=arrangement.k_prime,
        model_bytes=sum(weight.nbytes for weight in every_weight),
        device_bytes=arrangement.device_bytes(),
        gradient_bytes=engine.stream.staging.nbytes(),
        resident=tuple(weight.name for weight in arrangement.resident.weights),
        resident_bytes=sum(weight.compute_bytes for weight in arrangement.resident.weights),
        host_bytes=sum(segment.host_bytes() for segment in arrangement.segments),
        host_gradient_bytes=engine.stream.host_bytes(),
        optimizer_bytes=engine.optimizers.state_bytes(weight.master for weight in arrangement.weights),
        host_activation_bytes=engine.pool.held,
        parameters=sum(weight.master.numel() for weight in every_weight),
        unit_names=tuple(unit.name for unit in arrangement.units),
        unit_bytes=tuple(sum(weight.compute_bytes for weight in unit.every_weight) for unit in arrangement.units),
        lowered=sum(weight.lowered for weight in every_weight),
        pinned=arrangement.is_pinned,
        plan=arrangement.plan,
    )


def as_table(rows: Sequence[tuple[str, str]]) -> str:
    """Format names and values as aligned lines of text."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
