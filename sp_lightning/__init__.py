"""Models larger than GPU memory: `Trainer(strategy="superpipeline")`, Fabric's, or `superpipeline(module)` in a loop.

Importing this package registers the strategy with Lightning. The name has to be in the registry before the Trainer, or
Fabric, is built, and Lightning has no entry point for strategies. `lightning` and `pytorch_lightning`, whose Fabric is
`lightning_fabric`, have separate registries, and their classes do not mix: the name is registered in each one that a
program imports, before or after this package. This imports none of them itself, as each takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sp_lightning.arguments import options_among, refuse_unknown
from sp_lightning.losses import chunked_cross_entropy, loss_in_slices
from sp_lightning.pipeline import Pipeline, PipelineOptions
from sp_lightning.pipeline.options import ActivationPolicy, Auto, CompileOptions, OptimizerPlace, UnitPolicy
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
    k: int | Auto = "auto",
    k_prime: int = 1,
    memory_budget: int | float | str | None = None,
    units: UnitPolicy | None = None,
    resident: Sequence[str] = (),
    activations: ActivationPolicy = "auto",
    overlap_optimizer: bool | Auto = "auto",
    optimizer_on: OptimizerPlace = "auto",
    pin_memory: bool = True,
    host_threads: int | Auto = "auto",
    compile: CompileOptions = False,
    nvme_path: str | None = None,
    debug: bool = False,
    **unknown: Any,
) -> Pipeline:
    """Stream a module that is larger than GPU memory, to train or run it in a plain PyTorch loop.

    `PipelineOptions` describes the options from `k` to `debug`.

    Args:
        module: The module. Its weights move to CPU memory, if they are elsewhere. Put inputs on the device, as usual.
        device: The device to compute on; by default the current accelerator, or else the CPU.
        unknown: Raises an error that lists the options.

    Returns:
        The attached pipeline. Its `detach()`, or the end of a `with` block, makes the module a plain one again; until
        then the module and its memory stay.

    Raises:
        ValueError: If an argument is invalid, or does not fit the module or the available memory.
        TypeError: If there is no such argument.

    Examples:
        >>> model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
        >>> with superpipeline(model, "cpu", k=2) as pipeline:
        ...     model(torch.ones(1, 8)).sum().backward()
    """
    options = options_among(locals())
    refuse_unknown("superpipeline()", unknown)
    return Pipeline(module, device, options=options, planner=AutoPlanner())


_ADAPTORS = {
    "lightning": ("sp_lightning.lightning", "sp_lightning.fabric"),
    "pytorch_lightning": ("sp_lightning.pytorch_lightning",),
    "lightning_fabric": ("sp_lightning.lightning_fabric",),
}
"""The top package of a namespace -> the modules that register a strategy there when they are imported."""


class _RegisteringFinder:
    """Finds the namespaces of Lightning before all others do, for a program that imports them after this package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a namespace where others do, and have its loader register the strategies."""
        if fullname not in _ADAPTORS:
            return None
        # Python, too, ignores finders of the old protocol, which have no `find_spec`
        others = [other for other in sys.meta_path if other is not self and hasattr(other, "find_spec")]
        found = (other.find_spec(fullname, path, target) for other in others)
        spec = next(filter(None, found), None)
        # a folder of a user's own has no loader yet
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)  # it may load other modules, too
                run(module)
                _register(fullname)

            # the strategies are registered once the namespace's own loader has run its code
            loader.exec_module = run_and_register
        return spec


def _register(package: str) -> None:
    for adaptor in _ADAPTORS[package]:
        import_module(adaptor)


sys.meta_path.insert(0, _RegisteringFinder())
for _package in _ADAPTORS:
    if sys.modules.get(_package) is not None:
        _register(_package)


def __dir__() -> list[str]:
    """List all public names for completion; `__getattr__` imports some of them on demand."""
    return sorted([*__all__, "optim"])


def __getattr__(name: str) -> Any:
    """Return a class that needs Lightning: `lightning`'s, unless `pytorch_lightning` alone is imported or installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    usable = [each for each in ("lightning", "pytorch_lightning") if find_spec(each) is not None]
    if not usable:
        words = f"`sp_lightning.{name}` needs Lightning 2.5.5 or newer: `pip install -U lightning`."
        raise ImportError(words)
    chosen = next((each for each in usable if each in sys.modules), usable[0])
    return getattr(import_module(f"sp_lightning.{chosen}"), name)
