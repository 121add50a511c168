"""Stepping the optimizer on the host while the device computes, with the numbers of a plain step.

The user's optimizer stays the owner of all state and settings. What of it can be stepped weight by weight
(stepping.py knows) is taken out of its `param_groups` for the time of its `step()`, so that torch's own code steps
the rest and nothing else, and is then stepped unit by unit on the thread for work on the host.

[Note: when a unit is stepped]
*After backward*, by default: `step()` returns at once, and each unit is sent to the device when it is done. Everything
that decides about a step (clipping, a loss scaler, a user's hook that looks at gradients) has happened by then.
*In backward*, where somebody vouches that nothing will (`in_backward`): as soon as all of a group's gradients have
landed, and nothing holds one of its weights on the device any more: no node of the graph, no checkpoint.
Of what can be stepped, that comes first which the next forward will need first. So the units that gave their gradients
last are stepped first when backward ends, and those that gave them first may still wait while forward has begun.

[Note: nobody sees an unfinished step]
Masters are guarded (guard.py) for as long as a step is under way: whoever touches one waits for it. Weights whose
memory somebody else holds an alias of cannot be guarded, and are stepped in time.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.pipeline._private import others_hook_steps, users_of_storage
from sp_lightning.pipeline.gradients.gradient_return import GradientReturn
from sp_lightning.pipeline.gradients.landing import Shipment
from sp_lightning.pipeline.gradients.scaling import Scaling
from sp_lightning.pipeline.optimizer.host_steps import HostSteps, Share
from sp_lightning.pipeline.optimizer.stepping import HAVE_FUSED_KERNELS, fused_kernel_works, why_not_by_unit
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.transfer.lanes import Ticket
from sp_lightning.pipeline.weights.device import Group
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight

_OWN_USERS = 2  # of a master's memory: the master, and the tensor that its weight holds it by


@dataclass(eq=False)
class _InBackward:
    """An optimizer that steps while backward runs."""

    optimizer: Optimizer
    param_group_of: dict[Weight, int]
    clamp: float | None
    keep: bool
    settings: list[dict[str, Any]] | None = None  # not before the first unit: hooks before backward may change them


class Overlap:
    """Decides what is stepped when, and gives it to the thread for work on the host.

    Args:
        weights: All weights, by the identity of their masters.
        steps: Has them done.
        returns: Brings the gradients, and hands them over.
        stats: Counters.
        spent: Weights whose gradients were not kept, by identity; kept from one arrangement to the next.
        overlaps: Whether anything is to be overlapped; else steps are done when `step()` returns.
        fused: Whether to take torch's fused CPU kernels where the user left the choice to torch.
        is_nested: Whether the gradient that autograd has just finished may not be the last one for its weight.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        steps: HostSteps,
        returns: GradientReturn,
        stats: Stats,
        spent: set[int],
        overlaps: bool,
        fused: bool,
        is_nested: Callable[[], bool],
    ) -> None:
        self._weights = weights
        self._steps = steps
        self._returns = returns
        self._gradients = returns.gradients
        self._stats = stats
        self._overlaps = overlaps
        self._fused = fused
        self._is_nested = is_nested
        self._checked: set[int] = set()
        self._taken_out: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._to_step: dict[Group, list[Share]] = {}
        self._had_state: set[int] = set()
        self._now: _InBackward | None = None
        self._shipped: dict[Group, list[Shipment]] = {}
        self._stepped: set[Weight] = set()
        self._spent = spent
        returns.stepper = self

    # ------------------------------------------------------------------------------------- around an optimizer's step

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to update its parameters: take out what will be stepped unit by unit."""
        self.put_back()
        self._to_step.clear()  # of a step that ended with an exception
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        known = [self._weights[id(p)] for p in parameters if id(p) in self._weights]
        if not known:
            return
        self._returns.check_averaged(known)
        if self.why_not(optimizer) is not None:
            self._steps.settle()
            self._gradients.show_all()
            return
        self._had_state = set(map(id, optimizer.state))
        for group in optimizer.param_groups:
            weights = [self._weights[id(p)] for p in group["params"] if id(p) in self._weights]
            ours = [weight for weight in weights if self._may_step(weight)]
            left = [weight for weight in ours if weight not in self._stepped]
            self._share_out(optimizer, self._settings(optimizer, group), left)
            taken = {id(weight.master) for weight in ours}
            rest = [p for p in group["params"] if id(p) not in taken]
            self._taken_out.append((group, group["params"]))
            group["params"] = rest
            for weight in weights:
                if id(weight.master) not in taken:
                    self._let_plain_code_step(weight)
        self._stepped.clear()

    def after_step(self) -> None:
        """The optimizer has stepped what it was left with: now the rest."""
        self.put_back()
        for group in sorted(self._to_step, key=lambda group: (not group.resident, group.index)):
            shares = self._to_step[group]
            after = [ticket for share in shares for ticket in self._gradients.on_its_way(share.gradients)]
            self._begin(group, shares, after)
        begun = set()
        for group, shares in self._to_step.items():
            for share in shares:
                # state that is made in a first step depends on settings of the process, as torch's default dtype
                begins = not self._steps.has_begun(share.optimizer, share.gradients)
                self._steps.note_begun(share.optimizer, share.gradients)
                if begins or not self._overlaps or any(map(self._is_aliased, share.gradients)):
                    self._steps.finish(group)
                if begins:
                    begun.add(share.optimizer)
        self._to_step.clear()
        for optimizer in begun:
            self._put_new_state_in_order(optimizer)

    def _put_new_state_in_order(self, optimizer: Optimizer) -> None:
        """In that of parameters, as torch's own code makes it, and not in that in which units were stepped."""
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if id(parameter) not in self._had_state and parameter in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(parameter)

    def abandon(self) -> None:
        """After an exception in the middle of a step: what was given to the thread is finished, nothing else is."""
        self.put_back()
        with contextlib.suppress(Exception):  # it has been told of, or belongs to what failed
            self._steps.settle()
        left = sum(weight.master.requires_grad for weight in self._weights.values()) - len(self._stepped)
        if self._stepped and left > 0:
            warnings.warn(
                f"The exception came while the optimizer was stepping in backward: {len(self._stepped)} weights have "
                f"taken this step, {left} have not. Go on from a checkpoint, or train with `overlap_optimizer=False`.",
                stacklevel=2,
            )
        self._now = None
        self._to_step.clear()
        self._shipped.clear()
        self._stepped.clear()
        self._spent.clear()

    def put_back(self) -> None:
        """Param groups are whole again."""
        while self._taken_out:
            group, parameters = self._taken_out.pop()
            group["params"] = parameters

    def _settings(self, optimizer: Optimizer, param_group: dict[str, Any]) -> dict[str, Any]:
        """A param group as it is now, without its parameters: a scheduler may change it before it is used."""
        settings = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in param_group.items()
            if key != "params"
        }
        undecided = settings.get("fused", False) is None and settings.get("foreach") is None
        if self._fused and undecided and type(optimizer) in HAVE_FUSED_KERNELS:
            dtypes = {p.dtype for p in param_group["params"]}
            # on the CPU torch chooses its slowest path by default (pytorch#74588)
            settings["fused"] = all(fused_kernel_works(type(optimizer).__name__, dtype) for dtype in dtypes) or None
        return settings

    def _may_step(self, weight: Weight) -> bool:
        if weight in self._stepped:
            return True
        weight.readopt()
        gradient = self._gradients.get(weight)
        return gradient is not None and gradient.layout is torch.strided

    def _is_aliased(self, weight: Weight) -> bool:
        return users_of_storage(weight.host) > _OWN_USERS

    def why_not(self, optimizer: Optimizer) -> str | None:
        """Why an optimizer cannot step weights unit by unit; None if it can."""
        if getattr(optimizer, "found_inf", None) is not None:
            return "a GradScaler has left it to the optimizer's own kernel to skip steps"
        if others_hook_steps(optimizer):
            return f"a hook on steps may look at all that {type(optimizer).__name__} steps"
        for group in optimizer.param_groups:
            unknown = [p for p in group["params"] if id(p) in self._weights and id(p) not in self._checked]
            reason = why_not_by_unit(optimizer, group, unknown)
            if reason is not None:
                return reason
            self._checked.update(map(id, unknown))
        return None

    def _let_plain_code_step(self, weight: Weight) -> None:
        self._steps.finish(weight.unit.group)
        self._gradients.let_land([weight])
        self._gradients.show(weight)

    def _begin(
        self, group: Group, shares: list[Share], after: Sequence[Ticket], shipments: Sequence[Shipment] = ()
    ) -> None:
        self._steps.begin(group, shares, after, shipments)
        self._stats.overlapped_steps += group.units * self._overlaps

    def _share_out(self, optimizer: Optimizer, settings: dict[str, Any], weights: list[Weight]) -> None:
        shares: dict[tuple[Group, int], Share] = {}
        for weight in weights:
            gradient, scaling = self._gradients.take(weight)
            key = (weight.unit.group, id(scaling))
            if key not in shares:
                shares[key] = Share(optimizer, settings, scaling, {})
                self._to_step.setdefault(weight.unit.group, []).append(shares[key])
            shares[key].gradients[weight] = gradient

    # ------------------------------------------------------------------------------------------------- in backward

    @contextmanager
    def in_backward(self, optimizer: Optimizer, clamp: float | None = None, keep: bool = False) -> Iterator[None]:
        """Let an optimizer step units while the backward in here runs.

        Its `step()` must follow without a change of its settings, and nobody may ask for a gradient in between.

        Args:
            optimizer: The optimizer.
            clamp: Clip gradients to plus and minus this value.
            keep: Whether somebody may ask for gradients after the step.
        """
        if self._overlaps and self.why_not(optimizer) is None:
            groups = optimizer.param_groups
            weights = [(self._weights.get(id(p)), i) for i, group in enumerate(groups) for p in group["params"]]
            param_group_of = {weight: index for weight, index in weights if weight is not None}
            self._now = _InBackward(optimizer, param_group_of, clamp, keep)
        try:
            yield
        finally:
            self._now = None

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients that arrive in a lower dtype are kept when the optimizer has used them."""
        return self._now is not None and self._now.keep

    def wants(self, unit: Unit) -> bool:
        """Whether the unit's complete gradients should go to the optimizer right away."""
        if self._now is None or unit.resident or self._is_nested():
            return False
        trainable = _trainable(unit.group)
        return self._steps.has_begun(self._now.optimizer, trainable) and all(
            weight in self._now.param_group_of and not self._is_aliased(weight) for weight in trainable
        )

    def has_stepped(self, weight: Weight) -> bool:
        """Whether a gradient of this weight would come too late."""
        return weight in self._stepped or self.has_spent(weight)

    def has_stepped_in_backward(self, weight: Weight) -> bool:
        """Whether a weight was stepped in the backward before the `step()` that is to come."""
        return weight in self._stepped

    def has_spent(self, weight: Weight) -> bool:
        """Whether a weight's gradient was used as it arrived, and not kept."""
        return id(weight.master) in self._spent

    def forget_spent(self, weight: Weight) -> None:
        """Nobody misses a weight's gradient any more: `.grad` was set, as `zero_grad` does."""
        self._spent.discard(id(weight.master))

    def step_in_backward(self, shipment: Shipment) -> None:
        """Gradients of a unit are on their way; step its group if they are the last ones."""
        group = shipment.unit.group
        for other in [other for other in self._shipped if other is not group]:
            self._keep(other)  # backward has moved on, and there are few slots
        shipments = self._shipped.setdefault(group, [])
        shipments.append(shipment)
        gradients = {w: g for s in shipments for w, g in zip(s.weights, s.arrived, strict=True)}
        if len(gradients) < len(_trainable(group)):
            return
        if group.handles or any(weight.twin.is_aliased for weight in group.host.weights):
            self._keep(group)
            return
        assert self._now is not None
        del self._shipped[group]
        self._stepped.update(gradients)
        scaling = Scaling(clamp=self._now.clamp)
        shares = []
        if self._now.settings is None:
            groups = self._now.optimizer.param_groups
            self._now.settings = [self._settings(self._now.optimizer, param_group) for param_group in groups]
        for index, settings in enumerate(self._now.settings):
            own = {w: gradient for w, gradient in gradients.items() if self._now.param_group_of[w] == index}
            if own:
                shares.append(Share(self._now.optimizer, settings, scaling, own))
        self._begin(group, shares, [s.ticket for s in shipments], shipments)
        self._spent.update(id(w.master) for s in shipments if s.slot is not None for w in s.weights)
        self._stats.steps_in_backward += group.units

    def end_of_backward(self) -> None:
        """Groups that could not be stepped in backward keep their gradients."""
        for group in list(self._shipped):
            self._keep(group)

    def _keep(self, group: Group) -> None:
        for shipment in self._shipped.pop(group):
            self._returns.keep(shipment)

    def finish_step(self, group: Group) -> None:
        """Wait until no step reads or writes what belongs to a group any more."""
        self._steps.finish(group)

    @property
    def settled(self) -> bool:
        """Whether all masters are what plain training would have there."""
        return self._steps.done and not self._spent


def _trainable(group: Group) -> list[Weight]:
    return [weight for weight in group.host.weights if weight.master.requires_grad]
