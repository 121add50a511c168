"""When a module's units are arranged anew, and the change from one arrangement to the next.

It always happens between steps, while no graph needs the old arrangement. The reasons: the module has other parameters,
steps have shown something (learned.py), a planner wants another window, autocast goes on or off.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.activations.policy import AutoPolicy
from sp_lightning.pipeline.engine import Engine
from sp_lightning.pipeline.layout.arrangement import Arrangement
from sp_lightning.pipeline.layout.learned import WindowPlan
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.units.tree import Shape
from sp_lightning.pipeline.weights.units import Member


class Planner(Protocol):
    """Chooses the window; asked between steps, when no graph waits for its backward."""

    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        """Return the plan for the next step, which may have a backward or not; None for the smallest window."""

    def abandon(self) -> None:
        """Discard the measurement under way: a step did not finish, or the pipeline ends."""


class Arranger:
    """Makes arrangements of a module and keeps one of them at work.

    Raises:
        ValueError: If an option does not fit the module or the available memory.
    """

    def __init__(self, engine: Engine, planner: Planner | None) -> None:
        self._engine = engine
        self._planner = planner
        self._is_arranged = False
        self._arrange(None)

    def before_step(self, look_for_new_parameters: bool, waiting: bool) -> None:
        """Arrange anew if there is a reason to.

        Args:
            look_for_new_parameters: Whether to check for other Parameters in the modules.
            waiting: Whether a graph waits for its backward, and needs weights where they are.
        """
        engine, learned = self._engine, self._engine.learned
        if not self._is_arranged:  # the last attempt failed, e.g. for lack of memory
            self.rearrange()
        engine.optimizers.restore_param_groups()
        if waiting or self._is_lent_out():
            return
        if self._has_replaced_weights() or (look_for_new_parameters and self._has_new_parameters()):
            self.rearrange()
        if torch.is_grad_enabled():
            with without_torch_function():
                learned.note_trained(engine.arrangement.parameters)
        engine.outside.conclude_watching()
        members = engine.arrangement.streamed_members
        called = [members[number].unit_name for number in engine.order.used()] if learned.order is None else []
        if learned.conclude(engine.arrangement.units, called):
            self.rearrange()
        if self._planner is not None:
            plan = self._planner.before_step(engine, torch.is_grad_enabled())
            if plan != learned.plan:
                self._follow(plan)
        auto = engine.activations.auto
        if auto is not None and auto.must_choose:
            auto.choose(engine.room_for_activations())

    def rearrange(self) -> None:
        """Make another arrangement, for the same autocast dtype."""
        self._rearrange_for(self._engine.arrangement.autocast)

    def adapt_to_autocast(self, member: Member, autocast: torch.dtype | None) -> bool:
        """Follow a change of autocast that is found in a member's call.

        Returns:
            Whether everything was arranged anew for it.
        """
        engine = self._engine
        if engine.arrangement.unused_in_step and not (engine.graphs.waiting() or self._is_lent_out()):
            engine.guard.in_step = False
            self._rearrange_for(autocast)
            engine.arm_guard()
            return True
        for weight in [entry.weight for entry in member.entries if entry.weight.lowered]:
            engine.outside.keep_as_is(weight)  # one step uses the unit both with and without autocast
        return False

    def stop_planning(self) -> None:
        """Discard the measurement under way: a step did not finish, or it was the last."""
        if self._planner is not None:
            self._planner.abandon()

    # ------------------------------------------------------------------------------------------------- reasons for it

    def _is_lent_out(self) -> bool:
        """Tell whether modules hold other tensors for the time of a call, as `functional_call` puts them there."""
        for member in self._engine.arrangement.members:
            for entry in member.entries:
                lent: Any = entry.parameters.get(entry.key)
                if type(lent) is Tensor:
                    return True
        return False

    def _has_new_parameters(self) -> bool:
        """Tell whether modules were added or removed, or Parameters replaced (`load_state_dict(assign=True)`).

        Pruning moves a parameter to another name in its module and adds a mask, which belongs on the device, to its
        buffers.
        """
        return self._shape.has_changed() or any(
            type(found := entry.parameters.get(entry.key)) in (entry.weight.kind, nn.Parameter, type(None))
            and found is not entry.weight.master
            for member in self._engine.arrangement.members
            for entry in member.entries
        )

    def _has_replaced_weights(self) -> bool:
        with self._engine.at_work:
            return any(segment.has_converted() for segment in self._engine.arrangement.segments)

    # ----------------------------------------------------------------------------------------- from one to the next

    def _follow(self, plan: WindowPlan | None) -> None:
        """Adopt the window that the planner wants."""
        policies = self._engine.activations.auto
        self._engine.learned.plan = plan
        self.rearrange()
        self._engine.activations.choose_by(policies)  # the units are the same, so their measurements still hold
        if policies is None:
            return
        if plan is not None and plan.policies:
            units = self._engine.arrangement.units
            policies.prescribe({m.name: plan.policies.get(unit.name, "keep") for unit in units for m in unit.members})
        else:
            policies.must_choose = True  # for another room

    def _rearrange_for(self, autocast: torch.dtype | None) -> None:
        self._is_arranged = False
        self._engine.uninstall()
        module = self._engine.module
        self._engine.learned.forget_all_but({*map(id, module.modules()), *map(id, module.parameters())})
        self._arrange(autocast)

    def _arrange(self, autocast: torch.dtype | None) -> None:
        engine = self._engine
        arrangement = Arrangement(
            engine.module, engine.options, engine.learned, engine.memory, engine.backend, autocast, engine.replicas
        )
        engine.take(arrangement)
        try:
            engine.install()
        except BaseException:
            arrangement.release_copies()
            raise
        self._shape = Shape(engine.module)
        self._is_arranged = True
        engine.activations.choose_by(self._auto_policy())  # other units: measured anew
        engine.stats.arrangements += 1

    def _auto_policy(self) -> AutoPolicy | None:
        """Make the policy that chooses for each unit; None where activations have no memory limit."""
        engine = self._engine
        if not engine.activations.chooses or engine.budget is None:
            return None
        is_planned = self._planner is not None and "auto" in (engine.options.k, engine.options.k_prime)
        pin = engine.arrangement.host_share.pinnable != 0
        return AutoPolicy(engine.activations.second_forwards, pin=pin, warns=not is_planned)
