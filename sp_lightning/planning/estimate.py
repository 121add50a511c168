"""`sp_lightning.plan(module)`: a model's predicted device memory, host memory and step time, as a table over k.

It is estimated from the model's shapes and from assumptions, without a machine to measure on: units are found by the
engine's own rules, on a copy of the model on the meta device. Each weight matrix multiplies and adds once for each
token, and a unit saves half as much again as its matrices read and write: transformer blocks with fused attention save
0.9 to 1.6 times that much. Logits, in fp32, are saved beside.
"""

from __future__ import annotations

import copy
import textwrap
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.activations.ways import Footprint, Link
from sp_lightning.pipeline.engine import SHARE_OF_FREE_MEMORY
from sp_lightning.pipeline.layout.memory import largest_unit_bytes
from sp_lightning.pipeline.options import ActivationPolicy
from sp_lightning.pipeline.sizes import parse_bytes, readable_bytes, readable_seconds
from sp_lightning.pipeline.units.finder import find_units
from sp_lightning.pipeline.weights.autocast import weights_of_known_layers
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.planning.choose import choose
from sp_lightning.planning.cost import Machine, Prediction, UnitWork, Workload
from sp_lightning.planning.measure import bytes_of

Precision: TypeAlias = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]

STATE = {
    "SGD": 0,
    **dict.fromkeys(("ASGD", "Adagrad", "RMSprop", "Muon"), 1),
    **dict.fromkeys(("Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Rprop"), 2),
}
"""State elements per parameter element of torch's optimizers, with their default arguments."""

_HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_DEVICE_MEMORY = 24 * 2**30  # if the user gives none, and there is no device
_SAVED = 1.5  # bytes that a unit saves for each one that its matrices read or write


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
        tokens: Number of tokens (or patches) in a step: how often each weight matrix is applied.

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
        for name, known in (("precision", get_args(Precision)), ("activations", get_args(ActivationPolicy))):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be one of {', '.join(known)}.")
        if isinstance(self.optimizer, str) and self.optimizer not in STATE:
            raise ValueError(f"`optimizer={self.optimizer!r}` is not one of {', '.join(STATE)}, nor a number of bytes.")
        if self.device_bytes <= 0:
            raise ValueError(f"`device_memory={self.device_memory!r}` must be an amount of memory, such as '24GiB'.")

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory; 0 if `device_memory` is not an amount."""
        if self.device_memory is not None:
            try:
                return parse_bytes(self.device_memory, device_bytes=None) or 0
            except ValueError:
                return 0
        return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else _DEVICE_MEMORY


def estimate(module: nn.Module, given: Assumptions) -> tuple[Workload, Machine]:
    """Estimate the workload of a model, which is neither changed nor called, and the machine that is assumed."""
    dtype, is_mixed = _HALF.get(given.precision), given.precision.endswith("mixed")
    module = _on_meta(module, None if is_mixed else dtype)
    division = find_units(module, given.units, given.resident, largest_unit_bytes(given.device_bytes))
    if is_mixed and dtype is not None:
        lowered = weights_of_known_layers(module)
        for weight in [weight for unit in division.units for weight in unit.weights if id(weight.master) in lowered]:
            weight.compute_dtype = dtype
    vocabulary = {child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)}
    units = tuple(_work(unit, given, vocabulary) for unit in division.units)
    shapes = [shape for unit in division.all_units() for shape in _matrices(unit)]
    logits = 4 * given.tokens * sum(shape[0] for shape in shapes if shape[0] in vocabulary)
    workload = Workload(
        units=units,
        resident=_work(division.resident, given, vocabulary),
        stepping="in backward" if any(unit.step_bytes for unit in units) else None,
        outside_bytes=logits + max([logits, *(way.working for unit in units for way in unit.ways)]),  # and gradients
    )
    return workload, Machine(given.to_device * 1e9, given.to_host * 1e9, given.host_bandwidth * 1e9)


def _on_meta(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Copy a module to the meta device, where it takes no memory; shared tensors stay shared."""
    attributes = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    copies: dict[int, Any] = {}
    for tensor in [*attributes, *module.buffers(), *module.parameters()]:
        empty = torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, copies)


