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
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.pipeline import on_device
from sp_lightning.pipeline._private import in_backward, is_tracing, storage_key, without_torch_function
from sp_lightning.pipeline.accelerator import AcceleratorBackend
from sp_lightning.pipeline.activations import Activations
from sp_lightning.pipeline.arrangement import Arrangement, Learned, move_buffers, move_unmanaged
from sp_lightning.pipeline.auto import AutoPolicy
from sp_lightning.pipeline.backward import BackwardPass, Graph, Graphs
from sp_lightning.pipeline.compiled import compiled_call, keep_out_of_graphs, run_uncompiled
from sp_lightning.pipeline.cores import choose_cores
from sp_lightning.pipeline.debug import AccessCheck
from sp_lightning.pipeline.device import Group
from sp_lightning.pipeline.emulated import HostBackend
from sp_lightning.pipeline.gradients import GradientReturn
from sp_lightning.pipeline.guard import (
    EngineAtWork,
    Guard,
    forget_ended_steps,
    guards_resumed,
    guards_suspended,
    resume_all_guards,
    stop_watching_functions,
    watch_functions,
)
from sp_lightning.pipeline.hooks import before_backward, install_gate, remove_gate, replace_tensors, tensors_in
from sp_lightning.pipeline.host import as_bytes
from sp_lightning.pipeline.lowering import LoweringSpy, known_to_be_lowered
from sp_lightning.pipeline.meter import Meter
from sp_lightning.pipeline.offload import STAYING, Bundle, Offloader
from sp_lightning.pipeline.optimizer import Optimizers, listen_to_optimizers, stop_listening
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.overlap import KnownOptimizers, Overlap
from sp_lightning.pipeline.planned import Planner
from sp_lightning.pipeline.pool import HostPool
from sp_lightning.pipeline.saved import SavedTensors
from sp_lightning.pipeline.schedule import Pass, Schedule
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.summary import Summary
from sp_lightning.pipeline.swap import swap_in, swap_out
from sp_lightning.pipeline.trace import Kind, Recording
from sp_lightning.pipeline.transfer import Backend
from sp_lightning.pipeline.units import Member, Unit
from sp_lightning.pipeline.weights import Twin, Weight
from sp_lightning.pipeline.window import Window

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

    Attributes:
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
    ) -> None:
        self.module = module
        self._progress = progress
        self.device = _full_device(device)
        self.options = options or PipelineOptions()
        self.stats = Stats()
        _check_not_attached(module)
        self._backend = backend or _make_backend(self.device, self.options)
        keep_out_of_graphs()
        self._learned = Learned()
        self._planner = planner
        self._at_work = EngineAtWork()
        self._depth = 0
        self._touched_outside: list[Weight] = []
        self._rearrange = False
        self._untouched = True
        self._spent: set[int] = set()
        self._known_optimizers: KnownOptimizers = weakref.WeakKeyDictionary()
        self.optimizers = Optimizers(
            self.stats, self._at_work, self._close, insists=self.options.overlap_optimizer is True
        )
        self._calls = 0
        self._called: dict[str, None] = {}  # units, in the order of their first calls
        self._pool = HostPool(self._backend)
        meter = self._meter = Meter(self.device, self.stats)
        self._offloader = Offloader(self._backend, self._pool, meter, self.stats)
        self._saved = SavedTensors(lambda twin: self._backward.require(twin), meter, self._offloader)
        self._activations = Activations(
            self.options.activations, self._saved, self.device, self.stats, checks=self.options.debug
        )
        self._graphs = Graphs()
        self._inside: list[list[Group]] = []  # what each call that is running now computes with
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
            self._overlap.settle()
            self._returns.settle()
            self._close()

    def backward_inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What `backward(inputs=...)` needs in place of these tensors: for a master, the leaf that is in the graph."""
        with without_torch_function():
            weights = {id(weight.master): weight for weight in self._plan.weights}
            return [weights[id(t)].twin.parameter if id(t) in weights else t for t in tensors]

    def reset(self) -> None:
        """After an exception in the middle of a step: idle, nothing in flight, ready for the next step."""
        with self._at_work:
            self.stats.resets += 1
            for member in self._plan.members:
                member.held.clear()
                swap_out(member)
            self._inside.clear()
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
        return elsewhere or any(self._returns.gradient_of(weight) is not None for weight in self._plan.weights)

    def drop_gradients(self) -> None:
        """Nothing is left of a backward pass that failed, where there was no gradient before it."""
        for parameter in self._parameters_elsewhere():
            parameter.grad = None

    def _parameters_elsewhere(self) -> list[nn.Parameter]:
        """Those that autograd itself collects gradients of."""
        return [*self._plan.unmanaged.values(), *self._plan.on_device]

    def shrink(self) -> str | None:
        """Take less device memory from the next step on, of what `"auto"` leaves open.

        Returns:
            What was given up, in words; None if nothing is left to give up.
        """
        self._stop_planning()
        self._planner = None  # or the window would grow again
        if self._learned.plan is not None:
            self._learned.plan, self._rearrange = None, True
            return f"the window that was planned, with `k={self._plan.k}`, gives way to the usual one"
        if self.options.activations == "auto" and self._activations.recompute_from_now_on():
            return "units compute their activations a second time in backward from now on"
        if self.options.k == "auto" and self._plan.k > self._plan.k_prime and not self._learned.short_of_memory:
            self._learned.short_of_memory = self._rearrange = True
            return f"`k` is {self._plan.k_prime} from now on, and was {self._plan.k}"
        return None

    def rebuild(self) -> None:
        """Take in a changed module tree: other Parameter objects, added or removed modules.

        Raises:
            RuntimeError: In the middle of a step.
        """
        if self._depth or self._backward.running:
            raise RuntimeError("`rebuild()` was called in the middle of a step. Call it between steps.")
        _attached_masters.difference_update(map(id, self._masters))
        self._rearrange_for(self._plan.autocast)
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
        self._plan.give_up_memory()
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
        plan = self._plan
        every_weight = [weight for unit in plan.all_units for weight in unit.every_weight]
        return Summary(
            device=str(self.device),
            units=len(plan.units),
            k=plan.k,
            k_prime=plan.k_prime,
            model_bytes=sum(weight.master.nbytes for weight in every_weight),
            device_bytes=plan.device_bytes(),
            gradient_bytes=self._returns.device_bytes(),
            resident=tuple(weight.name for weight in plan.resident.weights),
            resident_bytes=sum(weight.compute_bytes for weight in plan.resident.weights),
            host_bytes=sum(group.host.host_bytes() for group in plan.groups if group.units),
            host_gradient_bytes=self._returns.host_bytes(),
            optimizer_bytes=self._overlap.optimizer_bytes(),
            host_activation_bytes=self._pool.held,
            parameters=sum(weight.master.numel() for weight in every_weight),
            unit_names=tuple(unit.name for unit in plan.units),
            unit_bytes=tuple(sum(weight.compute_bytes for weight in unit.every_weight) for unit in plan.units),
            lowered=sum(weight.lowered for weight in every_weight),
            pinned=all(group.host.source.pinned for group in plan.groups),
            plan=plan.plan,
        )

    # ---------------------------------------------------------------------------------------------- for a planner

    @property
    def arrangement(self) -> Arrangement:
        """Units, and where their weights lie at the moment."""
        return self._plan

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
        if self._plan.budget is not None:
            return self._plan.budget
        free = self._backend.free_memory()
        if free is None:
            return None
        return self._plan.streaming_bytes() + int(_SHARE_OF_FREE_MEMORY * free)

    # ------------------------------------------------------------------------------------------ attach and take off

    def _arrange(self, autocast: torch.dtype | None = None) -> None:
        plan = Arrangement(self.module, self.options, self._learned, self._backend, autocast, self._progress)
        self._settle_on_device(plan)
        self._plan = plan
        self.stats.arrangements += 1
        if not plan.units and self.options.activations in ("recompute", "offload"):
            warnings.warn(
                f"`activations={self.options.activations!r}` has no effect any more: every weight is used outside of "
                "its module's forward (a penalty over all of them, say), so all stay on the device, no unit is left.",
                stacklevel=2,
            )
        self._schedule = Schedule(len(plan.streamed_members))
        self._saved.twins = plan.twins
        self._returns = GradientReturn(
            plan.all_units, self._backend, self.stats, plan.pin_gradients, self._sign_of_backward
        )
        self._guard = Guard(self, plan.weights)
        groups = [member.unit.group for member in plan.streamed_members if member.unit is not None]
        self._window = Window(plan.groups, groups, self._schedule, self._backend, self.stats, self._evict)
        self._overlap = Overlap(
            plan.weights,
            self._window,
            self._backend,
            self._returns,
            self.stats,
            self._known_optimizers,
            self._spent,
            on_device=plan.on_device,
            overlaps=self.options.overlap_optimizer is not False,
            fused=self.device.type != "cpu",  # on the CPU the user's choice stands: the same numbers as plain training
            is_nested=lambda: self._backward.is_nested(),
            settle=self.settle,
        )
        self.optimizers.work_with(self._overlap, self._returns, self._window, plan.on_device)
        self._backward = BackwardPass(
            window=self._window,
            schedule=self._schedule,
            returns=self._returns,
            resident=plan.resident,
            stats=self.stats,
            at_work=self._at_work,
            prepare=self._follow_requires_grad,
            on_begin=self._activate,
            on_end=self._end_backward,
        )
        move_buffers(self.module, self.device)
        move_unmanaged(plan.unmanaged.values(), self.device)
        self._pool.pinnable = plan.pinnable_bytes()
        stay = (*self.module.buffers(), *plan.unmanaged.values(), *plan.on_device)
        self._meter.uncounted = set(map(storage_key, stay))
        for twin in plan.twins.values():  # now, because torch.func forbids it inside of its transforms
            self._follow_requires_grad(twin)
        if self.options.compile:
            for member in plan.streamed_members:
                member.compiled = compiled_call(member.module)
        self._activations.auto = self._auto_policy()  # units have changed: measured anew
        for member in plan.members:
            install_gate(member, self)

    def _settle_on_device(self, plan: Arrangement) -> None:
        """Let units live on the device, if there is really room for all of them."""
        try:
            on_device.move(plan.on_device, self.device, self.optimizers.seen)
        except torch.OutOfMemoryError:
            on_device.move(plan.on_device, _HOST, self.optimizers.seen)
            raise
        for known in self._known_optimizers.values():
            known.forget_units(plan.on_device)

    def _dismantle(self) -> None:
        """Take the arrangement off the module; masters keep their identity, their values and their memory."""
        self._overlap.put_back()
        self._overlap.settle()
        for member in self._plan.members:
            remove_gate(member)
        for twin in self._plan.twins.values():
            if twin.gradient_hook is not None:  # a reference cycle through C++ that Python's collector cannot see
                twin.gradient_hook.remove()
        self._returns.close()
        self._guard.disarm()
        self._backend.drain()
        self._returns.give_up_memory()
        for group in self._plan.groups:
            group.host.release_copies()
        on_device.move(self._plan.on_device, _HOST, self.optimizers.seen)
        move_unmanaged(self._plan.unmanaged.values(), _HOST)  # all is checked as if for the first time

    def _take_in_what_was_learned(self) -> None:
        """Between steps, when no graph holds on to the old arrangement."""
        if self._graphs.waiting():
            return
        self._look_at_the_order()
        if not self._rearrange:
            return
        self._rearrange = False
        for weight in self._touched_outside:
            users = [m for m in self._plan.streamed_members if any(place.weight is weight for place in m.places)]
            never_called = [m.module for m in users if m.entered == 0 and any(m.module.children())]
            if never_called:  # a mere container: its children are called by its parent
                self._learned.split += never_called
            else:
                self._learned.resident.append(weight.name)
        self._touched_outside.clear()
        self._learned.plan = None  # it was made for other units
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
        self._rearrange_for(self._plan.autocast)
        self._activations.auto = policies  # units are the same, and so is what was measured of them
        if policies is not None and plan is not None and plan.policies:
            units = [(unit, plan.policies.get(unit.name, "keep")) for unit in self._plan.units]
            policies.prescribe({m.name: policy for unit, policy in units for m in unit.members})
        elif policies is not None:
            policies.prescribe(None)

    def _stop_planning(self) -> None:
        if self._planner is not None:
            self._planner.abandon()

    def _look_at_the_order(self) -> None:
        """Lay units out anew if the first step did not call them in the order of the modules.

        Units that follow each other must not share a place, or the later one cannot be fetched ahead.
        """
        if self._learned.order is None and self._called:
            self._learned.order = list(self._called)
            expected = [unit.name for unit in self._plan.units if unit.name in self._called]
            self._rearrange |= self._learned.order != expected

    def _auto_policy(self) -> AutoPolicy | None:
        """What chooses for each unit, where there is a limit to what activations may take."""
        if not self._activations.chooses or self._room_for_activations() is None:
            return None
        return AutoPolicy(self._backend, self._meter, lambda: self._room_for_activations() or 0)

    def _room_for_activations(self) -> int | None:
        """Bytes of device memory for activations; None if no limit is known."""
        budget = self.budget
        return None if budget is None else max(0, budget - self._plan.streaming_bytes())

    # -------------------------------------------------------------------------------------------------- the scope

    @contextmanager
    def _scope(self, look_for_new_parameters: bool = False) -> Iterator[None]:
        if self._depth == 0:
            self._open(look_for_new_parameters)
        self._depth += 1
        pushed = self._saved.push()
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
            return AccessCheck(lambda: self._plan, lambda: bool(self._at_work) or guards_suspended())
        return nullcontext()

    def _open(self, look_for_new_parameters: bool) -> None:
        if in_backward():
            self._backward.note()
            return
        if self._backward.running or any(member.active for member in self._plan.members):
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
        self._untouched = True
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
            for member in self._plan.members
            for place in member.places
        )

    def _has_replaced_weights(self) -> bool:
        with self._at_work:
            return not self._graphs.waiting() and any(weight.is_replaced for weight in self._plan.weights)

    def _activate(self) -> None:
        if not self._guard.redirects:
            if not (in_backward() and self._graphs.waiting()):  # the backward of the step before
                self._window.suspect_all()
            self._guard.arm()

    def _close(self) -> None:
        if self._depth or self._backward.running:
            return
        if self._overlap.settled and self._returns.settled:
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
        if member.unit is None:
            return self._call_around_units(member, forward, args, kwargs)
        autocast = self._autocast_dtype()
        if autocast != self._plan.autocast and self._adapt_to_autocast(member, autocast):
            return member.module(*args, **kwargs)  # as a member of the new arrangement
        if self._activations.manages(member):
            return self._activations.run(member, args, kwargs)  # which calls the module, and so comes here once more
        number = self._enter(member)
        pushed = self._saved.push()
        try:
            if autocast is not None and torch.is_grad_enabled() not in member.observed:
                output = self._run_watched(member, forward, args, kwargs)
            elif member in self._graphs.current.uncompiled or self._backward.is_uncompiled(member):
                output = run_uncompiled(forward, *args, **kwargs)
            else:
                output = forward(*args, **kwargs)
            return self._watch(member, output, number)
        finally:
            if pushed:
                self._saved.pop()
            self._leave(member)

    def _call_around_units(
        self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if member.looks_into is None:
            return forward(*args, **kwargs)
        # nn.TransformerEncoder asks its first layer's weights whether a fast path will do: it must see ordinary ones
        swap_in(member.looks_into, self._follow_requires_grad)
        try:
            return forward(*args, **kwargs)
        finally:
            swap_out(member.looks_into)

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
            known = {id(weight.master) for weight in known_to_be_lowered(self.module, self._plan.units)}
            learned.lowered |= known
            learned.assumed |= known
        if self._untouched and not self._graphs.waiting():
            self._guard.disarm()
            self._rearrange_for(autocast)
            self._activate()
            return True
        for weight in [place.weight for place in member.places if place.weight.lowered]:
            self._keep_as_is(weight)  # the unit is used with and without autocast in one step
        return False

    def _rearrange_for(self, autocast: torch.dtype | None) -> None:
        self._dismantle()
        for weight in self._plan.weights:
            if weight.is_replaced:  # who keeps our memory keeps the values in it
                self._learned.leave_memory_of(weight)
            else:  # or what `p.data = ...` has given it stays out of the memory that is sent
                weight.readopt()
        self._plan.give_up_memory()
        self._arrange(autocast)

    def _run_watched(
        self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Watch a first forward under autocast: what it does with weights decides in which dtype they are sent."""

        def keep_as_is(layer: nn.Module) -> None:
            for place in member.places:
                if place.parameters is layer._parameters and place.weight.lowered:
                    self._keep_as_is(place.weight)
                    place.parameters[place.key] = self.serve(place.weight)

        spy = LoweringSpy(self._plan.twins, self._learned.assumed, self.device.type, keep_as_is)
        with spy:  # which does not see into compiled code
            output = run_uncompiled(forward, *args, **kwargs)
        member.observed.add(spy.builds_graph)
        if spy.builds_graph:
            self._graphs.current.uncompiled.add(member)
        self._rearrange |= self._learned.take_in(spy.lowered, spy.used_as_is, [p.weight for p in member.places])
        return output

    def _enter(self, member: Member) -> int:
        """A call begins; returns its number."""
        with self._at_work:
            number = self._calls = self._calls + 1
            self._untouched = False
            member.entered += 1
            direction = _direction()
            if self._backward.running and direction is not Pass.BACKWARD:
                self._backward.abandon()  # it ended with an exception that the user caught inside of the step
            if member.index >= 0:
                self._schedule.visit(member.index, direction)
                if self._learned.order is None:
                    self._called.setdefault(member.unit_name)
            self._keep_apart_uses(member)
            for group in [group for group in member.groups if self._window.is_blocked(group)]:
                for weight in {id(place.weight): place.weight for place in member.places}.values():
                    if weight.twin.group is group:
                        self._make_resident(weight)
                        self._touched_outside.append(weight)
            for group in member.groups:
                self._window.bring(group)
                group.users += 1
            member.held.append(member.groups)
            self._inside.append(member.groups)
            swap_in(member, self._follow_requires_grad)
            self._window.prefetch(self._backward.in_use)
            if direction is not Pass.BACKWARD and len(self._inside) == 1:
                self._backend.trace.begin(Kind.FORWARD, member.unit_name)
            if self._activations.may_offload and member.index >= 0:
                self._offloader.enter(member, self._activations.offloads)
            return number

    def _units_ahead(self, member: Member) -> int:
        """How many other units forward is expected to use before backward begins, as far as the offloader asks."""
        ahead = [member.unit]
        for index in islice(self._schedule.upcoming_before_the_turn(), len(self._plan.streamed_members)):
            following = self._plan.streamed_members[index].unit
            if following is not ahead[-1]:
                ahead.append(following)
            if len(ahead) > STAYING:
                break
        return len(ahead) - 1

    def _keep_apart_uses(self, member: Member) -> None:
        """Autocast without its cache casts for each use: a weight that is used twice for one graph is sent as it is."""
        if self._plan.autocast is None or torch.is_autocast_cache_enabled() or not torch.is_grad_enabled():
            return
        if in_backward():  # a checkpoint's recomputation is the same use once more
            return
        outermost = {p.weight for p in member.places if p.parameters.get(p.key) is p.weight.master}
        for weight in outermost:
            if weight.used_for is not None and weight.used_for() is self._graphs.current:
                self._keep_as_is(weight)
            weight.used_for = weakref.ref(self._graphs.current)

    def _leave(self, member: Member) -> None:
        with self._at_work:
            if not member.held:  # an exception inside led to a reset
                return
            self._inside.pop()
            if not self._inside and not in_backward():
                self._backend.trace.end()
            for group in member.held.pop():
                group.users -= 1
            for place in member.places:
                if place.weight.twin.changed_in_place:
                    self._write_back(place.weight)
            if not member.active and not self._backward.has_reached(member.unit):
                swap_out(member)
            if self._activations.may_offload and member.index >= 0:
                self._offloader.leave(lambda: self._units_ahead(member))
            self._window.prefetch([*member.groups, *self._backward.in_use] if in_backward() else ())

    def _follow_requires_grad(self, twin: Twin) -> None:
        with torch.inference_mode(False):
            twin.parameter.requires_grad_(twin.weight.master.requires_grad)
            if twin.parameter.requires_grad and twin.gradient_hook is None:
                self._returns.watch(twin)

    def _write_back(self, weight: Weight) -> None:
        """A forward changed a weight in place: the host has the truth, so it gets the change."""
        if weight.lowered:
            raise RuntimeError(
                f"Weight {weight.name!r} is both cast by autocast and changed in place by a forward. Keep its module "
                "out of autocast, or change the weight outside of the forward."
            )
        with torch.inference_mode(False), torch.no_grad():
            arrived = torch.empty_like(weight.host)
            self._backend.synchronize(self._backend.download(as_bytes(arrived), as_bytes(weight.twin.data)))
            weight.master.copy_(arrived)
        weight.twin.written_back()
        self.stats.host_syncs += 1
        self.stats.write_backs += 1
        group = weight.twin.group
        group.state = group.host.state()

    def _watch(self, member: Member, output: Any, number: int) -> Any:
        """Have backward announce itself, and let nothing that leaves a unit lie in its slot."""
        tensors = tensors_in(output)
        if any(storage_key(tensor) in self._plan.twins for tensor in tensors):
            output = replace_tensors(output, lambda t: t.clone() if storage_key(t) in self._plan.twins else t)
            tensors = tensors_in(output)
        if member.index >= 0 and torch.is_grad_enabled():
            watched = [tensor for tensor in tensors if tensor.requires_grad]
            if watched:
                graph = self._graphs.watch_current()
                groups, around = member.held[-1], [group for held in self._inside[:-1] for group in held]
                plan, bundle = self._plan, self._offloader.current
                before_backward(
                    watched, lambda: self._reach(plan, member, graph, groups, around, bundle), number, self._calls
                )
        return output

    # --------------------------------------------------------------------------------------------------- backward

    def _sign_of_backward(self) -> None:
        self._backward.note()

    def _reach(
        self,
        plan: Arrangement,
        member: Member,
        graph: Graph,
        groups: list[Group],
        around: list[Group],
        bundle: Bundle | None,
    ) -> None:
        """Backward is about to run the nodes of a member's call."""
        if plan is not self._plan:
            return  # a graph of an earlier arrangement: unpacking will say so if it matters
        if torch.is_grad_enabled() and self._depth == 0:
            raise RuntimeError(
                "A backward pass with create_graph=True will need the weights once more. Surround forward and backward "
                "with `with pipeline.step():`."
            )
        self._backward.reach(member, graph, groups, around)
        self._backend.trace.begin(Kind.BACKWARD, member.unit_name)
        if bundle is not None:
            self._offloader.reach(bundle)

    def _end_backward(self) -> None:
        self._backend.trace.end()
        self._activations.end_backward()
        self._offloader.end_backward()
        self._close()

    def _evict(self, group: Group) -> None:
        self._backward.evict(group)

    # --------------------------------------------------------------------------- weights used outside of their unit

    def serve(self, weight: Weight) -> nn.Parameter:
        """The weight on the device, for an operation outside of its unit (see guard.py)."""
        with self._at_work:
            self._overlap.finish_step(weight.unit.group)
            self._untouched = False
            if weight.lowered:  # who uses it here may not want it cast
                self._keep_as_is(weight)
            twin = weight.twin
            in_use = twin.group.users > 0 or self._backward.has_reached(weight.unit)
            if not (twin.group.resident or (in_use and twin.group.loaded)):
                twin = self._make_resident(weight)
                self._touched_outside.append(weight)
            self._window.bring(twin.group)
            if twin.parameter.requires_grad != weight.master.requires_grad:
                self._follow_requires_grad(twin)
            return twin.parameter

    def touched(self, weight: Weight) -> None:
        """Somebody outside of the engine looks at a master: its step must be done."""
        if self._guard.redirects:
            with self._at_work:
                self._overlap.finish_step(weight.unit.group)
        else:
            self.settle()

    def asked_for_gradient(self, weight: Weight) -> None:
        """Somebody reads a master's `.grad`."""
        if self._overlap.has_spent(weight):
            raise RuntimeError(
                f"The gradient of weight {weight.name!r} was used by the optimizer as it arrived, and not kept. Read "
                "it before the step, in `on_before_optimizer_step`, or train with `overlap_optimizer=False`."
            )
        with self._at_work:
            self._overlap.finish_step(weight.unit.group)
            self._returns.settle()
            self._returns.show(weight)

    def gradient_is_dropped(self, weight: Weight) -> None:
        """Somebody gives a master another `.grad`, or none."""
        self._returns.drop(weight)
        self._overlap.forget_spent(weight)

    def note_write(self, weight: Weight) -> None:
        """A master may be written to."""
        for group in (weight.twin.group, weight.unit.group):
            group.suspect, group.state = True, None

    def in_graph(self, weight: Weight) -> Tensor:
        """The leaf that the graph of this step was built on."""
        return weight.twin.parameter

    def _keep_as_is(self, weight: Weight) -> None:
        """Send a weight in its own dtype from now on; if it was lowered, give it a resident copy until then."""
        self._learned.used_as_is.add(id(weight.master))
        if weight.lowered:
            self._make_resident(weight)

    def _make_resident(self, weight: Weight) -> Twin:
        self.stats.promotions += 1
        twin = self._plan.make_resident(weight)
        self._window.groups.append(twin.group)
        self._rearrange = True
        return twin


def _check_not_attached(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if id(parameter) in _attached_masters:
            raise ValueError(
                f"Parameter {name!r} already belongs to a pipeline, which streams it. Call its `detach()` first."
            )


def _best_device() -> torch.device:
    """The current accelerator, if torch has streams for it."""
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        if device is not None and hasattr(torch.get_device_module(device), "Stream"):
            return device
    return torch.device("cpu")


def _full_device(device: torch.device | str | None) -> torch.device:
    device = _best_device() if device is None else torch.device(device)
    if device.type != "cpu" and ":" not in str(device):  # no index given
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return device


def _direction() -> Pass:
    if in_backward():
        return Pass.BACKWARD
    return Pass.FORWARD if torch.is_grad_enabled() else Pass.INFERENCE


def _make_backend(device: torch.device, options: PipelineOptions) -> Backend:
    """The backend for a device; `debug` adds poison, and delays where copies run on threads."""
    cores = choose_cores(device, options.host_threads)
    if device.type == "cpu":
        return HostBackend(device, poison=options.debug, max_delay=0.002 if options.debug else 0.0, cores=cores)
    return AcceleratorBackend(device, poison=options.debug, cores=cores)
