"""When a module's units are arranged anew, and the change from one arrangement to the next.

It always happens between steps, while no graph needs the old arrangement. The reasons: the module has other parameters,
steps have shown something (learned.py), a planner wants another window, autocast goes on or off.
"""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.activations.auto import AutoPolicy
from sp_lightning.pipeline.engine import Engine
from sp_lightning.pipeline.layout.arrangement import Arrangement
from sp_lightning.pipeline.layout.device_layout import WindowPlan
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

    def __init__(
        self,
        engine: Engine,
        planner: Planner | None,
    ) -> None:
        self._engine = engine
        self._options = engine.options
        self._learned = engine.learned
        self._graphs = engine.graphs
        self._activations = engine.activations
        self._planner = planner
        self._is_arranged = False
        self._arrange()

    @property
    def arrangement(self) -> Arrangement:
        """The units, and where their weights currently lie."""
        return self._engine.arrangement

    def before_step(self, look_for_new_parameters: bool, waiting: bool) -> None:
        """Arrange anew if there is a reason to.

        Args:
            look_for_new_parameters: Whether to check for other Parameters in the modules.
            waiting: Whether a graph waits for its backward, and needs weights where they are.
        """
        if not self._is_arranged:  # the last attempt failed, e.g. for lack of memory
            self.rearrange()
        must_stay = waiting or self._is_lent_out()
        if not must_stay and (self._has_replaced_weights() or (look_for_new_parameters and self._has_new_parameters())):
            self.rearrange()
        self._engine.optimizers.restore_param_groups()
        if must_stay:
            return
        if torch.is_grad_enabled():
            masters = (weight.master for weight in self.arrangement.weights)
            with without_torch_function():
                self._learned.note_trained(chain(masters, self.arrangement.parameters_on_device))
        self._engine.outside.conclude_watching()
        if self._learned.conclude(self.arrangement.units):
            self.rearrange()
        self._follow_plan()

    def rearrange(self) -> None:
        """Make another arrangement, for the same autocast dtype."""
        self._rearrange_for(self.arrangement.autocast)

    def adapt_to_autocast(self, member: Member, autocast: torch.dtype | None) -> bool:
        """Follow a change of autocast that is found in a member's call.

        Returns:
            Whether everything was arranged anew for it.
        """
        if self.arrangement.unused_in_step and not (self._graphs.waiting() or self._is_lent_out()):
            self._engine.guard.in_step = False
            self._rearrange_for(autocast)
            self._engine.arm_guard()
            return True
        for weight in [entry.weight for entry in member.entries if entry.weight.lowered]:
            self._engine.outside.keep_as_is(weight)  # one step uses the unit both with and without autocast
        return False

    def stop_planning(self) -> None:
        """Discard the measurement under way: a step did not finish, or it was the last."""
        if self._planner is not None:
            self._planner.abandon()

    # ------------------------------------------------------------------------------------------------- reasons for it

    def _is_lent_out(self) -> bool:
        """Tell whether modules hold other tensors for the time of a call, as `functional_call` puts them there."""
        for member in self.arrangement.members:
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
            type(found := entry.current) in (entry.weight.kind, nn.Parameter, type(None))
            and found is not entry.weight.master
            for member in self.arrangement.members
            for entry in member.entries
        )

    def _has_replaced_weights(self) -> bool:
        with self._engine.at_work:
            segments = [segment for group in self.arrangement.groups for segment in group.segments]
            return any(
                weight.is_converted for segment in segments if segment.is_elsewhere for weight in segment.weights
            )

    def _follow_plan(self) -> None:
        """Adopt the window that the planner wants."""
        if self._planner is None:
            return
        plan = self._planner.before_step(self._engine, torch.is_grad_enabled())
        if plan == self._learned.plan:
            return
        policies = self._activations.auto
        self._learned.plan = plan
        self.rearrange()
        self._activations.choose_by(policies)  # the units are the same, so their measurements still hold
        if policies is not None and plan is not None and plan.policies:
            units = [(unit, plan.policies.get(unit.name, "keep")) for unit in self.arrangement.units]
            policies.prescribe({m.name: policy for unit, policy in units for m in unit.members})
        elif policies is not None:
            policies.prescribe(None)

    # ----------------------------------------------------------------------------------------- from one to the next

    def _rearrange_for(self, autocast: torch.dtype | None) -> None:
        self._is_arranged = False
        self._engine.uninstall()
        module = self._engine.module
        self._learned.forget_all_but({*map(id, module.modules()), *map(id, module.parameters())})
        self._arrange(autocast)

    def _arrange(self, autocast: torch.dtype | None = None) -> None:
        engine = self._engine
        arrangement = Arrangement(
            engine.module,
            self._options,
            self._learned,
            engine.memory,
            engine.backend,
            autocast,
            engine.replicas,
        )
        engine.take(arrangement)
        try:
            engine.install()
        except BaseException:
            arrangement.release_copies()
            raise
        self._shape = Shape(engine.module)
        self._is_arranged = True
        self._activations.choose_by(self._auto_policy())  # other units: measured anew
        engine.stats.arrangements += 1
        if not arrangement.units and self._options.activations not in ("keep", "auto"):
            warnings.warn(
                f"`activations={self._options.activations!r}` has no effect any more: every weight is used outside of "
                "its module's forward (say, by a penalty over all), so all stay on the device and no unit is left.",
                stacklevel=2,
            )

    def _auto_policy(self) -> AutoPolicy | None:
        """Make the policy that chooses for each unit; None where activations have no memory limit."""
        if not self._activations.chooses or self._engine.budget is None:
            return None
        is_planned = self._planner is not None and "auto" in (self._options.k, self._options.k_prime)
        return AutoPolicy(
            self._activations.second_forwards,
            self._room_for_activations,
            pin=self.arrangement.host_share.pinnable_bytes() != 0,
            warns=not is_planned,
        )

    def _room_for_activations(self) -> int:
        """Return the bytes of device memory left for activations; only meaningful where there is a limit."""
        return max(0, (self._engine.budget or 0) - self.arrangement.streaming_bytes())
