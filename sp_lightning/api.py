"""The front door for plain PyTorch loops: the engine, with a planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from sp_lightning.pipeline import Pipeline, PipelineOptions
from sp_lightning.pipeline.options import ActivationPolicy, UnitPolicy
from sp_lightning.planning import AutoPlanner


def superpipeline(
    module: nn.Module,
    device: torch.device | str | None = None,
    *,
    k: int | Literal["auto"] = "auto",
    k_prime: int | Literal["auto"] = "auto",
    memory_budget: int | float | str | None = None,
    units: UnitPolicy | None = None,
    resident: Sequence[str] = (),
    activations: ActivationPolicy = "auto",
    overlap_optimizer: bool | Literal["auto"] = "auto",
    resident_optimizer: bool = False,
    pin_memory: bool | Literal["auto"] = "auto",
    host_threads: int | Literal["auto"] = "auto",
    compile: bool = False,
    debug: bool = False,
) -> Pipeline:
    """Train or run a module that is larger than the device, in a plain PyTorch loop.

    Args:
        module: The module, with its parameters on the CPU. Inputs go to the device, as ever.
        device: Where to compute; by default the current accelerator, or else the CPU.
        k: Units on the device at once; by default chosen by what the first steps take, within `memory_budget`.
        k_prime: Units moved together, at most `k`; chosen likewise.
        memory_budget: Device memory for weights, gradients on their way and activations, such as `"12GB"`.
        units: What a unit is: module classes, class names, or `(name, module) -> bool`. `None` finds units.
        resident: Names of modules and parameters that stay on the device.
        activations: `"keep"` what a unit's forward saves for backward on the device, `"recompute"` it in backward
            from the unit's inputs, or `"offload"` it to host memory until then. `"auto"` chooses for each unit.
        overlap_optimizer: Step units on the host while the device computes.
        resident_optimizer: Let whole units live on the device, with gradients and optimizer state, if there is room.
        pin_memory: Page-locked host memory.
        host_threads: Threads that step units and add up gradients on the host.
        compile: Compile the forward of each unit, as `block.compile()` does.
        debug: Delay copies, poison free slots, check accesses.

    Returns:
        The attached pipeline; call its `detach()` to get the plain module back.

    Raises:
        ValueError: If an argument is wrong or does not fit.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
        >>> pipeline = superpipeline(model, "cpu", k=2)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> pipeline.detach()
    """
    options = PipelineOptions(
        k=k,
        k_prime=k_prime,
        memory_budget=memory_budget,
        units=units,
        resident=resident,
        activations=activations,
        overlap_optimizer=overlap_optimizer,
        resident_optimizer=resident_optimizer,
        pin_memory=pin_memory,
        host_threads=host_threads,
        compile=compile,
        debug=debug,
    )
    return Pipeline(module, device, options=options, planner=AutoPlanner())
