"""Estimates the work of a step from a model's shapes and from assumptions, without a machine to measure on.

Units are found by the engine's own rules, on a copy of the model on the meta device. Each weight matrix multiplies and
adds once for each token. What a step of a language model takes is counted there, too (rehearsal.py). Of other models
nobody knows what to call them with: a unit saves half as much again as its matrices read and write.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import nn

from sp_lightning.optim.layout import GROUP
from sp_lightning.pipeline.activations.memory import Footprint
from sp_lightning.pipeline.options import ActivationPolicy, OptimizerPlace, parse_bytes
from sp_lightning.pipeline.units.finder import find_units
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.autocast import weights_of_cast_layers
from sp_lightning.planning.cost import Machine, Stepping, UnitWork, Workload
from sp_lightning.planning.measure import bytes_of
from sp_lightning.planning.memory import bytes_of_pieces
from sp_lightning.planning.rehearsal import StepMemory, on_meta, rehearse
from sp_lightning.planning.ways import ways_of

Precision: TypeAlias = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]

Master: TypeAlias = Literal["split", "split24"]
Moments: TypeAlias = Literal["fp32", "bf16", "int8"]

STATE = {
    "SGD": 0,
    **dict.fromkeys(("ASGD", "Adagrad", "Lion", "RMSprop", "Muon"), 1),
    **dict.fromkeys(("Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Rprop"), 2),
}
"""State elements per parameter element of torch's optimizers and of Lion, with their default arguments."""

COMPACT = ("AdamW", "Adam", "SGD", "Lion")
"""Optimizers that `sp_lightning.optim` has, too."""

_MORE_COMPACT: tuple[tuple[Master, Moments], ...] = (
    ("split", "fp32"),
    ("split", "bf16"),
    ("split", "int8"),
    ("split24", "int8"),
)
_LOW_BYTES = {None: 0.0, "split": 2.0, "split24": 1.0}  # of a master, beside the bf16 weight
_MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / GROUP}  # with a scale for each group

