"""Copies of the objects that a unit was given, for its second forward.

By the end of a forward a key/value cache contains what all units have computed, and with it their graph. That graph
holds the calls that may run again. If a call held the cache, neither would ever be freed unless backward came, because
the cycle passes through C++. A copy made before the call leads to nothing that is computed later.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Set
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from sp_lightning.pipeline.activations.effects import MAX_OBJECTS, PLAIN, is_user_defined

_CONTAINERS = (dict, list, set, deque)


class StandIns:
    """Makes stand-ins for containers and for objects of users' classes, with aliases of the same tensors in them.

    Args:
        known: Objects, by identity, that are not copied, because the unit finds them elsewhere, too.
    """

    def __init__(self, known: Set[int]) -> None:
        self._known = known
        self._made: dict[int, Any] = {}
        self._alive: list[Any] = []  # what was looked at, so that no identity is used again

    def of(self, objects: Iterable[Any]) -> list[Any]:
        """Return a stand-in for each object; where none is needed, the object itself."""
        return [self._of(value) for value in objects]

    def _of(self, value: Any) -> Any:
        if type(value) in PLAIN or id(value) in self._known or len(self._made) > MAX_OBJECTS:
            return value
        if id(value) not in self._made:
            self._make(value)
        return self._made[id(value)]

    def _make(self, value: Any) -> None:
        self._made[id(value)] = value
        self._alive.append(value)
        if isinstance(value, Tensor):
            if not (isinstance(value, nn.Parameter) or value.is_inference()):
                alias = value.detach()  # the graph stays behind
                self._made[id(value)] = alias.requires_grad_() if value.requires_grad else alias
                if vars(value):
                    take_attributes(alias, self._of(vars(value)))
        elif isinstance(value, tuple):
            items = [self._of(item) for item in value]
            if type(value) is tuple:
                self._made[id(value)] = tuple(items)
            elif hasattr(value, "_make"):
                self._made[id(value)] = value._make(items)
        elif isinstance(value, _CONTAINERS) or _is_an_object(value):
            with suppress(Exception):  # a class may refuse to be copied
                self._made[id(value)] = copy.copy(value)
            if self._made[id(value)] is not value:
                self._fill(self._made[id(value)])

    def _fill(self, made: Any) -> None:
        """Replace what a copy contains by stand-ins."""
        if isinstance(made, dict):
            dict.update(made, {key: self._of(item) for key, item in made.items()})
        elif isinstance(made, list):
            made[:] = [self._of(item) for item in made]
        elif isinstance(made, deque):
            items = [self._of(item) for item in made]
            made.clear()
            made.extend(items)
        if hasattr(made, "__dict__"):
            vars(made).update({name: self._of(item) for name, item in vars(made).items()})


def _is_an_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and is_user_defined(type(value)) and not isinstance(value, nn.Module)


def take_attributes(made: Tensor, attributes: dict[str, Any]) -> None:
    """Give a tensor the attributes that a user has set on another, without those that its class has set on both."""
    vars(made).update({name: value for name, value in attributes.items() if name not in vars(made)})
