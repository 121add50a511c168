"""The engine: the parts that stream a module, how weights are placed, and the device memory that a module may take.

Parts are made in the order in which they build on each other. Each gets the parts that it needs by name. The places of
weights change only between steps, while no graph needs them: steps have shown something (`Learned`), another window is
planned, or autocast has changed. Units and the parts stay the same; only another module tree gets other ones.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

import torch
from torch import nn

from sp_lightning.pipeline.activations.offload import Meter, Offloader
from sp_lightning.pipeline.activations.policy import Activations
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.calls.backward import BackwardEvents, BackwardPass
from sp_lightning.pipeline.calls.gates import Caller, compiled_call, install_gate, remove_gate
from sp_lightning.pipeline.calls.guard import Guard, guard_masters, release_masters
from sp_lightning.pipeline.gradients.routes import WaitingGradients
from sp_lightning.pipeline.gradients.segment_gradients import SegmentGradients
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.graphs import Graphs, Opener
from sp_lightning.pipeline.host_memory import has_room_for
from sp_lightning.pipeline.lanes.at_work import EngineAtWork
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.optimizer.optimizers import Optimizers
from sp_lightning.pipeline.optimizer.state_ring import StateRing
from sp_lightning.pipeline.optimizer.staying import StayingUnits, move_all_but_parameters, move_parameters
from sp_lightning.pipeline.optimizer.unit_steps import UnitSteps
from sp_lightning.pipeline.optimizer.visit import Visits
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.placing.arrangement import Arrangement, Learned
from sp_lightning.pipeline.placing.places import WindowPlan
from sp_lightning.pipeline.processes.averages import Averages
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.stats import Progress, Stats
from sp_lightning.pipeline.weights.autocast import Autocasts, Lowering
from sp_lightning.pipeline.weights.segment import HostMemory
from sp_lightning.pipeline.weights.weight import GradientLife
from sp_lightning.pipeline.window.window import Window

SHARE_OF_FREE_MEMORY = 0.9  # the budget, as a share of free device memory, if the user gives none


class Planner:
    """Chooses the window and policies for activations between steps; this base class keeps the smallest window."""

    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        """Return the plan for the next step, which has a backward if it `builds_graph`; no graph waits for its own."""
        return None

    def abandon(self) -> None:
        """Discard the measurement under way: a step did not finish, or the pipeline ends."""


class StepStory(BackwardEvents, Protocol):
    """Tells the parts of the engine what happens in a step (calls/story.py)."""

    def follow_arrangement(self) -> None:
        """Work from now on with the parts that belong to the engine's arrangement of the module."""


