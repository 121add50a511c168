"""Gradients on their way to the host, and what may take them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sp_lightning.pipeline.gradients.buffers import LandingBuffer
from sp_lightning.pipeline.gradients.unit_gradients import Gradient, UnitGradients
from sp_lightning.pipeline.lanes.lanes import Ticket


@dataclass(eq=False)
class Shipment:
    """Gradients of a unit on their way to the host.

    Attributes:
        unit: The gradients of the unit.
        gradients: Those that are on their way.
        arrived: The tensors that they land in.
        ticket: The copy, or the addition, that brings them.
        buffer: The landing buffer to release when they have been read; None if they land where they stay.
    """

    unit: UnitGradients
    gradients: Sequence[Gradient]
    arrived: Sequence[Tensor]
    ticket: Ticket
    buffer: LandingBuffer | None


class Taker(Protocol):
    """What takes gradients as soon as they arrive, in backward: an optimizer's step that has begun (`EarlyStep`)."""

    keeps_gradients: bool

    def wants(self, unit: UnitGradients) -> bool:
        """Tell whether the unit's complete gradients should go to the optimizer right away."""

    def take(self, shipment: Shipment) -> None:
        """Step the unit when its gradients have landed, and release the landing buffer; or give them back."""

    def end_of_backward(self) -> None:
        """Give back what was not used."""
