"""The parts of a pipeline that outlive an arrangement."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from sp_lightning.pipeline.activations.meter import Meter
from sp_lightning.pipeline.activations.offload import Offloader
from sp_lightning.pipeline.activations.policy import Activations
from sp_lightning.pipeline.activations.pool import HostPool
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.layout.learned import Learned
from sp_lightning.pipeline.optimizer.optimizers import Optimizers
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.graphs import Graphs
from sp_lightning.pipeline.weights.guard import EngineAtWork
from sp_lightning.pipeline.weights.segment import HostMemory
from sp_lightning.pipeline.weights.weight import Twin


class Lasting:
    """The parts that serve every arrangement of a pipeline.

    Args:
        module: The module.
        device: The device that forward and backward run on.
        options: The user's options.
        backend: Allocates memory, copies, and runs work on the host.
        replicas: The other processes that train the same model; None if there are none.
        require: Called with a twin before backward reads it.
        relax_guard: Called after work for an optimizer between steps.
        settle: Finishes all steps, of whatever arrangement there is by then.

    Attributes:
        module: The module.
        device: The device that forward and backward run on.
        options: The user's options.
        backend: Allocates memory, copies, and runs work on the host.
        replicas: The other processes that train the same model; None if there are none.
        stats: Counters.
        at_work: A scope entered around everything that the engine does itself.
        learned: Findings from past steps, for the next arrangement.
        memory: The host memory that masters lie in.
        graphs: The autograd graphs that calls build.
        pool: Host memory for offloaded activations.
        meter: Counts the device memory that autograd's saved tensors hold.
        offloader: Offloads saved activations to the host and fetches them back.
        saved: The saved-tensor hooks.
        activations: Applies the policy for activations to each call.
        optimizers: Notices optimizer steps.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        options: PipelineOptions,
        backend: Backend,
        replicas: Replicas | None,
        *,
        require: Callable[[Twin], None],
        relax_guard: Callable[[], None],
        settle: Callable[[], None],
    ) -> None:
        self.module = module
        self.device = device
        self.options = options
        self.backend = backend
        self.replicas = replicas
        self.stats = Stats()
        self.at_work = EngineAtWork()
        self.learned = Learned()
        self.memory = HostMemory()
        self.graphs = Graphs()
        self.pool = HostPool(backend)
        self.meter = Meter(backend, self.stats, always=options.activations != "auto" or options.debug)
        self.offloader = Offloader(backend, self.pool, self.meter, self.stats)
        self.saved = SavedTensors(require, self.meter, self.offloader)
        self.activations = Activations(options.activations, self.saved, backend, self.stats, checks=options.debug)
        self.optimizers = Optimizers(
            self.stats,
            self.at_work,
            relax_guard=relax_guard,
            settle=settle,
            must_overlap=options.overlap_optimizer is True,
        )
