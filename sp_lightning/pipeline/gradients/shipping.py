"""Sending a unit's gradients to the host: each parcel on its route, in one copy.

The route depends on what is on the host already, and on whether the unit is stepped while backward runs (route.py). The
methods below `send` are in the order of those routes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, KeysView, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.buffers import LandingBuffers, Parcel, Shipment
from sp_lightning.pipeline.gradients.homes import Homes
from sp_lightning.pipeline.gradients.host_gradients import HostGradients
from sp_lightning.pipeline.gradients.route import Route, choose_route
from sp_lightning.pipeline.gradients.sums import Sums
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.lanes.trace import Kind
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import tensor_hooks
from sp_lightning.pipeline.weights.group import Group
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


class Stepper(Protocol):
    """The interface through which `Shipping` has units stepped in backward (implemented in early_steps.py)."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are kept after the optimizer has used them."""

    def wants(self, unit: Unit) -> bool:
        """Tell whether the unit's complete gradients should go to the optimizer right away."""

    def has_stepped(self, weight: Weight) -> bool:
        """Tell whether the weight was stepped already, so that another gradient of it would come too late."""

    def step_in_backward(self, shipment: Shipment) -> None:
        """Step a unit when its gradients have landed, and release the landing buffer."""

    def end_of_backward(self) -> None:
        """Hand shipments that were not stepped after all to `Shipping.take_back`."""

    def abandon(self) -> None:
        """Finish the steps that were begun, and begin no other, after an exception."""


