"""Tensors and modules that stay on the device, and their moves there and back.

*Tensors that do not stream.* Buffers stay, because BatchNorm saves and changes these very tensors. So do tensors that a
user's own `to` or `_apply` moves: the anchors of a detector, the states of a metric, a teacher in a list. And so do
parameters that cannot stream.

*Units that stay with their gradients and optimizer state.* While they stay, their weights are plain parameters, which
torch's own code updates. Only gates know of their calls.

[Note: living in several processes]
A unit stays on the device in all processes, or in none, as masters on the host are shared. When processes meet, the
plan of the first one becomes that of all (engine.py). Gradients are averaged when backward has ended, as DDP does, so
each process updates its own copy with the same bits. When processes meet, each gets the values that user code has
written to the first one's copy (`Processes.share_copies`). State on the host belongs to the first process. It gives the
state to all when a unit comes to the device, and continues with its own when the unit leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain, product
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.host_memory import has_room_for
from sp_lightning.pipeline.placing.arrangement import Arrangement
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.torch_private import contains_others, parts_of, without_torch_function
from sp_lightning.pipeline.units.tree import Tree

HOST = torch.device("cpu")

# ------------------------------------------------------------------------------------------ what does not stream


def weights_on_accelerators(root: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the engine can manage, but that are not on the host."""
    weights = Tree(root, ()).weights.values()
    return [weight.master for weight in weights if weight.master.device.type not in ("cpu", "meta")]


