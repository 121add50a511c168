"""What a pipeline keeps from one arrangement to the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable

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


class Lasting:
    """Parts that work with every arrangement of a pipeline.

    Args:
        module: The module.
        device: Where is computed.
        options: The user's choices.
        backend: Allocates, copies, and works on the host.
        replicas: Other processes that train the same model, if there are any.
        require: Called with a twin before backward reads it.
        close: Called when something was done between steps for an optimizer.

    Attributes:
        module: See above.
        device: See above.
        options: See above.
        backend: See above.
        replicas: See above.
        stats: Counters.
        at_work: Entered around whatever the engine does itself.
        learned: What steps have shown, for the next arrangement.
        graphs: The graphs that calls build.
        pool: The host memory in which saved activations wait.
        meter: Counts what autograd holds on the device.
        offloader: Takes what may wait on the host.
        saved: The saved-tensor hooks.
        activations: Decides what becomes of what autograd saves.
        optimizers: Notices that optimizers step.
        known_optimizers: How each of them is stepped by units.
        spent: Masters, by identity, whose gradients were used as they arrived.
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
        close: Callable[[], None],
    ) -> None:
        self.module = module
        self.device = device
        self.options = options
        self.backend = backend
        self.replicas = replicas
        self.stats = Stats()
        self.at_work = EngineAtWork()
        self.learned = Learned()
        self.graphs = Graphs()
        self.pool = HostPool(backend)
        self.meter = Meter(device, self.stats)
        self.offloader = Offloader(backend, self.pool, self.meter, self.stats)
        self.saved = SavedTensors(require, self.meter, self.offloader)
        self.activations = Activations(options.activations, self.saved, device, self.stats, checks=options.debug)
        self.optimizers = Optimizers(self.stats, self.at_work, close, insists=options.overlap_optimizer is True)
        self.known_optimizers: KnownOptimizers = weakref.WeakKeyDictionary()
        self.spent: set[int] = set()
