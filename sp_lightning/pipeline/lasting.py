"""What a pipeline keeps from one arrangement to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sp_lightning.pipeline.activations.meter import Meter
from sp_lightning.pipeline.activations.offload import Offloader
from sp_lightning.pipeline.activations.policy import Activations
from sp_lightning.pipeline.activations.pool import HostPool
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.learned import Learned
from sp_lightning.pipeline.modules.at_work import EngineAtWork
from sp_lightning.pipeline.optimizer.host_steps import KnownOptimizers
from sp_lightning.pipeline.optimizer.optimizers import Optimizers
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.weights.graphs import Graphs


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
