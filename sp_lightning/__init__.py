"""Models larger than GPU memory: `Trainer(strategy="superpipeline")`, Fabric's, or `superpipeline(module)` in a loop.

Importing this package registers the strategy with Lightning. The name has to be in the registry before the Trainer, or
Fabric, is built, and Lightning has no entry point for strategies. `lightning` and `pytorch_lightning`, whose Fabric is
`lightning_fabric`, have separate registries, and their classes do not mix: the name is registered in each one that is
already imported or, if none is, in each one that is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from sp_lightning.arguments import refuse_unknown
from sp_lightning.losses import chunked_cross_entropy, loss_in_slices
from sp_lightning.pipeline import Pipeline, PipelineOptions
from sp_lightning.pipeline.options import ActivationPolicy, OptimizerPlace, UnitPolicy
from sp_lightning.planning import Assumptions, AutoPlanner, plan
from sp_lightning.timeline import write_timeline

if TYPE_CHECKING:
    from sp_lightning.lightning import (
        SuperpipelineCallback,
        SuperpipelineCheckpointIO,
        SuperpipelineStrategy,
    )

__version__ = "0.2.0"

__all__ = [
    "Assumptions",
    "Pipeline",
    "PipelineOptions",
    "SuperpipelineCallback",
    "SuperpipelineCheckpointIO",
    "SuperpipelineStrategy",
    "__version__",
    "chunked_cross_entropy",
    "loss_in_slices",
    "plan",
    "superpipeline",
    "write_timeline",
]


def superpipeline(  # noqa: D417 - PipelineOptions describes them
    module: nn.Module,
    device: torch.device | str | None = None,
    *,
    k: int | Literal["auto"] = "auto",
    k_prime: int = 1,
    memory_budget: int | float | str | None = None,
    units: UnitPolicy | None = None,
    resident: Sequence[str] = (),
    activations: ActivationPolicy = "auto",
    overlap_optimizer: bool | Literal["auto"] = "auto",
    optimizer_on: OptimizerPlace = "auto",
    pin_memory: bool = True,
    host_threads: int | Literal["auto"] = "auto",
    compile: bool = False,
    debug: bool = False,
    **unknown: Any,
) -> Pipeline:
    """Stream a module that is larger than device memory, to train or run it in a plain PyTorch loop.

    `PipelineOptions` tells what the options from `k` to `debug` do.

    Args:
        module: The module; its weights move to the host, if they are elsewhere. Inputs go on the device, as usual.
        device: The device to compute on; by default the current accelerator, or else the CPU.
        unknown: Refused, with the names that there are.

    Returns:
        The attached pipeline. Its `detach()` gives the plain module back; until then the module and its memory stay.

    Raises:
        ValueError: If an argument is invalid, or does not fit the module or the available memory.
        TypeError: If there is no such argument.

    Examples:
        >>> model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
        >>> pipeline = superpipeline(model, "cpu", k=2)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> pipeline.detach()
    """
    refuse_unknown("superpipeline()", unknown)
    options = PipelineOptions(
        k=k,
        k_prime=k_prime,
        memory_budget=memory_budget,
        units=units,
        resident=resident,
        activations=activations,
        overlap_optimizer=overlap_optimizer,
        optimizer_on=optimizer_on,
        pin_memory=pin_memory,
        host_threads=host_threads,
        compile=compile,
        debug=debug,
    )
    return Pipeline(module, device, options=options, planner=AutoPlanner())


_ADAPTORS = {
    "sp_lightning.lightning": "lightning",
    "sp_lightning.pytorch_lightning": "pytorch_lightning",
    "sp_lightning.fabric": "lightning",
    "sp_lightning.lightning_fabric": "lightning_fabric",
}
"""The module that registers a strategy when imported -> the top package of its namespace."""
_OF_THE_TRAINER = ("sp_lightning.lightning", "sp_lightning.pytorch_lightning")

_packages = {package for package in _ADAPTORS.values() if sys.modules.get(package) is not None}
if not _packages:
    _packages = {package for package in _ADAPTORS.values() if find_spec(package) is not None}
_registered = [adaptor for adaptor, package in _ADAPTORS.items() if package in _packages]
# Lightning's messages go to the logger of the namespace that is imported last
for _adaptor in reversed(_registered):
    import_module(_adaptor)


def __getattr__(name: str) -> Any:
    """Return a class that needs Lightning: `lightning`'s, unless only `pytorch_lightning` had been imported before."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    usable = [each for each in _OF_THE_TRAINER if each in _registered]
    usable += [each for each in _OF_THE_TRAINER if find_spec(_ADAPTORS[each]) is not None]
    if not usable:
        needed = "Lightning 2.5.5 or newer: `pip install -U lightning`"
        raise ImportError(f"`sp_lightning.{name}` needs {needed}.")
    return getattr(import_module(usable[0]), name)
