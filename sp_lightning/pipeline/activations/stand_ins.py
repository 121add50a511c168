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

from sp_lightning.pipeline.activations.effects import MAX_OBJECTS
from sp_lightning.pipeline.activations.places import PLAIN, attributes_of, places_of

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
        elif isinstance(value, _CONTAINERS) or (attributes_of(value) and not isinstance(value, nn.Module)):
            with suppress(Exception):  # a class may refuse to be copied
                self._made[id(value)] = copy.copy(value)
            if self._made[id(value)] is not value:
                self._fill(self._made[id(value)])

    def _fill(self, made: Any) -> None:
        """Replace what a copy contains by stand-ins."""
        for place in places_of(made):
            content = place.read()
            stand_ins = {id(item): self._of(item) for item in place.values(content)}
            place.write(place.with_copies(content, stand_ins))


def take_attributes(made: Tensor, attributes: dict[str, Any]) -> None:
    """Give a tensor the attributes that a user has set on another, without those that its class has set on both."""
    vars(made).update({name: value for name, value in attributes.items() if name not in vars(made)})
