"""The memory in which gradients stay on the host: one buffer for each unit.

A buffer is allocated once and used in every step. If the user keeps a gradient, its memory is left to them, and the
home gets other memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.gradient_layout import GradientLayout
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.torch_private import users_of_storage, users_of_tensor
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


class Homes:
    """The homes of all units' gradients; a unit may have a second one, for gradients in a lower dtype.

    Args:
        backend: Pins the memory.
        pin: Whether to pin it.

    Attributes:
        pins: Whether the memory of homes that are made from now on is pinned.
    """

    def __init__(self, backend: Backend, pin: bool) -> None:
        self._backend = backend
        self.pins = pin
        self._homes: dict[Unit, Home] = {}
        self._lower: dict[Unit, Home] = {}
        self._outgrown: list[Home] = []

    def of(self, unit: Unit, weights: Sequence[Weight]) -> Home:
        """Return the home of gradients in their masters' dtypes, with room for at least these weights of a unit."""
        return self._home(self._homes, unit, self.layout_of(unit, weights))

    def layout_of(self, unit: Unit, weights: Sequence[Weight]) -> GradientLayout:
        """Return the layout of the home that `of` returns, which may be larger than these weights need."""
        home = self._homes.get(unit)
        if home is not None and home.indices.keys() >= set(weights):
            return home.layout
        return GradientLayout.in_master_dtypes(w for w in unit.weights if w.master.requires_grad or w in weights)

    def in_lower_dtypes(self, unit: Unit, layout: GradientLayout) -> Home:
        """Return the home of exactly these gradients of a unit, in the dtypes in which they arrive."""
        return self._home(self._lower, unit, layout)

    def _home(self, homes: dict[Unit, Home], unit: Unit, layout: GradientLayout) -> Home:
        home = homes.get(unit)
        if home is not None and home.layout == layout:
            return home
        if home is not None:
            self._outgrown.append(home)  # a copy into it may still be on its way
        homes[unit] = Home(layout, self._backend, self.pins)
        return homes[unit]

    def room_for(self, weight: Weight) -> Tensor:
        """Return memory for one weight's gradient, in its master's dtype, that nobody else holds."""
        return self.of(weight.unit, [weight]).room_for(weight)

    def memory_of(self, unit: Unit, gradients: Sequence[Tensor]) -> Tensor | None:
        """Return the memory of a home that consists of exactly these gradients; None if there is no such home."""
        for home in (self._homes.get(unit), self._lower.get(unit)):
            if home is not None and home.consists_of(gradients):
                return home.memory
        return None

    def is_only_shown(self, weight: Weight, gradient: int) -> bool:
        """Tell whether nobody but a home and `.grad` holds a weight's gradient (see `Home.is_only_shown`)."""
        homes = (self._homes.get(weight.unit), self._lower.get(weight.unit))
        return any(home is not None and home.is_only_shown(weight, gradient) for home in homes)

    def is_in_lower(self, weight: Weight, gradient: int) -> bool:
        """Tell whether a gradient, in its master's dtype, is in a home beside others in a lower one, and only shown."""
        home = self._lower.get(weight.unit)
        return home is not None and home.is_only_shown(weight, gradient)

    def has_lower(self, unit: Unit) -> bool:
        """Tell whether a unit has a home for gradients in a lower dtype."""
        return unit in self._lower

    def give_up_lower(self, unit: Unit) -> HostBuffer | None:
        """Give up a unit's home for gradients in a lower dtype, when no copy is on its way to it.

        Returns:
            Its memory, or None if somebody else holds a part of it.
        """
        home = self._lower.pop(unit)
        if home.is_left():
            return home.buffer
        home.buffer.release()
        return None

    def release_lower(self, unit: Unit) -> None:
        """Release the memory of gradients of a unit in a lower dtype, which are in their masters' dtypes by now."""
        if self.has_lower(unit):
            self._lower.pop(unit).buffer.release()

    def release_outgrown(self) -> None:
        """Unpin the memory of homes that were replaced, when no copy is on its way to them."""
        while self._outgrown:
            self._outgrown.pop().buffer.release()

    def release(self) -> None:
        """Release the memory of gradients in their masters' dtypes, which stay where they are."""
        while self._homes:
            self._homes.popitem()[1].buffer.release()

    def nbytes(self) -> int:
        """Return the bytes of host memory."""
        return sum(home.memory.nbytes for home in [*self._homes.values(), *self._lower.values()])