_KNOWN: dict[str, tuple[object, ...]] = {
    "precision": get_args(Precision),
    "activations": get_args(ActivationPolicy),
    "optimizer_on": get_args(OptimizerPlace),
    "master": (None, *get_args(Master)),
    "moments": get_args(Moments),
}
_ABOVE_ZERO = (
    "to_device", "to_host", "both_ways", "compute", "host_bandwidth", "host_bandwidth_int8", "memory_bandwidth",
    "device_step", "device_step_int8", "gradient_clip_val", "tokens", "length", "devices",
)  # fmt: skip
_HALF = {
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
_DEVICE_MEMORY = 24 * 2**30  # if the user gives none, and there is no device
_LEAST_MEMORY = 2**16  # bytes; less is a number without its unit
_SAVED = 1.5  # bytes that a unit saves for each one that its matrices read or write
# what copies in both directions at once reach of the sum of both
_BOTH_WAYS = 0.85
# what host memory gives in all, if cores and copies ask for it at once, for each byte that the optimizer alone reaches
_MEMORY_FOR_ALL = 1.5


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
        host_bandwidth_int8: The same with int8 moments, which are computed. None is as `host_bandwidth`.
        both_ways: Bandwidth of copies in both directions at once, in GB/s of both together. None takes 85 % of the sum.
        memory_bandwidth: Bandwidth of host memory for all that asks for it at once, cores and copies, in GB/s. None is
            half as much again as `host_bandwidth`.
        device_step: Bandwidth at which the optimizer steps on the device, in GB/s of what it would read and write on
            the host. None counts nothing: in plain training this is part of what `compute` says.
        device_step_int8: The same with int8 moments. None is as `device_step`.
        precision: The Trainer's `precision`.
        gradient_clip_val: The Trainer's `gradient_clip_val`: by norm, for which all gradients have to be there first.
        host_memory: Host memory that the ladder is for: bytes, or text such as "64GiB". None shows usual amounts.
        optimizer: Name of the optimizer's class in `torch.optim`, or the bytes of state that it keeps per parameter.
        master: What `sp_lightning.optim` keeps of fp32 masters beside bf16 weights. None for torch's optimizers.
        moments: How `sp_lightning.optim` keeps moments.
        activations: The strategy's `activations`.
        units: The strategy's `units`: names of module classes. None finds units automatically.
        resident: The strategy's `resident`.
        optimizer_on: The strategy's `optimizer_on`.
        tokens: Number of tokens (or patches) in a step: how often each weight matrix is applied, on each device.
        length: Number of these in a row, for a language model. None puts them all in one.
        devices: Devices of the machine, which share its memory and what can be read of it in a second.

    Raises:
        ValueError: If a value is not above zero, or not one of the known ones.
    """

    device_memory: int | str | None = None
    host_memory: int | str | None = None
    to_device: float = 25.0
    to_host: float = 25.0
    compute: float = 80.0
    host_bandwidth: float = 60.0
    host_bandwidth_int8: float | None = None
    both_ways: float | None = None
    memory_bandwidth: float | None = None
    device_step: float | None = None
    device_step_int8: float | None = None
    precision: Precision = "bf16-mixed"
    gradient_clip_val: float | None = None
    optimizer: float | str = "AdamW"
    master: Master | None = None
    moments: Moments = "fp32"
    activations: ActivationPolicy = "auto"
    units: str | Sequence[str] | None = None
    resident: Sequence[str] = ()
    optimizer_on: OptimizerPlace = "auto"
    tokens: int = 2048
    length: int | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}={value}` must be above zero.")
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be one of {', '.join(map(str, known))}.")
        if isinstance(self.optimizer, str) and self.optimizer not in STATE:
            raise ValueError(f"`optimizer={self.optimizer!r}` is not one of {', '.join(STATE)}, nor a number of bytes.")
        if self.is_compact and self.optimizer not in COMPACT:
            raise ValueError(
                f"`master` and `moments` are for {', '.join(COMPACT)}, not `optimizer={self.optimizer!r}`."
            )
        if self.master is not None and self.precision != "bf16-true":
            raise ValueError(f"`master={self.master!r}` needs bf16 weights: `precision='bf16-true'`.")
        for name, nbytes in (("device_memory", self.device_bytes), ("host_memory", self.host_bytes)):
            if nbytes is not None and nbytes <= 0:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be an amount of memory, such as '24GiB'.")
            if nbytes is not None and nbytes < _LEAST_MEMORY:
                raise ValueError(f"`{name}={getattr(self, name)!r}` is {nbytes} bytes. Was '{nbytes}GiB' meant?")

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory; 0 if `device_memory` is not an amount."""
        if self.device_memory is not None:
            return _bytes_in(self.device_memory)
        if not torch.cuda.is_available():
            return _DEVICE_MEMORY
        return int(torch.cuda.get_device_properties(0).total_memory)

    @property
    def host_bytes(self) -> int | None:
        """Bytes of host memory; None if no amount is given, 0 if it is not one."""
        return None if self.host_memory is None else _bytes_in(self.host_memory)

    @property
    def is_compact(self) -> bool:
        """Whether the optimizer is one of `sp_lightning.optim`."""
        return self.master is not None or self.moments != "fp32"

    @property
    def steps_by_unit(self) -> bool:
        """Whether units are stepped one by one: not by an optimizer of the user's own, which may do anything."""
        return isinstance(self.optimizer, str) and self.optimizer != "ASGD"

    @property
    def may_visit(self) -> bool:
        """Whether state of units may visit the device to be stepped there; several devices would have to agree."""
        return self.devices == 1 and self.optimizer in COMPACT

    @property
    def optimizer_words(self) -> str:
        """The optimizer, and how it keeps what."""
        kept = [] if self.master is None else [f"master={self.master!r}"]
        kept += [] if self.moments == "fp32" else [f"moments={self.moments!r}"]
        return f"{self.optimizer}({', '.join(kept)})" if kept else str(self.optimizer)

    def state_bytes(self, numbers: int, nbytes: int) -> int:
        """Return what the optimizer keeps for trained weights of so many numbers, and so many bytes."""
        if not isinstance(self.optimizer, str):
            return int(self.optimizer * numbers)
        if not self.is_compact:
            return STATE[self.optimizer] * nbytes
        moments = STATE[self.optimizer] * _MOMENT_BYTES[self.moments]
        return int(numbers * (_LOW_BYTES[self.master] + moments))


def ladder(given: Assumptions) -> Iterator[Assumptions]:
    """Yield the ways to keep masters and moments: what is given, then those of `sp_lightning.optim`, if torch's is.

    Each takes less host memory than the one before it. This is what `plan` shows, what a run that will not fit is
    advised to take, and what the callback names where the optimizer is what a step waits for.
    """
    yield given
    if given.optimizer in COMPACT and not given.is_compact:
        for master, moments in _MORE_COMPACT:
            yield replace(given, precision="bf16-true", master=master, moments=moments)


def _bytes_in(amount: int | str) -> int:
    try:
        return parse_bytes(amount, device_bytes=None) or 0
    except ValueError:
        return 0


def estimate(
    module: nn.Module, given: Assumptions, rehearsed: dict[Precision, StepMemory | None] | None = None
) -> tuple[Workload, Machine]:
    """Estimate the workload of a model, which is not changed, and the assumed machine; note what was `rehearsed`."""
    rehearsed = {} if rehearsed is None else rehearsed
    dtype, is_mixed = _HALF.get(given.precision), given.precision.endswith("mixed")
    original, module = module, on_meta(module, None if is_mixed else dtype)
    division = find_units(module, given.units, given.resident, given.device_bytes)
    lowered = dtype if is_mixed else None
    if lowered is not None:
        cast = weights_of_cast_layers(module)
        for unit in division.units:
            for weight in unit.weights:
                if id(weight.master) in cast:
                    weight.compute_dtype = lowered
    if given.precision not in rehearsed:
        members = [member.name for unit in division.units for member in unit.members]
        again = on_meta(original, None if is_mixed else dtype)
        rehearsed[given.precision] = rehearse(again, members, given.tokens, given.length, lowered)
    memory = rehearsed[given.precision]
    machine = _machine(given)
    vocabulary = {table.num_embeddings for table in module.modules() if isinstance(table, nn.Embedding)}
    # which backward begins with
    last = given if given.activations == "auto" else replace(given, activations="keep")
    units = [_work(unit, given, machine, vocabulary, memory) for unit in division.units[:-1]]
    units.append(_work(division.units[-1], last, machine, vocabulary, memory))
    stepping: Stepping | None = None
    if any(unit.step_bytes for unit in units):
        # a loss scaler looks at all gradients, too
        waits = given.gradient_clip_val is not None or given.precision == "16-mixed"
        stepping = "after backward" if waits else "in backward"
    shapes = [shape for unit in division.all_units() for shape in _matrices(unit)]
    logits = 4 * given.tokens * sum(shape[0] for shape in shapes if shape[0] in vocabulary)
    # and gradients
    outside_bytes = logits + max([logits, *(way.working for unit in units for way in unit.ways)])
    workload = Workload(
        units=tuple(units),
        resident=_work(division.resident, given, machine, vocabulary, None),
        stepping=stepping,
        lives_whole=not given.steps_by_unit,
        adds_up=given.devices > 1,
        turn_bytes=0 if memory is None else memory.turn_bytes,
        outside_bytes=outside_bytes if memory is None else memory.outside_bytes,
    )
    return workload, machine


def _machine(given: Assumptions) -> Machine:
    """Return the machine as one of its devices sees it, which share what can be read of its memory in a second."""
    share = given.host_bandwidth * 1e9 / given.devices
    host, device = given.host_bandwidth, given.device_step
    if given.moments == "int8":
        host = given.host_bandwidth_int8 or host
        device = given.device_step_int8 or device
    up, down = min(given.to_device * 1e9, share), min(given.to_host * 1e9, share)
    both = _BOTH_WAYS * (up + down) if given.both_ways is None else given.both_ways * 1e9
    memory = math.inf  # of several devices, copies have their share
    if given.devices == 1:
        memory = 1e9 * (given.memory_bandwidth or _MEMORY_FOR_ALL * given.host_bandwidth)
    return Machine(
        to_device=up,
        to_host=down,
        host=host * 1e9,
        both=both if given.devices == 1 else min(both, share),
        device=math.inf if device is None else device * 1e9,
        host_memory=memory,
    )


def _matrices(unit: Unit) -> list[torch.Size]:
    """Return the shapes of all weights that a unit multiplies with; tables are looked up."""
    modules = [module for member in unit.members for module in member.module.modules()]
    shapes = []
    for module in modules:
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            shapes += [weight.shape for weight in module.parameters(recurse=False)]
    return [shape for shape in shapes if len(shape) > 1]


def _work(
    unit: Unit, given: Assumptions, machine: Machine, vocabulary: Collection[int], memory: StepMemory | None
) -> UnitWork:
    """Return the work of a unit; a matrix with as many rows as there are words makes logits."""
    matrices = _matrices(unit)
    trained = [weight for weight in unit.weights if weight.master.requires_grad]
    weights = sum(weight.nbytes for weight in unit.weights)
    masters = sum(weight.nbytes for weight in trained)
    copies = sum(weight.compute_bytes for weight in unit.weights if weight.lowered)
    stepped = sum(weight.compute_bytes for weight in trained if weight.lowered)
    gradients = sum(weight.compute_bytes for weight in trained)
    numbers = sum(weight.master.numel() for weight in trained)
    state = given.state_bytes(numbers, masters)
    # of several devices, gradients are added up in one pass, in the masters' dtype, and that is what the step reads
    sums = masters if given.devices > 1 else 0
    added = given.devices * gradients + 2 * sums - gradients if sums else 0
    forward = 2 * given.tokens * sum(shape.numel() for shape in matrices) / (given.compute * 1e12)
    # Backward multiplies once for the input's gradient, and once more for the gradient of each trained weight.
    backward = forward * (1 + masters / max(1, weights))
    nbytes = given.tokens * (4 if given.precision == "32-true" else 2)
    inputs = nbytes * matrices[0][-1] if matrices else 0
    moved = sum(shape[-1] + (0 if shape[0] in vocabulary else shape[-2]) for shape in matrices)
    saved = max(inputs, int(_SAVED * nbytes * moved))
    work = replace(bytes_of(unit), forward_seconds=forward, backward_seconds=backward)
    calls = []
    if memory is not None:
        calls = [memory.calls[member.name] for member in unit.members if member.name in memory.calls]
    calls = calls or [Footprint(inputs, saved - inputs, saved, saved, repeatable=True)]
    ways = ways_of(work, calls, forward, machine)
    work = replace(
        work,
        step_bytes=2 * (masters + state) + gradients + stepped + added,
        ways=tuple(way for way in ways if given.activations in ("auto", way.policy)) or ways,
        host_bytes=weights + state + copies + sums,
    )
    if given.optimizer_on == "host" or not trained:
        return work
    # and gradients, as many as masters; torch's own steps take as much again
    temporary = masters if hasattr(torch.optim, str(given.optimizer)) and not given.is_compact else 0
    work = replace(work, bytes_on_device=weights + masters + state + copies + temporary)
    if not given.may_visit:
        return work
    up, down = masters + state, masters + state + stepped
    pieces = bytes_of_pieces(down + work.gradient_bytes, numbers)
    return replace(work, visit_up=up, visit_down=down, visit_bytes=pieces)
