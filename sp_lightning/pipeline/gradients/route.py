"""Where a unit's gradients go from the device: to stay, to be added to what is there, or to the optimizer."""

from __future__ import annotations

import enum


class Route(enum.Enum):
    """The ways to the host."""

    HOME = "home"
    """To where they stay, in their masters' dtypes: they are the masters' `.grad`."""

    HOME_AS_THEY_CAME = "home as they came"
    """To where they stay, in a lower dtype: they become `.grad` when somebody asks for it."""

    SUM = "sum"
    """Through a slot, and into a sum."""

    OPTIMIZER = "optimizer"
    """Through a slot, which the optimizer reads them from; then they are gone."""

    @property
    def stays(self) -> bool:
        """Whether they stay where they land."""
        return self in (Route.HOME, Route.HOME_AS_THEY_CAME)


def choose_route(*, first: bool, lower: bool, complete: bool, fills_home: bool, used_up: bool) -> Route:
    """Choose the way of a unit's gradients.

    Args:
        first: Whether there is nothing to add them to, and no user's hook to ask.
        lower: Whether some of them are in a lower dtype than their master.
        complete: Whether they are all that the unit gets.
        fills_home: Whether nothing else has its place among them where they would stay in their masters' dtypes.
        used_up: Whether the optimizer reads them as they arrive, and nobody after it.
    """
    if not first:
        return Route.SUM
    if not lower:
        return Route.HOME if fills_home else Route.SUM
    if used_up:
        return Route.OPTIMIZER
    return Route.HOME_AS_THEY_CAME if complete else Route.SUM
