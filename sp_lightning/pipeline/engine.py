"""The engine: the parts that stream a module, from attach to detach, and the moments when weights get other places.

Parts are made in the order in which they build on each other. Each gets the parts that it needs by name. The places of
weights change only between steps, while no graph needs them: steps have shown something (`Learned`), another window is
planned, or autocast has changed. Units and the parts stay the same; only another module tree gets other ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from sp_lightning.pipeline.activations.memory import Meter
from sp_lightning.pipeline.activations.offload import Offloader
from sp_lightning.pipeline.activations.policy import Activations
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.calls.backward import BackwardEvents, BackwardPass
from sp_lightning.pipeline.calls.gates import Caller, compiled_call, install_gate, remove_gate
from sp_lightning.pipeline.calls.graphs import Graphs
from sp_lightning.pipeline.calls.guard import Guard
from sp_lightning.pipeline.gradients.routes import Routes
from sp_lightning.pipeline.gradients.segment_gradients import SegmentGradients
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.gradients.waiting import WaitingRoom
from sp_lightning.pipeline.lanes.at_work import EngineAtWork
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.optimizer.living import Living
from sp_lightning.pipeline.optimizer.optimizers import Optimizers
from sp_lightning.pipeline.optimizer.unit_steps import UnitSteps
from sp_lightning.pipeline.optimizer.visit import Visits
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.processes.averages import Averages
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.room import Room
from sp_lightning.pipeline.stats import Progress, Stats
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.units.moving import move_all_but_parameters, move_parameters
from sp_lightning.pipeline.units.unit import Member
from sp_lightning.pipeline.weights.autocast import Autocasts
from sp_lightning.pipeline.weights.segment import HostMemory
from sp_lightning.pipeline.window.arrangement import Arrangement, Learned
from sp_lightning.pipeline.window.order import Order
from sp_lightning.pipeline.window.places import WindowPlan
from sp_lightning.pipeline.window.window import Window


class Planner:
    """Chooses the window and policies for activations between steps; this base class keeps the smallest window."""

    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        """Return the plan for the next step, which has a backward if it `builds_graph`; no graph waits for its own."""
        return None

    def abandon(self) -> None:
        """Discard the measurement under way: a step did not finish, or the pipeline ends."""


class StepStory(BackwardEvents, Protocol):
    """Tells the parts of the engine what happens in a step (calls/story.py)."""

    def work_with(
        self,
        arrangement: Arrangement,
        window: Window,
        stream: GradientStream,
        backward: BackwardPass,
        guard: Guard,
    ) -> None:
        """Work from now on with the parts that belong to this arrangement of the module."""


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
        self._sums_gradients = processes is not None and processes.trains
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
        self.room = Room(backend, self.visits, self.meter)
        self.waiting = WaitingRoom(self.memory)
        self.living = Living(device, self.optimizers.states, processes)
        self.planner = planner
        self._is_arranged = False
        self.plan: WindowPlan | None = None  # the plan by which weights are placed
        # The plan that the planner wants for the next step.
        self._wanted_plan: WindowPlan | None = None

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
        self.order = Order(len(members))
        units = [member.unit for member in members if member.unit is not None]
        self.window = Window(arrangement.in_window, units, self.order, self.backend, self.stats)
        self.stream = GradientStream(self.window, Routes(self.window, self.waiting), self.waiting, self.room)
        self.room.arrangement = arrangement
        self.room.stream = self.stream
        self.steps = UnitSteps(self.window, self.stream, self.visits)
        self.backward = BackwardPass(self._story, self.at_work, self.device, self.window, self.stream)
        self.guard = Guard(
            self.at_work, self.graphs, self.backward, arrangement, self.steps, self.device, self.processes
        )
        self._story.work_with(arrangement, self.window, self.stream, self.backward, self.guard)
        self.saved.twins = arrangement.twins
        self.saved.backward = self.backward
        self._names = self._named_parameters()
        move_parameters(arrangement.unmanaged.values(), self.device)
        self.place_weights()
        self.activations.measure_anew(self.room.budget is not None)
        move_all_but_parameters(self.module, self.device)
        compiles = self.options.compile
        if compiles:
            arguments = compiles if isinstance(compiles, dict) else {}
            for member in members:
                member.compiled = compiled_call(member.module, arguments)
        for member in arrangement.members:
            install_gate(member, self._caller)

    def uninstall(self) -> None:
        """Restore the module, except for its buffers. Masters keep their identity and values, and are on the host."""
        if hasattr(self, "guard"):  # the last part that is made before the module is changed
            if not self.optimizers.shows_used_gradients:
                self.optimizers.drop_used_gradients()
            self._leave_places()
            for member in self.arrangement.members:
                # The call of a module around units may still be running.
                member.put_back_masters()
                remove_gate(member)
            self.arrangement.detach_weights()
        self.living.move_all_to_host(self.module)
        self.memory.keep([])

    def rearrange(self) -> None:
        """Restore the module, and take it over as it is now: it has become another tree."""
        self._is_arranged = False
        addresses = self.memory.addresses
        self.uninstall()
        self.memory.addresses = addresses  # masters that the user has moved stay where they are
        self.learned = Learned(self.learned.divided, self.learned.autocasts)
        self.plan = self.activations.auto = None
        self._arrange()

    # ------------------------------------------------------------------------------------------------------- placing it

    def place_weights(self) -> None:
        """Place weights by the plan and by findings, in the dtypes that autocast uses; no graph may wait meanwhile."""
        arrangement = self.arrangement
        self._is_arranged = False
        self._show_used_gradients()
        # Otherwise all of them would become users' `.grad` here.
        self.optimizers.drop_used_gradients()
        self._leave_places()
        arrangement.leave_places()
        arrangement.choose(self.plan)
        self.waiting.limit(arrangement.room_for_gradients)
        self.living.move_units(arrangement)
        arrangement.lay_out()
        units, stream = arrangement.in_window, self.stream
        gradients = [SegmentGradients(unit, segment) for unit in units for segment in unit.segments]
        stream.follow_segments(gradients)
        stream.routes.landing.size_for(units)
        if self.processes is not None and self._sums_gradients:
            stream.averages = Averages(gradients, self.window, stream.routes, self.processes)
        self.optimizers.work_with(self.steps, arrangement, frozenset(self._names.values()))
        on_device = [*self.module.buffers(), *arrangement.named_on_device.values()]
        self.meter.leave_out(on_device)
        self.living.watch(arrangement)
        for twin in arrangement.twins.values():
            self.backward.follow_requires_grad(twin)
        self.guard.install(arrangement.weights)
        self._is_arranged = True
        self.stats.arrangements += 1

    def _show_used_gradients(self) -> None:
        """Make gradients of units that come to the device the masters' `.grad`, which `zero_grad` clears there."""
        coming = () if self.plan is None else self.plan.on_device
        if not coming:
            return
        with self.at_work:
            for weight, gradient in self.stream.gradient_of.items():
                if weight.unit.name in coming:
                    gradient.show()

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
        self.guard.remove()
        self.window.mark_all_absent()

    # ------------------------------------------------------------------------------------------------- reasons for it

    def before_step(self, look_for_new_parameters: bool, waiting: bool) -> None:
        """Place weights again if there is a reason to, unless a graph is `waiting` for its backward."""
        if not self._is_arranged:  # the last attempt has failed, for example for lack of memory
            self.rearrange()
        if waiting:
            return
        if self.arrangement.is_lent_out():
            return
        with self.at_work:
            on_device = self.arrangement.parameters_on_device
            is_converted = any(parameter.device != self.device for parameter in on_device)
            for weight in self.arrangement.weights:
                is_converted |= weight.is_converted
        if is_converted or (look_for_new_parameters and self._named_parameters() != self._names):
            self.rearrange()
        if torch.is_grad_enabled():
            with without_torch_function():
                self.learned.note_trained(self.arrangement.every_weight)
        if self.learned.has_news and self.processes:
            return  # processes that share weights place them when they meet
        may_place = not self._gradients_wait()
        if may_place:
            self._place_by_findings()
        self._wanted_plan = self.planner.before_step(self, torch.is_grad_enabled())
        # Several processes adopt the first one's plan, when they meet.
        if may_place and not self._sums_gradients:
            self._adopt_plan(self._wanted_plan)

    def meet(self) -> None:
        """Meet the other processes, before the first step after one that changed weights."""
        processes = self.processes
        if processes is None:
            return
        learned = self.learned
        with self.at_work:
            edited: Sequence[str] | RuntimeError
            try:
                edited = self.window.pop_edited_segments()
            except RuntimeError as error:  # this process has written, and may not
                edited = error
            with without_torch_function():
                learned.note_trained(self.arrangement.every_weight)
            self.room.least = None
            has_news = learned.has_news or (learned.order is None and bool(self._called_units()))
            own_state = edited, has_news, self._wanted_plan, self.room.budget
            edits, news, plans, budgets = zip(*processes.gather(own_state), strict=True)
            for edit in edits:
                if isinstance(edit, RuntimeError):
                    raise edit
            self.window.note_edits_elsewhere(edits[processes.owner])
            self.room.least = min(filter(None, budgets), default=None)
            if any(news):
                learned.agree(self.module, self.arrangement.units, self._called_units(), processes)
                self._place_by_findings()
            else:
                self._adopt_plan(plans[0])

    def _place_by_findings(self) -> None:
        """Place weights again if findings call for it, or even divide the module again."""
        arrangement = self.arrangement
        # Processes agree on an order when they meet: placing weights may take all of them.
        called: list[str] = []
        if self.learned.order is None and not self._sums_gradients:
            called = self._called_units()
        if not self.learned.draw_conclusions(arrangement.units, called):
            return
        if self.learned.divided != arrangement.divided:
            self.rearrange()
        else:  # the plan was made for other units
            self._adopt_plan(None, anew=True)
            self.activations.measure_anew(self.room.budget is not None)

    def _called_units(self) -> list[str]:
        """Return the names of units that the last step has called, in the order of their calls."""
        members = self.arrangement.streamed_members
        return [members[number].unit_name for number in self.order.used_members()]

    def _adopt_plan(self, plan: WindowPlan | None, anew: bool = False) -> None:
        """Adopt a plan's window and policies; place weights again if the window changes, or if `anew`."""
        before = self.plan
        self.plan = plan
        self.waiting.follow_plan(None if plan is None else plan.waiting)
        if anew or (before and before.window) != (plan and plan.window):
            self.place_weights()
        elif plan is not None and self.arrangement.layout.window is before:
            self.arrangement.layout.window = plan
        if self.activations.auto is not None:
            self.activations.auto.policies = {} if plan is None else plan.policies

    def adapt_to_autocast(self, member: Member, dtype: torch.dtype | None) -> None:
        """Follow a member's call under another autocast than its weights were placed for."""
        autocasts = self.learned.autocasts
        known = autocasts.common([member.name])
        is_new = known is not dtype and member.name not in autocasts.mixed
        if is_new and (member.is_streamed or self.arrangement.unused_in_step):
            members = self.arrangement.streamed_members
            seen = [members[number].name for number in self.order.used_members()]
            if member.name in seen:
                autocasts.mix(member.name)
            elif self._may_place_now():
                with self.at_work:
                    self.window.write_back_all()
                autocasts.switch(known, dtype, seen)
                self.place_weights()
                self.activations.measure_anew(self.room.budget is not None)
                return
            elif member.is_streamed:
                autocasts.noted[member.name] = dtype
                self.learned.outdated = True
        for weight in [entry.weight for entry in member.entries if entry.weight.lowered]:
            if member.name in autocasts.mixed:
                self.guard.keep_as_is(weight)
            else:
                self.guard.keep_as_is_for_now(weight)

    def _may_place_now(self) -> bool:
        """Tell whether weights may get other places within a step: no graph, and no call, needs them where they are."""
        arrangement, graphs = self.arrangement, self.graphs
        if graphs.waiting() or graphs.current.is_built or self.backward.running or arrangement.is_lent_out():
            return False
        if self._gradients_wait():
            return False
        # Each of several processes may train other modules: they place weights when they meet.
        if self.processes is not None and torch.is_grad_enabled():
            return False
        return not any(member.running_calls for member in arrangement.members)

    def _gradients_wait(self) -> bool:
        """Tell whether gradients wait on the device: other places for weights would bring them to the host."""
        return bool(self.waiting.waited) and self.stream.bytes_on_device() > 0

    def _named_parameters(self) -> dict[str, int]:
        """Return the identities of parameters by name; they change if a module is added, removed or pruned."""
        return {name: id(parameter) for name, parameter in self.module.named_parameters(remove_duplicate=False)}

    def has_gradients_on_device(self) -> bool:
        """Tell whether parameters that stay on the device have got gradients since the last call."""
        some_came = self.living.pop_some_came()
        return some_came or any(parameter.grad is not None for parameter in self.arrangement.unmanaged.values())
