"""The plan of a pipeline, in numbers and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from sp_lightning.pipeline.engine import Engine
from sp_lightning.pipeline.stats import readable_bytes


class Summary:
    """The plan of a pipeline, and what it takes at the moment; `str()` of it is a table."""

    def __init__(self, engine: Engine) -> None:
        arrangement, memory = engine.arrangement, engine.memory
        layout = arrangement.layout
        weights = [weight for unit in arrangement.all_units for weight in unit.every_weight]
        resident = arrangement.resident.weights
        self.device = str(engine.device)  # that forward and backward run on
        self.units = len(arrangement.units)
        self.k = arrangement.k  # units on the device at once
        self.k_prime = arrangement.k_prime  # units moved together
        # elements of all weights
        self.parameters = sum(weight.master.numel() for weight in weights)
        # of all weights in their own dtypes
        self.model_bytes = sum(weight.nbytes for weight in weights)
        # of the device, for slots, resident weights, all of the units that live there, and pieces of those that visit
        self.device_bytes = layout.device_bytes + engine.steps.visits.pieces.nbytes()
        # of the device, for gradients on their way to the host
        self.gradient_bytes = engine.stream.routes.staging.nbytes()
        self.resident = tuple(weight.name for weight in resident)  # names of resident weights
        self.resident_bytes = sum(weight.compute_bytes for weight in resident)  # on the device
        # of the host, for weights and for the copies of them that are sent
        self.host_bytes = sum(segment.memory.nbytes for segment in arrangement.segments)
        self.host_bytes += memory.nbytes_for("copies")
        # of the host, as far as it has been allocated: for gradients, optimizer state, and offloaded activations
        kept = memory.nbytes_for("gradients") + memory.nbytes_for("sums")
        self.host_gradient_bytes = engine.landing.nbytes() + kept
        self.optimizer_bytes = engine.optimizers.states.nbytes([weight.master for weight in arrangement.weights])
        # the part of optimizer state that visits the device, and is page-locked for that
        self.visiting_bytes = memory.nbytes_for("state")
        self.host_activation_bytes = engine.offloader.pool.held
        # devices that share this memory, but for buffers of each
        self.devices = 1 if engine.processes is None else engine.processes.box.count
        self.unit_names = tuple(unit.name for unit in arrangement.units)
        # names of units that live on the device, with gradients and optimizer state, and what these take there
        self.living = tuple(unit.name for unit in layout.units_on_device)
        self.living_bytes = layout.window.on_device_bytes
        # names of units that visit the device to be stepped, and of those that are stepped on the host
        visiting = [unit for unit in arrangement.in_window if unit.visits]
        self.visiting = tuple(part.name for unit in visiting for part in unit.parts)
        self.stepped_on_host = tuple(
            unit.name
            for unit in arrangement.units
            if unit.name not in self.visiting and any(weight.master.requires_grad for weight in unit.weights)
        )
        # sent for each unit
        self.unit_bytes = tuple(sum(weight.compute_bytes for weight in unit.every_weight) for unit in arrangement.units)
        # number of weights that are sent in autocast's dtype
        self.lowered = sum(weight.lowered for weight in weights)
        self.pinned = arrangement.is_pinned  # whether everything that is sent lies in pinned memory
        # the planner's choice and its prediction; None if nothing was planned
        self.plan = arrangement.plan
        # the share of all weights' bytes by which `device_bytes` is smaller
        self.saved = max(0.0, 1 - self.device_bytes / self.model_bytes) if self.model_bytes else 0.0
        # host memory for weights, gradients and optimizer state
        in_all = self.host_bytes + self.host_gradient_bytes + self.optimizer_bytes
        self.host_bytes_per_parameter = in_all / max(1, self.parameters)

    @property
    def stepping(self) -> str:
        """Which units live on the device, visit it or are stepped on the host, in words; empty if all are the last."""
        if not (self.living or self.visiting):
            return ""
        in_units = set(self.living).intersection(self.unit_names)
        there = f"{len(in_units)} of {self.units} units"
        if len(in_units) < len(self.living):
            there += ", and what is resident,"
        return (
            f"{there} live on the device with their state ({readable_bytes(self.living_bytes)}), {len(self.visiting)} "
            f"visit it to be stepped there, {len(self.stepped_on_host)} are stepped on the host"
        )

    @property
    def weights_on_device(self) -> str:
        """What weights take of the device at most, in words."""
        on_device = readable_bytes(self.device_bytes)
        if self.living:
            return f"{on_device}, with all of the units that live there"
        return f"{on_device} of {readable_bytes(self.model_bytes)}"

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as pairs of a name and a value."""
        streamed = "all stay on the device" if self.k >= self.units else "streamed"
        largest = readable_bytes(max(self.unit_bytes, default=0))
        on_host = readable_bytes(self.host_bytes)
        if self.devices > 1:
            on_host += f" for {self.devices} devices"
        if self.pinned:
            on_host += ", page-locked"
        return [
            ("device", self.device),
            ("units", f"{self.units} ({streamed}), largest {largest}"),
            ("k, k_prime", f"{self.k}, {self.k_prime}"),
            ("resident", f"{len(self.resident)} weights, {readable_bytes(self.resident_bytes)}"),
            ("weights on the device", self.weights_on_device),
            ("device memory saved", f"{self.saved:.0%} of what all weights take"),
            ("weights on the host", on_host),
            *([("optimizer steps", self.stepping)] if self.stepping else []),
        ]

    def __str__(self) -> str:
        return as_table(self.rows())


def as_table(rows: Sequence[tuple[str, str]]) -> str:
    """Format names and values as aligned lines of text."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
