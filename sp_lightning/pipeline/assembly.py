"""An assembly: the parts that stream one arrangement, wired together, installed in the module tree and removed.

A pipeline has one assembly at a time. Another one replaces it when units, or the dtypes that weights are sent in,
change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sp_lightning.pipeline.backward import BackwardPass
from sp_lightning.pipeline.calls import Calls
from sp_lightning.pipeline.gradients.averaged_stream import AveragedStream
from sp_lightning.pipeline.gradients.averaging import Averaging
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.lasting import Lasting
from sp_lightning.pipeline.layout.arrangement import Arrangement
from sp_lightning.pipeline.optimizer import on_device
from sp_lightning.pipeline.optimizer.clipping import Clipping
from sp_lightning.pipeline.optimizer.group_steps import GroupSteps
from sp_lightning.pipeline.optimizer.optimizers import OptimizerParts
from sp_lightning.pipeline.optimizer.overlap import Overlap
from sp_lightning.pipeline.outside import OutsideUse
from sp_lightning.pipeline.torch_private import storage_key
from sp_lightning.pipeline.units.moving import move_all_but_parameters, move_unmanaged
from sp_lightning.pipeline.units.tree import weights_on_accelerators
from sp_lightning.pipeline.weights.compiled import compiled_call
from sp_lightning.pipeline.weights.gates import Gatekeeper, install_gate, remove_gate
from sp_lightning.pipeline.weights.order import Order
from sp_lightning.pipeline.weights.swap import swap_out
from sp_lightning.pipeline.weights.window import Window
from sp_lightning.pipeline.weights.write_back import WriteBack

_HOST = torch.device("cpu")


class Assembly:
    """The parts that belong to one arrangement. Constructing it wires them; `install` is what changes the module.

    Args:
        arrangement: The units, and where their weights lie.
        lasting: The parts that outlive the arrangement.
        in_step: Tells whether the scope of a step is open.
        keeper: The object that members' calls are routed to.

    Attributes:
        arrangement: The units, and where their weights lie.
        order: Predicts which use comes next.
        window: Brings groups to the device.
        stream: Brings gradients to the host.
        steps: The optimizers' work on the host.
        overlap: Steps units while the device computes.
        backward: Follows backward passes.
        outside: Serves weights that are used outside of their unit.
        guard: Notices accesses to masters.
        calls: Runs the calls of members.
    """

    def __init__(
        self, arrangement: Arrangement, lasting: Lasting, in_step: Callable[[], bool], keeper: Gatekeeper
    ) -> None:
        self.arrangement = arrangement
        self._lasting = lasting
        self._in_step = in_step
        self._keeper = keeper
        backend, stats = lasting.backend, lasting.stats
        members = arrangement.streamed_members
        groups = [member.unit.group for member in members if member.unit is not None]
        self.order = Order(len(members))
        self.write_back = WriteBack(backend, stats, lasting.at_work)
        self.window = Window(
            arrangement.groups,
            groups,
            self.order,
            backend,
            stats,
            self.write_back,
        )
        self.stream = self._make_stream()
        fused = lasting.device.type != "cpu"  # on the CPU the user's choice stands, as in plain training
        self.steps = GroupSteps(self.window, backend, self.stream, stats, fused)
        self.overlap = Overlap(
            arrangement.weights_by_master,
            self.steps,
            self.stream,
            overlaps=lasting.options.overlap_optimizer is not False,
        )
        self.backward = BackwardPass(
            window=self.window,
            order=self.order,
            stream=self.stream,
            overlap=self.overlap,
            write_back=self.write_back,
            resident=arrangement.resident,
            stats=stats,
            at_work=lasting.at_work,
            on_begin=self._begin_backward,
            on_end=self._end_backward,
        )
        self.outside = OutsideUse(
            arrangement,
            lasting,
            window=self.window,
            stream=self.stream,
            backward=self.backward,
            write_back=self.write_back,
            settle=self.settle,
        )
        self.guard = self.outside.guard
        self.calls = Calls(
            arrangement,
            lasting,
            window=self.window,
            order=self.order,
            backward=self.backward,
            outside=self.outside,
            write_back=self.write_back,
            in_step=in_step,
        )
        self._clipping = Clipping(arrangement.weights_by_master, arrangement.parameters_on_device, backend, self.stream)

    def _make_stream(self) -> GradientStream:
        arrangement, lasting, pin = self.arrangement, self._lasting, self.arrangement.host_share.pin_gradients
        units, backend, stats, replicas = arrangement.all_units, lasting.backend, lasting.stats, lasting.replicas
        if replicas is None:
            return GradientStream(units, self.window, backend, stats, pin)
        averaging = Averaging(replicas, list(arrangement.unmanaged.values()), lasting.optimizers)
        return AveragedStream(units, self.window, backend, stats, pin, averaging)

    # ------------------------------------------------------------------------------------ installing and uninstalling

    def install(self) -> None:
        """Take over the module.

        Raises:
            torch.OutOfMemoryError: If the units that should live on the device do not fit; the module is not taken over
                then.
        """
        arrangement, lasting = self.arrangement, self._lasting
        self._settle_on_device()
        lasting.saved.twins = arrangement.twins
        lasting.optimizers.work_with(
            OptimizerParts(
                overlap=self.overlap,
                clipping=self._clipping,
                stream=self.stream,
                window=self.window,
                parameters=frozenset(map(id, lasting.module.parameters())),
                write_back=self.write_back.write_served,
            )
        )
        move_all_but_parameters(lasting.module, lasting.device)
        move_unmanaged(arrangement.unmanaged.values(), lasting.device)
        lasting.pool.pinnable = arrangement.host_share.pinnable_bytes()
        stay = (*lasting.module.buffers(), *arrangement.unmanaged.values(), *arrangement.parameters_on_device)
        lasting.meter.uncounted = set(map(storage_key, stay))
        for twin in arrangement.twins.values():
            self.backward.follow_requires_grad(twin)
        if lasting.options.compile:
            for member in arrangement.streamed_members:
                member.compiled = compiled_call(member.module)
        self.guard.install()
        self.install_gates()

    def install_gates(self) -> None:
        """Have modules surround their calls."""
        for member in self.arrangement.members:
            install_gate(member, self._keeper)

    def remove_gates(self) -> None:
        """Undo `install_gates`."""
        for member in self.arrangement.members:
            remove_gate(member)

    def _settle_on_device(self) -> None:
        """Move the units that live on the device there, or move them all back if memory runs out."""
        lasting, parameters = self._lasting, self.arrangement.parameters_on_device
        try:
            on_device.move(parameters, lasting.device, lasting.optimizers.seen)
        except torch.OutOfMemoryError:
            on_device.move(parameters, _HOST, lasting.optimizers.seen)
            raise

    def uninstall(self) -> None:
        """Give the module back, except for its buffers. Masters keep their identity, their values and their memory."""
        arrangement, lasting = self.arrangement, self._lasting
        self.backward.close()
        self.overlap.close()
        self.steps.settle()
        for member in arrangement.members:
            swap_out(member)  # the call of a module that looks into a unit may still be running
        self.remove_gates()
        for twin in arrangement.twins.values():
            if twin.gradient_hook is not None:  # a reference cycle through C++ that Python's collector cannot see
                twin.gradient_hook.remove()
            twin.refuse_gradients()
        lasting.backend.drain()
        arrangement.release_host_memory()  # first, as gradients in a lower dtype need more memory to be shown
        self.stream.close()
        self.guard.remove()
        # those of modules that were added meanwhile, too, which plain training needs on the device
        moving = dict.fromkeys([*arrangement.parameters_on_device, *weights_on_accelerators(lasting.module)])
        on_device.move(moving, _HOST, lasting.optimizers.seen)

    # ------------------------------------------------------------------------------------------------------ in a step

    def arm_guard(self) -> None:
        """Begin a step or a backward pass: guard masters, and have weights on the device checked before use."""
        if not self.guard.in_step:
            self.window.suspect_all()
            self.guard.in_step = True

    def relax_guard(self) -> None:
        """Relax the guard as far as possible, once neither a step nor a backward pass is under way."""
        if self._in_step() or self.backward.running:
            return
        self.guard.in_step = False
        self.guard.settled = self.overlap.settled and self.stream.settled and self.window.settled

    def settle(self) -> None:
        """Wait until gradients have landed, and nothing reads or writes masters."""
        with self._lasting.at_work:
            self.steps.settle()
            self.stream.settle()
            self.relax_guard()

    def abandon(self) -> None:
        """Clean up after an exception has ended whatever was under way."""
        self.calls.abandon()
        self.overlap.restore_param_groups()
        self.backward.abandon()
        self._lasting.saved.abandon()
        self._lasting.backend.drain()
        self._lasting.offloader.abandon()
        self.order.abandon()
        self.window.abandon()

    def _begin_backward(self) -> None:
        self.arm_guard()
        self._lasting.activations.begin_backward()

    def _end_backward(self) -> None:
        self._lasting.backend.trace.end()
        self._lasting.activations.end_backward()
        self._lasting.offloader.end_backward()
        if not self._in_step():
            self.window.end_step()
            self._lasting.graphs.begin()  # the one that checkpoints have built meanwhile has had its backward
        self.relax_guard()
