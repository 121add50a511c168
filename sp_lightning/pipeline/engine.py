"""The engine: the parts that stream a module, wired together, installed in the module tree and removed.

Its parts are made in the order in which they build on each other, and each has those that it needs by name. The first
ones live from attach to detach; the others know the units and where their weights lie, so there are new ones whenever
units are arranged anew (arranger.py).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from sp_lightning.pipeline.activations.memory import HostPool, Meter
from sp_lightning.pipeline.activations.offload import Offloader
from sp_lightning.pipeline.activations.policy import Activations
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.backward import BackwardPass
from sp_lightning.pipeline.calls import Calls
from sp_lightning.pipeline.gradients.averaging import AveragedStream, Replicas
from sp_lightning.pipeline.gradients.buffers import Pin
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.layout.arrangement import Arrangement
from sp_lightning.pipeline.layout.learned import Learned
from sp_lightning.pipeline.optimizer.group_steps import GroupSteps
from sp_lightning.pipeline.optimizer.optimizers import Optimizers
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.outside import OutsideUse
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import storage_key
from sp_lightning.pipeline.units.moving import move_all_but_parameters, move_parameters, move_unmanaged
from sp_lightning.pipeline.units.tree import weights_on_accelerators
from sp_lightning.pipeline.weights.compiled import compiled_call
from sp_lightning.pipeline.weights.gates import Gatekeeper, install_gate, remove_gate
from sp_lightning.pipeline.weights.graphs import Graphs
from sp_lightning.pipeline.weights.guard import EngineAtWork
from sp_lightning.pipeline.weights.order import Order
from sp_lightning.pipeline.weights.segment import HostMemory
from sp_lightning.pipeline.weights.window import Window

_HOST = torch.device("cpu")

SHARE_OF_FREE_MEMORY = 0.9  # the budget, as a share of free device memory, if the user gives none


class Engine:
    """The parts that stream a module.

    Attributes:
        parameters: The identities of the module's parameters.
    """

    arrangement: Arrangement
    keeper: Gatekeeper  # the object that members' calls are routed to

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        options: PipelineOptions,
        backend: Backend,
        replicas: Replicas | None,
    ) -> None:
        self.module = module
        self.device = device
        self.options = options
        self.backend = backend
        self.replicas = replicas
        self.stats = Stats()
        self.at_work = EngineAtWork()
        self.learned = Learned()  # findings from past steps, for the next arrangement
        self.memory = HostMemory()  # the host memory that masters lie in
        self.graphs = Graphs()
        self.pool = HostPool(backend)
        self.meter = Meter(backend, self.stats, always=options.activations != "auto" or options.debug)
        self.offloader = Offloader(backend, self.pool, self.meter, self.stats)
        self.saved = SavedTensors(self.meter, self.offloader)
        self.activations = Activations(options.activations, self.saved, self.offloader, backend, self.stats)
        self.optimizers = Optimizers(self.stats, self.at_work, options.overlap_optimizer)

    def take(self, arrangement: Arrangement) -> None:
        """Make the parts for an arrangement."""
        self.arrangement = arrangement
        backend, stats, at_work = self.backend, self.stats, self.at_work
        members = arrangement.streamed_members
        groups = [member.unit.group for member in members if member.unit is not None]
        self.order = Order(len(members))
        self.window = Window(arrangement.groups, groups, self.order, backend, stats)
        self.stream = self._make_stream()
        fused = self.device.type != "cpu"  # on the CPU the user's choice stands, as in plain training
        self.steps = GroupSteps(self.window, backend, self.stream, stats, fused)
        self.backward = BackwardPass(self, self.window, self.stream, self.optimizers, arrangement.resident, at_work)
        self.outside = OutsideUse(
            self, arrangement, self.learned, self.graphs, self.window, self.stream, self.backward, at_work
        )
        self.guard = self.outside.guard
        self.calls = Calls(
            arrangement,
            self.graphs,
            self.saved,
            self.activations,
            self.offloader,
            self.window,
            self.backward,
            self.outside,
            at_work,
        )

    def _make_stream(self) -> GradientStream:
        arrangement, share = self.arrangement, self.arrangement.host_share
        units, backend, stats = arrangement.all_units, self.backend, self.stats
        pin = Pin.ALL if share.pin_gradients else Pin.NOTHING if share.pinnable == 0 else Pin.LANDING
        if self.replicas is None:
            return GradientStream(units, self.window, backend, stats, pin)
        unmanaged = list(arrangement.unmanaged.values())
        return AveragedStream(units, self.window, backend, stats, pin, self.replicas, unmanaged)

    @property
    def budget(self) -> int | None:
        """Device memory for weights, gradients on their way and activations; None if no limit is known."""
        if self.arrangement.budget is not None:
            return self.arrangement.budget
        memory = self.backend.memory()
        if memory is None:
            return None
        streaming = self.arrangement.streaming_bytes()
        if torch.is_grad_enabled():  # what is free still includes what the first backward will allocate
            streaming = min(streaming, self.arrangement.device_bytes() + self.stream.device_bytes())
        return streaming + int(SHARE_OF_FREE_MEMORY * memory.free)

    def room_for_activations(self) -> int:
        """Return the bytes of device memory left for activations; only meaningful where there is a limit."""
        return max(0, (self.budget or 0) - self.arrangement.streaming_bytes())

    # ------------------------------------------------------------------------------------ installing and uninstalling

    def install(self) -> None:
        """Take over the module.

        Raises:
            torch.OutOfMemoryError: If the units that should live on the device do not fit; the module is not taken over
                then.
        """
        arrangement = self.arrangement
        self._settle_on_device()
        self.saved.twins, self.saved.backward = arrangement.twins, self.backward
        self.parameters = frozenset(map(id, self.module.parameters()))
        self.optimizers.work_with(self, arrangement.weights_by_master)
        move_all_but_parameters(self.module, self.device)
        move_unmanaged(arrangement.unmanaged.values(), self.device)
        self.pool.pinnable = arrangement.host_share.pinnable
        stay = (*self.module.buffers(), *arrangement.unmanaged.values(), *arrangement.parameters_on_device)
        self.meter.uncounted = set(map(storage_key, stay))
        for twin in arrangement.twins.values():
            self.backward.follow_requires_grad(twin)
        if self.options.compile:
            for member in arrangement.streamed_members:
                member.compiled = compiled_call(member.module)
        self.guard.install()
        self.install_gates()

    def install_gates(self) -> None:
        """Have modules surround their calls."""
        for member in self.arrangement.members:
            install_gate(member, self.keeper)

    def remove_gates(self) -> None:
        """Undo `install_gates`."""
        for member in self.arrangement.members:
            remove_gate(member)

    def _settle_on_device(self) -> None:
        """Move the units that live on the device there, or move them all back if memory runs out."""
        parameters = self.arrangement.parameters_on_device
        try:
            self._move(parameters, self.device)
        except torch.OutOfMemoryError:
            self._move(parameters, _HOST)
            raise

    def _move(self, parameters: Collection[nn.Parameter], device: torch.device) -> None:
        move_parameters(parameters, device)
        self.optimizers.move_state(parameters)

    def uninstall(self) -> None:
        """Give the module back, except for its buffers. Masters keep their identity, their values and their memory."""
        arrangement = self.arrangement
        self.backward.close()
        self.optimizers.leave_weights()
        self.steps.settle()
        for member in arrangement.members:
            member.put_back_masters()  # the call of a module that looks into a unit may still be running
        self.remove_gates()
        for twin in arrangement.twins.values():
            if twin.gradient_hook is not None:  # a reference cycle through C++ that Python's collector cannot see
                twin.gradient_hook.remove()
            twin.refuse_gradients()
        self.backend.drain()
        arrangement.release_copies()  # first, as gradients in a lower dtype need more memory to be shown
        self.stream.close()
        self.guard.remove()
        # those of modules that were added meanwhile, too, which plain training needs on the device
        moving = dict.fromkeys([*arrangement.parameters_on_device, *weights_on_accelerators(self.module)])
        self._move(moving, _HOST)
        arrangement.close()

    # ------------------------------------------------------------------------------------------------------ in a step

    def arm_guard(self) -> None:
        """Begin a step or a backward pass: guard masters, and have weights on the device checked before use."""
        if not self.guard.in_step:
            self.window.suspect_all()
            self.guard.in_step = True

    def relax_guard(self) -> None:
        """Relax the guard as far as possible, once neither a step nor a backward pass is under way."""
        if self.graphs.in_step or self.backward.running:
            return
        self.guard.in_step = False
        copies = self.window.copies_of(self.arrangement.groups)
        self.guard.settled = self.optimizers.settled and self.stream.settled and not copies

    def settle(self) -> None:
        """Wait until gradients have landed, and nothing reads or writes masters."""
        with self.at_work:
            self.steps.settle()
            self.stream.settle()
            self.relax_guard()

    def abandon(self) -> None:
        """Clean up after an exception has ended whatever was under way."""
        self.calls.abandon()
        self.optimizers.restore_param_groups()
        self.backward.abandon()
        self.saved.abandon()
        self.backend.drain()
        self.offloader.abandon()
        self.order.abandon()
        self.window.abandon()

    def begin_backward(self) -> None:
        """Follow the beginning of a backward pass."""
        self.arm_guard()

    def end_backward(self) -> None:
        """Follow the end of a backward pass."""
        self.graphs.has_served = False
        self.backend.trace.end()
        self.activations.end_backward()
        if not self.graphs.in_step:
            self.window.end_step()
            self.graphs.begin()  # the one that checkpoints have built meanwhile has had its backward
        self.relax_guard()
