"""The stream of gradients of one of several processes, which are averaged before they leave the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline.gradients.averaging import Averaging
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.gradients.unit_gradients import Gradient, UnitGradients
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.window import Window


class AveragedStream(GradientStream):
    """Brings averages of gradients to the host; a process's own while `Replicas.averages` is off."""

    def __init__(
        self,
        units: Sequence[Unit],
        window: Window,
        backend: Backend,
        stats: Stats,
        pin: bool,
        averaging: Averaging,
    ) -> None:
        super().__init__(units, window, backend, stats, pin)
        self._averaging = averaging
        averaging.of(self._units)

    @property
    def _averages(self) -> bool:
        return self._averaging.replicas.averages

    @override
    def _put(self, gradient: Gradient, tensor: Tensor) -> None:
        if not self._averages:
            super()._put(gradient, tensor)
            return
        self._averaging.begin()
        self._averaging.check_not_started(gradient.unit)
        earlier = gradient.on_device
        gradient.unit.gathered += earlier is None
        gradient.on_device = tensor if earlier is None else earlier.to(gradient.weight.dtype) + tensor

    @override
    def left_behind(self, units: Sequence[Unit]) -> list[UnitGradients]:
        """Return nothing: units have their turns in one order, and those that are not complete have it at the end."""
        return [] if self._averages else super().left_behind(units)

    @override
    @torch.no_grad()
    def send(self, unit: UnitGradients, is_last: bool) -> None:
        """Start averaging a unit that is complete, and those that it has kept waiting, each when its turn comes."""
        if not self._averages:
            super().send(unit, is_last)
            return
        for due in self._averaging.next_after(unit):
            self._start(due)

    def _start(self, unit: UnitGradients) -> None:
        """Put a unit's gradients together, zeros where there is none, and start averaging them."""
        self._send_averaged()
        self._gathering.pop(unit, None)
        staging = self._staging.take(unit.layout.nbytes)
        for gradient, view in zip(unit.trained, staging.views(unit.layout)[0], strict=True):
            if gradient.on_device is None:
                view.zero_()
            else:
                view.copy_(gradient.on_device)
            gradient.on_device = None
        unit.gathered = 0
        self._averaging.start(unit, staging)

    def _send_averaged(self) -> None:
        """Send the unit whose gradients are being averaged, as computing waits for that."""
        averaged = self._averaging.wait()
        if averaged is not None:
            unit, staging, complete = averaged
            self._dispatch(unit, unit.trained, unit.layout, staging, is_last=complete)

    @override
    def _send_rest(self, takes_part: bool) -> None:
        """Average what is left in the order of all processes, and take back what none of them has a gradient of.

        Unless all take part, a process does so only if a gradient has arrived in it: `torch.autograd.grad` in some
        processes does not concern the others.
        """
        if not self._averages:
            super()._send_rest(takes_part)
            return
        if not (takes_part or self._arrived or self._averaging.has_unmanaged()):
            return
        self._averaging.begin()
        own = list(self._arrived)
        for unit in self._averaging.left():
            if not unit.gathered:
                unit.begin()
            for gradient in unit.trained:
                if gradient.on_device is None:
                    gradient.look()
                    self._arrived.setdefault(gradient, gradient.host is None)
            self._start(unit)
        self._send_averaged()
        reached = self._averaging.agree(own)
        for gradient in [gradient for gradient in self._arrived if gradient not in reached]:
            gradient.late.clear()
            if self._arrived.pop(gradient):
                gradient.forget()
                gradient.unit.note_emptied()
        self._averaging.average_unmanaged()

    @override
    def abandon(self) -> None:
        self._averaging.abandon()
        super().abandon()
