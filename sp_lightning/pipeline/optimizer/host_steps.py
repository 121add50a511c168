"""Optimizer steps on the thread for work on host memory: handing them over, and waiting for them.

overlap.py decides when a unit is stepped; stepping.py does it, in one pass over memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.buffers import Shipment
from sp_lightning.pipeline.gradients.scaling import Scaling
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.lanes.trace import Kind
from sp_lightning.pipeline.optimizer.runs import State, StepInputs
from sp_lightning.pipeline.optimizer.stepping import UnitStep, has_state, keeps_state
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.group import Group
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.weights.window import Window


@dataclass(eq=False)
class Share:
    """Weights of one group that one param group steps, with one scaling.

    Attributes:
        optimizer: The optimizer that the param group belongs to.
        settings: The param group without its parameters, as it was when the step was decided.
        scaling: Unscaling and clipping, applied to the gradients first.
        gradients: The weights, each with the gradient to step it with.
    """

    optimizer: Optimizer
    settings: dict[str, Any]
    scaling: Scaling
    gradients: dict[Weight, Tensor]

    @property
    def is_first_step(self) -> bool:
        """Whether the step makes state of one of the weights."""
        return not all(has_state(self.optimizer, self.settings, weight.master) for weight in self.gradients)

    def look_up_state(self, group: Group) -> list[State]:
        """Return the optimizer's state of each weight of the group, empty if there is none; first steps fill it."""
        state = self.optimizer.state
        for weight in self.gradients if keeps_state(self.optimizer, self.settings) else ():
            state.setdefault(weight.master, {})
        return [state.get(weight.master, {}) for weight in group.weights]


class _GroupStep:
    """A step of a group's weights, which the thread takes section by section (sections.py).

    The optimizer's state is looked up at once: `optimizer.state` may be cleared or replaced before the thread begins.

    Args:
        group: The group, whose state still is that of its masters.
        calls: What steps the weights of each share.
        after: Tickets of all gradients.
    """

    def __init__(self, group: Group, calls: Sequence[tuple[UnitStep, Share]], after: Sequence[Ticket]) -> None:
        self._group = group
        self._calls = [(unit_step, share, share.look_up_state(group)) for unit_step, share in calls]
        self._after = after
        self._under_way: list[Iterator[None]] = []

    def step_section(self, is_last: bool) -> None:
        """Step the next section."""
        with torch.inference_mode(False), torch.no_grad(), without_torch_function():
            if not self._under_way:
                self._begin()
            for sections in self._under_way:
                next(sections)
            if is_last:
                self._group.note_stepped()

    def _begin(self) -> None:
        group = self._group
        group.refresh_other_copies({weight for _, share, _ in self._calls for weight in share.gradients})
        for unit_step, share, states in self._calls:
            gradients = [share.gradients.get(weight) for weight in group.weights]
            inputs = StepInputs(gradients, states, group.copies())
            sections = unit_step.sections(share.optimizer, share.settings, share.scaling, inputs, self._wait_for_all)
            self._under_way.append(sections)

    def _wait_for_all(self) -> None:
        for ticket in self._after:
            ticket.join()


class HostSteps:
    """Gives steps to the thread, and knows which are under way.

    Args:
        window: Is told when a step outdates a group on the device.
        backend: Has the thread.
        on_first_step: Called with an optimizer before its first step of a group.
    """

    def __init__(self, window: Window, backend: Backend, on_first_step: Callable[[Optimizer], None]) -> None:
        self._window = window
        self._backend = backend
        self._on_first_step = on_first_step
        self._under_way: list[Group] = []
        # of this arrangement's groups: those of another one would hold memory for state that lies elsewhere by now
        self._unit_steps: weakref.WeakKeyDictionary[Optimizer, dict[Group, UnitStep]] = weakref.WeakKeyDictionary()

    def begin(
        self, group: Group, shares: list[Share], after: Sequence[Ticket], shipments: Sequence[Shipment] = ()
    ) -> None:
        """Have the thread step the weights of a group, section by section (see [Note: sections] in sections.py).

        Args:
            group: The group.
            shares: The weights to step, divided by param groups.
            after: Tickets that the step has to wait for.
            shipments: Gradients that are used where they arrived; their landing buffers are released after the step.
        """

        def release_buffers() -> None:
            for shipment in shipments:
                if shipment.buffer is not None:
                    shipment.buffer.release()

        self._window.finish_optimizer(group)
        step = _GroupStep(group, [(self._unit_step(share.optimizer, group), share) for share in shares], after)
        self._window.outdate(group, [weight for share in shares for weight in share.gradients])
        copies = self._window.copies_of(group)
        moved = sum(2 * w.master.nbytes + gradient.nbytes for s in shares for w, gradient in s.gradients.items())
        tickets: dict[Hashable, Ticket] = {}
        for cut, start, end in group.sections:
            tickets[cut] = self._backend.work(
                partial(step.step_section, is_last=cut is None),
                [*copies, *tickets.values(), *(ticket.until(cut) for ticket in after)],
                nbytes := moved * (end - start) // max(1, group.nbytes),
                release_buffers if cut is None else None,
                rank=0 if group.resident else group.index + 1,
            )
            self._backend.trace.moved(Kind.STEP, group.name, nbytes, tickets[cut])
        group.being_stepped = Ticket.of_parts(tickets)
        self._under_way.append(group)
        if group.apart:
            # weights made resident are in groups that do not wait for this one's step
            self.finish_optimizer(group)

    def _unit_step(self, optimizer: Optimizer, group: Group) -> UnitStep:
        if optimizer not in self._unit_steps:
            self._on_first_step(optimizer)
            self._unit_steps[optimizer] = {}
        unit_steps = self._unit_steps[optimizer]
        if group not in unit_steps:
            unit_steps[group] = UnitStep([weight.layout for weight in group.weights])
        return unit_steps[group]

    def finish_optimizer(self, group: Group) -> None:
        """Wait until no step reads or writes the memory of a group any more.

        Raises:
            Exception: The first error of a step. All other steps have ended by then, and their errors are dropped: they
                mostly have the same cause.
        """
        try:
            self._window.finish_optimizer(group)
        except Exception:
            with suppress(Exception):
                self.settle()
            raise

    def settle(self) -> None:
        """Wait until every step is done, and no copy to the device reads a master: others may write to them.

        Raises:
            Exception: The first error of a step.
        """
        errors = []
        while self._under_way:
            try:
                self._window.finish_optimizer(self._under_way[0])
            except Exception as error:
                errors.append(error)
            self._under_way.pop(0)  # not if an interrupt has ended the wait
        self._window.settle()
        if errors:
            raise errors[0]

    def note_finished(self) -> bool:
        """Note which steps are over, and tell whether none is under way any more; does not wait."""
        for group in self._under_way:
            if group.being_stepped is not None and group.being_stepped.done:
                self.finish_optimizer(group)
        self._under_way = [group for group in self._under_way if group.being_stepped is not None]
        return not self._under_way
