"""Estimates a workload from a model's shapes and assumptions, without a machine to measure on.

Units are found by the engine's own rules, on a copy of the model on the meta device. If the model's inputs are known, a
dry run counts what units compute and save. Else each weight matrix is assumed to multiply and add once for each token,
and activations are left out. Times are FLOPs over an assumed rate, and bytes over an assumed bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from sp_lightning.pipeline.activations.link import Link
from sp_lightning.pipeline.activations.ways import Way
from sp_lightning.pipeline.division.finder import find_units
from sp_lightning.pipeline.gradients.buffers import gradient_bytes
from sp_lightning.pipeline.layout.device_layout import largest_unit_bytes, sent_bytes, stepped_bytes
from sp_lightning.pipeline.modules.lowering import is_lowered_layer
from sp_lightning.pipeline.options import ActivationPolicy
from sp_lightning.pipeline.sizes import parse_bytes
from sp_lightning.pipeline.weights.sections import count_sections
from sp_lightning.pipeline.weights.units import Division, Unit
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.planning.dry_run import DryRun, Seen, dry_run, shapes_of
from sp_lightning.planning.workload import Machine, UnitWork, Workload, calls_in_order

Precision: TypeAlias = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]

GIGA, TERA = 1e9, 1e12

STATE = {
    "SGD": 0,
    "ASGD": 1,
    "Adagrad": 1,
    "RMSprop": 1,
    "Muon": 1,
    "Adadelta": 2,
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Rprop": 2,
}
"""State elements per parameter element of torch's optimizers, with their default arguments."""

_FACTORED = "Adafactor"  # keeps one element per row and column instead
_HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_DEVICE_MEMORY = 24 * 2**30  # if the user gives none, and there is no device


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about machine and training, for a plan without measurements.

    Args:
        device_memory: Device memory, of which a step may take 90 %: bytes, or text such as "24GiB". None asks the
            device, and is 24 GiB where there is none.
        to_device: Bandwidth of copies to the device, in GB/s.
        to_host: Bandwidth of copies to the host, in GB/s.
        compute: Speed that the device reaches on such a model, in TFLOP/s: about half of what its maker states.
        host_bandwidth: Bandwidth at which the optimizer reads and writes host memory, in GB/s.
        precision: The Trainer's `precision`.
        optimizer: Name of the optimizer's class in `torch.optim`, or the bytes of state that it keeps per parameter.
        activations: The strategy's `activations`.
        units: The strategy's `units`: names of module classes. None finds units automatically.
        resident: The strategy's `resident`.
        resident_optimizer: The strategy's `resident_optimizer`.
        tokens: Number of tokens that each weight matrix is applied to in a step, if the model's inputs are not known.

    Raises:
        ValueError: If a value is not above zero, or not one of the known ones.
    """

    device_memory: int | str | None = None
    to_device: float = 25.0
    to_host: float = 25.0
    compute: float = 80.0
    host_bandwidth: float = 60.0
    precision: Precision = "bf16-mixed"
    optimizer: float | str = "AdamW"
    activations: ActivationPolicy = "auto"
    units: str | Sequence[str] | None = None
    resident: Sequence[str] = ()
    resident_optimizer: bool = False
    tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("to_device", "to_host", "compute", "host_bandwidth", "tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}={getattr(self, name)}` must be above zero.")
        for name, allowed in (("precision", Precision), ("activations", ActivationPolicy)):
            if getattr(self, name) not in get_args(allowed):
                known = ", ".join(map(repr, get_args(allowed)))
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be one of {known}.")
        if isinstance(self.optimizer, str) and self.optimizer not in (*STATE, _FACTORED):
            known = ", ".join(sorted((*STATE, _FACTORED)))
            raise ValueError(
                f"`optimizer={self.optimizer!r}` is not one of {known}. Give the bytes that yours keeps per parameter."
            )
        self._check_device_memory()

    def _check_device_memory(self) -> None:
        given = self.device_memory
        try:
            known = given is None or parse_bytes(given, device_bytes=None)
        except ValueError:
            known = None
        if not known:
            raise ValueError(f"`device_memory={given!r}` must be an amount of memory: bytes, or text such as '24GiB'.")

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory."""
        if self.device_memory is not None:
            return parse_bytes(self.device_memory, device_bytes=None) or 0
        if torch.cuda.is_available():
            return int(torch.cuda.get_device_properties(0).total_memory)
        return _DEVICE_MEMORY


