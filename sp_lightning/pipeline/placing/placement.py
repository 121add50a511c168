"""The occasions when weights get other places: before a step, when processes meet, and when autocast has changed.

Weights are placed only between steps, and while no graph needs them where they are. The reasons are another module
tree, the findings of past steps (`Learned`), another plan, and another autocast. `engine.py` places them.
"""

from __future__ import annotations

import torch

from sp_lightning.pipeline.engine import Engine
from sp_lightning.pipeline.graphs import Opener
from sp_lightning.pipeline.placing.places import WindowPlan
from sp_lightning.pipeline.processes.box import written_by_follower
from sp_lightning.pipeline.units.unit import Member


class PlacementPolicy:
    """Decides when an engine places weights."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # The plan that the planner wants for the next step.
        self._wanted_plan: WindowPlan | None = None

    def before_step(self, opener: Opener, waiting: bool) -> None:
        """Place weights again if there is a reason to, unless a graph is `waiting` for its backward."""
        engine = self._engine
        if not engine.is_arranged:  # the last attempt has failed, for example for lack of memory
            engine.rearrange()
        if waiting or engine.arrangement.is_lent_out():
            return
        if engine.is_another_tree(opener):
            engine.rearrange()
        if torch.is_grad_enabled():
            with engine.at_work:
                engine.learned.note_trained(engine.arrangement.every_weight)
        if engine.learned.has_news and engine.processes:
            return  # processes that share weights place them when they meet
        may_place = not self._gradients_wait()
        if may_place:
            self._place_by_findings()
        self._wanted_plan = engine.planner.before_step(engine, torch.is_grad_enabled())
        # Several processes adopt the first one's plan, when they meet.
        if may_place and not engine.sums_gradients:
            self._adopt_plan(self._wanted_plan)

    def meet(self, places: bool) -> None:
        """Meet the other processes: all get the first one's edits of weights, and place weights if asked.

        Raises:
            RuntimeError: A process has written to a weight, and the process that owns it has not.
        """
        engine = self._engine
        processes = engine.processes
        if processes is None:
            return
        learned = engine.learned
        with engine.at_work:
            if not places:
                engine.steps.settle()
            processes.look_at_copies()
            edited = {*engine.window.pop_edited_segments(), *processes.written_copies}
            learned.note_trained(engine.arrangement.every_weight)
            engine.least_budget = None
            has_news = learned.has_news or (learned.order is None and bool(self._called_units()))
            may_differ = processes.copies_may_differ
            own_state = edited, may_differ, has_news, self._wanted_plan, engine.device_budget
            edits, may_differs, news, plans, budgets = zip(*processes.gather(own_state), strict=True)
            processes.check_edits(edits)
            owners = edits[processes.owner]
            engine.window.adopt_edits(owners)
            if owners:
                processes.gather(None)  # the owner has shared its edits
            processes.share_copies(None if any(may_differs) else edits[0])
            engine.least_budget = min(filter(None, budgets), default=None)
            if not places:
                return
            if any(news):
                learned.agree(engine.module, engine.arrangement.units, self._called_units(), processes)
                self._place_by_findings()
            else:
                self._adopt_plan(plans[0])

    def end_step(self) -> None:
        """Raise if this process has written to weights in the step that ends, and another one owns them."""
        processes = self._engine.processes
        if processes is not None and not processes.box.is_keeper:
            self._engine.window.refuse_writes()
            processes.look_at_copies()
            for name in processes.written_copies:
                raise written_by_follower(name)

    def _place_by_findings(self) -> None:
        """Place weights again if findings call for it, or even divide the module again."""
        engine = self._engine
        arrangement = engine.arrangement
        # Processes agree on an order when they meet: placing weights may take all of them.
        called: list[str] = []
        if engine.learned.order is None and not engine.sums_gradients:
            called = self._called_units()
        if not engine.learned.draw_conclusions(arrangement.units, called):
            return
        if engine.learned.divided != arrangement.divided:
            engine.rearrange()
        else:  # the plan was made for other units
            self._adopt_plan(None, places_anyway=True)
            engine.activations.measure_anew(engine.device_budget is not None)

    def _called_units(self) -> list[str]:
        """Return the names of units that the last step has called, in the order of their first calls."""
        engine = self._engine
        members = engine.arrangement.streamed_members
        return list(dict.fromkeys(members[number].unit_name for number in engine.window.order.used_members()))

    def _adopt_plan(self, plan: WindowPlan | None, places_anyway: bool = False) -> None:
        """Adopt a plan's window and policies; place weights again if the window changes, or if it `places_anyway`."""
        engine = self._engine
        before = engine.plan
        engine.plan = plan
        engine.waiting.follow_plan(None if plan is None else plan.waiting)
        engine.visits.begin_in_backward = plan is None or not plan.defers_visits
        if places_anyway or (before and before.window) != (plan and plan.window):
            engine.place_weights()
        elif plan is not None and engine.arrangement.layout.window is before:
            engine.arrangement.layout.window = plan
        if engine.activations.auto is not None:
            engine.activations.auto.policies = {} if plan is None else plan.policies

    def adapt_to_autocast(self, member: Member, dtype: torch.dtype | None) -> None:
        """Follow a member's call under another autocast than its weights were placed for."""
        engine = self._engine
        autocasts = engine.learned.autocasts
        known = autocasts.common([member.name])
        is_new = known is not dtype and member.name not in autocasts.mixed
        if is_new and (member.is_streamed or engine.arrangement.unused_in_step):
            members = engine.arrangement.streamed_members
            seen = [members[number].name for number in engine.window.order.used_members()]
            if member.name in seen:
                autocasts.mix(member.name)
            elif self._may_place_now():
                with engine.at_work:
                    engine.window.write_back_all()
                autocasts.switch(known, dtype, seen)
                engine.place_weights()
                engine.activations.measure_anew(engine.device_budget is not None)
                return
            elif member.is_streamed:
                autocasts.noted[member.name] = dtype
                engine.learned.outdated = True
        for weight in dict.fromkeys(entry.weight for entry in member.entries if entry.weight.lowered):
            engine.guard.make_resident(weight)
            # weights that were cast in this graph stay cast
            if member.name in autocasts.mixed or weight.cast_in == engine.graphs.current.number:
                engine.learned.casts.note_as_is(weight)
            else:
                weight.twin.stop_watching()  # autocast is off

    def _may_place_now(self) -> bool:
        """Tell whether weights may get other places within a step: no graph, and no call, needs them where they are."""
        engine = self._engine
        arrangement, graphs = engine.arrangement, engine.graphs
        if graphs.waiting() or graphs.current.is_built or engine.backward.running or arrangement.is_lent_out():
            return False
        if self._gradients_wait():
            return False
        # Each of several processes may train other modules: they place weights when they meet.
        if engine.processes is not None and torch.is_grad_enabled():
            return False
        return not any(member.running_calls for member in arrangement.members)

    def _gradients_wait(self) -> bool:
        """Tell whether gradients wait on the device: other places for weights would bring them to the host."""
        engine = self._engine
        return bool(engine.waiting.waited) and engine.stream.bytes_on_device() > 0
