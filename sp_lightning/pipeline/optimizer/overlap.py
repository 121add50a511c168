"""Stepping the optimizer on the host while the device computes, with the numbers of a plain step.

The user's optimizer stays the owner of all state and settings. Weights that can be stepped unit by unit (stepping.py
decides) are taken out of its `param_groups` while its `step()` runs, so that torch's own code steps all others and
nothing else. Those taken out are then stepped unit by unit, on the thread for work on host memory.

[Note: when a unit is stepped]
*After backward*, by default: `step()` returns at once, and each unit is sent to the device when it is done. Everything
that decides about a step (clipping, a loss scaler, a user's hook that looks at gradients) has happened by then.
*In backward*, where somebody vouches that nothing of the kind will happen (early_steps.py).
Of the units that can be stepped, the one that the next forward needs first comes first. So when backward ends, the
units whose gradients came last are stepped first, and those whose gradients came first may wait until after the next
forward has begun.

[Note: nobody sees an unfinished step]
Masters are guarded (guard.py) for as long as a step is under way: whoever touches one waits for it. Weights whose
memory somebody else holds an alias of cannot be guarded, and are stepped before `step()` returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.gradient_return import GradientReturn
from sp_lightning.pipeline.optimizer.early_steps import EarlyStep, EarlyStepper
from sp_lightning.pipeline.optimizer.host_steps import HostSteps, Share
from sp_lightning.pipeline.optimizer.stepping import (
    HAVE_FUSED_KERNELS,
    fused_kernel_works,
    parameters_of,
    why_not_by_unit,
)
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import has_foreign_step_hooks, without_torch_function
from sp_lightning.pipeline.weights.group import Group
from sp_lightning.pipeline.weights.weight import Weight


class Overlap:
    """Decides what is stepped when, and gives it to the thread for work on host memory.

    Args:
        weights: All weights, by the identity of their masters.
        steps: Gives steps to the thread.
        gradient_return: Brings the gradients, and hands them over in backward.
        stepper: Steps units before backward ends.
        stats: Counters.
        overlaps: Whether steps overlap with computing; if not, they are done when `step()` returns.
        fused: Whether to take torch's fused CPU kernels where the user left the choice to torch.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        steps: HostSteps,
        gradient_return: GradientReturn,
        stepper: EarlyStepper,
        stats: Stats,
        overlaps: bool,
        fused: bool,
    ) -> None:
        self._weights = weights
        self._steps = steps
        self._gradient_return = gradient_return
        self._gradients = gradient_return.gradients
        self._stats = stats
        self._overlaps = overlaps
        self._fused = fused
        self._checked: set[int] = set()
        self._taken_out: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._to_step: dict[Group, list[Share]] = {}
        self._held: set[Group] = set()  # with gradients that users hold, and may change when `step()` has returned
        self._had_state: set[int] = set()
        self._stepper = stepper
        self._is_closed = False

    # ------------------------------------------------------------------------------------- around an optimizer's step

    def before_step(self, optimizer: Optimizer) -> None:
        """Take the weights that will be stepped unit by unit out of an optimizer that is about to step."""
        self.restore_param_groups()
        self._to_step.clear()  # left by a step that ended with an exception
        self._held.clear()
        known = [self._weights[id(p)] for p in parameters_of(optimizer) if id(p) in self._weights]
        if not known:
            return
        self._gradient_return.check_averaged(known)
        why_not = self.why_not(optimizer)
        stepped = self._stepper.conclude(optimizer, known, why_not)
        if why_not is not None:
            self._steps.settle()
            self._gradients.show_all()
            return
        self._had_state = set(map(id, optimizer.state))
        for param_group in optimizer.param_groups:
            self._take_out(optimizer, param_group, stepped)

    def _take_out(self, optimizer: Optimizer, param_group: dict[str, Any], stepped: Collection[Weight]) -> None:
        """Leave in a param group what torch's own code steps; share out all others that were not stepped yet.

        Without a gradient, as frozen weights are, there is nothing to step: torch would wait for the units to see that.
        """
        weights = [self._weights[id(p)] for p in param_group["params"] if id(p) in self._weights]
        waiting = [weight for weight in weights if weight not in stepped and self._gradients.get(weight) is not None]
        ours = [weight for weight in waiting if self._may_step(weight)]
        self._share_out(optimizer, self._settings(optimizer, param_group), ours)
        theirs = set(waiting).difference(ours)
        taken = {id(weight.master) for weight in weights if weight not in theirs}
        self._taken_out.append((param_group, param_group["params"]))
        param_group["params"] = [p for p in param_group["params"] if id(p) not in taken]
        for weight in weights:
            if weight in theirs:
                self._let_plain_code_step(weight)

    def after_step(self) -> None:
        """Step the weights that were taken out of the optimizer, after it has stepped the others."""
        self.restore_param_groups()
        first_steps = {share for shares in self._to_step.values() for share in shares if share.is_first_step}
        for group in sorted(self._to_step, key=lambda group: (not group.resident, group.index)):
            shares = self._to_step[group]
            after = [ticket for share in shares for ticket in self._gradients.tickets_of(share.gradients)]
            self._steps.begin(group, shares, after)
            self._stats.overlapped_steps += group.unit_count * self._overlaps
        for group, shares in self._to_step.items():
            is_held = group in self._held or any(weight.is_aliased for share in shares for weight in share.gradients)
            # state made in a first step depends on settings of the process (torch's default dtype): wait for it
            if is_held or not self._overlaps or not first_steps.isdisjoint(shares):
                self._steps.finish_optimizer(group)
        self._to_step.clear()
        for optimizer in {share.optimizer for share in first_steps}:
            self._put_new_state_in_order(optimizer)

    def drop_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the weights among these parameters without gradients."""
        weights = (self._weights.get(id(parameter)) for parameter in parameters)
        self._gradients.drop_all(weight for weight in weights if weight is not None)

    def _put_new_state_in_order(self, optimizer: Optimizer) -> None:
        """Put new state in the order of the parameters, as torch's own code does, not in that of the units' steps."""
        for parameter in parameters_of(optimizer):
            if id(parameter) not in self._had_state and parameter in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(parameter)

    def close(self) -> None:
        """Leave all steps to the optimizers' own code: units are arranged anew, or by the next step if that fails."""
        self.restore_param_groups()
        self._is_closed = True

    def restore_param_groups(self) -> None:
        """Put everything that was taken out back into the param groups."""
        while self._taken_out:
            param_group, parameters = self._taken_out.pop()
            param_group["params"] = parameters

    def _settings(self, optimizer: Optimizer, param_group: dict[str, Any]) -> dict[str, Any]:
        """Copy a param group, without its parameters: a scheduler may change it before the copy is used."""
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
        weight.follow()
        gradient, master = self._gradients.get(weight), weight.master
        if gradient is None or gradient.layout is not torch.strided:
            return False
        # users may give `.grad` another dtype or layout, which the optimizer's own code knows what to do with
        return gradient is not master.grad or (gradient.dtype, gradient.stride()) == (master.dtype, master.stride())

    def why_not(self, optimizer: Optimizer) -> str | None:
        """Return why an optimizer cannot step weights unit by unit; None if it can."""
        if self._is_closed:
            return "units have yet to be arranged anew"
        if getattr(optimizer, "found_inf", None) is not None:
            return "a GradScaler has left it to the optimizer's own kernel to skip steps"
        if has_foreign_step_hooks(optimizer):
            return f"a step hook may look at everything that {type(optimizer).__name__} steps"
        for param_group in optimizer.param_groups:
            with without_torch_function():
                unknown = [p for p in param_group["params"] if id(p) not in self._checked and self._may_be_stepped(p)]
            reason = why_not_by_unit(optimizer, param_group, unknown)
            if reason is not None:
                return reason
            self._checked.update(map(id, unknown))
        return None

    def _may_be_stepped(self, parameter: nn.Parameter) -> bool:
        weight = self._weights.get(id(parameter))
        return weight is not None and (parameter.requires_grad or self._gradients.get(weight) is not None)

    def _let_plain_code_step(self, weight: Weight) -> None:
        self._steps.finish_optimizer(weight.unit.group)
        self._gradients.wait_until_landed([weight])
        self._gradients.show(weight)

    def _share_out(self, optimizer: Optimizer, settings: dict[str, Any], weights: list[Weight]) -> None:
        shares: dict[tuple[Group, int], Share] = {}
        for weight in weights:
            if self._gradients.is_held(weight):
                self._held.add(weight.unit.group)
            gradient, scaling = self._gradients.take(weight)
            key = (weight.unit.group, id(scaling))
            if key not in shares:
                shares[key] = Share(optimizer, settings, scaling, {})
                self._to_step.setdefault(weight.unit.group, []).append(shares[key])
            shares[key].gradients[weight] = gradient

    # ------------------------------------------------------------------------------------------------- in backward

    def stepping_in_backward(
        self, optimizer: Optimizer, clamp: float | None = None, keep: bool = False
    ) -> AbstractContextManager[None]:
        """Let an optimizer step units in the backward pass of this scope.

        Its `step()` must follow without a change of its settings, and nobody may ask for a gradient in between.

        Args:
            optimizer: The optimizer.
            clamp: Clip gradients to plus and minus this value.
            keep: Whether gradients are kept after the step.
        """
        if not self._overlaps or self.why_not(optimizer) is not None:
            return nullcontext()
        groups = optimizer.param_groups
        weights = [(self._weights.get(id(p)), i) for i, group in enumerate(groups) for p in group["params"]]
        param_group_of = {weight: index for weight, index in weights if weight is not None}

        def look_up_settings() -> list[dict[str, Any]]:
            return [self._settings(optimizer, param_group) for param_group in optimizer.param_groups]

        return self._stepper.scope(EarlyStep(optimizer, param_group_of, look_up_settings, clamp, keep))

    @property
    def settled(self) -> bool:
        """Whether all masters are as they would be in plain training."""
        return self._steps.note_finished() and self._stepper.is_concluded
