"""Estimates the work of a step from a model's shapes and from assumptions, without a machine to measure on.

Units are found by the engine's own rules, on a copy of the model on the meta device. Each weight matrix multiplies and
adds once for each token, and saves a constant part of what it reads and writes: that of decoders with fused attention,
whatever the length of their rows (docs/planning.md).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from sp_lightning.optim.layout import GROUP
from sp_lightning.pipeline.activations.memory import Footprint
from sp_lightning.pipeline.options import ActivationPolicy, OptimizerPlace, Policy, parse_bytes
from sp_lightning.pipeline.units.finder import find_units
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.autocast import weights_of_cast_layers
from sp_lightning.planning.measure import work_of
from sp_lightning.planning.memory import ways_of
from sp_lightning.planning.work import Machine, Stepping, UnitWork, Workload

Precision: TypeAlias = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
Moments: TypeAlias = Literal["fp32", "int8"]

STATE = {
    "SGD": 0,
    **dict.fromkeys(("ASGD", "Adagrad", "Lion", "RMSprop", "Muon"), 1),
    **dict.fromkeys(("Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Rprop"), 2),
}
"""State elements per parameter element of torch's optimizers and of Lion, with their default arguments."""

COMPACT = ("AdamW", "Adam")
"""Optimizers that `sp_lightning.optim` has, too."""