@dataclass(frozen=True)
class Estimate:
    """A model as a workload.

    Attributes:
        workload: The work of a step.
        machine: The assumed speeds.
        parameters: Number of elements of all weights.
        flops: FLOPs of a step, forward and backward.
    """

    workload: Workload
    machine: Machine
    parameters: int
    flops: float


def estimate(module: nn.Module, inputs: Any, given: Assumptions) -> Estimate:
    """Estimate the workload of a model.

    Args:
        module: The model, on any device, including the meta device. It is neither changed nor called.
        inputs: The inputs to its forward, as for `dry_run`; `None` if they are not known.
        given: The assumptions.

    Raises:
        ValueError: If the model has no parameters, `units` or `resident` do not fit it, or its forward cannot be
            followed (`CannotFollow`).
    """
    dtype = _HALF.get(given.precision)
    autocast = dtype if given.precision.endswith("mixed") else None
    module = shapes_of(module, None if autocast else dtype)
    division = find_units(module, given.units, given.resident, largest_unit_bytes(given.device_bytes), on_meta=True)
    if autocast is not None:
        for weight in _lowered_weights(module, division.units):
            weight.compute_dtype = autocast
    run = _look(module, division, inputs, autocast, given)
    seen, outside = run.units, run.outside
    work = tuple(_work(unit, calls, given) for unit, calls in zip(division.units, seen, strict=True))
    resident = _work(division.resident, Seen(), given)
    workload = Workload(
        units=work,
        resident=resident,
        stepping="in backward" if any(unit.gradient_bytes for unit in (*work, resident)) else None,
        turn_seconds=3 * outside.flops / (given.compute * TERA),
        outside_bytes=outside.saved,
        reserve_bytes=max([outside.saved, *(calls.inputs + calls.saved for calls in seen)]),
        calls=calls_in_order(run.calls, len(work)),
    )
    weights = [weight for unit in division.all_units() for weight in unit.weights]
    computing = sum(unit.forward_seconds + unit.backward_seconds for unit in work) + workload.turn_seconds
    machine = Machine(
        to_device=given.to_device * GIGA,
        to_host=given.to_host * GIGA,
        optimizer=given.host_bandwidth * GIGA / _bytes_per_step(weights, given),
    )
    parameters = sum(weight.master.numel() for weight in weights)
    return Estimate(workload, machine, parameters, computing * given.compute * TERA)


def _look(
    module: nn.Module, division: Division, inputs: Any, autocast: torch.dtype | None, given: Assumptions
) -> DryRun:
    """Count what is computed and saved in units and outside of them."""
    if inputs is not None:
        return dry_run(module, division, inputs, autocast)
    tables = [child for child in module.modules() if isinstance(child, nn.Embedding | nn.EmbeddingBag)]
    looked_up = {id(parameter) for table in tables for parameter in table.parameters()}

    def multiplied(unit: Unit) -> int:
        masters = [weight.master for weight in unit.weights]
        return sum(master.numel() for master in masters if master.dim() > 1 and id(master) not in looked_up)

    return DryRun([Seen(flops=2 * given.tokens * multiplied(unit)) for unit in division.units])


