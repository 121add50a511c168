"""The engine: the parts that stream a module, from attach to detach, and when its weights get other places.

Its parts are made in the order in which they build on each other, and each has those that it needs by name. Where
weights lie changes only between steps, if no graph needs it: steps have shown something (`Learned`), another window is
planned, or autocast is. Units, and all that knows them, stay the same; only for another module tree there are others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sp_lightning.pipeline.activations.memory import Meter
from sp_lightning.pipeline.activations.offload import Offloader
from sp_lightning.pipeline.activations.policy import Activations
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.calls.backward import BackwardPass
from sp_lightning.pipeline.calls.calls import Calls
from sp_lightning.pipeline.calls.gates import compiled_call, install_gate, remove_gate
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
from sp_lightning.pipeline.units.tree import move_all_but_parameters, move_parameters
from sp_lightning.pipeline.units.unit import Member
from sp_lightning.pipeline.weights.autocast import Autocasts
from sp_lightning.pipeline.weights.segment import HostMemory
from sp_lightning.pipeline.window.arrangement import Arrangement, Learned
from sp_lightning.pipeline.window.order import Order
from sp_lightning.pipeline.window.places import WindowPlan
from sp_lightning.pipeline.window.window import Window


class Planner:
    """Chooses the window and policies for activations between steps; this one leaves the smallest window."""

    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        """Return the plan for the next step, which may have a backward or not; no graph waits for its own."""
        return None

    def abandon(self) -> None:
        """Discard the measurement under way: a step did not finish, or the pipeline ends."""


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
        # whether processes have one sum of gradients; from attach on, also while one arranges units in an evaluation
        self._sums_gradients = processes is not None and processes.trains
        self.stats = Stats()
        self.at_work = EngineAtWork()
        self.learned = Learned((), Autocasts())  # findings from past steps, for when weights are placed next
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
        self.calls = Calls(self)  # that members' calls are routed to
        self._is_arranged = False
        self.plan: WindowPlan | None = None  # the planner's choice that weights are placed by
        self._own_plan: WindowPlan | None = None  # the plan that the planner wants

    # --------------------------------------------------------------------------------------------------- taking it over

    def arrange(self) -> None:
        """Divide the module into units, and take it over."""
        arrangement = Arrangement(self.module, self.options, self.learned, self.memory, self.backend)
        self.arrangement = arrangement
        members = arrangement.streamed_members
        self.order = Order(len(members))
        units = [member.unit for member in members if member.unit is not None]
        self.window = Window(arrangement.in_window, units, self.order, self.backend, self.stats)
        self.stream = GradientStream(self.window, Routes(self.window, self.waiting), self.waiting, self.room)
        self.room.arrangement, self.room.stream = arrangement, self.stream
        self.steps = UnitSteps(self.window, self.stream, self.visits)
        self.backward = BackwardPass(self, self.window, self.stream)
        self.guard = Guard(self)
        self.saved.twins, self.saved.backward = arrangement.twins, self.backward
        self._names = self._named_parameters()
        move_parameters(arrangement.unmanaged.values(), self.device)
        self.place()
        self.activations.measure_anew(self.room.budget is not None)
        move_all_but_parameters(self.module, self.device)
        compiles = self.options.compile
        if compiles:
            arguments = compiles if isinstance(compiles, dict) else {}
            for member in members:
                member.compiled = compiled_call(member.module, arguments)
        for member in arrangement.members:
            install_gate(member, self.calls)

    def uninstall(self) -> None:
        """Give the module back, except for its buffers. Masters keep their identity and values, and are on the host."""
        if hasattr(self, "guard"):  # the last part, before anything is changed
            if not self.optimizers.shows_used:
                self.optimizers.drop_used()
            self._leave_places()
            for member in self.arrangement.members:
                # the call of a module that looks into a unit may still be running
                member.put_back_masters()
                remove_gate(member)
            self.arrangement.close()
        self.living.bring_home(self.module)
        self.memory.keep([])

    def rearrange(self) -> None:
        """Give the module back, and take it over as it is now: it is another tree."""
        self._is_arranged = False
        addresses = self.memory.addresses
        self.uninstall()
        self.memory.addresses = addresses  # what the user has put elsewhere stays there
        self.learned = Learned(self.learned.divided, self.learned.autocasts)
        self.plan = self.activations.auto = None
        self.arrange()

    # ------------------------------------------------------------------------------------------------------- placing it

    def place(self) -> None:
        """Put weights where the plan and what was learned want them, sent as autocast uses them; no graph may wait."""
        arrangement = self.arrangement
        self._is_arranged = False
        self._show_used()
        self.optimizers.drop_used()  # or all of it would have to be shown
        self._leave_places()
        arrangement.leave_places()
        arrangement.choose(self.plan)
        self.waiting.limit(arrangement.room_for_gradients)
        self.living.follow(arrangement)
        arrangement.lay_out()
        units, stream = arrangement.in_window, self.stream
        gradients = [SegmentGradients(unit, segment) for unit in units for segment in unit.segments]
        stream.bring(gradients)
        stream.routes.landing.serve(units)
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

    def _show_used(self) -> None:
        """Have gradients of what comes to the device be the users', who may zero them there, as `zero_grad` does."""
        coming = () if self.plan is None else self.plan.on_device
        if not coming:
            return
        with self.at_work:
            for weight, gradient in self.stream.of.items():
                if weight.unit.name in coming:
                    gradient.show()

    def _leave_places(self) -> None:
        """Have nothing under way, and nobody guard weights, follow their gradients, or count on where they lie."""
        self.graphs.outdate()
        self.backward.close()
        self.optimizers.leave_weights()
        self.steps.settle()
        self.visits.close()
        self.backend.drain()
        self.stream.close()
        self.guard.remove()
        self.window.abandon()

    # ------------------------------------------------------------------------------------------------- reasons for it

    def before_step(self, look_for_new_parameters: bool, waiting: bool) -> None:
        """Place weights anew if there is a reason to, unless a graph is `waiting` for its backward."""
        if not self._is_arranged:  # the last attempt failed, e.g. for lack of memory
            self.rearrange()
        if waiting:
            return
        if self.arrangement.is_lent_out():
            return
        with self.at_work:
            living = self.arrangement.parameters_on_device
            is_converted = any(each.device != self.device for each in living)
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
            self._conclude()
        self._own_plan = self.planner.before_step(self, torch.is_grad_enabled())
        # of several processes all follow the first one's, when they meet
        if may_place and not self._sums_gradients:
            self._follow(self._own_plan)

    def meet(self) -> None:
        """Meet the other processes, before the first step after one that changed weights."""
        processes = self.processes
        if processes is None:
            return
        learned = self.learned
        with self.at_work:
            edited: Sequence[str] | RuntimeError
            try:
                edited = self.window.edited()
            except RuntimeError as error:  # this process may not write
                edited = error
            with without_torch_function():
                learned.note_trained(self.arrangement.every_weight)
            self.room.least = None
            has_news = learned.has_news or (learned.order is None and bool(self._called()))
            own = edited, has_news, self._own_plan, self.room.budget
            edits, news, plans, budgets = zip(*processes.gather(own), strict=True)
            for edit in edits:
                if isinstance(edit, RuntimeError):
                    raise edit
            self.window.note_edited(edits[processes.owner])
            self.room.least = min(filter(None, budgets), default=None)
            if any(news):
                learned.agree(self.module, self.arrangement.units, self._called(), processes)
                self._conclude()
            else:
                self._follow(plans[0])

    def _conclude(self) -> None:
        """Place weights anew if something was learned that calls for it, or even divide the module anew."""
        arrangement = self.arrangement
        # processes agree on an order when they meet: placing weights may take all of them
        called = self._called() if self.learned.order is None and not self._sums_gradients else []
        if not self.learned.conclude(arrangement.units, called):
            return
        if self.learned.divided != arrangement.divided:
            self.rearrange()
        else:  # the plan was made for other units
            self._follow(None, anew=True)
            self.activations.measure_anew(self.room.budget is not None)

    def _called(self) -> list[str]:
        """Return the names of units that the last step has called, in the order of their calls."""
        return [self.arrangement.streamed_members[number].unit_name for number in self.order.used()]

    def _follow(self, plan: WindowPlan | None, anew: bool = False) -> None:
        """Adopt the window that the planner wants, and what becomes of activations; place weights `anew` anyway."""
        before, self.plan = self.plan, plan
        self.waiting.follow(None if plan is None else plan.waiting)
        self.visits.begin_in_backward = plan is None or not plan.defers_visits
        if anew or (before and before.window) != (plan and plan.window):
            self.place()
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
            seen = [self.arrangement.streamed_members[number].name for number in self.order.used()]
            if member.name in seen:
                autocasts.mix(member.name)
            elif self._may_place_now():
                with self.at_work:
                    self.window.write_back_all()
                autocasts.switch(known, dtype, seen)
                self.place()
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
        # of several processes, each may train other modules: they place weights when they meet
        if self.processes is not None and torch.is_grad_enabled():
            return False
        return not any(member.running_calls for member in arrangement.members)

    def _gradients_wait(self) -> bool:
        """Tell whether gradients wait on the device: other places for weights would bring them to the host."""
        return bool(self.waiting.waited) and self.stream.bytes_on_device() > 0

    def _named_parameters(self) -> dict[str, int]:
        """Return the identities of parameters by name: others if a module was added, removed, or pruned, say."""
        return {name: id(parameter) for name, parameter in self.module.named_parameters(remove_duplicate=False)}

    # ------------------------------------------------------------------------------------------------------ in a step

    def arm_guard(self) -> None:
        """Begin a step or a backward pass: guard masters, and have weights on the device checked before use."""
        if not self.guard.in_step:
            self.window.suspect_all()
            self.guard.in_step = True

    def relax_guard(self) -> None:
        """Relax the guard, once neither a step nor a backward pass is under way."""
        if not (self.graphs.scopes or self.backward.running):
            self.guard.in_step = False
            self.guard.end_step()

    def settle(self) -> None:
        """Wait until gradients have landed, and nothing reads or writes masters."""
        with self.at_work:
            self.steps.settle()
            self.stream.settle()
            self.window.settled = True

    def end_backward(self, some_came: bool) -> None:
        """Follow the end of a backward pass, which may have brought gradients."""
        self.graphs.has_served = False
        self.backend.trace.end()
        self.activations.end_backward()
        if not self.graphs.scopes:
            self.window.write_back_all()
            self.graphs.begin()  # the one that checkpoints have built has had its backward
        some_came |= self.living.take_news()
        # not after `torch.autograd.grad`, which may run in some processes only
        unmanaged = self.arrangement.unmanaged.values()
        if some_came or any(parameter.grad is not None for parameter in unmanaged):
            self.end_pass()
        self.relax_guard()

    def abandon_pass(self) -> None:
        """Have other processes not wait for this one's part of a pass that an exception has ended."""
        if self.stream.averages is not None:
            self.stream.averages.abandon_pass()

    def end_pass(self) -> None:
        """Add gradients up with those of other processes, if there are any, and this is no pass of this one's own."""
        averages = self.stream.averages
        if averages is not None:
            with self.at_work:
                averages.end_pass(self.arrangement.named_on_device)
