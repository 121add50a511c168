"""Where gradients stay on the host: one buffer for each unit's.

It is made once and used in every step. A gradient that the user keeps stays theirs: its home gets other memory then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline._private import users_of_storage, users_of_tensor
from sp_lightning.pipeline.gradients.landing import TensorsIn, lay_out_gradients
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.weights.host import HostBuffer
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


class Homes:
    """The homes of all units' gradients; a unit may have two, one of them for gradients in a lower dtype.

    Args:
        backend: Pins the memory.
        pin: Whether to page-lock it.
    """

    def __init__(self, backend: Backend, pin: bool) -> None:
        self._backend = backend
        self._pin = pin
        self._homes: dict[Unit, Home] = {}
        self._lower: dict[Unit, Home] = {}
        self._outgrown: list[Home] = []

    def of(self, unit: Unit, weights: Sequence[Weight]) -> Home:
        """The home of gradients in their masters' dtypes, of at least these weights of a unit."""
        home, members = self._homes.get(unit), self.members(unit, weights)
        if home is None or home.weights != members:
            home = self._put(self._homes, unit, members, [weight.master.dtype for weight in members])
        return home

    def members(self, unit: Unit, weights: Sequence[Weight]) -> list[Weight]:
        """All whose gradients lie, or would lie, in the home of these weights of a unit."""
        home = self._homes.get(unit)
        if home is not None and set(weights) <= set(home.weights):
            return home.weights
        return [weight for weight in unit.weights if weight.master.requires_grad or weight in weights]

    def in_lower_dtypes(self, unit: Unit, weights: Sequence[Weight], dtypes: Sequence[torch.dtype]) -> Home:
        """The home of gradients as they come, of exactly these weights of a unit."""
        home = self._lower.get(unit)
        if home is None or home.weights != list(weights) or home.dtypes != list(dtypes):
            home = self._put(self._lower, unit, weights, dtypes)
        return home

    def _put(
        self, homes: dict[Unit, Home], unit: Unit, weights: Sequence[Weight], dtypes: Sequence[torch.dtype]
    ) -> Home:
        if unit in homes:
            self._outgrown.append(homes[unit])  # a copy into it may still be on its way
        homes[unit] = Home(weights, dtypes, self._backend, self._pin)
        return homes[unit]

    def room_for(self, weight: Weight) -> Tensor:
        """Memory for one weight's gradient, in its master's dtype, that nobody else holds."""
        return self.of(weight.unit, [weight]).room_for(weight)

    def memory_of(self, unit: Unit, gradients: Sequence[Tensor]) -> Tensor | None:
        """Where these gradients lie together as they travel, with nothing else among them; None if they do not."""
        for home in (self._homes.get(unit), self._lower.get(unit)):
            if home is not None and list(map(id, home.tensors)) == list(map(id, gradients)):
                return home.memory
        return None

    def has_lower(self, unit: Unit) -> bool:
        """Whether gradients of a unit have stayed as they came."""
        return unit in self._lower

    def give_up_lower(self, unit: Unit) -> None:
        """Gradients of a unit do not stay as they come any more; nothing is on its way to them."""
        self._lower.pop(unit).buffer.release()

    def release_outgrown(self) -> None:
        """No copy is on its way any more to homes that others have taken the place of."""
        while self._outgrown:
            self._outgrown.pop().buffer.release()

    def release(self) -> None:
        """Undo page-locks; gradients stay where they are."""
        for home in [*self._homes.values(), *self._lower.values()]:
            home.buffer.release()

    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(home.memory.nbytes for home in [*self._homes.values(), *self._lower.values()])


class Home:
    """Where the gradients of a unit's weights stay on the host: one buffer, a tensor per weight.

    It is used again every step, unless the user kept a gradient (PCGrad and the like do).
    """

    def __init__(self, weights: Sequence[Weight], dtypes: Sequence[torch.dtype], backend: Backend, pin: bool) -> None:
        self.weights = list(weights)
        self.dtypes = list(dtypes)
        self._backend = backend
        self._pin = pin
        self._build()

    def _build(self) -> None:
        nbytes = lay_out_gradients(self.weights, self.dtypes).nbytes
        self.buffer = HostBuffer(nbytes, self._backend, self._pin)
        self.memory = self.buffer.bytes
        found = TensorsIn(self.memory)
        self.tensors, self.norms = found.tensors(self.weights, self.dtypes), found.norms(self.weights, self.dtypes)

    def vacate(self) -> None:
        """Make sure that nobody else holds any of it."""
        if not all(_are_free(self.tensors)):
            self.buffer.release()
            self._build()

    def room_for(self, weight: Weight) -> Tensor:
        """Memory for one weight's gradient that nobody else holds."""
        index = self.weights.index(weight)
        return self.tensors[index] if _are_free(self.tensors)[index] else torch.empty_like(weight.host)


def _references(tensors: Sequence[Tensor]) -> list[int]:
    """How often Python holds each of them; counted here, as what a call adds depends on whether dynamo is at work."""
    return [sys.getrefcount(tensor) for tensor in tensors]


# what counts for a tensor that is in a list and nowhere else
(_OWN_REFERENCES,) = _references([torch.empty(0)])


def _are_free(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether only its home holds each gradient: not the user, not a view of it, not a `.grad`."""
    references = _references(tensors)
    return [
        count <= _OWN_REFERENCES and users_of_tensor(tensor) <= 1 and users_of_storage(tensor) <= 1
        for tensor, count in zip(tensors, references, strict=True)
    ]


def _references_of_a_shown_gradient() -> int:
    parameter, home = torch.nn.Parameter(torch.empty(0)), [torch.empty(0)]
    parameter.grad = home[0]
    gradient = parameter.grad  # noqa: F841 - a name for it counts, as in `is_only_shown`
    return _references(home)[0]


# the same where it is some Parameter's `.grad` and has one name, too: what the former counts depends on torch's version
_SHOWN_REFERENCES = _references_of_a_shown_gradient()


def is_only_shown(home: Sequence[Tensor], gradient: int) -> bool:
    """Whether only its home and `.grad` hold a gradient, so that nobody can tell when exactly it changes.

    Args:
        home: Gradients in the home.
        gradient: The `id` of one of them, for which the caller has one name.
    """
    for tensor, count in zip(home, _references(home), strict=True):
        if id(tensor) == gradient:
            return count <= _SHOWN_REFERENCES and users_of_tensor(tensor) <= 2 and users_of_storage(tensor) <= 1
    return False