def _lowered_weights(root: nn.Module, units: Sequence[Unit]) -> list[Weight]:
    """Return the fp32 weights that only layers with a lowered operation own; the engine looks at how they are used."""
    owned: set[int] = set()
    elsewhere: set[int] = set()
    for module in root.modules():
        found = owned if is_lowered_layer(module) else elsewhere
        found.update(id(parameter) for parameter in module._parameters.values() if parameter is not None)
    lowered = owned - elsewhere
    weights = [weight for unit in units for weight in unit.weights]
    return [weight for weight in weights if weight.dtype is torch.float32 and id(weight.master) in lowered]


def _work(unit: Unit, seen: Seen, given: Assumptions) -> UnitWork:
    trained = [weight for weight in unit.weights if weight.master.requires_grad]
    numbers = sum(weight.master.numel() for weight in unit.weights)
    parameters = sum(weight.master.numel() for weight in trained)
    forward = seen.flops / (given.compute * TERA)
    # Backward multiplies once for the input's gradient, and once more for the gradient of each trained weight.
    backward = forward * (1 + parameters / numbers) if numbers else 0.0
    weights = sent_bytes([unit])
    return UnitWork(
        name=unit.name,
        weight_bytes=weights,
        gradient_bytes=gradient_bytes(unit) if trained else 0,
        parameters=parameters,
        forward_seconds=forward,
        backward_seconds=backward,
        host_bytes=sum(_host_bytes(weight, given) for weight in unit.weights),
        ways=_ways(seen, weights, forward, backward, given),
        bytes_on_device=sum(_bytes_on_device(weight, given) for weight in unit.weights) if trained else 0,
        sections=count_sections(weight.layout for weight in unit.weights),
        stepped_bytes=stepped_bytes(unit),
    )


def _ways(seen: Seen, weights: int, forward: float, backward: float, given: Assumptions) -> tuple[Way, ...]:
    """Return what may become of a unit's activations, as far as the user leaves the choice."""
    link = Link(up=given.to_device * GIGA, down=given.to_host * GIGA)
    ways = seen.footprint.ways(link, weights, forward, backward)
    return tuple(way for way in ways if given.activations in ("auto", way.policy))


def _host_bytes(weight: Weight, given: Assumptions) -> int:
    """Return the most host memory for a master, its lowered copy, its gradient and its optimizer state."""
    copy = weight.compute_bytes if weight.lowered else 0
    if not weight.master.requires_grad:
        return weight.nbytes + copy
    # In the first step a gradient comes in the master's dtype, and there is no copy yet. Until the first steps are
    # measured, gradients stay as they come; after that, those in a lower dtype need no memory of their own.
    gradient = max(weight.nbytes, copy + weight.compute_bytes)
    return weight.nbytes + gradient + _state_bytes(weight.master, given)


def _bytes_on_device(weight: Weight, given: Assumptions) -> int:
    """Return what a weight, its gradient, its optimizer state and autocast's copy of it take on the device."""
    if not given.resident_optimizer:
        return 0
    trained = weight.nbytes + _state_bytes(weight.master, given) if weight.master.requires_grad else 0
    return weight.nbytes + trained + weight.lowered * weight.compute_bytes


def _state_bytes(parameter: nn.Parameter, given: Assumptions) -> int:
    if not isinstance(given.optimizer, str):
        return int(given.optimizer * parameter.numel())
    if given.optimizer in STATE:
        return STATE[given.optimizer] * parameter.nbytes
    if parameter.dim() < 2:
        return parameter.nbytes
    *matrices, rows, columns = parameter.shape
    return prod(matrices) * (rows + columns) * parameter.element_size()


def _bytes_per_step(weights: Sequence[Weight], given: Assumptions) -> float:
    """Return what an optimizer reads and writes per parameter: gradient, master, state, and the copy that is sent."""
    trained = [weight for weight in weights if weight.master.requires_grad]
    touched = sum(
        2 * (weight.nbytes + _state_bytes(weight.master, given)) + weight.compute_bytes * (2 if weight.lowered else 1)
        for weight in trained
    )
    return touched / max(1, sum(weight.master.numel() for weight in trained)) or 1.0
