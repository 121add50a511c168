"""`superpipeline(module, ...)`: the entry point for plain PyTorch loops, which gives the engine a planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from sp_lightning.pipeline import ActivationPolicy, Pipeline, PipelineOptions, UnitPolicy
from sp_lightning.planning import AutoPlanner


def superpipeline(  # noqa: D417 (the others are documented once)
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
    pin_memory: bool = True,
    host_threads: int | Literal["auto"] = "auto",
    compile: bool = False,
    debug: bool = False,
) -> Pipeline:
    """Stream a module that is larger than device memory, to train or run it in a plain PyTorch loop.

    Args:
        module: The module; its weights move to the host, if they are elsewhere. Inputs go on the device, as usual.
        device: The device to compute on; by default the current accelerator, or else the CPU.

    The other arguments are those of `PipelineOptions`, which says what they mean.

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