class Engine:
    """The parts that stream a module."""

    arrangement: Arrangement

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        options: PipelineOptions,
        backend: Backend,
        planner: Planner,
        processes: Processes | None,
        progress: Progress,
    ) -> None:
        self.module = module
        self.device = device
        self.options = options
        self.backend = backend
        self.processes = processes
        # Whether processes share sums of gradients. It is decided at attach, as an evaluation may place weights, too.
        self.sums_gradients = processes is not None and processes.trains
        self.stats = Stats()
        self.at_work = EngineAtWork()
        # Findings of past steps, for the next time that weights are placed.
        self.learned = Learned((), Autocasts())
        box = None if processes is None else processes.box
        self.memory = HostMemory(backend, box, progress)
        self.graphs = Graphs()
        self.meter = Meter(backend, self.stats, always=options.activations != "auto" or options.debug)
        self.offloader = Offloader(backend, self.meter, self.stats)
        self.saved = SavedTensors(self.meter, self.offloader)
        self.activations = Activations(options.activations, self.saved, self.offloader, backend, self.stats)
        self.optimizers = Optimizers(self.at_work, processes, options.overlap_optimizer)
        self.visits = Visits(backend, self.stats)
        self.drive = None if options.nvme_path is None else StateRing(options.nvme_path, backend, self.stats)
        # the smallest budget of several processes, after they have met
        self.least_budget: int | None = None
        self.waiting = WaitingGradients(self.memory, self)
        self.staying = StayingUnits(device, self.optimizers.states, processes)
        self.planner = planner
        self.is_arranged = False  # whether all parts know where weights lie
        self.plan: WindowPlan | None = None  # the plan by which weights are placed
        # The window while there is no other plan, if units stay on the device as the host has no room for their state.
        self.first_plan: WindowPlan | None = None

    # --------------------------------------------------------------------------------------------------- taking it over

    def take_over(self, story: StepStory, caller: Caller) -> None:
        """Take the module over: `story` tells the parts what happens in steps, and `caller` runs its modules' calls."""
        self._story = story
        self._caller = caller
        self._arrange()

    def _arrange(self) -> None:
        """Divide the module into units, and have the engine's parts stream them."""
        arrangement = Arrangement(self.module, self.options, self.learned, self.memory, self.backend)
        self.arrangement = arrangement
        members = arrangement.streamed_members
        units = [member.unit for member in members if member.unit is not None]
        self.window = Window(arrangement.in_window, units, self.backend, self.stats)
        self.stream = GradientStream(self.window, self.waiting)
        self.steps = UnitSteps(self.window, self.stream, self.visits, self.drive)
        self.backward = BackwardPass(self._story, self.at_work, self.window, self.stream)
        self.guard = Guard(
            self.at_work, self.graphs, self.backward, arrangement, self.steps, self.device, self.processes
        )
        self._lowering = Lowering(self.learned.casts, self.graphs, self.guard)
        self._story.follow_arrangement()
        self.saved.twins = arrangement.twins
        self.saved.backward = self.backward
        self._names = self._named_parameters()
        move_parameters(arrangement.unmanaged.values(), self.device)
        self.place_weights()
        self.activations.measure_anew(self.device_budget is not None)
        move_all_but_parameters(self.module, self.device)
        compiles = self.options.compile
        if compiles:
            arguments = compiles if isinstance(compiles, dict) else {}
            for member in members:
                member.compiled = compiled_call(member.module, arguments)
        for member in arrangement.members:
            install_gate(member, self._caller)

    def uninstall(self, for_good: bool = True) -> None:
        """Restore the module, except for its buffers. Masters keep their identity and values, and are on the host.

        So is the state of optimizers, unless this is `for_good` and the host has no room for it. Gradients that a step
        has used stay where they still exist, if this is `for_good` and the host has room for them.
        """
        # the last one comes first, and none is left out if another one fails
        with ExitStack() as parts:
            parts.callback(self.memory.keep, [])
            parts.callback(self.staying.move_all_to_host, self.module, may_leave_state=for_good)
            if hasattr(self, "guard"):  # the last part that is made before the module is changed
                parts.callback(self.arrangement.detach_weights)
                parts.callback(self._restore_members)
                parts.callback(release_masters, self.guard)
                parts.callback(self._leave_places)
                parts.callback(self._drop_used_without_room if for_good else self.stream.drop_used)

    def drop_work(self) -> None:
        """Drop all work under way, after an interrupt that may have left it in any state."""
        self.at_work.abandon()
        if hasattr(self, "guard"):
            self.stream.forget()

    def _drop_used_without_room(self) -> None:
        """Drop gradients that a step has used, unless each process of the host has room for twice as much."""
        count = 1 if self.processes is None else self.processes.box.count
        weights = self.stream.gradient_of
        nbytes = sum(weight.nbytes for weight in weights if weight.gradient_life is GradientLife.USED)
        if not has_room_for(2 * count * nbytes):
            self.stream.drop_used()

    def _restore_members(self) -> None:
        for member in self.arrangement.members:
            # The call of a module around units may still be running.
            member.put_back_masters()
            remove_gate(member)

    def rearrange(self) -> None:
        """Restore the module, and take it over as it is now: it has become another tree."""
        self.is_arranged = False
        addresses = self.memory.addresses
        self.uninstall(for_good=False)
        self.memory.addresses = addresses  # masters that the user has moved stay where they are
        self.learned = Learned(self.learned.divided, self.learned.autocasts)
        self.plan = self.activations.auto = None
        self._arrange()

    # ------------------------------------------------------------------------------------------------------- placing it

    def place_weights(self) -> None:
        """Place weights by the plan and by findings, in the dtypes that autocast uses; no graph may wait meanwhile."""
        arrangement = self.arrangement
        self.is_arranged = False
        plan = self.plan or self.first_plan
        if plan is not None:
            with self.at_work:
                for weight, gradient in self.stream.gradient_of.items():
                    if weight.unit.name in plan.on_device:  # `zero_grad` clears it there
                        gradient.show()
        # Otherwise all others would become users' `.grad` here, too.
        self.stream.drop_used()
        self._leave_places()
        arrangement.leave_places()
        arrangement.choose(self.plan, self.first_plan)
        self.waiting.limit(arrangement.room_for_gradients, is_first=not self.optimizers.steps_taken)
        self.staying.move_units(arrangement)
        arrangement.lay_out()
        units, stream = arrangement.in_window, self.stream
        gradients = [SegmentGradients(unit, segment) for unit in units for segment in unit.segments]
        stream.follow_segments(gradients)
        stream.routes.landing.size_for(units)
        if self.processes is not None and self.sums_gradients:
            stream.averages = Averages(gradients, self.window, stream.routes, self.processes)
        self.optimizers.work_with(self.steps, frozenset(self._names.values()))
        on_device = [*self.module.buffers(), *arrangement.named_on_device.values()]
        self.meter.leave_out(on_device)
        self.staying.watch(arrangement)
        for twin in arrangement.twins.values():
            self.backward.follow_requires_grad(twin)
        guard_masters(self.guard, arrangement.weights, self._lowering)
        self.is_arranged = True
        self.stats.arrangements += 1

    def settle(self) -> None:
        """Wait until all gradients have landed, and nothing reads or writes masters."""
        with self.at_work:
            self.steps.settle_all()

    def _leave_places(self) -> None:
        """Finish all work, and detach the parts that guard weights, follow gradients or know places of weights."""
        self.graphs.outdate_all()
        self.backward.allow_gradients_of_masters()
        self.optimizers.leave_weights()
        self.steps.settle()
        self.visits.close()
        self.backend.drain()
        self.stream.hand_over_gradients()
        release_masters(self.guard)
        self.window.mark_all_absent()

    def is_another_tree(self, opener: Opener) -> bool:
        """Tell whether the module was converted since it was arranged, or has got or lost parameters by the program."""
        with self.at_work:
            on_device = self.arrangement.parameters_on_device
            is_converted = any(parameter.device != self.device for parameter in on_device)
            for weight in self.arrangement.weights:
                is_converted |= weight.is_converted
        return is_converted or (opener is not Opener.CALL and self._named_parameters() != self._names)

    def _named_parameters(self) -> dict[str, int]:
        """Return the identities of parameters by name; they change if a module is added, removed or pruned."""
        return {name: id(parameter) for name, parameter in self.module.named_parameters(remove_duplicate=False)}

    def has_gradients_on_device(self) -> bool:
        """Tell whether parameters that stay on the device have got gradients since the last call."""
        some_came = self.staying.pop_some_came()
        return some_came or any(parameter.grad is not None for parameter in self.arrangement.unmanaged.values())

    # ---------------------------------------------------------------------------------------------- the device's memory

    @property
    def device_budget(self) -> int | None:
        """Device memory for weights, gradients on their way to the host and activations; None if no limit is known."""
        layout, user_budget = self.arrangement.layout, self.arrangement.budget
        memory = None if user_budget is not None else self.backend.memory()
        if memory is None:
            return user_budget
        streaming = layout.streaming_bytes
        # The bytes that the first backward will allocate are still free.
        if torch.is_grad_enabled():
            streaming = min(streaming, layout.device_bytes + self.stream.routes.staging.nbytes())
        # Gradients that wait release their memory as units are updated.
        streaming += self.visits.nbytes() + self.stream.bytes_on_device() + int(SHARE_OF_FREE_MEMORY * memory.free)
        return min(streaming, self.least_budget or streaming)

    def left_for_gradients(self) -> float:
        """Return the bytes that are free, and stay free if the step takes no more than it has so far."""
        user_budget = self.arrangement.budget
        if user_budget is not None:
            taken = self.arrangement.layout.streaming_bytes + self.visits.nbytes() + self.meter.step_peak
            return user_budget - taken - self.stream.bytes_on_device()
        memory = self.backend.memory()
        if memory is None:
            return 0.0
        next_peak = max(0, memory.peak_so_far - memory.allocated)
        return SHARE_OF_FREE_MEMORY * memory.free - next_peak
