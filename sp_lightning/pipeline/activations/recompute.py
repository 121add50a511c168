"""Running a unit's forward again in backward, instead of holding what its first one saved.

[Note: decided when a call is over]
While a unit's forward runs, everything that autograd saves is held. Only then, with the whole call seen, is it decided
whether to drop it and keep the inputs. So nothing has to be known beforehand of what a forward may not do twice: one
that changes its inputs in place, or that checkpoints a part of itself, keeps what it has saved, from its first call on
and for this call alone. The peak is the same as if tensors had been dropped at once: in backward, too, a whole unit is
there.

`torch.utils.checkpoint` around a unit would have to know at its beginning. It would also run a part that the unit
checkpoints itself three times, let BatchNorm count every batch twice, and not allow `ctx.saved_tensors` to be read
twice.

[Note: run again]
Backward asks for the first tensor that was dropped. The unit is called again, through its gate, as a user's own
checkpoint would call it: with the same inputs, random states, autocast and attributes. What is saved in the second
forward takes the place of what was dropped, in the same order, and the forward ends as soon as nothing is missing. The
graph of the second forward is thrown away; gradients flow through the first.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from sp_lightning.pipeline._private import scope_that_ends_before_backward, storage_key, without_torch_function
from sp_lightning.pipeline.activations.effects import SideEffects
from sp_lightning.pipeline.activations.offload import SMALLEST
from sp_lightning.pipeline.activations.saved import Kept, SavedTensors
from sp_lightning.pipeline.activations.stand_ins import StandIns
from sp_lightning.pipeline.activations.surroundings import Surroundings
from sp_lightning.pipeline.modules.functions import watch_functions
from sp_lightning.pipeline.modules.guard import HostParameter
from sp_lightning.pipeline.modules.tensors import tensors_in
from sp_lightning.pipeline.weights.units import Member


class Footprint(NamedTuple):
    """What calls of a unit take on the device, in bytes.

    Attributes:
        held: Inputs that nothing else held already.
        saved: What the forwards saved beyond that.
        large: How much of `saved` is in pieces that are worth a copy to the host.
        working: The most that a single call took.
        repeatable: Whether the forwards can run again, and something is gained by it.
    """

    held: int
    saved: int
    large: int
    working: int
    repeatable: bool

    def and_also(self, other: Footprint) -> Footprint:
        """Of these calls and of others, between the same forward and backward."""
        return Footprint(
            self.held + other.held,
            self.saved + other.saved,
            self.large + other.large,
            max(self.working, other.working),
            self.repeatable and other.repeatable,
        )


class CannotRunAgain(RuntimeError):
    """A unit's forward was to run again in backward, and what it computes from has changed since.

    Args:
        reason: What has happened.

    Attributes:
        reason: The same.
        is_avoided: Whether what the unit's next forward saves is held.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}. Use `activations='keep'` or `'offload'`, or change it after backward.")
        self.reason = reason
        self.is_avoided = False