def move_all_but_parameters(root: nn.Module, device: torch.device) -> None:
    """Do what `root.to(device)` would do, except that parameters and their gradients do not move."""
    parameters = list(root.parameters())
    gradients = [parameter.grad for parameter in parameters]
    staying = set(map(id, [*parameters, *gradients]))
    # each entry holds the tensor itself, or another one might get its identity
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) in staying:
            return tensor
        if id(tensor) not in moved:
            # validation may come first, training later
            with torch.inference_mode(not is_lazy(tensor) and tensor.is_inference()):
                moved[id(tensor)] = tensor, tensor.to(device)
        return moved[id(tensor)][1]

    def apply(_: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        return type(root)._apply(root, move, *args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]

    modules = [module for module in root.modules() if not isinstance(module, torch.jit.ScriptModule)]
    # parameters that consist of other tensors are hidden from `_apply`, which would exchange all that they are
    hidden = [
        (module._parameters, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None and contains_others(parameter)
    ]
    for parameters_of_module, name, _ in hidden:
        parameters_of_module[name] = None
    vars(root)["_apply"] = apply
    try:
        root.to(device)
    finally:
        del vars(root)["_apply"]
        for parameters_of_module, name, parameter in hidden:
            parameters_of_module[name] = parameter


def move_parameters(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move parameters that are elsewhere, with their gradients; the Parameter objects stay the same.

    `Module.to` knows tensors that contain others, and calls a class's own `to`.
    """
    for parameter in parameters:
        if parameter.device != device:
            with torch.inference_mode(parameter.is_inference()):
                nn.ParameterList([parameter]).to(device)


# --------------------------------------------------------------------------- units that stay with all their state


def move_state(
    optimizer: Optimizer,
    parameters: Iterable[nn.Parameter],
    device: torch.device | None = None,
) -> None:
    """Move the optimizer's state of parameters to a device, or to theirs, as `Optimizer.load_state_dict` does."""
    moving = set(map(id, parameters))
    # looking state up by a guarded weight would wait for its gradient
    with without_torch_function():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in moving:
                    continue
                target = device or parameter.device
                counts_there = target.type == "cpu" or group.get("fused") or group.get("capturable")
                state = optimizer.state.get(parameter, {})
                # a copy, because a step of a backward may make state at the same time
                for key, value in state.copy().items():
                    if key != "step" or counts_there:
                        moved = tree_map_only(Tensor, partial(torch.Tensor.to, device=target), value)
                        if moved is not value:
                            state[key] = moved


class States:
    """The state of several optimizers."""

    def __init__(self, optimizers: Collection[Optimizer]) -> None:
        self.optimizers = optimizers

    def nbytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes that the state of parameters takes."""
        with without_torch_function():
            pairs = product(parameters, self.optimizers)
            # Lists are made first, because the thread that steps may add state at the same time.
            states = [list(optimizer.state.get(parameter, {}).values()) for parameter, optimizer in pairs]
        return sum(leaf.nbytes for leaf in tree_leaves(states) if isinstance(leaf, Tensor))

    def move(self, parameters: Collection[nn.Parameter], device: torch.device) -> None:
        """Move the state of parameters to a device."""
        for optimizer in self.optimizers if parameters else ():
            move_state(optimizer, parameters, device)

    def share(self, parameters: Iterable[nn.Parameter], processes: Processes) -> None:
        """Give the first process's state of parameters to all processes."""
        with without_torch_function():
            for parameter, optimizer in product(parameters, self.optimizers):
                state = processes.share(optimizer.state.get(parameter))
                if state is not None:
                    optimizer.state[parameter] = state

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the state of parameters, because another process steps them from now on."""
        with without_torch_function():
            for parameter, optimizer in product(parameters, self.optimizers):
                optimizer.state.pop(parameter, None)


class StayingUnits:
    """Moves units to the device and back, with gradients and optimizer state, in all processes at the same moment."""

    def __init__(self, device: torch.device, states: States, processes: Processes | None) -> None:
        self._device = device
        self._states = states
        self._processes = processes
        self._hooks: list[RemovableHandle] = []
        self._some_came = False

    @torch.inference_mode(False)  # the step may be one of an evaluation
    @torch.no_grad()
    def move_units(self, arrangement: Arrangement) -> None:
        """Move units that leave the device, and then those that come to it, before anything is laid out."""
        # All processes share state in the same order.
        units = sorted(arrangement.all_units, key=attrgetter("name"))
        for unit in units:
            leaving = [weight.master for weight in unit.weights if weight.stays_on_device]
            if self._processes is not None and not self._processes.box.is_keeper:
                self._states.drop(leaving)
            self._move(leaving, HOST)
        for unit in units:
            coming = [weight.master for weight in unit.weights_on_device if not weight.stays_on_device]
            if self._processes is not None:
                self._states.share(coming, self._processes)
            self._move(coming, self._device)
            if self._device == HOST:  # the emulated device has no other memory, so they are copied
                for part in chain.from_iterable(map(parts_of, coming)):
                    part.data = part.data.clone()

    @torch.inference_mode(False)
    @torch.no_grad()
    def move_all_to_host(self, module: nn.Module, may_leave_state: bool) -> None:
        """Move all parameters on the device to the host, for good.

        If it `may_leave_state`, optimizer state stays on the device where the host has no room for it.
        """
        parameters = weights_on_accelerators(module)
        nbytes = sum(parameter.nbytes for parameter in parameters) + self._states.nbytes(parameters)
        if may_leave_state and not has_room_for(nbytes):
            move_parameters(parameters, HOST)
        else:
            self._move(parameters, HOST)

    def watch(self, arrangement: Arrangement) -> None:
        """Note from now on whether backward brings gradients to parameters that stay on the device."""
        for hook in self._hooks:
            hook.remove()
        if self._processes is not None:
            self._processes.copies = arrangement.named_on_device
            self._processes.look_at_copies(changed_alike=True)
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
                for parameter in arrangement.parameters_on_device
                if parameter.requires_grad
            ]

    def _note_gradient(self, _: Tensor) -> None:
        self._some_came = True

    def pop_some_came(self) -> bool:
        """Tell whether gradients have come to parameters that stay on the device since the last call."""
        some_came = self._some_came
        self._some_came = False
        return some_came

    def _move(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Move parameters that are elsewhere; their state goes first, so that none is left behind after an error."""
        self._states.move(parameters, device)
        move_parameters(parameters, device)
