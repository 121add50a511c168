"""Operands of an operation: finding them among its arguments, in containers, too, replacing and moving them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

_CONTAINERS = (list, tuple, dict)


def instances_in(value: Any, kind: type) -> Iterator[Any]:
    """Yield the instances of a class among an operation's arguments."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, _CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, kind):
                yield item
            elif isinstance(item, _CONTAINERS):  # mostly, it is neither, and a generator for it would be a waste
                yield from instances_in(item, kind)


def replace_instances(value: Any, kind: type, substitute: Callable[[Any], Any]) -> Any:
    """Return an operation's arguments with the instances of a class replaced; containers without any stay the same."""
    if isinstance(value, kind):
        return substitute(value)
    if isinstance(value, list | tuple):
        items = [replace_instances(item, kind, substitute) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        new_items = {key: replace_instances(item, kind, substitute) for key, item in value.items()}
        if all(new_items[key] is item for key, item in value.items()):
            return value
        replaced = copy(value)  # it may be of another class, such as the outputs of transformers' models
        for key, item in new_items.items():
            replaced[key] = item
        return replaced
    return value
