"""The strategy, callback and checkpoint plugin for `lightning.pytorch`. `pytorch_lightning.py` is its twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Literal

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import CheckpointIO, Precision, TorchCheckpointIO
from lightning.pytorch.plugins.environments import ClusterEnvironment  # type: ignore[attr-defined]
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from torch import nn
from torch.distributed.constants import default_pg_timeout

from sp_lightning._namespace import Namespace, namespace
from sp_lightning.callback import CallbackMixin
from sp_lightning.checkpoint_io import StreamingCheckpointIO
from sp_lightning.pipeline import PipelineOptions
from sp_lightning.strategy import SuperpipelineMixin


class SuperpipelineCheckpointIO(StreamingCheckpointIO, TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO` without the second copy of the checkpoint in host memory."""


class SuperpipelineCallback(CallbackMixin, Callback):
    """Logs streaming metrics, draws a timeline and reports where the time went. It only observes.

    While a model trains, the Trainer's loggers receive metrics under `superpipeline/`. Every now and then a step is
    recorded to measure times; at the end of each recording the host waits once for the device.

    Args:
        timeline: The file to write a picture of where the time of a step goes to. Its suffix selects the format:
            ".html" (a page to zoom into), ".png", or ".json" (a Chrome trace). The file is written as soon as the first
            recording is complete, and again with later steps at the end of the run.
        timeline_steps: The number of steps in the timeline.
        summary: Whether to print the plan as a table when a run begins and, at the end, what was streamed and what
            would make it faster. Without this callback, the table is printed if the Trainer prints a model summary.

    Raises:
        ImportError: If `timeline` ends in ".png" and Pillow is not installed.
        ValueError: If `timeline` has another suffix, or `timeline_steps` is less than one.

    Example::

        trainer = Trainer(strategy="superpipeline", callbacks=SuperpipelineCallback(timeline="timeline.html"))
    """

    lightning: ClassVar[Namespace] = namespace("lightning.pytorch")

    def __init__(self, timeline: str | Path | None = None, timeline_steps: int = 1, summary: bool = True) -> None:
        super().__init__(timeline, timeline_steps, summary)


class SuperpipelineStrategy(SuperpipelineMixin, ParallelStrategy):
    """Trains, validates, tests and predicts with models larger than device memory.

    Weights, gradients and optimizer state live in host memory. The model is split into units (layers, blocks), `k` of
    which are on the device at a time, and units are copied while others compute. Losses, gradients and weights are
    those of plain training.

    Args:
        accelerator: Set by the Trainer, as in every Lightning strategy.
        parallel_devices: Set by the Trainer, as in every Lightning strategy. With more than one device, each has a
            process with its own replica of the model, and gradients are averaged as in DDP.
        cluster_environment: Set by the Trainer, as in every Lightning strategy.
        checkpoint_io: The plugin that writes and reads checkpoints. The default streams them, without a second copy
            in host memory.
        precision_plugin: Set by the Trainer, as in every Lightning strategy.
        process_group_backend: The `torch.distributed` backend for training on several devices. None uses torch's
            default for the device.
        timeout: How long a process waits for the others.
        k: Number of units on the device at once. With `k` at least the number of units, nothing is streamed. "auto"
            starts with two, then chooses what the first steps show to be fastest within `memory_budget`.
        k_prime: Number of units moved together in one transfer, at most `k`. "auto" starts with one, and is then chosen
            with `k`.
        memory_budget: Device memory that weights, gradients on their way to the host and activations may take: a number
            of bytes, text such as "12GB", or a fraction of the device's memory. None means 90 % of what is free, and no
            limit on the CPU. A window that needs more is refused.
        units: The modules to use as units: classes, class names, or a callable `(name, module) -> bool`. None finds
            them automatically.
        resident: Names of modules or parameters to keep on the device at all times.
        activations: What to do with the tensors that a unit saves for backward. "keep" leaves them on the device,
            "recompute" keeps only the unit's inputs and runs its forward again in backward, "offload" moves them to
            host memory until backward. "auto" measures two steps, then chooses for each unit so that everything fits.
        overlap_optimizer: Whether to step the optimizer unit by unit while the device computes. "auto" does so where
            the result is that of a plain step; True makes anything else an error.
        resident_optimizer: Whether whole units may live on the device, with their gradients and optimizer state, where
            `k="auto"` finds memory to spare. The optimizer steps them there, and only the other units stream.
        pin_memory: Whether to use pinned (page-locked) host memory, which makes copies fast. "auto" pins where the
            device gains by it.
        host_threads: Number of threads that step the optimizer and add up gradients on the host. "auto" uses
            `OMP_NUM_THREADS` if you set it, else three quarters of the cores near the device; on a CPU, torch's number.
        compile: Whether to compile the forward of each unit with `torch.compile`, as `block.compile()` does; units that
            are alike share one graph. Blocks that you compiled yourself stay as they are.
        debug: Whether to delay copies at random, poison free slots and check every access to a weight.

    Raises:
        ValueError: If an argument has an invalid value.
        MisconfigurationException: If the Trainer's other arguments do not work with this strategy.

    Example::

        trainer = Trainer(strategy="superpipeline", precision="bf16-mixed")
        trainer = Trainer(strategy=SuperpipelineStrategy(k=4, memory_budget="12GB"))
    """

    lightning: ClassVar[Namespace] = namespace("lightning.pytorch")
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
# Lightning takes a SingleDeviceStrategy to mean only that the module has no wrapper and may be compiled as a whole.
SingleDeviceStrategy.register(SuperpipelineStrategy)
