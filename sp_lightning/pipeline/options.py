"""The user's options, checked once, before any work."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch import nn

_UNITS_OF_BYTES = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS_OF_BYTES |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}

UnitPolicy: TypeAlias = str | type | Sequence[str | type] | Callable[[str, nn.Module], bool]

Policy: TypeAlias = Literal["keep", "recompute", "offload"]
"""The policy for a unit's saved tensors: they stay on the GPU, are computed again, or wait in CPU memory."""

Auto: TypeAlias = Literal["auto"]

ActivationPolicy: TypeAlias = Literal[Policy, Auto]

OptimizerPlace: TypeAlias = Literal["auto", "host"]
"""The place where weights are updated, and where their state is: the fastest one, or CPU memory."""

CompileOptions: TypeAlias = bool | dict[str, Any]
"""Whether to compile units, or the arguments of `torch.compile` to do so with."""

_OF_TORCH_COMPILE = ("backend", "dynamic", "fullgraph", "mode", "options")
_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")

_CHOICES = {
    "activations": get_args(ActivationPolicy),
    "overlap_optimizer": (True, False, "auto"),
    "pin_memory": (True, False),
    "optimizer_on": get_args(OptimizerPlace),
    "debug": (True, False),
}


@dataclass(frozen=True)
class PipelineOptions:
    """How a module is streamed: the arguments of `superpipeline` and of the strategies. The defaults work.

    A `Pipeline` without the planner that these add has simpler defaults: `k="auto"` means two units,
    `activations="auto"` recomputes if there is a budget, and `optimizer_on="auto"` means `"host"`.

    Args:
        k: Number of units in GPU memory at a time; if it is the number of all units, all stay there. `"auto"` starts
            with two, and then chooses what the first steps show to be fastest within `memory_budget`.
        k_prime: Number of neighboring layers, at most `k`, that are joined into one unit and move together.
        memory_budget: GPU memory for weights, gradients in flight and activations: bytes, text such as `"12GB"`, or a
            fraction of all GPU memory. `None` means 90 % of what is free, and no limit on the CPU.
        units: The modules to use as units: classes, class names, or a callable `(name, module) -> bool`. `None` finds
            them automatically.
        resident: Names of modules or parameters to keep on the GPU at all times.
        activations: The policy for the tensors that a unit saves for backward. `"keep"` leaves them on the GPU,
            `"recompute"` runs the unit's forward again in backward, `"offload"` moves them to CPU memory until then.
            `"auto"` measures two steps, and then chooses for each unit.
        overlap_optimizer: Whether to update weights unit by unit while the GPU computes. `"auto"` does so if the result
            is that of a plain step; `True` raises an error otherwise.
        optimizer_on: The place where weights are updated. With `"auto"`, if measured steps show that it is faster,
            units stay on the GPU with their gradients and optimizer state, or are updated there while their state is
            copied to the GPU and back. With `"host"`, the CPU updates all units.
        pin_memory: Whether to pin CPU memory, for fast copies.
        host_threads: Number of CPU threads that update weights. `"auto"` uses `OMP_NUM_THREADS` if you set it, else
            three quarters of the cores; without a GPU, torch's number.
        compile: Whether to compile each unit's forward, as `block.compile()` does. Equal units share one graph. A dict
            has arguments of `torch.compile`, such as `{"mode": "max-autotune-no-cudagraphs"}`.
        nvme_path: A folder on a drive, for optimizer state that has no room in CPU memory. `docs/drive.md` says which
            optimizers can use it.
        debug: Whether to delay copies at random, and to fill free slots with NaN.

    Raises:
        ValueError: If an option has an invalid value.
    """

    k: int | Auto = "auto"
    k_prime: int = 1
    memory_budget: int | float | str | None = None
    units: UnitPolicy | None = None
    resident: Sequence[str] = ()
    activations: ActivationPolicy = "auto"
    overlap_optimizer: bool | Auto = "auto"
    optimizer_on: OptimizerPlace = "auto"
    pin_memory: bool = True
    host_threads: int | Auto = "auto"
    compile: CompileOptions = False
    nvme_path: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        _check_count("k", self.k)
        _check_count("k_prime", self.k_prime, may_be_auto=False)
        _check_count("host_threads", self.host_threads)
        if self.k != "auto" and self.k_prime > self.k:
            raise ValueError(
                f"`k_prime={self.k_prime}` is larger than `k={self.k}`. Layers that move "
                f"together must fit among those on the GPU. Choose 1 <= k_prime <= {self.k}, or "
                "a larger k."
            )
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget, device_bytes=None)
        if self.units is not None:
            as_predicate(self.units)
        is_list = isinstance(self.resident, Sequence) and not isinstance(self.resident, str)
        if not is_list or not all(isinstance(name, str) for name in self.resident):
            raise ValueError(f"`resident={self.resident!r}` must be a list of module or parameter names.")
        _check_compile(self.compile)
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in allowed):
                choices = ", ".join(map(repr, allowed))
                raise ValueError(f"`{name}={value!r}` must be one of {choices}.")

    @property
    def slots(self) -> int | Auto:
        """The number of units, of `k_prime` neighbors each, that are on the device at once."""
        return self.k if self.k == "auto" else self.k // self.k_prime


