"""The strategy, the callback and the checkpoint plugin for `pytorch_lightning`. `lightning.py` is its twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins import CheckpointIO, Precision, TorchCheckpointIO
from pytorch_lightning.plugins.environments import ClusterEnvironment  # type: ignore[attr-defined]
from pytorch_lightning.strategies import ParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from torch import nn
from torch.distributed.constants import default_pg_timeout

from sp_lightning._namespace import Namespace, namespace
from sp_lightning.callback import CallbackMixin
from sp_lightning.checkpoint_io import StreamingCheckpointIO
from sp_lightning.pipeline import PipelineOptions
from sp_lightning.strategy import SuperpipelineMixin


class SuperpipelineCheckpointIO(StreamingCheckpointIO, TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO`, without its second copy of the checkpoint in host memory."""


class SuperpipelineCallback(CallbackMixin, Callback):  # type: ignore[misc]
    """Logs what is streamed, draws it, and says in the end where the time went. It observes only.

    While a model trains, the Trainer's loggers get metrics under `superpipeline/`. Every now and then a step is
    recorded, for times; at the end of each recording the host waits once for the device.

    Args:
        timeline: A file for a picture of where the time of a step goes, for a name that ends in ".html" (a page to
            zoom into) or ".png", or a Chrome trace for ".json". It is written once a few steps are done, and with
            later steps at the end.
        timeline_steps: How many steps it shows.
        summary: Whether to print a table when a run begins, and in the end what was streamed and what would help.
            Without this callback there is a table if the Trainer prints a summary of the model.

    Raises:
        ImportError: `timeline` ends in ".png", and Pillow is not installed.
        ValueError: `timeline` ends in something else, or `timeline_steps` is less than one.

    Example::

        trainer = Trainer(strategy="superpipeline", callbacks=SuperpipelineCallback(timeline="timeline.html"))
    """

    lightning: ClassVar[Namespace] = namespace("pytorch_lightning")

    def __init__(self, timeline: str | Path | None = None, timeline_steps: int = 1, summary: bool = True) -> None:
        super().__init__(timeline, timeline_steps, summary)


class SuperpipelineStrategy(SuperpipelineMixin, ParallelStrategy):  # type: ignore[misc]
    """Trains, validates, tests and predicts with models larger than the memory of the device.

    Weights, gradients and optimizer state live in host memory. The model is split into units (layers, blocks), of
    which `k` are on the device at once, and the moving hides behind the computing. Losses, gradients and weights are
    those of plain training.

    Args:
        accelerator: As in every Lightning strategy; the Trainer sets it.
        parallel_devices: As in every Lightning strategy; the Trainer sets it. With more than one device
            there is a process for each, with a replica of the model, and gradients are averaged as DDP does.
        cluster_environment: As in every Lightning strategy; the Trainer sets it.
        checkpoint_io: How checkpoints are written and read. By default they are streamed, without a second copy in
            memory.
        precision_plugin: As in every Lightning strategy; the Trainer sets it.
        process_group_backend: How processes on several devices talk; by default what torch has for the device.
        timeout: How long one of them waits for the others.
        k: How many units are on the device at once. With `k` at least the number of units, nothing is streamed.
            "auto" begins with two and chooses what the first steps show to be fastest within `memory_budget`.
        k_prime: How many units one transfer moves, at most `k`. "auto" begins with one and is chosen with `k`.
        memory_budget: The device memory that a step may take, in bytes, as "12GB", or as a fraction of the device.
            None is 90 % of what is free.
        units: What a unit is: module classes or their names, or a function of a module's name and the module. None
            finds them.
        resident: Names of modules or parameters that always stay on the device.
        activations: What happens to what a unit's forward saves for backward: "keep" leaves it on the device,
            "recompute" keeps the unit's inputs alone and runs its forward again in backward, "offload" lets it wait in
            host memory. "auto" measures and chooses for each unit, so that all of it fits.
        overlap_optimizer: Whether the optimizer steps unit by unit while the device computes, with the numbers of a
            plain step. "auto" does so where the optimizer treats each weight by itself; True makes any other an error.
        resident_optimizer: Whether whole units may live on the device, with their gradients and optimizer state, where
            `k="auto"` finds memory to spare. They are stepped there, and only the rest streams.
        pin_memory: Whether host memory is page-locked, which makes transfers fast.
        host_threads: How many threads step the optimizer and add up gradients on the host, beside the training loop.
            "auto" takes three quarters of the cores near the device, or as many as `OMP_NUM_THREADS` says.
        compile: Whether to compile the forward of each unit with `torch.compile`, as `block.compile()` would. Blocks
            that you compiled yourself stay as they are.
        debug: Whether to poison free device memory, to delay transfers at random and to check every access.

    Raises:
        ValueError: An argument has a value that it cannot have.
        MisconfigurationException: The Trainer's other arguments do not go with the strategy.

    Example::

        trainer = Trainer(strategy="superpipeline", precision="bf16-mixed")
        trainer = Trainer(strategy=SuperpipelineStrategy(k=4, memory_budget="12GB"))
    """

    lightning: ClassVar[Namespace] = namespace("pytorch_lightning")
    streaming_checkpoint_io: ClassVar[type[StreamingCheckpointIO]] = SuperpipelineCheckpointIO
    callback: ClassVar[type[Callback]] = SuperpipelineCallback

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        k: int | Literal["auto"] = "auto",
        k_prime: int | Literal["auto"] = "auto",
        memory_budget: int | float | str | None = None,
        units: str | type[nn.Module] | Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool] | None = None,
        resident: Sequence[str] = (),
        activations: Literal["keep", "recompute", "offload", "auto"] = "auto",
        overlap_optimizer: bool | Literal["auto"] = "auto",
        resident_optimizer: bool = False,
        pin_memory: bool | Literal["auto"] = "auto",
        host_threads: int | Literal["auto"] = "auto",
        compile: bool = False,
        debug: bool = False,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            options=PipelineOptions(
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
            ),
        )


SuperpipelineStrategy.register_strategies(StrategyRegistry)
# To Lightning this class means that a module is in no wrapper, and may be compiled as a whole; it means nothing else.
SingleDeviceStrategy.register(SuperpipelineStrategy)
