"""Optimizers, torch's and ours, and which of them can step units one by one, with the bits of a plain step.

`OptimizerWeights` are the weights of an optimizer, found once; `Step` is one of its steps.
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
from sp_lightning.pipeline.gradients.stream import refusal
from sp_lightning.pipeline.torch_private import CodeOfStep, code_of_step, has_foreign_step_hooks, step_is_replaced
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.leaf import TwinParameter
from sp_lightning.pipeline.weights.quantized import QuantizedWeight

BY_ELEMENT = (Adam, AdamW, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, Adadelta, Rprop)
"""Optimizers that treat each element by itself: exactly these classes, as subclasses may do anything.

They step on a thread of the engine, and settings that the user's thread may change meanwhile do not affect that.
"""

BY_WEIGHT = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers that treat each weight by itself, but as a whole."""

OURS = (ours.AdamW, ours.Adam, ours.Lion)
"""This package's own optimizers, which treat each weight by itself."""

STEP_BY_WEIGHT = (*BY_ELEMENT, *BY_WEIGHT, *OURS)
"""Optimizers that treat each weight by itself."""

ANY_VALUE = {
    "adjust_lr_fn", "alpha", "amsgrad", "beta2_decay", "betas", "centered", "d", "dampening", "decoupled_weight_decay",
    "eps", "etas", "foreach", "fused", "initial_accumulator_value", "lr", "lr_decay", "maximize", "moments", "momentum",
    "momentum_decay", "nesterov", "ns_coefficients", "ns_steps", "rho", "step_sizes", "weight_decay",
}  # fmt: skip
"""Options of these optimizers that may have any value: each weight is treated by itself with all of them."""

OFF = {"capturable", "differentiable"}
"""Options of these optimizers that have to be off."""

HAVE_FUSED_KERNELS = (Adam, AdamW, SGD, Adagrad)
"""Optimizers with a fused CPU kernel."""


def why_not_by_unit(optimizer: Optimizer) -> str | None:
    """Return why units cannot be stepped one by one, with the bits of a plain step; None if they can."""
    name = type(optimizer).__name__
    if getattr(optimizer, "found_inf", None) is not None:
        return "a GradScaler has left it to the optimizer's own kernel to skip steps"
    if has_foreign_step_hooks(optimizer):
        return f"a step hook may read everything that {name} steps"
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

    With `fused`, torch's fused CPU kernels are chosen where the user left the choice to torch, which would take its
    slowest path on the CPU (pytorch#74588).
    """
    groups = []
    for param_group in optimizer.param_groups:
        options = {key: value for key, value in param_group.items() if key != "params"}
        # Options may be lists of tensors.
        settings: dict[str, Any] = tree_map_only(Tensor, _copy_of_number, options)
        undecided = settings.get("fused", False) is None and settings.get("foreach") is None
        if fused and undecided and type(optimizer) in HAVE_FUSED_KERNELS:
            # up to torch 2.13 SGD's kernel silently leaves weights in half precision as they are (pytorch#191763)
            is_half = any(parameter.itemsize < 4 for parameter in param_group["params"])
            settings["fused"] = None if type(optimizer) is SGD and is_half else True
        groups.append(settings)
    return groups


def _copy_of_number(tensor: Tensor) -> Tensor:
    """Copy a tensor with one element, such as a learning rate; others stay as they are."""
    if tensor.numel() == 1:
        return tensor.detach().clone()
    return tensor


def refuse_copies(optimizer: Optimizer) -> None:
    """Raise if an optimizer is to step a leaf, which is on the device in place of a weight."""
    for parameter in parameters_of(optimizer):
        # it has no gradient, so an optimizer would silently skip it
        if isinstance(parameter, TwinParameter):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps a copy of weight {parameter.weight.name!r} that is on the "
                "GPU only while it is used there. The weight itself would never change. The copy was taken "
                "from its module in the middle of a forward, as Pyro's parameter store does. Give the "
                "optimizer `module.parameters()` outside of the forward. If that is not possible, train "
                "without superpipeline. `resident` does not help, because such weights also have copies."
            )


# --------------------------------------------------------------------------------- what is decided for a step


class Afterwards(enum.Enum):
    """The fate of an engine's gradient after an optimizer has used it."""

    DROPPED = enum.auto()
    """The gradient may be gone when `step()` returns: a unit may be updated in backward and drop it."""

    KEPT_UNTIL_THE_NEXT_STEP = enum.auto()
    """The gradient can be read until the next step begins."""

    KEPT_UNTIL_ZEROED = enum.auto()
    """The gradient stays until the user's `zero_grad`; without that, the next one is added to it."""


class OptimizerWeights:
    """The weights of an optimizer, and their units; found once, as long as param groups have the same parameters."""

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: Mapping[int, Gradient],
    ) -> None:
        self.parameters = identities_of(optimizer)
        # The gradients of the weights, in the order of its parameters, with the number of each one's param group.
        # Quantized weights are not trained.
        self.gradients = {
            gradients[identity]: number
            for number, identities in enumerate(self.parameters)
            for identity in identities
            if identity in gradients and not isinstance(gradients[identity].weight, QuantizedWeight)
        }
        self.weights = {gradient.weight for gradient in self.gradients}
        units = {weight.unit for weight in self.weights}
        # The units of the weights; the one that the next forward needs first comes first.
        self.units = sorted(units, key=lambda unit: (not unit.resident, unit.index))


StepInput: TypeAlias = tuple[Tensor, dict[str, Any]]
"""A gradient, and the optimizer's state of its weight when the step is handed over to the thread."""


class Step:
    """A step of an optimizer.

    Attributes:
        fused: Whether torch's fused kernels are taken where the user left the choice to torch.
        inputs_by_unit: For each unit, the inputs of the step for each weight with a gradient.
        awaited: The units whose step has to end before `step()` returns, because it reads a user's `.grad`, or makes
            state, which depends on torch's default dtype, for example.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        optimizer_weights: OptimizerWeights,
        fused: bool,
    ) -> None:
        self.optimizer = optimizer
        self.optimizer_weights = optimizer_weights
        self.fused = fused
        self.inputs_by_unit: defaultdict[Unit, dict[Gradient, StepInput]] = defaultdict(dict)
        self.awaited: set[Unit] = set()

    def collect_gradients(self, gradients: Iterable[Gradient]) -> None:
        """Collect the inputs of the step for these gradients.

        Weights without a gradient, such as frozen ones, are left out: torch would wait for their units to see that.
        """
        for gradient in gradients:
            if gradient.of_segment.is_consumed:
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
            if weight.unit.presence.suspect:
                weight.locate_master()
            state: dict[str, Any] = {}
            settings = self.settings[self.optimizer_weights.gradients[gradient]]
            # otherwise torch keeps no state
            if type(self.optimizer) is not SGD or settings["momentum"] != 0:
                state = self.optimizer.state[weight.master]
                if not state:
                    self.awaited.add(weight.unit)
            self.inputs_by_unit[weight.unit][gradient] = tensor, state

    @cached_property
    def settings(self) -> list[dict[str, Any]]:
        """The settings of each param group when the first unit is stepped: hooks before backward may change them."""
        return settings_of(self.optimizer, self.fused)

    @cached_property
    def one_passes(self) -> list[OnePass]:
        """The one-pass update of each param group's weights."""
        return [OnePass(self.optimizer, settings) for settings in self.settings]

    @cached_property
    def codes(self) -> list[CodeOfStep]:
        """The optimizer's own code for each param group's weights."""
        return [code_of_step(self.optimizer, settings.copy()) for settings in self.settings]
