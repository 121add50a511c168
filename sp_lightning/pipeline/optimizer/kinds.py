"""Optimizers, torch's and ours: which can step units one by one, with the bits of a plain step; hearing of steps.

What a step has to do with our weights is decided once for an optimizer (`Plan`); `Step` is one of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sp_lightning.optim import optimizers as ours
from sp_lightning.optim.of_torch import OnePass
from sp_lightning.pipeline.gradients.segment_gradients import Gradient, State
from sp_lightning.pipeline.gradients.stream import GradientStream, refusal
from sp_lightning.pipeline.lanes.at_work import optimizer_steps, optimizer_waits
from sp_lightning.pipeline.torch_private import has_foreign_step_hooks, stand_in_for, step_is_replaced
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.quantized import QuantizedWeight
from sp_lightning.pipeline.weights.weight import Weight

if TYPE_CHECKING:
    from sp_lightning.pipeline.optimizer.optimizers import Optimizers

BY_ELEMENT = (Adam, AdamW, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, Adadelta, Rprop)
"""Optimizers that treat each element by itself: exactly these classes, as subclasses may do anything.

They step on a thread of the engine, and no setting that the user's thread may change meanwhile has a say in that.
"""

BY_WEIGHT = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers that treat each weight by itself, but as a whole."""

OURS = (ours.AdamW, ours.Adam)
"""Optimizers of ours, which take care of each weight themselves."""

STEP_BY_WEIGHT = (*BY_ELEMENT, *BY_WEIGHT, *OURS)
"""Optimizers that treat each weight by itself."""

HAVE_FUSED_KERNELS = (Adam, AdamW, SGD, Adagrad)
"""Optimizers with a fused CPU kernel."""


def why_not_by_unit(optimizer: Optimizer) -> str | None:
    """Return why units cannot be stepped one by one, with the bits of a plain step; None if they can."""
    name = type(optimizer).__name__
    if getattr(optimizer, "found_inf", None) is not None:
        return "a GradScaler has left it to the optimizer's own kernel to skip steps"
    if has_foreign_step_hooks(optimizer):
        return f"a step hook may look at everything that {name} steps"
    # `torch.as_tensor` of its `eta`; Lightning sets this dtype around forwards
    if type(optimizer) is ASGD:
        return "ASGD reads torch's default dtype in each step, which a forward may change meanwhile"
    if type(optimizer) not in STEP_BY_WEIGHT:
        return f"{name} is not one of torch's optimizers, or of ours, that treat each weight by itself"
    if step_is_replaced(optimizer):
        return f"`step` of {name} was replaced"
    if type(optimizer) in BY_WEIGHT and torch.is_autocast_enabled("cpu"):
        return f"autocast is on, which casts the matrix products of {name} only in the thread that calls `step()`"
    for group in optimizer.param_groups:
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                return f"{name} has {flag}=True"
    return None


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Iterate over the parameters of all param groups."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def settings_of(optimizer: Optimizer, fused: bool) -> list[dict[str, Any]]:
    """Copy all param groups without their parameters: a scheduler may change them before the copies are used.

    With `fused`, to torch's fused CPU kernels where the user left the choice to torch, which takes its slowest path
    on the CPU then (pytorch#74588).
    """
    groups = []
    for param_group in optimizer.param_groups:
        settings = {
            key: value.clone() if isinstance(value, Tensor) and value.numel() == 1 else value
            for key, value in param_group.items()
            if key != "params"
        }
        undecided = settings.get("fused", False) is None and settings.get("foreach") is None
        if fused and undecided and type(optimizer) in HAVE_FUSED_KERNELS:
            # up to torch 2.13 SGD's kernel silently leaves weights in half precision as they are (pytorch#191763)
            is_half = any(parameter.itemsize < 4 for parameter in param_group["params"])
            settings["fused"] = None if type(optimizer) is SGD and is_half else True
        groups.append(settings)
    return groups


# --------------------------------------------------------------------------------- what is decided for a step


