"""The state of optimizers: what of it may be on the device, how large it is, and moving it there and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.optim import Adadelta, Adagrad, Optimizer, Rprop
from torch.utils._pytree import tree_leaves, tree_map_only

from sp_lightning.optim.of_torch import OnePass
from sp_lightning.pipeline.optimizer.kinds import OURS, parameters_of, settings_of, why_not_by_unit
from sp_lightning.pipeline.optimizer.pieces import lay_together
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.stats import Progress
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.units.unit import Unit

_TAKE_TWICE = (Adadelta, Adagrad, Rprop)


def move_state(optimizer: Optimizer, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move the optimizer's state of parameters to a device, as `Optimizer.load_state_dict` does."""
    moving = set(map(id, parameters))
    # looking state up by a guarded weight would wait for its gradient
    with without_torch_function():
        for group in optimizer.param_groups:
            counts_there = device.type == "cpu" or group.get("fused") or group.get("capturable")
            for parameter in [p for p in group["params"] if id(p) in moving]:
                state = optimizer.state.get(parameter, {})
                # a copy, because a step of a backward may make state at the same time
                for key, value in state.copy().items():
                    if key != "step" or counts_there:
                        moved = tree_map_only(Tensor, partial(torch.Tensor.to, device=device), value)
                        if moved is not value:
                            state[key] = moved


class States:
    """The state of several optimizers."""

    def __init__(self, optimizers: Collection[Optimizer]) -> None:
        self._optimizers = optimizers

    # ------------------------------------------------------------------------------------- what may live on the device

    def may_live_on_device(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Tell whether parameters may live on the device: all that are trained are stepped there, each by itself.

        If nobody has stepped one yet, its state would be made there, and nobody knows how large it is. An optimizer of
        any other class may look at several weights at once, so that all of its weights are on the host.
        """
        alone: set[int] = set()
        together: set[int] = set()
        for optimizer in self._optimizers:
            stepped = alone if why_not_by_unit(optimizer) is None else together
            stepped.update(map(id, parameters_of(optimizer)))
        for parameter in parameters:
            is_stepped = id(parameter) in alone or not parameter.requires_grad
            if id(parameter) in together or not is_stepped:
                return False
        return True

    def may_visit(self, unit: Unit, fused: bool) -> bool:
        """Tell whether a unit may visit the device to be stepped: all optimizers step weights in one pass.

        `fused` tells whether torch's fused kernels are taken where the user left the choice to torch.
        """
        for optimizer in self._optimizers:
            passes = [OnePass(optimizer, settings) for settings in settings_of(optimizer, fused)]
            if why_not_by_unit(optimizer) or not all(each.is_possible for each in passes):
                return False
        return bool(self._optimizers) and any(weight.master.requires_grad for weight in unit.every_weight)

    # -------------------------------------------------------------------------------------------------- how large it is

    def nbytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes that the state of parameters takes."""
        with without_torch_function():
            both = product(parameters, self._optimizers)
            states = [optimizer.state.get(parameter, {}) for parameter, optimizer in both]
        # lists, because the thread that steps may add state at the same time
        leaves = tree_leaves([list(state.values()) for state in states])
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))

    def bytes_of_step(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return what a step of parameters that live on an accelerator takes of it meanwhile.

        Torch's own code takes as much as the weights that it steps at once, or twice as much, unless it is fused, or
        goes one by one.
        """
        trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
        nbytes = 0
        for optimizer in self._optimizers:
            times = 2 if isinstance(optimizer, _TAKE_TWICE) else 1
            for group in optimizer.param_groups if type(optimizer) not in OURS else ():
                if group.get("foreach", False) is not False and not group.get("fused"):
                    own = [each for each in group["params"] if id(each) in trained]
                    nbytes += times * sum(each.nbytes for each in own)
        return nbytes

    # -------------------------------------------------------------------------------------------------------- moving it

    def move(self, parameters: Collection[nn.Parameter], device: torch.device) -> None:
        """Move the state of parameters to a device."""
        for optimizer in self._optimizers if parameters else ():
            move_state(optimizer, parameters, device)

    def lay_together(self, units: Iterable[Unit], progress: Progress) -> None:
        """Have the state of units that visit the device lie together, page-locked."""
        visiting = [unit for unit in units if unit.visits]
        nbytes = {unit: self.nbytes(weight.master for weight in unit.weights) for unit in visiting}
        work = progress.begin("Arranging optimizer state", sum(nbytes.values()))
        for unit, optimizer in product(nbytes, self._optimizers):
            lay_together(unit, optimizer)
            work.advance(nbytes[unit] // len(self._optimizers))

    def share(self, parameters: Iterable[nn.Parameter], processes: Processes) -> None:
        """Have the first process's state of parameters in all processes."""
        with without_torch_function():
            for parameter, optimizer in product(parameters, self._optimizers):
                state = processes.share(optimizer.state.get(parameter))
                if state is not None:
                    optimizer.state[parameter] = state

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the state of parameters, which another process steps from now on."""
        with without_torch_function():
            for parameter, optimizer in product(parameters, self._optimizers):
                optimizer.state.pop(parameter, None)