class UnitCall:
    """One call of a unit: what its forward saved, and how to run it again.

    The graph holds it. It holds what it has saved weakly, so that autograd frees each tensor when its node has run.

    Args:
        member: Whose call it is.
        saved: The engine's saved-tensor hooks.
        device: Where is computed.
        args: Its arguments.
        kwargs: Its keyword arguments.
        on_repeat: Called with it when its forward runs again; what it returns surrounds that.
        checks: Whether to compare, bit by bit, what the forward saves the second time with what it saved at first.
        may_repeat: Whether to drop anything at all.

    Attributes:
        member: Whose call it is.
        footprint: What it takes; known when the forward is over.
    """

    def __init__(
        self,
        member: Member,
        saved: SavedTensors,
        device: torch.device,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_repeat: Callable[[UnitCall], AbstractContextManager[None]],
        checks: bool,
        may_repeat: bool,
    ) -> None:
        self.member = member
        self._may_repeat = may_repeat
        self._checks = checks
        self._saved = saved
        self._meter = saved.meter
        self._on_repeat = on_repeat
        self._bytes_before = self._meter.bytes
        self._kept: list[weakref.ref[Kept]] = []
        self._checkpoints_itself = False
        self._effects = SideEffects(member.module)
        self._inputs = _Inputs(saved, args, kwargs, StandIns(self._effects.found))
        self._effects.include(self._inputs.objects)
        self._held = self._meter.bytes - self._bytes_before
        self._surroundings = Surroundings(device)
        self._weights = [(twin, twin.version()) for twin in {place.weight.twin for place in member.places}]
        self._on_device = [(parameter, parameter._version) for parameter in member.on_device]

    # ------------------------------------------------------------------------------------------------ first forward

    def pack(self, tensor: Tensor) -> Kept:
        """Hold a tensor until the call is over."""
        self._checkpoints_itself = self._checkpoints_itself or _is_saved_by_a_checkpoint()
        kept = Kept(tensor, self._meter)
        self._kept.append(weakref.ref(kept))
        return kept

    def settle(self, output: Any) -> str | None:
        """The forward is over: drop what it has saved, if that can be computed again and is worth it.

        Returns:
            What prevents it that nobody has chosen, in words.
        """
        obstacle = self._effects.settle()
        if self._inputs.are_changed or self._weights_are_changed():
            obstacle = f"changes its {'input' if self._inputs.are_changed else 'weights'} in place"
        if (scope := scope_that_ends_before_backward()) is not None:
            obstacle = f"is called under {scope}"
        known = {storage_key(tensor) for tensor in [*self._inputs.tensors, *tensors_in(output)]}
        alive = [kept for _, kept in self._alive()]
        tensors = [kept.tensor for kept in alive if kept.tensor is not None]
        is_worth_it = any(storage_key(tensor) not in known for tensor in tensors)
        # what was changed after it was saved must raise in backward, as it does in plain training
        is_wrong = any(kept.is_changed for kept in alive)
        has_changed_weights = any(twin.weight.twin is not twin for twin, _ in self._weights)  # was lowered, say
        is_possible = (
            self._may_repeat
            and self._inputs.outlive_the_call
            and not (is_wrong or has_changed_weights or self._checkpoints_itself)
        )
        repeatable = obstacle is None and is_worth_it and is_possible
        self.footprint = self._take_stock(tensors, repeatable)
        if repeatable:
            if self._checks:
                self._sums = {index: _checksum(kept.get()) for index, kept in self._alive()}
            self.drop()
            return None
        del self._inputs, self._surroundings, self._effects
        return obstacle if is_worth_it and is_possible else None

    def drop(self) -> None:
        """Let go of what can be computed again."""
        for _, kept in self._alive():
            kept.drop()

    def _take_stock(self, tensors: list[Tensor], repeatable: bool) -> Footprint:
        dense = [tensor for tensor in tensors if storage_key(tensor)]  # a sparse tensor has no storage
        sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in dense}
        saved = max(0, self._meter.bytes - self._bytes_before - self._held)
        large = sum(nbytes for nbytes in sizes.values() if nbytes >= SMALLEST)
        return Footprint(self._held, saved, min(large, self._held + saved), self._held + saved, repeatable)

    def _weights_are_changed(self) -> bool:
        with without_torch_function():
            return any(twin.version() != version for twin, version in self._weights) or any(
                parameter._version != version for parameter, version in self._on_device
            )

    def _alive(self) -> Iterator[tuple[int, Kept]]:
        for index, reference in enumerate(self._kept):
            if (kept := reference()) is not None:
                yield index, kept

    # --------------------------------------------------------------------------------------------------- in backward

    def unpack(self, kept: Kept) -> Tensor:
        """The tensor that was held, or computed again if it was dropped."""
        if kept.tensor is None:
            self._repeat()
        return kept.get()

    def _repeat(self) -> None:
        """Run the forward again until all that was dropped, and is still asked for, is there."""
        with self._on_repeat(self):
            if self.has_changed:
                raise CannotRunAgain(_changed_since(self.member.name))
            refill = _Refill(self._kept)
            args, kwargs = self._inputs.again()
            with (
                self._surroundings.restored(),
                self._effects.undone(),
                self._with_its_weights(),
                torch.enable_grad(),
                saved_tensors_hooks(refill.pack, lambda tensor: tensor),
                suppress(_NothingMissing),
            ):
                self.member.module(*args, **kwargs)
            if refill.missing or (self._checks and self._differs()):
                raise CannotRunAgain(_computed_something_else(self.member.name))

    @property
    def has_changed(self) -> bool:
        """Whether something that its forward has read was changed in place since, so that it cannot run again."""
        return self._inputs.are_changed or self._effects.cannot_be_undone or self._weights_are_changed()

    @contextmanager
    def _with_its_weights(self) -> Iterator[None]:
        """The leaves that the first forward computed with: a weight that was lowered may be sent as it is by now."""
        others = {
            id(twin.weight): twin for twin, _ in self._weights if twin.parameter is not twin.weight.twin.parameter
        }
        places = [place for place in self.member.places if id(place.weight) in others]
        now = [place.parameters[place.key] for place in places]
        for place in places:
            twin = others[id(place.weight)]
            self._saved.require(twin)
            place.parameters[place.key] = twin.parameter
        try:
            yield
        finally:
            for place, parameter in zip(places, now, strict=True):
                place.parameters[place.key] = parameter

    def _differs(self) -> bool:
        return any(_checksum(kept.get()) != self._sums[index] for index, kept in self._alive())


