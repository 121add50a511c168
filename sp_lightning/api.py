"""`superpipeline(module, ...)`: the entry point for plain PyTorch loops, which gives the engine a planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from sp_lightning.pipeline import ActivationPolicy, Pipeline, PipelineOptions, UnitPolicy
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
    """Stream a module that is larger than device memory, to train or run it in a plain PyTorch loop.

    Args:
        module: The module; its weights move to the host, if they are elsewhere. Inputs go on the device, as usual.
        device: The device to compute on; by default the current accelerator, or else the CPU.
        k: Number of units on the device at once; with as many as there are, all stay there. `"auto"` starts with two,
            then chooses what the first steps show to be fastest within `memory_budget`.
        k_prime: Number of units moved together, at most `k`. `"auto"` starts with one, and is chosen with `k`.
        memory_budget: Device memory for weights, gradients on their way to the host and activations: bytes, text such
            as `"12GB"`, or a fraction of the device's memory. `None` means 90 % of what is free, and no limit on the
            CPU.
        units: The modules to use as units: classes, class names, or a callable `(name, module) -> bool`. `None` finds
            them automatically.
        resident: Names of modules or parameters to keep on the device at all times.
        activations: What to do with the tensors that a unit saves for backward. `"keep"` leaves them on the device,
            `"recompute"` runs the unit's forward again in backward, `"offload"` moves them to host memory until then,
            `"recompute_offload"` keeps only inputs, in host memory. `"auto"` measures two steps, then chooses for each
            unit.
        overlap_optimizer: Whether to step the optimizer unit by unit while the device computes. `"auto"` does so where
            the result is that of a plain step; `True` makes anything else an error.
        resident_optimizer: Whether whole units may live on the device, with their gradients and optimizer state, where
            `k="auto"` finds memory to spare.
        pin_memory: Whether to page-lock host memory, for fast copies. `"auto"` does where the device gains by it.
        host_threads: Number of threads that step the optimizer on the host. `"auto"` uses `OMP_NUM_THREADS` if you set
            it, else three quarters of the cores near the device; on a CPU, torch's number.
        compile: Whether to compile each unit's forward, as `block.compile()` does; units that are alike share one
            graph.
        debug: Whether to delay copies at random, poison free slots and check every access to a weight.

    Returns:
        The attached pipeline. Its `detach()` gives the plain module back; until then the module and its memory stay.

    Raises:
        ValueError: If an argument is invalid, or does not fit the module or the available memory.

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
