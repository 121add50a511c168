"""The routes of a unit's gradients from the device: to their home, into a sum, or to the optimizer."""

from __future__ import annotations

import enum


class Route(enum.Enum):
    """A route to the host."""

    HOME = enum.auto()
    """To their home, in their masters' dtypes: they are the masters' `.grad`."""

    HOME_AS_THEY_CAME = enum.auto()
    """To their home, in a lower dtype: they become `.grad` when somebody asks for it."""

    SUM = enum.auto()
    """Through a landing buffer into a sum."""

    OPTIMIZER = enum.auto()
    """Into a landing buffer, from which the optimizer reads them; then they are gone."""

    @property
    def stays(self) -> bool:
        """Whether gradients stay where they land."""
        return self in (Route.HOME, Route.HOME_AS_THEY_CAME)


def choose_route(*, first: bool, lower: bool, complete: bool, fills_home: bool, used_up: bool) -> Route:
    """Choose the route of a unit's gradients.

    Args:
        first: Whether there is no gradient to add them to, and no user's hook to call.
        lower: Whether one of them is in another dtype than its master.
        complete: Whether they are all the gradients that the unit gets.
        fills_home: Whether they fill the unit's home for gradients in their masters' dtypes.
        used_up: Whether the optimizer reads them as they arrive, and nobody after it.
    """
    if not first:
        return Route.SUM
    if not lower:
        return Route.HOME if fills_home else Route.SUM
    if used_up:
        return Route.OPTIMIZER
    return Route.HOME_AS_THEY_CAME if complete else Route.SUM