class Plan:
    """What is decided once for an optimizer, as long as its param groups have the same parameters."""

    def __init__(self, optimizer: Optimizer, weights: Mapping[int, Weight], stream: GradientStream) -> None:
        # the gradients of its weights, in the order of its parameters, with the numbers of the param groups
        self.gradients: dict[Gradient, int] = {}
        self.others: list[nn.Parameter] = []  # that are no weights of ours
        for number, param_group in enumerate(optimizer.param_groups):
            for parameter in param_group["params"]:
                weight = weights.get(id(parameter))
                if weight is None or isinstance(weight, QuantizedWeight):  # nobody trains these
                    self.others.append(parameter)
                else:
                    self.gradients[stream.of[weight]] = number
        units = {gradient.weight.unit for gradient in self.gradients}
        # the units that its weights are in, first the one that the next forward needs first
        self.units = sorted(units, key=lambda unit: (not unit.resident, unit.index))


Used: TypeAlias = tuple[Tensor, dict[str, Any]]
"""A gradient as it lies on the host, and the optimizer's state of its weight, as it is when the step is handed over."""


class Step:
    """A step of an optimizer.

    Attributes:
        settings: Of each param group.
        used: What it reads for the weights that are still to be stepped.
        awaited: The units whose step has to end before anybody goes on: it reads gradients that are the user's, or
            makes state, which depends on torch's default dtype, for one.
    """

    def __init__(self, optimizer: Optimizer, plan: Plan, settings: Sequence[dict[str, Any]]) -> None:
        self.optimizer = optimizer
        self.plan = plan
        self.settings = settings
        self.used: dict[Gradient, Used] = {}
        self.awaited: set[Unit] = set()

    def use(self, gradients: Iterable[Gradient]) -> None:
        """Have it use what there is of these gradients.

        Without one, as frozen weights are, there is nothing to step: torch would wait for the units to see that.
        """
        for gradient in gradients:
            if gradient.of_segment.state is State.CONSUMED:
                continue
            weight = gradient.weight
            tensor = gradient.tensor
            if tensor is None:
                tensor = weight.master.grad
                if tensor is None:
                    continue
                if tensor.is_sparse:
                    raise refusal(weight, tensor)
                self.awaited.add(weight.unit)
            weight.follow()
            state = self.optimizer.state.get(weight.master, {})
            settings = self.settings[self.plan.gradients[gradient]]
            if not state and (type(self.optimizer) is not SGD or settings["momentum"] != 0):
                state = self.optimizer.state.setdefault(weight.master, state)
                self.awaited.add(weight.unit)
            self.used[gradient] = tensor, state

    @cached_property
    def one_passes(self) -> list[OnePass]:
        """What steps weights of each param group in one pass."""
        return [OnePass(self.optimizer, settings) for settings in self.settings]


# ------------------------------------------------------------------------------------------------- hearing of steps


_listeners: list[Optimizers] = []
_handles: list[RemovableHandle] = []


def listen_to_optimizers(listener: Optimizers) -> None:
    """Notify `listener` of every optimizer step."""
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))
    _listeners.append(listener)


def stop_listening(listener: Optimizers) -> None:
    """Undo `listen_to_optimizers`."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        while _handles:
            _handles.pop().remove()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    optimizer_steps.depth += 1
    # torch tells nobody of a step that ends with an exception, so nothing is changed that would have to be put back
    stand_in = stand_in_for(optimizer) if why_not_by_unit(optimizer) is None else None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    then_tell = partial(_call_and_tell, optimizer, stand_in, closure)  # before that there are no gradients
    if closure is None:
        _tell(optimizer, stand_in)
    elif len(args) > 1:
        args = (args[0], then_tell, *args[2:])
    else:
        kwargs = {**kwargs, "closure": then_tell}
    return (stand_in or optimizer, *args[1:]), kwargs


def _call_and_tell(optimizer: Optimizer, stand_in: Optimizer | None, closure: Callable[[], Any]) -> Any:
    for listener in list(_listeners):
        listener.before_closure()
    with optimizer_waits():  # the closure computes, and may do so outside of modules
        result = closure()
    _tell(optimizer, stand_in)
    return result


def _tell(optimizer: Optimizer, stand_in: Optimizer | None) -> None:
    if stand_in is not None:
        vars(stand_in).update(vars(optimizer))  # a closure may have changed it
    for listener in list(_listeners):
        listener.before_step(optimizer, stand_in)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    optimizer_steps.depth = max(0, optimizer_steps.depth - 1)
    for listener in reversed(_listeners):
        listener.after_step(optimizer)