def _matrices(unit: Unit) -> list[torch.Size]:
    """Return the shapes of all weights that a unit multiplies with; tables are looked up."""
    modules = [module for member in unit.members for module in member.module.modules()]
    computing = [module for module in modules if not isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return [p.shape for module in computing for p in module.parameters(recurse=False) if p.dim() > 1]


def _work(unit: Unit, given: Assumptions, vocabulary: Collection[int]) -> UnitWork:
    """Return the work of a unit; a matrix with as many rows as there are words makes logits."""
    matrices, work = _matrices(unit), bytes_of(unit)
    trained = [weight for weight in unit.weights if weight.master.requires_grad]
    weights, masters = (sum(weight.nbytes for weight in some) for some in (unit.weights, trained))
    copies, stepped = (sum(w.compute_bytes for w in some if w.lowered) for some in (unit.weights, trained))
    gradients = sum(weight.compute_bytes for weight in trained)
    numbers = sum(weight.master.numel() for weight in trained)
    state = STATE[given.optimizer] * masters if isinstance(given.optimizer, str) else int(given.optimizer * numbers)
    forward = 2 * given.tokens * sum(shape.numel() for shape in matrices) / (given.compute * 1e12)
    # Backward multiplies once for the input's gradient, and once more for the gradient of each trained weight.
    backward = forward * (1 + masters / max(1, weights))
    nbytes = given.tokens * (4 if given.precision == "32-true" else 2)
    inputs = nbytes * matrices[0][-1] if matrices else 0
    moved = sum(shape[-1] + (0 if shape[0] in vocabulary else shape[-2]) for shape in matrices)
    saved = max(inputs, int(_SAVED * nbytes * moved))
    footprint = Footprint(inputs, saved - inputs, saved, saved, repeatable=True, large_inputs=inputs)
    link = Link(up=given.to_device * 1e9, down=given.to_host * 1e9)
    ways = footprint.ways(link, work.weight_bytes, forward, backward)
    return replace(
        work,
        step_bytes=2 * (masters + state) + gradients + stepped,
        forward_seconds=forward,
        backward_seconds=backward,
        ways=tuple(way for way in ways if given.activations in ("auto", way.policy)),
        bytes_on_device=weights + masters + state + copies if given.resident_optimizer and trained else 0,
        # Until the first steps are measured, gradients stay as they come: in the master's dtype. Later those in a lower
        # dtype take that besides the copies that are sent.
        host_bytes=weights + state + max(masters, copies + gradients),
    )


_KS = (1, 2, 3, 4, 8, 16, 32, 64, 128)  # the rows of the table, as far as there are so many units


@dataclass(frozen=True)
class Report:
    """The predicted cost of training a model, for several k. `str()` of it is a table."""

    title: str  # the model's name in the table
    given: Assumptions
    parameters: int  # elements of all weights
    workload: Workload
    rows: Sequence[Prediction]  # for each k that fits, with `k_prime=1` and no unit kept on the device
    best: Prediction | None  # the choice with the fastest step; None if nothing fits
    last_row: str  # what the table says of the first k that does not fit

    def as_dict(self) -> dict[str, Any]:
        """Return numbers and names only, for JSON."""
        return {
            "model": self.title,
            "assumptions": {**asdict(self.given), "device_memory": self.given.device_bytes},
            "parameters": self.parameters,
            "units": {unit.name: unit.weight_bytes for unit in self.workload.units},
            "rows": [_as_dict(row) for row in self.rows],
            "best": self.best and _as_dict(self.best),
        }

    def __str__(self) -> str:
        given = {**asdict(self.given), "device_memory": readable_bytes(self.given.device_bytes)}
        units, columns = self.workload.units, ("device", "host", "to device", "to host", "step")
        largest = readable_bytes(max(unit.weight_bytes for unit in units))
        lines = [
            f"{self.title}: {self.parameters:,} parameters in {len(units)} units of at most {largest}",
            *textwrap.wrap("Assumed: " + ", ".join(f"{name}={value}" for name, value in given.items()), 110),
            "",
            f"   k {''.join(f'{column:>11}' for column in columns)}  bottleneck",
            *(_as_row(str(row.choice.k), row) for row in self.rows),
            *([self.last_row] if self.last_row else []),
        ]
        if self.best is None:
            return "\n".join([*lines, "", "Nothing fits. Fewer tokens help, or a lower precision, or other `units`."])
        chosen = _as_dict(self.best)
        counts = {name: chosen[name] for name in ("k", "k_prime", "kept", "on_device")} | chosen["activations"]
        words = ", ".join(f"{name} {count}" for name, count in counts.items())
        busy = ", ".join(f"{lane.value} {readable_seconds(seconds)}" for lane, seconds in self.best.lanes.items())
        return "\n".join([*lines, _as_row("best", self.best), "", f"Best: {words}", f"Busy: {busy}"])


def _as_dict(row: Prediction) -> dict[str, Any]:
    choice = row.choice
    return {
        "k": choice.k,
        "k_prime": choice.k_prime,
        "kept": len(choice.kept),
        "on_device": len(choice.on_device),
        "activations": dict(Counter(way.policy for way in choice.ways)),
        "seconds": row.seconds,
        "bottleneck": row.bottleneck.value,
        "lanes": {lane.value: seconds for lane, seconds in row.lanes.items()},
        "device_bytes": row.device_bytes,
        "host_bytes": row.host_bytes,
        "bytes_to_device": row.bytes_to_device,
        "bytes_to_host": row.bytes_to_host,
    }


def _as_row(label: str, row: Prediction) -> str:
    sizes = (row.device_bytes, row.host_bytes, row.bytes_to_device, row.bytes_to_host)
    columns = [*map(readable_bytes, sizes), readable_seconds(row.seconds)]
    return f"{label:>4} {''.join(f'{column:>11}' for column in columns)}  {row.bottleneck.value}"


def plan(module: nn.Module, assumptions: Assumptions | None = None, title: str = "") -> Report:
    """Estimate the device memory, host memory and step time of training a model, before it is trained.

    Nothing is computed and no weights are needed, so the module may be on the meta device. The numbers are estimates,
    from shapes and from the assumptions; during training the planner measures instead.

    Args:
        module: The model. It is neither changed nor called.
        assumptions: About the device, the host, the precision, the optimizer, and the size of a step.
        title: Name of the model in the table; by default, the name of its class.

    Raises:
        ValueError: If the model has no parameters, or `units` or `resident` do not fit it.

    Example::

        print(plan(model, Assumptions(device_memory="24GB", tokens=8 * 2048)))
    """
    given = assumptions or Assumptions()
    workload, machine = estimate(module, given)
    budget, length = int(SHARE_OF_FREE_MEMORY * given.device_bytes), len(workload.units)
    rows: list[Prediction] = []
    last_row = ""
    for k in [*(k for k in _KS if k < length), length]:
        try:
            rows.append(choose(workload, machine, budget, k=k, k_prime=1, fill=False))
        except ValueError as error:
            last_row = f"{k:>4}  {error}"
            break
    best = choose(workload, machine, budget) if rows else None
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Report(title or type(module).__name__, given, parameters, workload, rows, best, last_row)
