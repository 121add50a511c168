"""Steps of optimizers on the host: given to the thread for work on host memory, and waited for.

When a unit is stepped is decided in overlap.py; how it is done, in one pass over memory, is in stepping.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.pipeline._private import without_torch_function
from sp_lightning.pipeline.gradients.landing import Shipment
from sp_lightning.pipeline.gradients.scaling import Scaling
from sp_lightning.pipeline.optimizer.stepping import UnitStep
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.transfer.lanes import Ticket
from sp_lightning.pipeline.transfer.trace import Kind
from sp_lightning.pipeline.weights.device import Group
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.weights.window import Window


class OptimizerSteps:
    """What is known of an optimizer; outlives an arrangement, as the optimizer's state does.

    Args:
        optimizer: The optimizer.
        settle: Finishes all steps; called before the optimizer's state is read or replaced as a whole.

    Attributes:
        units: How it steps the weights of a group, by their identities.
        begun: Weights that it has stepped, by identity.
    """

    def __init__(self, optimizer: Optimizer, settle: Callable[[], None]) -> None:
        self.units: dict[tuple[int, ...], UnitStep] = {}
        self.begun: set[int] = set()
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: settle()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: settle()),
        ]

    def forget_units(self, masters: Sequence[nn.Parameter]) -> None:
        """These are not stepped here from now on: give back the memory in which their state lay."""
        gone = set(map(id, masters))
        self.units = {key: unit for key, unit in self.units.items() if gone.isdisjoint(key)}

    def forget(self) -> None:
        """Leave no trace on the optimizer."""
        for hook in self._hooks:
            hook.remove()


KnownOptimizers = weakref.WeakKeyDictionary[Optimizer, OptimizerSteps]


@dataclass(eq=False)
class Share:
    """What one param group has of the weights of one group.

    Attributes:
        optimizer: Whose param group it is.
        settings: The param group as it was when the step was decided, without its parameters.
        scaling: What is to be done to the gradients first.
        gradients: The weights, with the gradients that they are stepped by.
    """

    optimizer: Optimizer
    settings: dict[str, Any]
    scaling: Scaling
    gradients: dict[Weight, Tensor]


class HostSteps:
    """Gives steps to the thread, and knows which are under way.

    Args:
        window: Is told that what is on the device is outdated.
        backend: Has the thread.
        known: Optimizers, kept from one arrangement to the next.
        settle: Finishes all that is under way, also what is not a step.
    """

    def __init__(self, window: Window, backend: Backend, known: KnownOptimizers, settle: Callable[[], None]) -> None:
        self._window = window
        self._backend = backend
        self._known = known
        self._settle_all = settle
        self._under_way: list[Group] = []

    def has_begun(self, optimizer: Optimizer, weights: Iterable[Weight]) -> bool:
        """Whether an optimizer has stepped all of these before, so that there is state."""
        known = self._known.get(optimizer)
        return known is not None and all(id(weight.master) in known.begun for weight in weights)

    def note_begun(self, optimizer: Optimizer, weights: Iterable[Weight]) -> None:
        """An optimizer has stepped these, or has been given them."""
        self._known[optimizer].begun.update(id(weight.master) for weight in weights)

    def begin(
        self, group: Group, shares: list[Share], after: Sequence[Ticket], shipments: Sequence[Shipment] = ()
    ) -> None:
        """Have the thread step what is in a group.

        Args:
            group: The group.
            shares: Its weights and their gradients, as param groups share them.
            after: What has to be done before.
            shipments: Gradients that are used as they arrived: their slots are free then.
        """
        before, weights = group.state, group.host.weights
        calls = [(self._unit_step(share.optimizer, group), share) for share in shares]
        written = [weight for share in shares for weight in share.gradients]

        def job() -> None:
            with without_torch_function(), torch.no_grad():
                current = group.host.copies_are_those_of(before)
                for unit_step, share in calls:
                    gradients = [share.gradients.get(weight) for weight in weights]
                    unit_step.step(share.settings, gradients, share.scaling, group.host.copies())
                group.state = group.host.stepped(weights if current else written)

        def release_slots() -> None:
            for shipment in shipments:
                if shipment.slot is not None:
                    shipment.slot.release()

        self._window.finish_step(group)
        self._window.outdate(group)
        moved = sum(2 * w.master.nbytes + gradient.nbytes for s in shares for w, gradient in s.gradients.items())
        group.being_stepped = self._backend.work(
            job, after, moved, release_slots, rank=group.index + 1 if not group.resident else 0
        )
        self._backend.trace.moved(Kind.STEP, group.name, moved, group.being_stepped)
        self._under_way.append(group)

    def _unit_step(self, optimizer: Optimizer, group: Group) -> UnitStep:
        if optimizer not in self._known:
            self._known[optimizer] = OptimizerSteps(optimizer, self._settle_all)
        units = self._known[optimizer].units
        key = tuple(id(weight.master) for weight in group.host.weights)
        if key not in units:
            units[key] = UnitStep(optimizer, [weight.master for weight in group.host.weights])
        return units[key]

    def finish_step(self, group: Group) -> None:
        """Wait until no step reads or writes what belongs to a group any more."""
        self._window.finish_step(group)

    def settle(self) -> None:
        """Wait until every step is done.

        Raises:
            Exception: The first error of a step.
        """
        errors = []
        while self._under_way:
            try:
                self._window.finish_step(self._under_way.pop(0))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def optimizer_bytes(self, on_device: Collection[nn.Parameter]) -> int:
        """Host memory for what optimizers keep about weights.

        Args:
            on_device: Parameters of which they keep it on the device.
        """
        elsewhere = set(map(id, on_device))
        with without_torch_function():
            # lists, because the thread that steps may put in more at this moment
            states = [item for optimizer in self._known for item in list(optimizer.state.items())]
            kept = [state for parameter, state in states if id(parameter) not in elsewhere]
        return sum(value.nbytes for state in kept for value in list(state.values()) if isinstance(value, Tensor))

    @property
    def done(self) -> bool:
        """Whether nothing is under way."""
        for group in self._under_way:
            if group.being_stepped is not None and group.being_stepped.done:
                self._window.finish_step(group)
        self._under_way = [group for group in self._under_way if group.being_stepped is not None]
        return not self._under_way