class _NothingMissing(Exception):
    """Ends a forward that has been run again far enough."""


class _Refill:
    """Puts what a second forward saves where the first one's was dropped."""

    def __init__(self, kept: list[weakref.ref[Kept]]) -> None:
        self._kept = iter(kept)
        self.missing = sum((one := reference()) is not None and one.tensor is None for reference in kept)

    def pack(self, tensor: Tensor) -> Tensor:
        reference = next(self._kept, None)
        kept = None if reference is None else reference()
        tensor = tensor.detach()  # or the second graph would hold itself (see `Kept`)
        if kept is not None and kept.tensor is None and kept.fill(tensor):
            self.missing -= 1
            if not self.missing:
                raise _NothingMissing
        return tensor


class _Inputs:
    """What a unit was called with: tensors in the way in which autograd would have saved them.

    Attributes:
        objects: What stands for whatever is neither a tensor nor a container that torch knows: for a cache, a number.
    """

    def __init__(self, saved: SavedTensors, args: tuple[Any, ...], kwargs: dict[str, Any], stand_ins: StandIns) -> None:
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        # what is given twice stays one object: `nn.MultiheadAttention` computes something else unless `key is value`
        distinct = {id(leaf): leaf for leaf in leaves if _is_data(leaf)}
        inputs = {key: _Input(leaf, saved) for key, leaf in distinct.items()}
        self._distinct = [*inputs.values()]
        others = {id(leaf): leaf for leaf in leaves if not isinstance(leaf, Tensor)}
        self.objects = stand_ins.of(others.values())
        inputs_and_objects = {**inputs, **dict(zip(others, self.objects, strict=True))}
        self._leaves = [inputs_and_objects.get(id(leaf), leaf) for leaf in leaves]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among them, without weights."""
        return [leaf.tensor for leaf in self._leaves if isinstance(leaf, _Input)]

    @property
    def outlive_the_call(self) -> bool:
        """False for what `torch.func` wraps, and unwraps when its transform is over."""
        return all(storage_key(tensor) or tensor.layout is not torch.strided for tensor in self.tensors)

    @property
    def are_changed(self) -> bool:
        """Whether one of them was changed in place since."""
        return any(isinstance(leaf, _Input) and leaf.is_changed for leaf in self._leaves)

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments once more."""
        again = {id(one): one.again() for one in self._distinct}
        leaves = [again.get(id(leaf), leaf) for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs


class _Input:
    """A tensor that a unit was called with, cut off from its graph.

    So it does not hold a node that holds it, once it has been changed in place, and hooks that the forward puts on it
    do not fire a second time.
    """

    def __init__(self, tensor: Tensor, saved: SavedTensors) -> None:
        self.tensor = tensor.detach()
        self._requires_grad = tensor.requires_grad
        self._saved = saved
        self._packed = saved.pack(self.tensor)

    @property
    def is_changed(self) -> bool:
        return isinstance(self._packed, Kept) and self._packed.is_changed

    def again(self) -> Tensor:
        return self._saved.unpack(self._packed).detach().requires_grad_(self._requires_grad)


def _checksum(tensor: Tensor) -> int:
    if tensor.dtype is torch.uint8:  # a kernel's workspace (LSTM), parts of which nobody has written to
        return 0
    return int(tensor.detach().contiguous().flatten().view(torch.uint8).sum(dtype=torch.int64))


def _is_saved_by_a_checkpoint() -> bool:
    """Whether the tensor that is being packed is an input that a `torch.utils.checkpoint`, of either kind, keeps."""
    frame: FrameType | None = sys._getframe(2)
    ours = (SavedTensors.__module__, HostParameter.__module__, watch_functions.__module__)
    between = (*ours, "torch.autograd.function")
    while frame is not None and _module_of(frame) in between:
        frame = frame.f_back
    return frame is not None and _module_of(frame) == "torch.utils.checkpoint"


def _module_of(frame: FrameType) -> str | None:
    return frame.f_globals.get("__name__")  # code that torch.compile has generated is in no module


def _is_data(value: Any) -> bool:
    """Whether an input is a tensor that autograd could save, and not a weight, which stands for itself."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference()


def _changed_since(name: str) -> str:
    return (
        f"an input or a weight of {name!r} has been modified by an inplace operation between forward and backward, so "
        "its forward cannot run again"
    )


def _computed_something_else(name: str) -> str:
    return (
        f"{name!r} has computed something else when its forward ran again in backward than the first time, because of "
        "something outside of it that has changed in between"
    )
