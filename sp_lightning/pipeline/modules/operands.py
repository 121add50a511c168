"""Guarded weights among the arguments of an operation, in containers, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def instances_in(value: Any, kind: type) -> Iterator[Any]:
    """Yield the instances of a class among an operation's arguments."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from instances_in(item, kind)
    elif isinstance(value, dict):
        for item in value.values():
            yield from instances_in(item, kind)


def replace_instances(value: Any, kind: type, substitute: Callable[[Any], Any]) -> Any:
    """Return an operation's arguments with the instances of a class replaced."""
    if isinstance(value, kind):
        return substitute(value)
    if isinstance(value, list | tuple):
        items = [replace_instances(item, kind, substitute) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: replace_instances(item, kind, substitute) for key, item in value.items()}
    return value