def _check_count(name: str, value: object, may_be_auto: bool = True) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_count and not (may_be_auto and value == "auto"):
        choices = "'auto' or an integer" if may_be_auto else "an integer"
        raise ValueError(f"`{name}={value!r}` must be {choices} of at least 1.")


def _check_compile(choice: CompileOptions) -> None:
    if isinstance(choice, bool):
        return
    if not isinstance(choice, dict) or not choice or not choice.keys() <= set(_OF_TORCH_COMPILE):
        arguments = ", ".join(_OF_TORCH_COMPILE)
        raise ValueError(
            f"`compile={choice!r}` must be True, False, or a dict of arguments of `torch.compile`: {arguments}."
        )
    inductor = choice.get("options") or {}
    has_cuda_graphs = choice.get("mode") in _WITH_CUDA_GRAPHS or inductor.get("triton.cudagraphs")
    if has_cuda_graphs or choice.get("backend") == "cudagraphs":
        raise ValueError(
            f"`compile={choice!r}` records CUDA graphs. These need weights that stay in their places. Use "
            "`compile=True`, or the mode 'max-autotune-no-cudagraphs'."
        )


def as_predicate(policy: UnitPolicy) -> Callable[[str, nn.Module], bool]:
    """Convert a user's definition of a unit to a function of a module and its name."""
    entries = policy if isinstance(policy, Sequence) and not isinstance(policy, str) else [policy]
    for entry in entries:
        if isinstance(entry, nn.Module):
            cls = type(entry).__name__
            raise ValueError(f"`units=` was given an instance of `{cls}`. Give its class.")
    if callable(policy) and not isinstance(policy, type):
        return policy
    names = {entry for entry in entries if isinstance(entry, str)}
    classes = tuple(entry for entry in entries if isinstance(entry, type))
    if not entries or not all(isinstance(entry, str | type) for entry in entries):
        raise ValueError(
            f"`units={policy!r}` must be None, a module class or class name, a non-empty list of "
            "those, or a callable (name, module) -> bool."
        )

    def matches(_: str, module: nn.Module) -> bool:
        if isinstance(module, classes):
            return True
        bases = type(module).__mro__
        return any({base.__name__, f"{base.__module__}.{base.__qualname__}"} & names for base in bases)

    return matches


def parse_bytes(budget: int | float | str, device_bytes: int | None) -> int | None:
    """Convert a user's budget to bytes; `None` if it is a fraction of a device whose memory size is unknown."""
    size: Any = budget
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", budget)
        if match is not None:
            size = int(float(match[1]) * _UNITS_OF_BYTES.get(match[2].lower(), 0))
    is_number = isinstance(size, int | float) and not isinstance(size, bool)
    if is_number and isinstance(size, int) and size == 1:
        raise ValueError(
            "`memory_budget=1` is one byte. For all of the GPU's memory, write 1.0. For less, write '12GB'."
        )
    if not is_number or not size > 0 or (isinstance(size, float) and size > 1):
        raise ValueError(
            f"`memory_budget={budget!r}` is not an amount of memory. Give bytes (an int above "
            "zero), a fraction of the device's memory (a float up to 1.0) or text such as '12GB'."
        )
    if isinstance(size, float):
        return None if device_bytes is None else int(size * device_bytes)
    return int(size)