class Home:
    """One host buffer in which the gradients of a unit's weights stay.

    It is used again in every step, unless the user kept a gradient (PCGrad and the like do).

    Attributes:
        layout: How the gradients lie in it.
        tensors: A tensor for each gradient. They are others in each backward pass, as users may change more about a
            `.grad` than its values: with `p.grad.data = ...`, which `module.double()` does, it has other memory.
    """

    def __init__(self, layout: GradientLayout, backend: Backend, pin: bool) -> None:
        self.layout = layout
        self.indices = {weight: index for index, weight in enumerate(layout.weights)}
        self._backend = backend
        self._pin = pin
        self._build()

    def _build(self) -> None:
        self.buffer = HostBuffer(self.layout.nbytes, self._backend, self._pin)
        self.memory = self.buffer.bytes
        self._places, self.norms = self.layout.tensors_in(self.memory), self.layout.norms_in(self.memory)
        self.tensors = [place.data for place in self._places]

    def is_left(self) -> bool:
        """Forget the tensors, and tell whether nobody else holds a part of the memory: no user, view or `.grad`."""
        self.tensors = []
        return all(map(_is_free, self._places))

    def vacate(self) -> None:
        """Make other tensors, in other memory if anybody else holds a part of this one."""
        if self.is_left():
            self.tensors = [place.data for place in self._places]
        else:
            self.buffer.release()
            self._build()

    def room_for(self, weight: Weight) -> Tensor:
        """Return memory for one weight's gradient that nobody else holds."""
        index = self.indices[weight]
        place = self.tensors[index] = self._places[index]  # another tensor of this home would count as a user
        if not _is_free(place):
            return torch.empty_like(weight.host)
        self.tensors[index] = place.data
        return self.tensors[index]

    def consists_of(self, gradients: Sequence[Tensor]) -> bool:
        """Tell whether its memory is that of exactly these gradients."""
        return len(gradients) == len(self._places) and all(map(_lies_in, gradients, self._places))

    def is_only_shown(self, weight: Weight, gradient: int) -> bool:
        """Tell whether only this home and `.grad` hold a gradient, so that nobody can see when exactly it changes.

        Args:
            weight: The weight.
            gradient: The `id` of the gradient, to which the caller must hold exactly one reference: it is counted.
        """
        index = self.indices.get(weight)
        if index is None or id(self.tensors[index]) != gradient or _references(self.tensors, index) > _SHOWN_REFERENCES:
            return False
        tensor, place = self.tensors[index], self._places[index]
        return _lies_in(tensor, place) and users_of_tensor(tensor) <= 2 and users_of_storage(place) <= 2


def _is_free(place: Tensor) -> bool:
    return users_of_storage(place) <= 1


def _lies_in(gradient: Tensor, place: Tensor) -> bool:
    """Tell whether a gradient is in its place, and not in memory that somebody has given it."""
    is_there = gradient.data_ptr() == place.data_ptr() and gradient.dtype == place.dtype
    return is_there and gradient.shape == place.shape and gradient.stride() == place.stride()


def _references(tensors: Sequence[Tensor], index: int) -> int:
    """Count references to a tensor, always in here: what a call adds depends on whether dynamo is at work."""
    return sys.getrefcount(tensors[index])


def _references_of_a_shown_gradient() -> int:
    parameter, home = torch.nn.Parameter(torch.empty(0)), [torch.empty(0)]
    parameter.grad = home[0]
    gradient = parameter.grad  # noqa: F841 - the name counts, as does the caller's of `is_only_shown`
    return _references(home, 0)


# of a gradient that its home and `.grad` hold, and that has one name: what `.grad` adds depends on torch's version
_SHOWN_REFERENCES = _references_of_a_shown_gradient()
