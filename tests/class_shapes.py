"""What Python allows the class of a module to be: kinds of bases, metaclasses, and methods with a meaning to Python.

`shaped(base, shape)` derives such a class from a class of modules that is made without arguments.
"""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")


class Counting(type):
    """A metaclass that hears of all that happens to its classes, and wants an argument for each."""

    heard: ClassVar[list[str]] = []

    def __new__(cls, name: str, bases: tuple[type, ...], contents: dict[str, Any], kind: str) -> Counting:
        cls.heard.append(f"{name} is made")
        return super().__new__(cls, name, bases, contents)

    def __init__(cls, name: str, bases: tuple[type, ...], contents: dict[str, Any], kind: str) -> None:
        super().__init__(name, bases, contents)

    def __setattr__(cls, name: str, value: Any) -> None:
        cls.heard.append(f"{name} is set")
        super().__setattr__(name, value)


class Abstract(ABC):
    @abstractmethod
    def forward(self, x: Any) -> Any: ...


class WithSlots:
    __slots__ = ("first",)


class WithoutSlots:
    __slots__ = ()


def generic_first(base: Any) -> type:
    class Made(Generic[T], base): ...

    return Made


def generic_of_int(base: Any) -> type:
    class Made(generic_first(base)[int]): ...  # type: ignore[misc]

    return Made


def abstract(base: Any) -> type:
    class Made(Abstract, base):
        def forward(self, x: Any) -> Any:
            return base.forward(self, x)

    return Made


def slots_without_names(base: Any) -> type:
    class Made(WithoutSlots, base):
        __slots__ = ()

    return Made


def slots_with_names(base: Any) -> type:
    class Made(WithSlots, base):
        __slots__ = ("second",)

    return Made


def dictionary(base: Any) -> type:
    class Made(base, dict):  # empty, so it is false
        __eq__ = object.__eq__
        __hash__ = object.__hash__

    return Made


def metaclass(base: Any) -> type:
    class Made(base, metaclass=Counting, kind="made"): ...

    return Made


def unwelcome_subclasses(base: Any) -> type:
    class Made(base):
        registry: ClassVar[list[type]] = []

        def __init_subclass__(cls, **kwargs: Any) -> None:
            Made.registry.append(cls)
            raise TypeError(f"{cls} must not be derived")

    return Made


def own_call(base: Any) -> type:
    class Made(base):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            return None if output is None else 1.5 * output

    return Made


def own_getattr(base: Any) -> type:
    class Made(base):
        def __getattr__(self, name: str) -> Any:
            return 1.5 if name == "factor" else super().__getattr__(name)

        def forward(self, x: Any) -> Any:
            return self.factor * super().forward(x)

    return Made


def own_equality(base: Any) -> type:
    class Made(base):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Made) and self._parameters is other._parameters

        def __hash__(self) -> int:
            return 7

    return Made


def no_length(base: Any) -> type:
    class Made(base):  # false
        def __len__(self) -> int:
            return 0

    return Made


def dataclass(base: Any) -> type:
    @dataclasses.dataclass(eq=False)
    class Made(base):
        factor: float = 1.5

        def __post_init__(self) -> None:
            super().__init__()

        def forward(self, x: Any) -> Any:
            return self.factor * super().forward(x)

    return Made


def forward_of_the_instance(base: Any) -> type:
    class Made(base):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.forward = partial(multiplied, self, 1.5)

    return Made


def own_deepcopy(base: Any) -> type:  # as torch.fx's and some quantized modules have it
    class Made(base):
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return remake(type(self), self.state_dict())

    return Made


def own_reduce(base: Any) -> type:
    class Made(base):
        def __reduce__(self) -> Any:
            return remake, (self.__class__, dict(self.state_dict()))

    return Made


def remake(made: type, state: dict[str, Any]) -> Any:
    module = made()
    module.load_state_dict(state)
    return module


def multiplied(module: Any, factor: float, x: Any) -> Any:
    return factor * type(module).forward(module, x)


SHAPES: dict[str, Callable[[Any], type]] = {
    make.__name__: make
    for make in (
        generic_first, generic_of_int, abstract, slots_without_names, slots_with_names, dictionary, metaclass,
        unwelcome_subclasses, own_call, own_getattr, own_equality, no_length, dataclass, forward_of_the_instance,
        own_deepcopy, own_reduce,
    )
}  # fmt: skip

WITH_ARGUMENTS = sorted(SHAPES.keys() - {"dataclass", "own_deepcopy", "own_reduce"})
"""Those that a class may have which is made with arguments."""


def shaped(base: type, shape: str) -> type:
    """A class of this shape, the same each time, which pickle finds by its name."""
    name = f"{base.__module__}.{base.__name__}.{shape}".replace(".", "_")
    module = sys.modules[__name__]
    if not hasattr(module, name):
        made = SHAPES[shape](base)
        type.__setattr__(made, "__qualname__", name)
        type.__setattr__(made, "__name__", name)
        setattr(module, name, made)
    return getattr(module, name)
