"""Optimizers, torch's and ours: which can step units one by one, with the bits of a plain step.

What a step has to do with our weights is decided once for an optimizer (`Plan`); `Step` is one of its steps.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.utils._pytree import tree_map_only

from sp_lightning.optim import optimizers as ours
from sp_lightning.optim.of_torch import OnePass
from sp_lightning.pipeline.gradients.segment_gradients import Gradient
from sp_lightning.pipeline.gradients.stream import GradientStream, refusal
from sp_lightning.pipeline.torch_private import has_foreign_step_hooks, step_is_replaced
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.quantized import QuantizedWeight
from sp_lightning.pipeline.weights.weight import Leftover, Weight

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

ANY_VALUE = {
    "adjust_lr_fn", "alpha", "amsgrad", "beta2_decay", "betas", "centered", "d", "dampening", "decoupled_weight_decay",
    "eps", "etas", "foreach", "fused", "initial_accumulator_value", "lr", "lr_decay", "maximize", "moments", "momentum",
    "momentum_decay", "nesterov", "ns_coefficients", "ns_steps", "rho", "step_sizes", "weight_decay",
}  # fmt: skip
"""Options of these with which each weight is treated by itself, whatever their value is."""

OFF = {"capturable", "differentiable"}
"""Options of these that have to be off."""

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
    for option in sorted(optimizer.defaults.keys() - ANY_VALUE - OFF):
        return f"{name} has an option that superpipeline does not know, {option!r}"
    for group in optimizer.param_groups:
        for option in OFF:
            if group.get(option):
                return f"{name} has {option}=True"
    return None


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Iterate over the parameters of all param groups."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def identities_of(optimizer: Optimizer) -> list[list[int]]:
    """Return the identities of the parameters of each param group."""
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def settings_of(optimizer: Optimizer, fused: bool) -> list[dict[str, Any]]:
    """Copy all param groups without their parameters: a scheduler may change them, also in place, before they are used.

    With `fused`, to torch's fused CPU kernels where the user left the choice to torch, which takes its slowest path
    on the CPU then (pytorch#74588).
    """
    groups = []
    for param_group in optimizer.param_groups:
        own = {key: value for key, value in param_group.items() if key != "params"}
        # what is in lists as well; what is no number stays as it is
        settings: dict[str, Any] = tree_map_only(Tensor, lambda x: x.detach().clone() if x.numel() == 1 else x, own)
        undecided = settings.get("fused", False) is None and settings.get("foreach") is None
        if fused and undecided and type(optimizer) in HAVE_FUSED_KERNELS:
            # up to torch 2.13 SGD's kernel silently leaves weights in half precision as they are (pytorch#191763)
            is_half = any(parameter.itemsize < 4 for parameter in param_group["params"])
            settings["fused"] = None if type(optimizer) is SGD and is_half else True
        groups.append(settings)
    return groups


def refuse_copies(optimizer: Optimizer) -> None:
    """Raise if an optimizer is to step what is on the device in place of a weight."""
    for parameter in parameters_of(optimizer):
        name = getattr(parameter, "twin_of", None)
        if name is not None:  # it has no gradient, so an optimizer would silently skip it
            raise RuntimeError(
                f"{type(optimizer).__name__} steps a copy of weight {name!r} that is on "
                "the GPU only while it is used there; the weight itself would never "
                "change. The copy was taken from its module in the middle of a forward, as "
                "Pyro's parameter store does. Give the optimizer what `module.parameters()` "
                "yields outside of the forward; where that is not possible, train without "
                "superpipeline (`resident` does not help: such weights have copies, too)."
            )


# --------------------------------------------------------------------------------- what is decided for a step


class Afterwards(enum.Enum):
    """What becomes of a gradient that an optimizer has used, if the engine has it."""

    DROPPED = enum.auto()
    """It may be gone when `step()` returns: units may be stepped with it in backward, and let go of it."""

    KEPT_UNTIL_THE_NEXT_STEP = enum.auto()
    """It can be read until the next step begins."""

    KEPT_UNTIL_ZEROED = enum.auto()
    """It stays until the user's `zero_grad`, and is added to if there is none."""


class OptimizerWeights:
    """What is decided once for an optimizer, as long as its param groups have the same parameters."""

    def __init__(self, optimizer: Optimizer, weights: Mapping[int, Weight], stream: GradientStream) -> None:
        self.parameters = identities_of(optimizer)
        # the gradients of its weights, in the order of its parameters, with the numbers of the param groups
        self.gradients: dict[Gradient, int] = {}
        for number, param_group in enumerate(optimizer.param_groups):
            for parameter in param_group["params"]:
                weight = weights.get(id(parameter))
                if weight is not None and not isinstance(weight, QuantizedWeight):  # nobody trains these
                    self.gradients[stream.gradient_of[weight]] = number
        units = {gradient.weight.unit for gradient in self.gradients}
        # the units that its weights are in, first the one that the next forward needs first
        self.units = sorted(units, key=lambda unit: (not unit.resident, unit.index))


StepInput: TypeAlias = tuple[Tensor, dict[str, Any]]
"""A gradient as it lies on the host, and the optimizer's state of its weight, as it is when the step is handed over."""


class Step:
    """A step of an optimizer.

    Attributes:
        fused: Whether torch's fused kernels are taken where the user left the choice to torch.
        used: Of each unit, what it reads of the weights that have a gradient.
        awaited: The units whose step has to end before anybody goes on: it reads gradients that are the user's, or
            makes state, which depends on torch's default dtype, for one.
    """

    def __init__(self, optimizer: Optimizer, optimizer_weights: OptimizerWeights, fused: bool) -> None:
        self.optimizer = optimizer
        self.optimizer_weights = optimizer_weights
        self.fused = fused
        self.inputs_by_unit: defaultdict[Unit, dict[Gradient, StepInput]] = defaultdict(dict)
        self.awaited: set[Unit] = set()

    def collect_gradients(self, gradients: Iterable[Gradient]) -> None:
        """Have it use what there is of these gradients.

        Without one, as frozen weights are, there is nothing to step: torch would wait for the units to see that.
        """
        for gradient in gradients:
            if gradient.of_segment.is_consumed:
                continue
            weight = gradient.weight
            if gradient.weight.leftover is Leftover.ZEROS:
                gradient.fill_zeros()
            tensor = gradient.tensor
            if tensor is None:
                tensor = weight.master.grad
                if tensor is None:
                    continue
                if tensor.is_sparse:
                    raise refusal(weight, tensor)
                self.awaited.add(weight.unit)
            if weight.unit.suspect:
                weight.locate_master()
            state = self.optimizer.state.get(weight.master, {})
            settings = self.settings[self.optimizer_weights.gradients[gradient]]
            if not state and (type(self.optimizer) is not SGD or settings["momentum"] != 0):
                state = self.optimizer.state.setdefault(weight.master, state)
                self.awaited.add(weight.unit)
            self.inputs_by_unit[weight.unit][gradient] = tensor, state

    @cached_property
    def settings(self) -> list[dict[str, Any]]:
        """Those of each param group, as they are when its first unit is stepped: hooks before backward change them."""
        return settings_of(self.optimizer, self.fused)

    @cached_property
    def one_passes(self) -> list[OnePass]:
        """What steps weights of each param group in one pass."""
        return [OnePass(self.optimizer, settings) for settings in self.settings]
