"""The pipeline: owns all of the engine's parts and moves them through a step.

[Note: one step]
`step()` opens a scope: masters are guarded, and what lies on the device is checked against them before it is used.
A unit's call *enters* it (its group is on the device, twins stand in the module tree) and *leaves* it (masters are
back, the slot may be given away). Backward *reaches* units through the nodes that made their outputs, through what it
unpacks, and through recomputation; it leaves all of them when it ends. Each time, the schedule is asked what comes
next and copies are started for it.

    schedule -> transfer -> device -> hooks -> autograd -> gradients -> optimizer -> host
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.pipeline._private import in_backward, is_tracing, storage_key, without_torch_function
from sp_lightning.pipeline.activations.auto import AutoPolicy
from sp_lightning.pipeline.activations.meter import Meter
from sp_lightning.pipeline.activations.offload import Offloader
from sp_lightning.pipeline.activations.policy import Activations
from sp_lightning.pipeline.activations.pool import HostPool
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.arrangement import Arrangement, move_buffers, move_unmanaged
from sp_lightning.pipeline.calls import Calls
from sp_lightning.pipeline.debug import AccessCheck
from sp_lightning.pipeline.gradients.averaging import Averaging
from sp_lightning.pipeline.gradients.backward import BackwardPass
from sp_lightning.pipeline.gradients.gradient_return import GradientReturn
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.learned import Learned
from sp_lightning.pipeline.modules.compiled import compiled_call, finish_before_compiling, keep_out_of_graphs
from sp_lightning.pipeline.modules.guard import (
    EngineAtWork,
    forget_ended_steps,
    guards_resumed,
    guards_suspended,
    resume_all_guards,
    stop_watching_functions,
    watch_functions,
)
from sp_lightning.pipeline.modules.hooks import install_gate, remove_gate
from sp_lightning.pipeline.modules.lowering import known_to_be_lowered
from sp_lightning.pipeline.modules.swap import swap_out
from sp_lightning.pipeline.optimizer import on_device
from sp_lightning.pipeline.optimizer.clipping import Clipping
from sp_lightning.pipeline.optimizer.host_steps import HostSteps, KnownOptimizers
from sp_lightning.pipeline.optimizer.optimizers import Optimizers, listen_to_optimizers, stop_listening
from sp_lightning.pipeline.optimizer.overlap import Overlap
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.outside import OutsideUse
from sp_lightning.pipeline.planned import Planner
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.summary import Summary
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.transfer.devices import full_device, make_backend
from sp_lightning.pipeline.transfer.trace import Recording
from sp_lightning.pipeline.weights.device import Group
from sp_lightning.pipeline.weights.graphs import Graphs
from sp_lightning.pipeline.weights.schedule import Schedule
from sp_lightning.pipeline.weights.units import Member, Unit
from sp_lightning.pipeline.weights.window import Window

_HOST = torch.device("cpu")
_SHARE_OF_FREE_MEMORY = 0.9  # that may be taken, where no budget says how much

_attached_masters: set[int] = set()


class Pipeline:
    """Streams a module's units between host and device while it computes.

    Attaching happens on construction, `detach` undoes it. In between, the module is used as ever: call it, call
    `backward`, step any torch optimizer over its parameters, save and load its state.

    Args:
        module: The module, with its parameters on the CPU.
        device: Where to compute; by default the current accelerator, or else the CPU.
        options: Choices; the defaults work.
        backend: How to copy; made for the device by default.
        planner: Chooses what `options` leave to it, between steps; without one the window stays as small as it is.
        progress: Told how many bytes of weights have been laid out on the host, and of how many.
        replicas: Other processes that train the same model: gradients are averaged with theirs.

    Attributes:
        replicas: See above.
        optimizers: What is done for optimizers: steps while the device computes, clipping, unscaling.

    Raises:
        ValueError: If an option does not fit the module or the memory; nothing is attached then.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
        >>> pipeline = Pipeline(model, "cpu")
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> pipeline.detach()
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | None = None,
        *,
        options: PipelineOptions | None = None,
        backend: Backend | None = None,
        planner: Planner | None = None,
        progress: Callable[[int, int], None] | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.module = module
        self.replicas = replicas
        self._progress = progress
        self.device = full_device(device)
        self.options = options or PipelineOptions()
        self.stats = Stats()
        _check_not_attached(module)
        if replicas is not None:
            replicas.begin_alike(module)
        processes = 1 if replicas is None else replicas.on_this_machine
        self._backend = backend or make_backend(self.device, self.options, processes)
        keep_out_of_graphs()
        finish_before_compiling(self._backend)
        self._learned = Learned()
        self._planner = planner
        self._at_work = EngineAtWork()
        self._depth = 0
        self._spent: set[int] = set()
        self._known_optimizers: KnownOptimizers = weakref.WeakKeyDictionary()
        self.optimizers = Optimizers(
            self.stats, self._at_work, self._close, insists=self.options.overlap_optimizer is True
        )
        self._pool = HostPool(self._backend)
        meter = self._meter = Meter(self.device, self.stats)
        self._offloader = Offloader(self._backend, self._pool, meter, self.stats)
        self._saved = SavedTensors(lambda twin: self._backward.require(twin), meter, self._offloader)
        self._activations = Activations(
            self.options.activations, self._saved, self.device, self.stats, checks=self.options.debug
        )
        self._graphs = Graphs()
        try:
            self._arrange()
        except BaseException:
            self._backend.close()
            raise
        listen_to_optimizers(self.optimizers)
        watch_functions(self)
        self._attached = True
        self._masters = list(module.parameters())
        _attached_masters.update(map(id, self._masters))

    # ------------------------------------------------------------------------------------------------------ public

    @contextmanager
    def step(self) -> Iterator[None]:
        """Scope around a training, validation or prediction step, or around a backward pass; may be nested.

        Calls of the module open one by themselves. A wider one is needed around code that uses weights outside of
        module calls, and around `torch.autograd.grad(..., create_graph=True)`.
        """
        # resumed, because an optimizer may call it through a closure of its own, which torch's hooks are not shown
        with guards_resumed(), self._scope(look_for_new_parameters=True):
            yield

    def weights_changed(self) -> None:
        """Weights on the host were written to: what lies on the device is checked before it is used again."""
        self._window.suspect_all()

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Write down what the lanes are busy with in this scope: units, copies, work on the host, and stalls."""
        with self._backend.trace.record() as recording:
            yield recording

    def settle(self) -> None:
        """Wait until gradients have landed and optimizer steps are done, as reading any weight does by itself."""
        with self._at_work:
            self._steps.settle()
            self._gradients.settle()
            self._close()

    @contextmanager
    def in_all_processes(self) -> Iterator[None]:
        """Scope around a backward pass that runs in all processes, even if in this one it comes to no weight."""
        before = None if self.replicas is None else self.replicas.passes
        yield
        if self.replicas is not None and self.replicas.passes == before:
            with self._at_work:
                self._returns.finish(takes_part=True)

    def share_buffers(self) -> None:
        """Between steps, if there are several processes: all have the buffers of the first one from now on."""
        if self.replicas is not None:
            self.replicas.share_buffers(self.module)

    def backward_inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What `backward(inputs=...)` needs in place of these tensors: for a master, the leaf that is in the graph."""
        with without_torch_function():
            weights = self._arrangement.weights_by_master
            return [weights[id(t)].twin.parameter if id(t) in weights else t for t in tensors]

    def reset(self) -> None:
        """After an exception in the middle of a step: idle, nothing in flight, ready for the next step."""
        with self._at_work:
            self.stats.resets += 1
            self._calls.abandon()
            self._overlap.abandon()
            self._backward.abandon()
            self._saved.pop_all()
            self._backend.drain()
            self._offloader.reset()
            self._stop_planning()
            self._schedule.forget_position()
            self._window.forget()
            self._depth = 0
            self._graphs.begin()
            resume_all_guards()
            self._guard.disarm()

    def has_gradients(self) -> bool:
        """Whether a gradient is there that the next backward pass would add to."""
        elsewhere = any(parameter.grad is not None for parameter in self._parameters_elsewhere())
        return elsewhere or any(self._gradients.get(weight) is not None for weight in self._arrangement.weights)

    def drop_gradients(self) -> None:
        """Nothing is left of a backward pass that failed, where there was no gradient before it."""
        for parameter in self._parameters_elsewhere():
            parameter.grad = None

    def _parameters_elsewhere(self) -> list[nn.Parameter]:
        """Those that autograd itself collects gradients of."""
        return [*self._arrangement.unmanaged.values(), *self._arrangement.on_device]

    def shrink(self) -> str | None:
        """Take less device memory from the next step on, of what `"auto"` leaves open.

        Returns:
            What was given up, in words; None if nothing is left to give up.
        """
        self._stop_planning()
        self._planner = None  # or the window would grow again
        if self._learned.plan is not None:
            self._learned.plan, self._learned.outdated = None, True
            return f"the window that was planned, with `k={self._arrangement.k}`, gives way to the usual one"
        if self.options.activations == "auto" and self._activations.recompute_from_now_on():
            return "units compute their activations a second time in backward from now on"
        if (
            self.options.k == "auto"
            and self._arrangement.k > self._arrangement.k_prime
            and not self._learned.short_of_memory
        ):
            self._learned.short_of_memory = self._learned.outdated = True
            return f"`k` is {self._arrangement.k_prime} from now on, and was {self._arrangement.k}"
        return None

    def rebuild(self) -> None:
        """Take in a changed module tree: other Parameter objects, added or removed modules.

        Raises:
            RuntimeError: In the middle of a step.
        """
        if self._depth or self._backward.running:
            raise RuntimeError("`rebuild()` was called in the middle of a step. Call it between steps.")
        _attached_masters.difference_update(map(id, self._masters))
        self._rearrange_for(self._arrangement.autocast)
        self._masters = list(self.module.parameters())
        _attached_masters.update(map(id, self._masters))

    def detach(self) -> None:
        """Give the module back: plain, on the CPU, without a trace. Calling it again does nothing."""
        if not self._attached:
            return
        failed = None
        try:
            self.settle()
        except Exception as error:  # of a step that nobody has asked for: the module is given back all the same
            failed = error
        if self._depth or self._backward.running or failed is not None:
            self.reset()
        self._attached = False
        self._stop_planning()
        _attached_masters.difference_update(map(id, self._masters))
        stop_listening(self.optimizers)
        stop_watching_functions(self)
        self._dismantle()
        self._arrangement.give_up_memory()
        for steps in self._known_optimizers.values():
            steps.forget()
        self._offloader.close()
        for buffer in self._learned.buffers.values():
            buffer.release()
        move_buffers(self.module, _HOST)
        forget_ended_steps()
        self._backend.close()
        if failed is not None:
            raise failed

    def summary(self) -> Summary:
        """What was planned, in numbers; `str()` of it is a table."""
        arrangement = self._arrangement
        every_weight = [weight for unit in arrangement.all_units for weight in unit.every_weight]
        return Summary(
            device=str(self.device),
            units=len(arrangement.units),
            k=arrangement.k,
            k_prime=arrangement.k_prime,
            model_bytes=sum(weight.master.nbytes for weight in every_weight),
            device_bytes=arrangement.device_bytes(),
            gradient_bytes=self._returns.device_bytes(),
            resident=tuple(weight.name for weight in arrangement.resident.weights),
            resident_bytes=sum(weight.compute_bytes for weight in arrangement.resident.weights),
            host_bytes=sum(group.host.host_bytes() for group in arrangement.groups if group.units),
            host_gradient_bytes=self._returns.host_bytes(),
            optimizer_bytes=self._steps.optimizer_bytes(arrangement.on_device),
            host_activation_bytes=self._pool.held,
            parameters=sum(weight.master.numel() for weight in every_weight),
            unit_names=tuple(unit.name for unit in arrangement.units),
            unit_bytes=tuple(sum(weight.compute_bytes for weight in unit.every_weight) for unit in arrangement.units),
            lowered=sum(weight.lowered for weight in every_weight),
            pinned=all(group.host.source.pinned for group in arrangement.groups),
            plan=arrangement.plan,
        )

    # ---------------------------------------------------------------------------------------------- for a planner

    @property
    def arrangement(self) -> Arrangement:
        """Units, and where their weights lie at the moment."""
        return self._arrangement

    @property
    def activations(self) -> AutoPolicy | None:
        """What chooses for the activations of each unit; None where nothing does."""
        return self._activations.auto

    def bytes_on_device(self, unit: Unit) -> int:
        """What a unit would take if it lived on the device; 0 if it may not, or if nothing of it is stepped.

        It may where the user wants that, if all optimizers step weight by weight: others look at weights together.
        """
        trainable = [weight.master for weight in unit.every_weight if weight.master.requires_grad]
        if not (self.options.resident_optimizer and self.optimizers.step_by_unit and trainable):
            return 0
        weights = sum(w.master.nbytes + w.lowered * w.compute_bytes for w in unit.every_weight)
        return weights + sum(p.nbytes + on_device.state_bytes(self.optimizers.seen, p) for p in trainable)

    @property
    def activation_peak(self) -> int:
        """The most bytes of activations that were on the device in the step before."""
        return self._meter.step_peak

    def memory_in_use(self) -> int | None:
        """Bytes of device memory that are allocated, where the device tells; the most is counted from now on."""
        return self._backend.memory_in_use()

    def most_memory_in_use(self) -> int | None:
        """The most bytes of device memory that were allocated since `memory_in_use` was asked."""
        return self._backend.most_memory_in_use()

    @property
    def budget(self) -> int | None:
        """Device memory for weights, gradients on their way and activations; None if no limit is known."""
        if self._arrangement.budget is not None:
            return self._arrangement.budget
        free = self._backend.free_memory()
        if free is None:
            return None
        return self._arrangement.streaming_bytes() + int(_SHARE_OF_FREE_MEMORY * free)

    # ------------------------------------------------------------------------------------------ attach and take off

    def _arrange(self, autocast: torch.dtype | None = None) -> None:
        arrangement = Arrangement(
            self.module, self.options, self._learned, self._backend, autocast, self._progress, self.replicas
        )
        self._settle_on_device(arrangement)
        self._arrangement = arrangement
        self.stats.arrangements += 1
        if not arrangement.units and self.options.activations in ("recompute", "offload"):
            warnings.warn(
                f"`activations={self.options.activations!r}` has no effect any more: every weight is used outside of "
                "its module's forward (a penalty over all of them, say), so all stay on the device, no unit is left.",
                stacklevel=2,
            )
        self._schedule = Schedule(len(arrangement.streamed_members))
        self._saved.twins = arrangement.twins
        self._returns = GradientReturn(
            arrangement.all_units,
            self._backend,
            self.stats,
            arrangement.pin_gradients,
            self._sign_of_backward,
            self._averaging_of(arrangement),
        )
        self._gradients = self._returns.gradients
        groups = [member.unit.group for member in arrangement.streamed_members if member.unit is not None]
        self._window = Window(arrangement.groups, groups, self._schedule, self._backend, self.stats, self._evict)
        self._steps = HostSteps(self._window, self._backend, self._known_optimizers, self.settle)
        self._overlap = Overlap(
            arrangement.weights_by_master,
            self._steps,
            self._returns,
            self.stats,
            self._spent,
            overlaps=self.options.overlap_optimizer is not False,
            fused=self.device.type != "cpu",  # on the CPU the user's choice stands: the same numbers as plain training
            is_nested=lambda: self._backward.is_nested(),
        )
        clipping = Clipping(
            arrangement.weights_by_master, arrangement.on_device, self._backend, self._gradients, self._overlap
        )
        self.optimizers.work_with(self._overlap, clipping, self._returns, self._window, arrangement.on_device)
        self._backward = BackwardPass(
            window=self._window,
            schedule=self._schedule,
            returns=self._returns,
            resident=arrangement.resident,
            stats=self.stats,
            at_work=self._at_work,
            prepare=self._returns.follow_requires_grad,
            on_begin=self._activate,
            on_end=self._end_backward,
        )
        outside = OutsideUse(
            arrangement,
            self._learned,
            window=self._window,
            returns=self._returns,
            overlap=self._overlap,
            backward=self._backward,
            graphs=self._graphs,
            backend=self._backend,
            stats=self.stats,
            at_work=self._at_work,
            settle=self.settle,
        )
        self._outside, self._guard = outside, outside.guard
        self._calls = Calls(
            arrangement,
            self._learned,
            window=self._window,
            schedule=self._schedule,
            backward=self._backward,
            outside=outside,
            returns=self._returns,
            graphs=self._graphs,
            saved=self._saved,
            activations=self._activations,
            offloader=self._offloader,
            backend=self._backend,
            stats=self.stats,
            at_work=self._at_work,
            in_step=lambda: self._depth > 0,
        )
        move_buffers(self.module, self.device)
        move_unmanaged(arrangement.unmanaged.values(), self.device)
        self._pool.pinnable = arrangement.pinnable_bytes()
        stay = (*self.module.buffers(), *arrangement.unmanaged.values(), *arrangement.on_device)
        self._meter.uncounted = set(map(storage_key, stay))
        for twin in arrangement.twins.values():  # now, because torch.func forbids it inside of its transforms
            self._returns.follow_requires_grad(twin)
        if self.options.compile:
            for member in arrangement.streamed_members:
                member.compiled = compiled_call(member.module)
        self._activations.auto = self._auto_policy()  # units have changed: measured anew
        for member in arrangement.members:
            install_gate(member, self)

    def _averaging_of(self, arrangement: Arrangement) -> Averaging | None:
        if self.replicas is None:
            return None
        weights = arrangement.weights_by_master
        in_order = [weights[id(parameter)] for parameter in self.module.parameters() if id(parameter) in weights]
        elsewhere = list(arrangement.unmanaged.values())
        return Averaging(self.replicas, in_order, elsewhere, lambda: self.stats.optimizer_steps)

    def _settle_on_device(self, arrangement: Arrangement) -> None:
        """Let units live on the device, if there is really room for all of them."""
        try:
            on_device.move(arrangement.on_device, self.device, self.optimizers.seen)
        except torch.OutOfMemoryError:
            on_device.move(arrangement.on_device, _HOST, self.optimizers.seen)
            raise
        for known in self._known_optimizers.values():
            known.forget_units(arrangement.on_device)

    def _dismantle(self) -> None:
        """Take the arrangement off the module; masters keep their identity, their values and their memory."""
        self._backward.closed = True
        self._overlap.put_back()
        self._steps.settle()
        for member in self._arrangement.members:
            swap_out(member)  # a caller that looks into a unit may be running
            remove_gate(member)
        for twin in self._arrangement.twins.values():
            if twin.gradient_hook is not None:  # a reference cycle through C++ that Python's collector cannot see
                twin.gradient_hook.remove()
            twin.refuse_gradients()
        self._returns.close()
        self._guard.disarm()
        self._backend.drain()
        self._returns.give_up_memory()
        for group in self._arrangement.groups:
            group.host.release_copies()
        on_device.move(self._arrangement.on_device, _HOST, self.optimizers.seen)
        move_unmanaged(self._arrangement.unmanaged.values(), _HOST)  # all is checked as if for the first time

    def _take_in_what_was_learned(self) -> None:
        """Between steps, when no graph holds on to the old arrangement."""
        if not self._graphs.waiting() and self._learned.conclude(self._arrangement.units):
            self.rebuild()

    def _follow_plan(self) -> None:
        """Between steps, when no graph holds on to the old arrangement: have the window that the planner wants."""
        if self._planner is None or self._graphs.waiting():
            return
        plan = self._planner.before_step(self, torch.is_grad_enabled())
        if plan == self._learned.plan:
            return
        policies = self._activations.auto
        self._learned.plan = plan
        self._rearrange_for(self._arrangement.autocast)
        self._activations.auto = policies  # units are the same, and so is what was measured of them
        if policies is not None and plan is not None and plan.policies:
            units = [(unit, plan.policies.get(unit.name, "keep")) for unit in self._arrangement.units]
            policies.prescribe({m.name: policy for unit, policy in units for m in unit.members})
        elif policies is not None:
            policies.prescribe(None)

    def _stop_planning(self) -> None:
        if self._planner is not None:
            self._planner.abandon()

    def _auto_policy(self) -> AutoPolicy | None:
        """What chooses for each unit, where there is a limit to what activations may take."""
        if not self._activations.chooses or self._room_for_activations() is None:
            return None
        never_again = self._activations.never_again
        return AutoPolicy(self._backend, self._meter, lambda: self._room_for_activations() or 0, never_again)

    def _room_for_activations(self) -> int | None:
        """Bytes of device memory for activations; None if no limit is known."""
        budget = self.budget
        return None if budget is None else max(0, budget - self._arrangement.streaming_bytes())

    # -------------------------------------------------------------------------------------------------- the scope

    @contextmanager
    def _scope(self, look_for_new_parameters: bool = False) -> Iterator[None]:
        if self._depth == 0:
            self._open(look_for_new_parameters)
        self._depth += 1
        pushed = self._saved.push(ahead=True)
        try:
            with self._checked():
                yield
        except BaseException:
            if self._depth == 1 and not in_backward():
                self.reset()
            raise
        finally:
            if pushed:
                self._saved.pop()
            if self._depth:
                self._depth -= 1
                if self._depth == 0 and not in_backward():
                    self._graphs.begin()  # who holds the old one waits for its backward
                self._close()

    def _checked(self) -> AbstractContextManager[Any]:
        # not in inference: torch's fused fast paths look for dispatch modes, and without them other numbers come out
        if self.options.debug and self._depth == 1 and torch.is_grad_enabled():
            return AccessCheck(
                lambda: self._arrangement, lambda: bool(self._at_work) or guards_suspended(), self.device.type
            )
        return nullcontext()

    def _open(self, look_for_new_parameters: bool) -> None:
        if in_backward():
            self._backward.note()
            return
        if self._backward.running or any(member.active for member in self._arrangement.members):
            self.reset()  # an exception came out of a backward that nothing surrounded
        if self._has_replaced_weights() or (look_for_new_parameters and self._has_new_parameters()):
            self.rebuild()
        self._overlap.put_back()
        self._take_in_what_was_learned()
        self._follow_plan()
        if not self._graphs.waiting():  # else this is the backward of the step before
            self.stats.steps += 1
            self._backend.trace.begin_step()
            self._activations.begin_step()
        self._offloader.begin()
        self._arrangement.untouched = True
        self._activate()
        with self._at_work:
            self._window.begin_step()

    def _has_new_parameters(self) -> bool:
        """Whether someone put other Parameters into the modules (`load_state_dict(assign=True)`), or took one out.

        Pruning puts a parameter elsewhere in its module, and a mask, which belongs on the device, among its buffers.
        """
        return not self._graphs.waiting() and any(
            type(found := place.parameters.get(place.key)) in (nn.Parameter, type(None))
            and found is not place.weight.master
            for member in self._arrangement.members
            for place in member.places
        )

    def _has_replaced_weights(self) -> bool:
        with self._at_work:
            return not self._graphs.waiting() and any(weight.is_replaced for weight in self._arrangement.weights)

    def _activate(self) -> None:
        if not self._guard.redirects:
            if not (in_backward() and self._graphs.waiting()):  # the backward of the step before
                self._window.suspect_all()
            self._guard.arm()

    def _close(self) -> None:
        if self._depth or self._backward.running:
            return
        if self._overlap.settled and self._gradients.settled:
            self._guard.disarm()
        else:
            self._guard.watch()

    # ------------------------------------------------------------------------------------------- calls of modules

    def call(self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call of a member's module with its weights on the device (see hooks.py)."""
        if is_tracing():
            raise RuntimeError(
                "A module that superpipeline streams cannot be traced: a trace would keep the weights of one moment. "
                "Trace `copy.deepcopy(module)`, which is plain, or call `detach()` first."
            )
        if guards_suspended():
            with guards_resumed():
                return self.call(member, forward, args, kwargs)
        if self._depth == 0:
            with self._scope():
                return self.call(member, forward, args, kwargs)
        if member.compiled is not None and member.module._compiled_call_impl is None:
            forward = member.compiled
        autocast = self._autocast_dtype()
        if (
            member.unit is not None
            and autocast != self._arrangement.autocast
            and self._adapt_to_autocast(member, autocast)
        ):
            return member.module(*args, **kwargs)  # as a member of the new arrangement
        return self._calls.run(member, forward, args, kwargs, autocast)

    def _autocast_dtype(self) -> torch.dtype | None:
        """The dtype in which weights can be sent because autocast would lower them to it; None where it would not."""
        if not torch.is_autocast_enabled(self.device.type):
            return None
        return torch.get_autocast_dtype(self.device.type)

    def _adapt_to_autocast(self, member: Member, autocast: torch.dtype | None) -> bool:
        """Autocast was switched on or off; True if everything was arranged anew for it."""
        learned = self._learned
        # without its cache, whether a weight is used once for a graph is to be seen first: nothing can be assumed
        if autocast is not None and not learned.lowered and torch.is_autocast_cache_enabled():
            learned.assume_lowered(known_to_be_lowered(self.module, self._arrangement.units))
        if self._arrangement.untouched and not self._graphs.waiting():
            self._guard.disarm()
            self._rearrange_for(autocast)
            self._activate()
            return True
        for weight in [place.weight for place in member.places if place.weight.lowered]:
            self._outside.keep_as_is(weight)  # the unit is used with and without autocast in one step
        return False

    def _rearrange_for(self, autocast: torch.dtype | None) -> None:
        self._dismantle()
        for weight in self._arrangement.weights:
            if weight.is_replaced:  # who keeps our memory keeps the values in it
                self._learned.leave_memory_of(weight)
            else:  # or what `p.data = ...` has given it stays out of the memory that is sent
                weight.readopt()
        self._arrangement.give_up_memory()
        self._arrange(autocast)

    # --------------------------------------------------------------------------------------------------- backward

    def _sign_of_backward(self) -> None:
        self._backward.note()

    def _end_backward(self) -> None:
        self._backend.trace.end()
        self._activations.end_backward()
        self._offloader.end_backward()
        self._close()

    def _evict(self, group: Group) -> None:
        self._backward.evict(group)


def _check_not_attached(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if id(parameter) in _attached_masters:
            raise ValueError(
                f"Parameter {name!r} already belongs to a pipeline, which streams it. Call its `detach()` first."
            )
