"""The pipeline: what users have of the engine. It leads through a step, and arranges units anew between steps.

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

from sp_lightning.pipeline._private import in_backward, is_tracing, without_torch_function
from sp_lightning.pipeline.activations.auto import AutoPolicy
from sp_lightning.pipeline.activations.meter import Meter
from sp_lightning.pipeline.activations.offload import Offloader
from sp_lightning.pipeline.activations.policy import Activations
from sp_lightning.pipeline.activations.pool import HostPool
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.arrangement import Arrangement, move_buffers
from sp_lightning.pipeline.assembly import Assembly
from sp_lightning.pipeline.debug import AccessCheck
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.lasting import Lasting
from sp_lightning.pipeline.learned import Learned
from sp_lightning.pipeline.modules.at_work import EngineAtWork
from sp_lightning.pipeline.modules.compiled import finish_before_compiling, keep_out_of_graphs
from sp_lightning.pipeline.modules.functions import stop_watching_functions, watch_functions
from sp_lightning.pipeline.modules.lowering import known_to_be_lowered
from sp_lightning.pipeline.modules.suspension import (
    forget_ended_steps,
    guards_resumed,
    guards_suspended,
    resume_all_guards,
)
from sp_lightning.pipeline.optimizer import on_device
from sp_lightning.pipeline.optimizer.optimizers import Optimizers, listen_to_optimizers, stop_listening
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.planned import Planner
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.summary import Summary
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.transfer.devices import full_device, make_backend
from sp_lightning.pipeline.transfer.trace import Recording
from sp_lightning.pipeline.weights.graphs import Graphs
from sp_lightning.pipeline.weights.units import Member, Unit

_HOST = torch.device("cpu")
SHARE_OF_FREE_MEMORY = 0.9  # that may be taken, where no budget says how much

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
            if self.options.resident_optimizer:
                raise ValueError(
                    "`resident_optimizer=True` works in one process only: which units live on the device would differ "
                    "between replicas."
                )
            replicas.begin_alike(module)
        processes = 1 if replicas is None else replicas.on_this_machine
        self._backend = backend or make_backend(self.device, self.options, processes)
        _check_share(self.options, self._backend)
        keep_out_of_graphs()
        finish_before_compiling(self._backend)
        self._learned = Learned()
        self._planner = planner
        self._at_work = EngineAtWork()
        self._depth = 0
        self._is_arranged = False
        self.optimizers = Optimizers(
            self.stats, self._at_work, lambda: self._assembly.close(), insists=self.options.overlap_optimizer is True
        )
        self._pool = HostPool(self._backend)
        meter = self._meter = Meter(self.device, self.stats)
        self._offloader = Offloader(self._backend, self._pool, meter, self.stats)
        self._saved = SavedTensors(lambda twin: self._assembly.backward.require(twin), meter, self._offloader)
        self._activations = Activations(
            self.options.activations, self._saved, self.device, self.stats, checks=self.options.debug
        )
        self._graphs = Graphs()
        self._lasting = Lasting(
            module=module,
            device=self.device,
            options=self.options,
            replicas=replicas,
            backend=self._backend,
            stats=self.stats,
            at_work=self._at_work,
            learned=self._learned,
            graphs=self._graphs,
            saved=self._saved,
            activations=self._activations,
            offloader=self._offloader,
            pool=self._pool,
            meter=meter,
            optimizers=self.optimizers,
            known_optimizers=weakref.WeakKeyDictionary(),
            spent=set(),
        )
        try:
            self._arrange()
        except BaseException:
            for buffer in self._learned.buffers.values():
                buffer.release()
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
        self._assembly.window.suspect_all()

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Write down what the lanes are busy with in this scope: units, copies, work on the host, and stalls."""
        with self._backend.trace.record() as recording:
            yield recording

    def settle(self) -> None:
        """Wait until gradients have landed and optimizer steps are done, as reading any weight does by itself."""
        self._assembly.settle()

    @contextmanager
    def in_all_processes(self) -> Iterator[None]:
        """Scope around a backward pass that runs in all processes, even if in this one it comes to no weight."""
        before = None if self.replicas is None else self.replicas.passes
        yield
        if self.replicas is not None and self.replicas.passes == before:
            with self._at_work:
                self._assembly.returns.finish(takes_part=True)

    def share_buffers(self) -> None:
        """Between steps, if there are several processes: all have the buffers of the first one from now on."""
        if self.replicas is not None:
            self.replicas.share_buffers(self.module)

    def backward_inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What `backward(inputs=...)` needs in place of these tensors: for a master, the leaf that is in the graph."""
        with without_torch_function():
            weights = self.arrangement.weights_by_master
            return [weights[id(t)].twin.parameter if id(t) in weights else t for t in tensors]

    def reset(self) -> None:
        """After an exception in the middle of a step: idle, nothing in flight, ready for the next step."""
        with self._at_work:
            self.stats.resets += 1
            self._assembly.abandon()
            self._stop_planning()
            self._depth = 0
            self._graphs.begin()
            resume_all_guards()
            self._assembly.guard.disarm()

    def has_gradients(self) -> bool:
        """Whether a gradient is there that the next backward pass would add to."""
        elsewhere = any(parameter.grad is not None for parameter in self._parameters_elsewhere())
        return elsewhere or any(self._assembly.gradients.get(weight) is not None for weight in self.arrangement.weights)

    def drop_gradients(self) -> None:
        """Nothing is left of a backward pass that failed, where there was no gradient before it."""
        for parameter in self._parameters_elsewhere():
            parameter.grad = None

    def _parameters_elsewhere(self) -> list[nn.Parameter]:
        """Those that autograd itself collects gradients of."""
        return [*self.arrangement.unmanaged.values(), *self.arrangement.on_device]

    def shrink(self) -> str | None:
        """Take less device memory from the next step on, of what `"auto"` leaves open.

        Returns:
            What was given up, in words; None if nothing is left to give up.
        """
        self._stop_planning()
        self._planner = None  # or the window would grow again
        if self._learned.plan is not None:
            self._learned.plan, self._learned.outdated = None, True
            return f"the window that was planned, with `k={self.arrangement.k}`, gives way to the usual one"
        if self.options.activations == "auto" and self._activations.recompute_from_now_on():
            return "units compute their activations a second time in backward from now on"
        if (
            self.options.k == "auto"
            and self.arrangement.k > self.arrangement.k_prime
            and not self._learned.short_of_memory
        ):
            self._learned.short_of_memory = self._learned.outdated = True
            return f"`k` is {self.arrangement.k_prime} from now on, and was {self.arrangement.k}"
        return None

    def rebuild(self) -> None:
        """Take in a changed module tree: other Parameter objects, added or removed modules.

        Raises:
            RuntimeError: In the middle of a step.
        """
        if self._depth or self._assembly.backward.running:
            raise RuntimeError("`rebuild()` was called in the middle of a step. Call it between steps.")
        self._rearrange_for(self.arrangement.autocast)
        _attached_masters.difference_update(map(id, self._masters))
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
        if self._depth or self._assembly.backward.running or failed is not None:
            self.reset()
        self._attached = False
        self._stop_planning()
        _attached_masters.difference_update(map(id, self._masters))
        stop_listening(self.optimizers)
        stop_watching_functions(self)
        self._assembly.take_down()
        self.arrangement.give_up_memory()
        for steps in self._lasting.known_optimizers.values():
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
        arrangement = self.arrangement
        every_weight = [weight for unit in arrangement.all_units for weight in unit.every_weight]
        return Summary(
            device=str(self.device),
            units=len(arrangement.units),
            k=arrangement.k,
            k_prime=arrangement.k_prime,
            model_bytes=sum(weight.master.nbytes for weight in every_weight),
            device_bytes=arrangement.device_bytes(),
            gradient_bytes=self._assembly.returns.device_bytes(),
            resident=tuple(weight.name for weight in arrangement.resident.weights),
            resident_bytes=sum(weight.compute_bytes for weight in arrangement.resident.weights),
            host_bytes=sum(group.host.host_bytes() for group in arrangement.groups if group.units),
            host_gradient_bytes=self._assembly.returns.host_bytes(),
            optimizer_bytes=self._assembly.steps.optimizer_bytes(arrangement.on_device),
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
        return self._assembly.arrangement

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
        if self.arrangement.budget is not None:
            return self.arrangement.budget
        free = self._backend.free_memory()
        if free is None:
            return None
        return self.arrangement.streaming_bytes() + int(SHARE_OF_FREE_MEMORY * free)

    @property
    def may_run_out(self) -> bool:
        """Whether a step may fail for want of device memory, or because of what was chosen to save it."""
        return self._backend.runs_out or self.budget is not None

    # ------------------------------------------------------------------------------------------ attach and take off

    def _arrange(self, autocast: torch.dtype | None = None) -> None:
        arrangement = Arrangement(
            self.module, self.options, self._learned, self._backend, autocast, self._progress, self.replicas
        )
        assembly = Assembly(arrangement, self._lasting, in_step=lambda: self._depth > 0)
        assembly.put_up(keeper=self)
        self._assembly = assembly
        self._is_arranged = True
        self._activations.auto = self._auto_policy()  # units have changed: measured anew
        self.stats.arrangements += 1
        if not arrangement.units and self.options.activations in ("recompute", "offload"):
            warnings.warn(
                f"`activations={self.options.activations!r}` has no effect any more: every weight is used outside of "
                "its module's forward (a penalty over all of them, say), so all stay on the device, no unit is left.",
                stacklevel=2,
            )

    def _take_in_what_was_learned(self) -> None:
        """Between steps, when no graph holds on to the old arrangement."""
        if not self._graphs.waiting() and self._learned.conclude(self.arrangement.units):
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
        self._rearrange_for(self.arrangement.autocast)
        self._activations.auto = policies  # units are the same, and so is what was measured of them
        if policies is not None and plan is not None and plan.policies:
            units = [(unit, plan.policies.get(unit.name, "keep")) for unit in self.arrangement.units]
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
        return None if budget is None else max(0, budget - self.arrangement.streaming_bytes())

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
                self._assembly.close()

    def _checked(self) -> AbstractContextManager[Any]:
        # not in inference: torch's fused fast paths look for dispatch modes, and without them other numbers come out
        if self.options.debug and self._depth == 1 and torch.is_grad_enabled():
            return AccessCheck(
                lambda: self.arrangement, lambda: bool(self._at_work) or guards_suspended(), self.device.type
            )
        return nullcontext()

    def _open(self, look_for_new_parameters: bool) -> None:
        if in_backward():
            self._assembly.backward.note()
            return
        if self._assembly.backward.running or any(member.active for member in self.arrangement.members):
            self.reset()  # an exception came out of a backward that nothing surrounded
        if not self._is_arranged:  # the last attempt has failed, for want of memory say
            self._rearrange_for(self.arrangement.autocast)
        if self._has_replaced_weights() or (look_for_new_parameters and self._has_new_parameters()):
            self.rebuild()
        self._assembly.overlap.put_back()
        self._take_in_what_was_learned()
        self._follow_plan()
        if not self._graphs.waiting():  # else this is the backward of the step before
            self.stats.steps += 1
            self._backend.trace.begin_step()
            self._activations.begin_step()
        self._offloader.begin()
        self.arrangement.untouched = True
        self._assembly.activate()
        with self._at_work:
            self._assembly.window.begin_step()

    def _has_new_parameters(self) -> bool:
        """Whether someone put other Parameters into the modules (`load_state_dict(assign=True)`), or took one out.

        Pruning puts a parameter elsewhere in its module, and a mask, which belongs on the device, among its buffers.
        """
        return not self._graphs.waiting() and any(
            type(found := place.parameters.get(place.key)) in (nn.Parameter, type(None))
            and found is not place.weight.master
            for member in self.arrangement.members
            for place in member.places
        )

    def _has_replaced_weights(self) -> bool:
        with self._at_work:
            return not self._graphs.waiting() and any(weight.is_replaced for weight in self.arrangement.weights)

    # ------------------------------------------------------------------------------------------- calls of modules

    def call(self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call of a member's module with its weights on the device (see hooks.py)."""
        if is_tracing():
            raise RuntimeError(
                "A module that superpipeline streams cannot be traced (by `torch.jit.trace`, "
                "`to_torchscript(method='trace')`, a logger with `log_graph=True`): a trace would keep the weights of "
                "one moment. Trace `copy.deepcopy(module)`, which is plain, or trace before or after the run."
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
            and autocast != self.arrangement.autocast
            and self._adapt_to_autocast(member, autocast)
        ):
            return member.module(*args, **kwargs)  # as a member of the new arrangement
        return self._assembly.calls.run(member, forward, args, kwargs, autocast)

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
            learned.assume_lowered(known_to_be_lowered(self.module, self.arrangement.units))
        if self.arrangement.untouched and not self._graphs.waiting():
            self._assembly.guard.disarm()
            self._rearrange_for(autocast)
            self._assembly.activate()
            return True
        for weight in [place.weight for place in member.places if place.weight.lowered]:
            self._assembly.outside.keep_as_is(weight)  # the unit is used with and without autocast in one step
        return False

    def _rearrange_for(self, autocast: torch.dtype | None) -> None:
        self._is_arranged = False
        self._assembly.take_down()
        for weight in self.arrangement.weights:
            if weight.is_replaced:  # who keeps our memory keeps the values in it
                self._learned.leave_memory_of(weight)
            else:  # or what `p.data = ...` has given it stays out of the memory that is sent
                weight.readopt()
        self.arrangement.give_up_memory()
        self._arrange(autocast)


def _check_share(options: PipelineOptions, backend: Backend) -> None:
    if isinstance(options.memory_budget, float) and backend.total_memory() is None:
        warnings.warn(
            f"`memory_budget={options.memory_budget}` is a share of the device's memory, and {backend.device} does not "
            "tell how much it has, so there is no budget. Give bytes, or text such as '2GiB'.",
            stacklevel=2,
        )


def _check_not_attached(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if id(parameter) in _attached_masters:
            raise ValueError(
                f"Parameter {name!r} already belongs to a pipeline, which streams it. Call its `detach()` first."
            )
