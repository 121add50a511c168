"""The gradients that the engine has between one backward pass and the next: shown to who asks, used up by steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sp_lightning.pipeline.gradients.unit_gradients import Gradient, State, UnitGradients
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


class HeldGradients:
    """The gradients of all units.

    Attributes:
        units: The same.
    """

    def __init__(self, units: Mapping[Unit, UnitGradients], stats: Stats) -> None:
        self.units = units
        self._stats = stats
        self._of = {gradient.weight: gradient for unit in units.values() for gradient in unit.gradients}
        self._held: dict[UnitGradients, None] = {}  # what the engine has gradients of

    def of(self, weight: Weight) -> Gradient:
        """Return the gradient of a weight."""
        return self._of[weight]

    @property
    def settled(self) -> bool:
        """Whether the engine has no gradients that nobody has asked for, so that anybody may read `.grad`."""
        return not self._held

    def settle(self) -> None:
        """Wait until every gradient has landed and been added."""
        under_way = [unit for unit in self._held if unit.ticket is not None]
        self._stats.host_syncs += bool(under_way)
        for unit in under_way:
            unit.wait()

    def show(self, weight: Weight) -> None:
        """Make a weight's gradient its master's `.grad`, because somebody reads it."""
        self._show(self._of[weight])

    def show_all(self) -> None:
        """Make all gradients the masters' `.grad`."""
        for unit in list(self._held):
            for gradient in unit.gradients:
                self._show(gradient)

    def _show(self, gradient: Gradient) -> None:
        if gradient.host is not None:
            gradient.unit.wait()
            gradient.show()
            self._note_held(gradient.unit)

    def drop(self, weight: Weight) -> None:
        """Forget a gradient, as somebody sets `.grad`."""
        gradient = self._of[weight]
        gradient.forget()
        self._note_held(gradient.unit)

    def consume(self, gradients: Iterable[Gradient]) -> None:
        """Leave weights without gradients, as a step has used them."""
        units: dict[UnitGradients, None] = {}
        for gradient in gradients:
            gradient.forget()
            gradient.weight.master.grad = None
            units[gradient.unit] = None
        for unit in units:
            self._note_held(unit)

    def _note_held(self, unit: UnitGradients) -> None:
        if unit.state is State.CONSUMED:
            return
        for gradient in unit.gradients:
            if gradient.host is not None:
                return
        self._held.pop(unit, None)
        unit.state = State.EMPTY
