"""What a pipeline keeps from one arrangement to the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from sp_lightning.pipeline.activations.meter import Meter
from sp_lightning.pipeline.activations.offload import Offloader
from sp_lightning.pipeline.activations.policy import Activations
from sp_lightning.pipeline.activations.pool import HostPool
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.layout.learned import Learned
from sp_lightning.pipeline.modules.at_work import EngineAtWork
from sp_lightning.pipeline.optimizer.host_steps import KnownOptimizers
from sp_lightning.pipeline.optimizer.optimizers import Optimizers
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.weights.graphs import Graphs
from sp_lightning.pipeline.weights.weight import Twin


@dataclass(frozen=True)
class Lasting:
    """Parts that work with every arrangement of a pipeline.

    Args:
        module: The module.
        device: Where is computed.
        options: The user's choices.
        replicas: Other processes that train the same model, if there are any.
        backend: Allocates, copies, and works on the host.
        stats: Counters.
        at_work: Entered around whatever the engine does itself.
        learned: What steps have shown, for the next arrangement.
        graphs: The graphs that calls build.
        saved: The saved-tensor hooks.
        activations: Decides what becomes of what autograd saves.
        offloader: Takes what may wait on the host.
        pool: The host memory that it waits in.
        meter: Counts what is held.
        optimizers: Notices that optimizers step.
        known_optimizers: How each of them is stepped by units.
        spent: Masters, by identity, whose gradients were used as they arrived.
    """

    module: nn.Module
    device: torch.device
    options: PipelineOptions
    replicas: Replicas | None
    backend: Backend
    stats: Stats
    at_work: EngineAtWork
    learned: Learned
    graphs: Graphs
    saved: SavedTensors
    activations: Activations
    offloader: Offloader
    pool: HostPool
    meter: Meter
    optimizers: Optimizers
    known_optimizers: KnownOptimizers
    spent: set[int]

    @classmethod
    def make(
        cls,
        module: nn.Module,
        device: torch.device,
        options: PipelineOptions,
        backend: Backend,
        replicas: Replicas | None,
        *,
        require: Callable[[Twin], None],
        close: Callable[[], None],
    ) -> Lasting:
        """The parts of a new pipeline.

        Args:
            module: The module.
            device: Where is computed.
            options: The user's choices.
            backend: Allocates, copies, and works on the host.
            replicas: Other processes that train the same model, if there are any.
            require: Called with a twin before backward reads it.
            close: Called when something was done between steps for an optimizer.
        """
        stats, at_work = Stats(), EngineAtWork()
        pool, meter = HostPool(backend), Meter(device, stats)
        offloader = Offloader(backend, pool, meter, stats)
        saved = SavedTensors(require, meter, offloader)
        return cls(
            module=module,
            device=device,
            options=options,
            replicas=replicas,
            backend=backend,
            stats=stats,
            at_work=at_work,
            learned=Learned(),
            graphs=Graphs(),
            saved=saved,
            activations=Activations(options.activations, saved, device, stats, checks=options.debug),
            offloader=offloader,
            pool=pool,
            meter=meter,
            optimizers=Optimizers(stats, at_work, close, insists=options.overlap_optimizer is True),
            known_optimizers=weakref.WeakKeyDictionary(),
            spent=set(),
        )