_VISITING = (*COMPACT, "SGD")  # which are stepped by passes over pieces
_MOMENT_BYTES = {"fp32": 4.0, "int8": 1 + 4 / GROUP}  # with a scale for each group
_KNOWN: dict[str, tuple[object, ...]] = {
    "precision": get_args(Precision),
    "activations": get_args(ActivationPolicy),
    "optimizer_on": get_args(OptimizerPlace),
    "moments": (None, *get_args(Moments)),
}
_MAY_BE_ZERO = ("optimizer", "chunked_loss")
_HALF = {
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
_DEVICE_MEMORY = 24 * 2**30  # if the user gives none, and there is no device
_LEAST_MEMORY = 2**16  # bytes; less is a number without its unit
# bytes that a unit saves for each one that its matrices read or write, with autocast and without
_SAVED_MIXED, _SAVED = 1.5, 1.28
_WORKING = 1.4  # of what a unit saves, what it takes as it computes
# logits in fp32, their gradients, and what a loss makes of them, by the size of the first
_OF_LOGITS = 3.0
_OF_CHUNKED_LOSS = 2.0  # what a loss without them takes, by the size of its weight
_BOTH_WAYS = 0.85  # of the sum of both, what copies in both directions at once reach
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
        both_ways: Bandwidth of copies in both directions at once, in GB/s of both together. None takes 85 % of the sum.
        memory_bandwidth: Bandwidth of host memory for all that asks for it at once, cores and copies, in GB/s. None is
            half as much again as `host_bandwidth`.
        precision: The Trainer's `precision`.
        gradient_clip_val: The Trainer's `gradient_clip_val`: by norm, for which all gradients have to be there first.
        optimizer: Name of the optimizer's class in `torch.optim`, or the bytes of state that it keeps per parameter.
        moments: How an optimizer of `sp_lightning.optim` keeps moments. None for torch's optimizers.
        activations: The strategy's `activations`.
        units: The strategy's `units`: names of module classes. None finds units automatically.
        resident: The strategy's `resident`.
        optimizer_on: The strategy's `optimizer_on`.
        tokens: Number of tokens (or patches) in a step: how often each weight matrix is applied, on each device.
        chunked_loss: Whether the loss does without all logits at once, as `chunked_cross_entropy` does.
        devices: Devices of the machine, which share its memory and what can be read of it in a second.

    Raises:
        ValueError: If a value is not above zero, or not one of the known ones.
    """

    device_memory: int | str | None = None
    to_device: float = 25.0
    to_host: float = 25.0
    compute: float = 80.0
    host_bandwidth: float = 60.0
    both_ways: float | None = None
    memory_bandwidth: float | None = None
    precision: Precision = "bf16-mixed"
    gradient_clip_val: float | None = None
    optimizer: float | str = "AdamW"
    moments: Moments | None = None
    activations: ActivationPolicy = "auto"
    units: str | Sequence[str] | None = None
    resident: Sequence[str] = ()
    optimizer_on: OptimizerPlace = "auto"
    tokens: int = 2048
    chunked_loss: bool = False
    devices: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in _MAY_BE_ZERO and isinstance(value, int | float) and not value > 0:
                raise ValueError(f"`{name}={value}` must be above zero.")
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be one of {', '.join(map(str, known))}.")
        if isinstance(self.optimizer, str) and self.optimizer not in STATE:
            raise ValueError(f"`optimizer={self.optimizer!r}` is not one of {', '.join(STATE)}, nor a number of bytes.")
        if self.moments is not None and self.optimizer not in COMPACT:
            raise ValueError(f"`moments` is for {' and '.join(COMPACT)}, not `optimizer={self.optimizer!r}`.")
        if self.device_bytes < _LEAST_MEMORY:
            raise ValueError(f"`device_memory={self.device_memory!r}` must be an amount of memory, such as '24GiB'.")

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory; 0 if `device_memory` is not an amount."""
        if self.device_memory is None:
            has_gpu = torch.cuda.is_available()
            return int(torch.cuda.get_device_properties(0).total_memory) if has_gpu else _DEVICE_MEMORY
        try:
            return parse_bytes(self.device_memory, device_bytes=None) or 0
        except ValueError:
            return 0

    @property
    def optimizer_words(self) -> str:
        """The optimizer, and how it keeps moments."""
        return str(self.optimizer) if self.moments is None else f"{self.optimizer}(moments={self.moments!r})"

    def state_bytes(self, numbers: int, nbytes: int) -> int:
        """Return what the optimizer keeps for trained weights of so many numbers, and so many bytes."""
        if not isinstance(self.optimizer, str):
            return int(self.optimizer * numbers)
        if self.moments is None:
            return STATE[self.optimizer] * nbytes
        low = 2.0 if self.precision == "bf16-true" else 0.0  # what bf16 has not of a number
        return int(numbers * (low + STATE[self.optimizer] * _MOMENT_BYTES[self.moments]))


def ladder(given: Assumptions) -> Iterator[Assumptions]:
    """Yield the ways to keep moments: what is given, then those of `sp_lightning.optim`, if torch's is.

    Each takes less host memory than the one before it. This is what `plan` shows, what a run that will not fit is
    advised to take, and what the callback names where the optimizer is what a step waits for.
    """
    yield given
    if given.optimizer in COMPACT and given.moments is None:
        for moments in get_args(Moments):
            yield replace(given, precision="bf16-true", moments=moments)


def estimate(module: nn.Module, given: Assumptions) -> tuple[Workload, Machine]:
    """Estimate the workload of a model, which is not changed, and the assumed machine."""
    dtype, is_mixed = _HALF.get(given.precision), given.precision.endswith("mixed")
    module = _on_meta(module, None if is_mixed else dtype)
    division = find_units(module, given.units, given.resident, given.device_bytes)
    cast = weights_of_cast_layers(module) if is_mixed else ()
    for weight in [weight for unit in division.units for weight in unit.weights]:
        if dtype is not None and id(weight.master) in cast:
            weight.compute_dtype = dtype
    vocabulary = {table.num_embeddings for table in module.modules() if isinstance(table, nn.Embedding)}
    policies: list[Policy] = ["keep", "recompute", "offload"]
    if given.activations != "auto":
        policies = [given.activations]
    # backward begins with the last one's activations
    units = [_work(unit, given, vocabulary, policies) for unit in division.units[:-1]]
    units.append(_work(division.units[-1], given, vocabulary, ["keep"]))
    stepping: Stepping | None = None
    if any(unit.step_bytes for unit in units):
        # a loss scaler looks at all gradients, too
        waits = given.gradient_clip_val is not None or given.precision == "16-mixed"
        stepping = "after backward" if waits else "in backward"
    heads = [shape for unit in division.all_units() for shape in _matrices(unit) if shape[0] in vocabulary]
    turn = sum(_OF_LOGITS * 4 * given.tokens * shape[0] for shape in heads)
    if given.chunked_loss:
        turn = sum(_OF_CHUNKED_LOSS * (4 if dtype is None else 2) * shape.numel() for shape in heads)
    workload = Workload(
        units=tuple(units),
        resident=_work(division.resident, given, vocabulary, ["keep"]),
        stepping=stepping,
        # an optimizer of the user's own may do anything
        lives_whole=not isinstance(given.optimizer, str) or given.optimizer == "ASGD",
        adds_up=given.devices > 1,
        turn_bytes=int(turn),
    )
    return workload, _machine(given)


def _on_meta(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Copy a module to the meta device, where it takes no memory; shared tensors stay shared."""
    copies: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    for weight in module.parameters():
        copies[id(weight)] = nn.Parameter(weight.to("meta"), weight.requires_grad)
    return copy.deepcopy(module, copies).to(dtype=dtype)


def _machine(given: Assumptions) -> Machine:
    """Return the machine as one of its devices sees it, which share what can be read of its memory in a second."""
    share = given.host_bandwidth * 1e9 / given.devices
    up, down = min(given.to_device * 1e9, share), min(given.to_host * 1e9, share)
    both = _BOTH_WAYS * (up + down) if given.both_ways is None else given.both_ways * 1e9
    memory = 1e9 * (given.memory_bandwidth or _MEMORY_FOR_ALL * given.host_bandwidth)
    if given.devices > 1:  # copies have their share
        both, memory = min(both, share), math.inf
    return Machine(up, down, given.host_bandwidth * 1e9, both, memory)


def _matrices(unit: Unit) -> list[torch.Size]:
    """Return the shapes of all weights that a unit multiplies with; tables are looked up."""
    modules = [module for member in unit.members for module in member.module.modules()]
    shapes = []
    for module in modules:
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            shapes += [weight.shape for weight in module.parameters(recurse=False)]
    return [shape for shape in shapes if len(shape) > 1]


def _work(unit: Unit, given: Assumptions, vocabulary: Collection[int], policies: Sequence[Policy]) -> UnitWork:
    """Return the work of a unit; a matrix with as many rows as there are words makes logits."""
    matrices = _matrices(unit)
    trained = [weight for weight in unit.weights if weight.master.requires_grad]
    weights = sum(weight.nbytes for weight in unit.weights)
    masters = sum(weight.nbytes for weight in trained)
    lowered = sum(weight.compute_bytes for weight in trained if weight.lowered)  # written to be sent
    gradients = sum(weight.compute_bytes for weight in trained)
    numbers = sum(weight.master.numel() for weight in trained)
    state = given.state_bytes(numbers, masters)
    # of several devices, gradients are added up in one pass, in the masters' dtype, and that is what the step reads
    sums = masters if given.devices > 1 else 0
    added = given.devices * gradients + 2 * sums - gradients if sums else 0
    forward = 2 * given.tokens * sum(shape.numel() for shape in matrices) / (given.compute * 1e12)
    is_mixed = given.precision.endswith("mixed")
    nbytes = given.tokens * (4 if given.precision == "32-true" else 2)
    inputs = (2 if is_mixed else 1) * nbytes * matrices[0][-1] if matrices else 0
    moved = sum(shape[-1] + (0 if shape[0] in vocabulary else shape[-2]) for shape in matrices)
    saved = max(inputs, int((_SAVED_MIXED if is_mixed else _SAVED) * nbytes * moved))
    call = Footprint(inputs, saved - inputs, saved, int(_WORKING * saved), repeatable=True)
    # several devices would have to agree
    visits = given.devices == 1 and given.optimizer in _VISITING
    # torch's own steps take as much again as masters
    meanwhile = masters if hasattr(torch.optim, str(given.optimizer)) and given.moments is None else 0
    is_free = given.optimizer_on == "auto"
    work = work_of(unit, state, meanwhile, lives=is_free or not trained, visits=is_free and visits)
    return replace(
        work,
        forward_seconds=forward,
        # it multiplies once for the input's gradient, and once more for the gradient of each trained weight
        backward_seconds=forward * (1 + masters / max(1, weights)),
        step_bytes=work.step_bytes + lowered + added,
        ways=ways_of([call], forward, policies),
        host_bytes=work.host_bytes + sums,
    )