class Shipping:
    """Sends parcels to the host.

    Args:
        gradients: The gradients that are on the host.
        homes: The memory in which they stay.
        landing_buffers: The memory through which the others pass.
        sums: Adds them to what is there.
        backend: Runs the copies.
        stats: Counters.
        finish_optimizer: Waits until no step reads the gradients of a group any more.

    Attributes:
        stepper: Steps units in backward, if an optimizer lets it.
        measures_norms: Whether each gradient brings its norm (see `HostGradients.norms_of`).
    """

    stepper: Stepper
    measures_norms = False

    def __init__(
        self,
        gradients: HostGradients,
        homes: Homes,
        landing_buffers: LandingBuffers,
        sums: Sums,
        backend: Backend,
        stats: Stats,
        finish_optimizer: Callable[[Group], None],
    ) -> None:
        self._gradients = gradients
        self._homes = homes
        self._landing_buffers = landing_buffers
        self._sums = sums
        self._backend = backend
        self._stats = stats
        self._finish_optimizer = finish_optimizer
        self._sent: dict[Weight, None] = {}
        self._with_sums: set[Unit] = set()
        self._moving_out: dict[Unit, Ticket] = {}  # of homes in a lower dtype, into sums

    @property
    def sent(self) -> KeysView[Weight]:
        """The weights whose gradients this backward has sent, in this order."""
        return self._sent.keys()

    def forget_sent(self) -> None:
        """Forget what was sent: backward has ended, or failed."""
        self._sent.clear()

    def send(self, parcel: Parcel, complete: bool, is_last: bool) -> None:
        """Send gradients on their route, and have the unit stepped if that may be done in backward.

        Args:
            parcel: The gradients.
            complete: Whether they are all the gradients that the unit gets.
            is_last: Whether, besides, nothing else will be added to them.
        """
        unit, layout, weights = parcel.unit, parcel.layout, parcel.layout.weights
        if self.measures_norms and all(weight.master.dtype == torch.float32 for weight in weights):
            parcel.measure()
        self._finish_optimizer(unit.group)
        self._gradients.apply_pending(weights)
        steps_now = is_last and self.stepper.wants(unit)
        route = choose_route(
            first=self._are_first(weights),
            lower=layout.is_lower,
            complete=complete and unit not in self._with_sums,  # a sum needs another home anyway
            fills_home=self._homes.layout_of(unit, weights) == layout,
            used_up=steps_now and not self.stepper.keeps_gradients,
        )
        if route.stays:
            shipment = self._send_home(parcel, route)
        elif route is Route.SUM:
            shipment = self._send_into_sum(parcel)
        else:
            shipment = self._send_to_optimizer(parcel)
        self._stats.bytes_to_host += parcel.bytes_to_send
        self._sent.update(dict.fromkeys(weights))
        self._gradients.mark_under_way(weights, shipment.ticket)
        if steps_now and self._sums.may_be_used(weights):
            self.stepper.step_in_backward(shipment)

    def _are_first(self, weights: Sequence[Weight]) -> bool:
        """Tell whether there is no gradient to add these to, and no user's hook to call."""
        return all(
            self._gradients.get(weight) is None and weight not in self._sent and not tensor_hooks(weight.master)
            for weight in weights
        )

    def _send_home(self, parcel: Parcel, route: Route) -> Shipment:
        unit, weights = parcel.unit, parcel.layout.weights
        if route is Route.HOME:
            home = self._homes.of(unit, weights)
        else:
            home = self._homes.in_lower_dtypes(unit, parcel.layout)
        self._gradients.wait_until_landed(weights)
        home.vacate()
        ticket = self._start_copy(home.memory, parcel)
        self._sums.begin(weights, home.tensors)
        if parcel.has_norms:
            self._gradients.note_norms(dict(zip(weights, home.norms, strict=True)))
        return Shipment(unit, weights, home.tensors, ticket, None)

    def _send_into_sum(self, parcel: Parcel) -> Shipment:
        for unit in [unit for unit, ticket in self._moving_out.items() if ticket.done]:
            del self._moving_out[unit]
            self._turn_lower_home_into_buffer(unit)
        # The optimizer may catch up during the next forward; sums that fall behind do so in the next backward, too.
        shipment = self._sums.add(self._send_through_buffer(parcel, patient=True), self.measures_norms)
        if self._homes.has_lower(parcel.unit):
            self._with_sums.add(parcel.unit)
            self._moving_out[parcel.unit] = shipment.ticket
        return shipment

    def _send_to_optimizer(self, parcel: Parcel) -> Shipment:
        if self._homes.has_lower(parcel.unit):  # from before units were stepped in backward
            self._gradients.wait_until_landed(parcel.layout.weights)
            self._turn_lower_home_into_buffer(parcel.unit)
        return self._send_through_buffer(parcel, patient=False)

    def _turn_lower_home_into_buffer(self, unit: Unit) -> None:
        """Reuse the home of gradients in a lower dtype, which stay there no longer."""
        if self._homes.has_lower(unit) and (left := self._homes.give_up_lower(unit)) is not None:
            self._landing_buffers.take_over(left)

    def _send_through_buffer(self, parcel: Parcel, patient: bool) -> Shipment:
        layout = parcel.layout
        buffer = self._landing_buffers.take(layout.nbytes, patient)
        ticket = self._start_copy(buffer.memory, parcel)
        return Shipment(parcel.unit, layout.weights, buffer.tensors(layout), ticket, buffer)

    def _start_copy(self, target: Tensor, parcel: Parcel) -> Ticket:
        """Start the copy, section by section."""
        tickets: dict[Hashable, Ticket] = {}
        for cut, begin, end in parcel.layout.sections(parcel.bytes_to_send):
            tickets[cut] = self._backend.download(target[begin:end], parcel.staging.memory[begin:end])
            self._backend.trace.moved(Kind.GRADIENTS, parcel.unit.name, end - begin, tickets[cut])
        parcel.staging.ticket = Ticket.of_parts(tickets)
        return parcel.staging.ticket

    def take_back(self, shipment: Shipment) -> None:
        """Keep gradients that were sent to the optimizer, which has not used them."""
        if shipment.buffer is not None:
            self._gradients.mark_under_way(shipment.weights, self._sums.add(shipment, self.measures_norms).ticket)
