"""The assumptions of `sp-lightning plan` about a machine and a training, and the optimizer's state that follows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.optim.dry_step import state_after_dry_step
from sp_lightning.optim.layout import GROUP
from sp_lightning.pipeline.engine import SHARE_OF_FREE_MEMORY
from sp_lightning.pipeline.host_memory import total_host_memory
from sp_lightning.pipeline.optimizer.kinds import STEP_BY_WEIGHT
from sp_lightning.pipeline.options import ActivationPolicy, OptimizerPlace, parse_bytes
from sp_lightning.pipeline.stats import readable_bytes

Precision: TypeAlias = Literal[
    "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "32", "bf16", "16"
]  # fmt: skip
Moments: TypeAlias = Literal["fp32", "int8"]
Loss: TypeAlias = Literal["chunked", "whole"]

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
"""The optimizers of this torch, by name."""

COMPACT = ("AdamW", "Adam")
"""Optimizers that `sp_lightning.optim` has, too."""

OF_SYSTEM = 6 * 2**30
"""Bytes of host memory for the system and for data."""

OF_CONTEXT = 2**29
"""Bytes of device memory that CUDA takes in each process."""

# bytes of device and host memory that a desktop takes
_OF_DESKTOP, _OF_DESKTOP_ON_HOST = 2**30, 3 * 2**30
_SHOWN, _SOLD = 125, 128  # GiB of host memory: a system shows the first of the second, 62.5 of 64
_MOMENT_BYTES = {"fp32": 4.0, "int8": 1 + 4 / GROUP}  # with a scale for each group
# short names and full ones
_PRECISIONS: dict[str, Precision] = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
_KNOWN: dict[str, object] = {
    "precision": Precision,
    "activations": ActivationPolicy,
    "optimizer_on": OptimizerPlace,
    "moments": Literal[None, Moments],
    "loss": Loss,
    "bits": Literal[16, 4],
}
# the memory that is assumed if the user gives none, and there is no device
_DEVICE_MEMORY, _HOST_MEMORY = int(23.6 * 2**30), int(62.5 * 2**30)
_LEAST_MEMORY = 2**16  # bytes; less is a number without its unit


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about machine and training, for a plan without measurements.

    Args:
        device_memory: GPU memory as torch shows it, such as "23.6GiB" of 24: CUDA's context takes 0.5 GiB, and a step
            may use 90 % of the rest. None asks the GPU, and is 23.6 GiB if there is none.
        host_memory: CPU memory as it is sold, such as "64GiB", of which a system shows 62.5; 6 GiB are for the system
            and for data. None asks the machine if it has a GPU, and is 64 GiB otherwise.
        desktop: Whether a desktop takes 1 GiB of GPU memory, and 3 GiB of CPU memory.
        link: Bandwidth of copies in each direction, in GB/s. Both at once reach 85 % of the sum.
        compute: The lowest speed that the GPU reaches on such a model, in TFLOP/s. The plan is chosen for it.
        compute_at_best: The highest speed that it reaches, in TFLOP/s, for the upper end of tokens per second. None is
            `compute`.
        device_bandwidth: Bandwidth of GPU memory, in GB/s, as its maker states it.
        host_bandwidth: Bandwidth at which the optimizer reads and writes CPU memory, in GB/s.
        memory_bandwidth: Bandwidth of CPU memory for cores and copies at once, in GB/s. None is 1.5 times
            `host_bandwidth`.
        nvme_read: Rate at which a drive reads optimizer state for which RAM has no room, in GB/s. None plans without a
            drive.
        nvme_write: Rate at which the drive writes for hours, which is less than the rate of its cache, in GB/s. None is
            `nvme_read`.
        nvme_both: Rate at which it reads and writes at once, both together, in GB/s. None is `nvme_read`.
        nvme_endurance: TB that may be written to the drive, by its maker's warranty.
        fp8: Whether torchao multiplies in FP8, in all linear layers but the head. This rounds: numbers are others.
        fp8_gain: How many times as fast as in 16 bits the GPU multiplies in FP8, at least. None if it cannot.
        fp8_gain_at_best: The same at the highest speed. None is `fp8_gain`.
        precision: The Trainer's `precision`.
        accumulate: The Trainer's `accumulate_grad_batches`.
        gradient_clip_val: The Trainer's `gradient_clip_val`: by norm, which needs all gradients first. 0 does not clip,
            as in the Trainer.
        optimizer: Name of the optimizer's class in `torch.optim`.
        moments: How an optimizer of `sp_lightning.optim` keeps moments. None for torch's optimizers.
        activations: The strategy's `activations`.
        units: The strategy's `units`: names of module classes. None finds units automatically.
        resident: The strategy's `resident`.
        optimizer_on: The strategy's `optimizer_on`.
        tokens: Number of tokens (or patches) in a batch: how often each weight matrix is applied, on each device.
        length: Number of tokens in a row: attention compares each of them with all others.
        loss: Whether a language model's loss does without all logits at once, as with `loss_in_slices`.
        lora: Rank of adapters on all linear layers but the head, on a frozen base. None trains all weights.
        bits: Bits of a weight of that base in those layers: 4 is QLoRA, by bitsandbytes.
        devices: Devices of the machine, which share its memory and the bandwidth of that memory.

    Raises:
        ValueError: If a value is not above zero, or not one of the known ones.
    """

    device_memory: int | str | None = None
    host_memory: int | str | None = None
    desktop: bool = False
    link: float = 25.0
    compute: float = 80.0
    compute_at_best: float | None = None
    device_bandwidth: float = 1000.0
    host_bandwidth: float = 60.0
    memory_bandwidth: float | None = None
    nvme_read: float | None = None
    nvme_write: float | None = None
    nvme_both: float | None = None
    nvme_endurance: float | None = None
    fp8: bool = False
    fp8_gain: float | None = 1.5
    fp8_gain_at_best: float | None = None
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
    bits: Literal[16, 4] = 16
    devices: int = 1

    def __post_init__(self) -> None:
        names = {name.casefold(): name for name in OPTIMIZERS}
        vars(self).update(  # not by assignment, as it is frozen
            precision=_PRECISIONS.get(self.precision, self.precision),
            optimizer=names.get(self.optimizer.casefold(), self.optimizer),
            gradient_clip_val=self.gradient_clip_val or None,
        )
        for name, value in vars(self).items():
            if type(value) in (int, float) and not value > 0:
                raise ValueError(f"`{name}={value}` must be above zero.")
        for name, kind in _KNOWN.items():
            known = get_args(kind)
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be one of {', '.join(map(str, known))}.")
        if self.bits == 4 and self.lora is None:
            raise ValueError("`bits=4` rounds the frozen base of adapters: give `lora` a rank, such as 16.")
        if self.moments is not None and self.optimizer not in COMPACT:
            raise ValueError(f"`moments` is for {' and '.join(COMPACT)}, not `optimizer={self.optimizer!r}`.")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"`optimizer={self.optimizer!r}` is not in torch {torch.__version__}, "
                f"which has {', '.join(OPTIMIZERS)}."
            )
        if _state_bytes(self.optimizer, (2, 2), torch.float32) is None:
            raise ValueError(
                f"`optimizer={self.optimizer!r}` cannot be planned: its step takes a closure, or sparse gradients. "
                "Plan with another one that keeps as much state."
            )
        if self.nvme_read and self.optimizer not in COMPACT:
            raise ValueError(f"A drive takes the state of {' and '.join(COMPACT)}, not `optimizer={self.optimizer!r}`.")
        if self.fp8 and self.fp8_gain is None:
            raise ValueError("`fp8` needs a GPU of compute capability 8.9 or newer, such as an RTX 40 or an H100.")
        for name, nbytes in {"device_memory": self.device_bytes, "host_memory": self.host_bytes}.items():
            if nbytes < _LEAST_MEMORY:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be an amount of memory, such as '24GiB'.")

    def __str__(self) -> str:
        at_best = "" if self.compute_at_best is None else f" to {self.compute_at_best:.0f}"
        devices = "a GPU" if self.devices == 1 else f"{self.devices} GPUs, each"
        rows = f" in rows of {self.length:,}" if self.length < self.tokens else ""
        base = " on a base of 4 bits" if self.bits == 4 else ""
        trained = "" if self.lora is None else f"LoRA of rank {self.lora}{base}, "
        clipped = "not clipped" if self.gradient_clip_val is None else "clipped by norm"
        desktop = "and a desktop (`--no-desktop`)" if self.desktop else "without a desktop (`--desktop`)"
        batches = "" if self.accumulate == 1 else f", {self.accumulate} batches in a step"
        in_fp8 = f", {self.fp8_gain} times as fast in FP8 at least," if self.fp8 else ""
        has_drive = self.nvme_read is not None
        drive = f"a drive through which {self.drive_rate / 1e9:.2g} GB/s of state pass; " if has_drive else ""
        return (
            f"{devices} with {readable_bytes(self.device_bytes)}, "
            f"{readable_bytes(self.bytes_of_others)} of it for CUDA {desktop}, "
            f"{self.compute:.0f}{at_best} TFLOP/s{in_fp8} and {self.link:g} GB/s each way; "
            f"{readable_bytes(self.host_bytes)} of RAM at {self.host_bandwidth:g} GB/s, "
            f"{readable_bytes(self.host_bytes - self.host_room)} of it for the system; "
            f"{drive}{trained}{self.tokens:,} tokens in a batch{rows}{batches}, gradients {clipped}."
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of GPU memory, as torch shows them; 0 if `device_memory` is not an amount."""
        has_gpu = torch.cuda.is_available()
        found = torch.cuda.get_device_properties(0).total_memory if has_gpu else _DEVICE_MEMORY
        return _bytes_of(self.device_memory, int(found))

    @property
    def bytes_of_others(self) -> int:
        """Bytes of GPU memory that CUDA and a desktop take."""
        return OF_CONTEXT + (_OF_DESKTOP if self.desktop else 0)

    @property
    def device_room(self) -> int:
        """Bytes of GPU memory that a step may take."""
        return int(SHARE_OF_FREE_MEMORY * (self.device_bytes - self.bytes_of_others))

    @property
    def host_bytes(self) -> int:
        """Bytes of CPU memory, as it is sold; 0 if `host_memory` is not an amount."""
        found = total_host_memory() if torch.cuda.is_available() else None
        return _bytes_of(self.host_memory, as_sold(found or _HOST_MEMORY))

    @property
    def bytes_of_system(self) -> int:
        """Bytes of CPU memory for the system, a desktop and data."""
        return OF_SYSTEM + (_OF_DESKTOP_ON_HOST if self.desktop else 0)

    @property
    def host_room(self) -> int:
        """Bytes of CPU memory that training may take."""
        return self.host_bytes * _SHOWN // _SOLD - self.bytes_of_system

    @property
    def drive_rate(self) -> float:
        """Bytes of optimizer state in a second that a drive reads, and writes again; infinite without a drive."""
        if self.nvme_read is None:
            return math.inf
        both = self.nvme_both or self.nvme_read
        return 1e9 * min(self.nvme_read, self.nvme_write or self.nvme_read, both / 2)

    def typed(self, arguments: Mapping[str, str]) -> dict[str, object]:
        """Return the values that have to be typed, those that are not the default, by their arguments.

        `arguments` has the field of each argument.
        """
        return {
            argument: getattr(self, field)
            for argument, field in arguments.items()
            if getattr(self, field) != getattr(Assumptions, field)
        }

    @property
    def tokens_in_step(self) -> int:
        """Tokens of a step of the optimizer, on all devices."""
        return self.tokens * self.accumulate * self.devices

    @property
    def optimizer_words(self) -> str:
        """The optimizer, and how it keeps moments."""
        return self.optimizer if self.moments is None else f"{self.optimizer}(moments={self.moments!r})"

    @property
    def steps_by_weight(self) -> bool:
        """Whether the optimizer treats each weight by itself, as it must for weights that stay on the GPU."""
        return OPTIMIZERS[self.optimizer] in STEP_BY_WEIGHT

    def state_bytes(self, weights: Iterable[Tensor]) -> int:
        """Return the bytes of state for trained weights; numbers that exist once for a weight do not count.

        Weights that the optimizer refuses, as Muon refuses vectors, are assumed to belong to another one: AdamW.
        """
        if self.moments is not None:
            low = 2.0 if self.precision == "bf16-true" else 0.0  # the bytes that bf16 lacks
            of_moments = 2 * _MOMENT_BYTES[self.moments]
            return int(sum(weight.numel() for weight in weights) * (low + of_moments))
        nbytes = 0
        for weight in weights:
            of_weight = _state_bytes(self.optimizer, tuple(weight.shape), weight.dtype)
            nbytes += 2 * weight.nbytes if of_weight is None else of_weight
        return nbytes


@lru_cache(maxsize=4096)  # a model has few shapes
def _state_bytes(optimizer: str, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
    """Return the bytes of an optimizer's state for a weight; None if its step takes no such weight."""
    # two moments; to make an optimizer imports torch._dynamo, which takes a second
    if optimizer in COMPACT:
        return 2 * math.prod(shape) * dtype.itemsize
    weight = torch.empty(shape, dtype=dtype, device="meta")
    state = state_after_dry_step(OPTIMIZERS[optimizer], [{"params": [weight]}])
    return None if state is None else sum(value.nbytes for value in state if value.dim())


def _bytes_of(memory: int | str | None, otherwise: int) -> int:
    try:
        return otherwise if memory is None else parse_bytes(memory, device_bytes=None) or 0
    except ValueError:
        return 0


def as_sold(nbytes: int) -> int:
    """Return the bytes of host memory that are sold where a system shows `nbytes`."""
    return -(-nbytes * _SOLD // _SHOWN)


def ladder(given: Assumptions) -> Iterator[Assumptions]:
    """Yield the ways to keep moments: the given one, and, if that is torch's, those of `sp_lightning.optim`.

    Each takes less host memory than the one before it. Adapters have so few moments that there is one way.
    """
    yield given
    if given.optimizer in COMPACT and given.moments is None and given.lora is None:
        for moments in get_args(Moments):
            yield replace(given, precision="bf16-true", moments=moments)
