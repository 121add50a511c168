"""Estimates the work of a step from a model's shapes and from assumptions, without a machine to measure on.

Units are found by the engine's own rules, on a copy of the model on the meta device. Each weight matrix multiplies and
adds once for each token, attention once for each pair of tokens of a row. A matrix saves a constant part of what it
reads and writes: that of decoders with fused attention, whatever the length of their rows (docs/planning.md).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from sp_lightning.optim.layout import GROUP
from sp_lightning.pipeline.activations.memory import Footprint
from sp_lightning.pipeline.host_memory import total_host_memory
from sp_lightning.pipeline.options import ActivationPolicy, OptimizerPlace, Policy, parse_bytes
from sp_lightning.pipeline.units.finder import find_units
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.autocast import weights_of_cast_layers
from sp_lightning.pipeline.weights.segment import STAGING_BUFFERS, STAGING_OF_SEVERAL
from sp_lightning.planning.measure import work_of
from sp_lightning.planning.memory import ways_of
from sp_lightning.planning.work import Machine, Stepping, UnitWork, Workload

Precision: TypeAlias = Literal[
    "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "32", "bf16", "16"
]  # fmt: skip
Moments: TypeAlias = Literal["fp32", "int8"]
Loss: TypeAlias = Literal["chunked", "whole"]

STATE = {
    "SGD": 0,
    **dict.fromkeys(("ASGD", "Adagrad", "Lion", "RMSprop", "Muon"), 1),
    **dict.fromkeys(("Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Rprop"), 2),
}
"""State elements per parameter element of torch's optimizers and of Lion, with their default arguments."""

COMPACT = ("AdamW", "Adam")
"""Optimizers that `sp_lightning.optim` has, too."""

_STEP_ON_HOST = ("ASGD", "Lion")
"""Optimizers whose weights do not live on the device, as it is not known that they step each by itself."""

_MOMENT_BYTES = {"fp32": 4.0, "int8": 1 + 4 / GROUP}  # with a scale for each group
# in full
_PRECISIONS: dict[str, Precision] = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
_KNOWN: dict[str, tuple[object, ...]] = {
    "precision": get_args(Precision),
    "activations": get_args(ActivationPolicy),
    "optimizer_on": get_args(OptimizerPlace),
    "moments": (None, *get_args(Moments)),
    "loss": get_args(Loss),
    "optimizer": tuple(STATE),
}
_HALF = {
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
# if the user gives none, and there is no device
_DEVICE_MEMORY, _HOST_MEMORY = 24 * 2**30, 64 * 2**30
OF_SYSTEM = 6 * 2**30  # bytes of host memory for the system and for data
_LEAST_MEMORY = 2**16  # bytes; less is a number without its unit
# bytes that a unit saves for each one that its matrices read or write, with autocast and without
_SAVED_MIXED, _SAVED = 1.5, 1.28
_WORKING = 1.4  # of what a unit saves, what it takes as it computes
# logits in fp32, their gradients, and what a loss makes of them, by the size of the first
_OF_LOGITS = 3.0
_OF_CHUNKED_LOSS = 2.0  # what a loss without them takes, by the size of its weight
# layers that make queries, of all heads together, and the side of their weights that has this width
_QUERIES = {"q_proj": 0, "to_q": 0, "query": 0, "q": 0, "qkv": 1, "qkv_proj": 1, "c_attn": 0}
# what few tokens pass in diffusers' models: modulation, and the text's half of blocks that have one for the image, too
_NOT_EACH = re.compile(r"norm\w*\.linear$|\b(ff_context|add_[qkv]_proj|to_add_out)\b")
# the backward of fused attention, which multiplies once more for the scores, by its forward
_ATTENTION_BACK = 2.5
_BOTH_WAYS = 1.7  # what copies in both directions at once reach together, by one of them
# what host memory gives in all, if cores and copies ask for it at once, for each byte that the optimizer alone reaches
_MEMORY_FOR_ALL = 1.5


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about machine and training, for a plan without measurements.

    Args:
        device_memory: Device memory, of which a step may take 90 %: bytes, or text such as "24GiB". None asks the
            device, and is 24 GiB where there is none.
        host_memory: Host memory, of which 6 GiB are for the system and for data. None asks the machine if it has a
            device, and is 64 GiB else.
        link: Bandwidth of copies to the device, and of those to the host, in GB/s. Both at once reach 85 % of the sum.
        compute: Speed that the device reaches on such a model, in TFLOP/s: about half of what its maker states.
        host_bandwidth: Bandwidth at which the optimizer reads and writes host memory, in GB/s.
        memory_bandwidth: Bandwidth of host memory for all that asks for it at once, cores and copies, in GB/s. None is
            half as much again as `host_bandwidth`.
        precision: The Trainer's `precision`.
        accumulate: The Trainer's `accumulate_grad_batches`.
        gradient_clip_val: The Trainer's `gradient_clip_val`: by norm, for which all gradients have to be there first.
        optimizer: Name of the optimizer's class in `torch.optim`.
        moments: How an optimizer of `sp_lightning.optim` keeps moments. None for torch's optimizers.
        activations: The strategy's `activations`.
        units: The strategy's `units`: names of module classes. None finds units automatically.
        resident: The strategy's `resident`.
        optimizer_on: The strategy's `optimizer_on`.
        tokens: Number of tokens (or patches) in a batch: how often each weight matrix is applied, on each device.
        length: Number of tokens in a row, each of which attention compares with all others.
        loss: Whether a language model's loss does without all logits at once, as with `loss_in_slices`.
        lora: Rank of adapters on all linear layers but the head, on a frozen base. None trains all weights.
        devices: Devices of the machine, which share its memory and what can be read of it in a second.

    Raises:
        ValueError: If a value is not above zero, or not one of the known ones.
    """

    device_memory: int | str | None = None
    host_memory: int | str | None = None
    link: float = 25.0
    compute: float = 80.0
    host_bandwidth: float = 60.0
    memory_bandwidth: float | None = None
    precision: Precision = "bf16-mixed"
    gradient_clip_val: float | None = None
    accumulate: int = 1
    optimizer: str = "AdamW"
    moments: Moments | None = None
    activations: ActivationPolicy = "auto"
    units: str | Sequence[str] | None = None
    resident: Sequence[str] = ()
    optimizer_on: OptimizerPlace = "auto"
    tokens: int = 2048
    length: int = 2048
    loss: Loss = "chunked"
    lora: int | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", _PRECISIONS.get(self.precision, self.precision))
        names = {name.casefold(): name for name in STATE}
        object.__setattr__(self, "optimizer", names.get(self.optimizer.casefold(), self.optimizer))
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not value > 0:
                raise ValueError(f"`{name}={value}` must be above zero.")
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be one of {', '.join(map(str, known))}.")
        if self.moments is not None and self.optimizer not in COMPACT:
            raise ValueError(f"`moments` is for {' and '.join(COMPACT)}, not `optimizer={self.optimizer!r}`.")
        for name, nbytes in {"device_memory": self.device_bytes, "host_memory": self.host_bytes}.items():
            if nbytes < _LEAST_MEMORY:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be an amount of memory, such as '24GiB'.")

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory; 0 if `device_memory` is not an amount."""
        has_gpu = torch.cuda.is_available()
        found = torch.cuda.get_device_properties(0).total_memory if has_gpu else _DEVICE_MEMORY
        return _bytes_of(self.device_memory, int(found))

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory; 0 if `host_memory` is not an amount."""
        found = total_host_memory() if torch.cuda.is_available() else None
        return _bytes_of(self.host_memory, found or _HOST_MEMORY)

    @property
    def optimizer_words(self) -> str:
        """The optimizer, and how it keeps moments."""
        return self.optimizer if self.moments is None else f"{self.optimizer}(moments={self.moments!r})"

    def state_bytes(self, numbers: int, nbytes: int) -> int:
        """Return what the optimizer keeps for trained weights of so many numbers, and so many bytes."""
        if self.moments is None:
            return STATE[self.optimizer] * nbytes
        low = 2.0 if self.precision == "bf16-true" else 0.0  # what bf16 has not of a number
        return int(numbers * (low + STATE[self.optimizer] * _MOMENT_BYTES[self.moments]))


def _bytes_of(memory: int | str | None, otherwise: int) -> int:
    try:
        return otherwise if memory is None else parse_bytes(memory, device_bytes=None) or 0
    except ValueError:
        return 0


def ladder(given: Assumptions) -> Iterator[Assumptions]:
    """Yield the ways to keep moments: what is given, then those of `sp_lightning.optim`, if torch's is.

    Each takes less host memory than the one before it.
    """
    yield given
    if given.optimizer in COMPACT and given.moments is None:
        for moments in get_args(Moments):
            yield replace(given, precision="bf16-true", moments=moments)


def estimate(module: nn.Module, given: Assumptions) -> tuple[Workload, Machine]:
    """Estimate the workload of a model, which is not changed, and the assumed machine."""
    dtype, is_mixed = _HALF.get(given.precision), given.precision.endswith("mixed")
    module = _on_meta(module, None if is_mixed and given.lora is None else dtype)
    vocabulary = {table.num_embeddings for table in module.modules() if isinstance(table, nn.Embedding)}
    if given.lora is not None:
        _add_adapters(module, given.lora, vocabulary, None if is_mixed else dtype)
    division = find_units(module, given.units, given.resident, given.device_bytes)
    cast = weights_of_cast_layers(module) if is_mixed else ()
    for weight in [weight for unit in division.units for weight in unit.weights]:
        if dtype is not None and id(weight.master) in cast:
            weight.compute_dtype = dtype
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
    matrices = [shape for unit in division.all_units() for _, shape in _matrices(unit, given)]
    heads = [shape for shape in matrices if shape[0] in vocabulary]
    turn = sum(_OF_LOGITS * 4 * given.tokens * shape[0] for shape in heads)
    if given.loss == "chunked":
        turn = sum(_OF_CHUNKED_LOSS * (4 if dtype is None else 2) * shape.numel() for shape in heads)
    machine = _machine(given)
    masters = sum(weight.nbytes for weight in module.parameters() if weight.requires_grad)
    workload = Workload(
        units=tuple(units),
        resident=_work(division.resident, given, vocabulary, ["keep"]),
        stepping=stepping,
        adds_up=given.devices * given.accumulate > 1,
        may_wait=given.devices == 1 and given.optimizer not in _STEP_ON_HOST,
        micro_steps=given.accumulate,
        staging_buffers=STAGING_BUFFERS if given.devices == 1 else STAGING_OF_SEVERAL,
        # sums are read and written, and gradients read
        add_seconds=(given.accumulate > 1) * 3 * masters / machine.host,
        turn_bytes=int(turn),
    )
    return workload, machine


def _add_adapters(module: nn.Module, rank: int, vocabulary: Collection[int], dtype: torch.dtype | None) -> None:
    """Freeze a model, and add the numbers of an adapter to each of its linear layers but the head."""
    module.requires_grad_(False)
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.out_features not in vocabulary:
            numbers = torch.empty(rank, layer.in_features + layer.out_features, device="meta", dtype=dtype)
            layer.adapter = nn.Parameter(numbers)


def _on_meta(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Copy a module to the meta device, where it takes no memory; shared tensors stay shared."""
    copies: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    for weight in module.parameters():
        copies[id(weight)] = nn.Parameter(weight.to("meta"), weight.requires_grad)
    return copy.deepcopy(module, copies).to(dtype=dtype)


def _machine(given: Assumptions) -> Machine:
    """Return the machine as one of its devices sees it, which share what can be read of its memory in a second."""
    host = given.host_bandwidth * 1e9
    share = host / given.devices
    link = min(given.link * 1e9, share)
    if given.devices > 1:  # copies have their share
        return Machine(link, link, host, min(_BOTH_WAYS * link, share))
    memory = given.memory_bandwidth or _MEMORY_FOR_ALL * given.host_bandwidth
    return Machine(link, link, host, _BOTH_WAYS * link, memory * 1e9)


def _matrices(unit: Unit, given: Assumptions) -> Iterator[tuple[str, torch.Size]]:
    """Yield the shapes of all weights that a unit multiplies tokens with, and the names of their layers.

    Tables are looked up, diffusion models' modulation is computed once for an image, their tokens pass one of two
    halves of a block, and adapters are next to nothing.
    """
    for name, module in [named for member in unit.members for named in member.module.named_modules()]:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or _NOT_EACH.search(name):
            continue
        for weight in module.parameters(recurse=False):
            if weight.dim() > 1 and min(weight.shape[:2]) > (given.lora or 0):
                yield name.rpartition(".")[2], weight.shape


def _work(unit: Unit, given: Assumptions, vocabulary: Collection[int], policies: Sequence[Policy]) -> UnitWork:
    """Return the work of a unit; a matrix with as many rows as there are words makes logits."""
    matrices = [*_matrices(unit, given)]
    shapes = [shape for _, shape in matrices]
    trained = [weight for weight in unit.weights if weight.master.requires_grad]
    weights = sum(weight.nbytes for weight in unit.weights)
    masters = sum(weight.nbytes for weight in trained)
    # written to be sent
    lowered = sum(weight.compute_bytes for weight in trained if weight.lowered)
    gradients = sum(weight.compute_bytes for weight in trained)
    numbers = sum(weight.master.numel() for weight in trained)
    state = given.state_bytes(numbers, masters)
    # gradients are added up in the masters' dtype, those of several devices in one pass; that is what the step reads
    sums = masters if given.devices * given.accumulate > 1 else 0
    added = sums - gradients if sums else 0
    if given.devices > 1:
        added += given.devices * gradients + sums
    rate = given.compute * 1e12
    forward = 2 * given.tokens * sum(shape.numel() for shape in shapes) / rate
    # scores and sums by them; each token of a language model looks at those before it
    width = sum(shape[_QUERIES[layer]] for layer, shape in matrices if layer in _QUERIES)
    pairs = given.tokens * min(given.tokens, given.length)
    attention = (2 if vocabulary else 4) * pairs * width / rate
    is_mixed = given.precision.endswith("mixed")
    nbytes = given.tokens * (4 if given.precision == "32-true" else 2)
    inputs = (2 if is_mixed else 1) * nbytes * shapes[0][-1] if shapes else 0
    moved = sum(shape[-1] + (0 if shape[0] in vocabulary else shape[-2]) for shape in shapes)
    saved = max(inputs, int((_SAVED_MIXED if is_mixed else _SAVED) * nbytes * moved))
    call = Footprint(inputs, saved - inputs, saved, int(_WORKING * saved), repeatable=True)
    # these are stepped by passes over pieces; several devices would have to agree
    visits = given.devices == 1 and given.optimizer in COMPACT
    # torch's own steps take as much again as masters
    meanwhile = masters if given.moments is None else 0
    is_free = given.optimizer_on == "auto"
    lives = not trained or (is_free and given.optimizer not in _STEP_ON_HOST)
    work = work_of(unit, state, meanwhile, lives=lives, visits=is_free and visits)
    return replace(
        work,
        forward_seconds=forward + attention,
        # it multiplies once for the input's gradient, and once more for the gradient of each trained weight
        backward_seconds=forward * (1 + masters / max(1, weights)) + _ATTENTION_BACK * attention,
        step_bytes=work.step_bytes + lowered + added,
        ways=ways_of([call], forward + attention, policies),
        sum_bytes=sums,
    )
