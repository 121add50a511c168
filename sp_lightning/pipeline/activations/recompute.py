"""Recomputation: a unit's forward runs again in backward, so that what it saves need not be held.

[Note: decided when a call is over]
While a unit's forward runs, everything that autograd saves is held. Only when the call is over, and all of it has been
seen, is it decided whether to drop these tensors and keep the inputs alone. So nothing has to be known in advance
about what a forward must not do twice: one that changes its inputs in place, or checkpoints a part of itself, keeps
what it has saved, from its first call on and for this call alone. The peak is the same as if tensors had been dropped
at once, because backward needs a whole unit as well.

`torch.utils.checkpoint` around a unit would have to decide at the beginning. It would also run a part that the unit
checkpoints itself three times, let BatchNorm count every batch twice, and not allow `ctx.saved_tensors` to be read
twice.

[Note: run again]
Backward asks for the first tensor that was dropped. The unit is called again, through its gate, as a user's own
checkpoint would call it: with the same inputs, RNG states, autocast settings and attributes. The tensors that the
second forward saves take the place of the dropped ones, in the same order, and the forward ends as soon as none is
missing. The graph of the second forward is thrown away; gradients flow through the first.

[Note: inputs on the host]
What a call holds are its inputs, and with many units or long sequences these are most of what is left. They can be
offloaded like anything else that is saved (offload.py): packed once the call has been entered, for they belong to what
its unit sends when it is left, and fetched for the second forward one unit ahead.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.pipeline.activations.effects import SideEffects
from sp_lightning.pipeline.activations.footprint import Footprint, bytes_worth_a_copy
from sp_lightning.pipeline.activations.inputs import Inputs
from sp_lightning.pipeline.activations.saved import Kept, SavedTensors
from sp_lightning.pipeline.activations.stand_ins import StandIns
from sp_lightning.pipeline.activations.surroundings import Surroundings
from sp_lightning.pipeline.lanes.backend import is_out_of_memory
from sp_lightning.pipeline.torch_private import scope_that_ends_before_backward, storage_key, without_torch_function
from sp_lightning.pipeline.units.tensors import tensors_in
from sp_lightning.pipeline.weights.guard import HostParameter
from sp_lightning.pipeline.weights.units import Member
from sp_lightning.pipeline.weights.weight import Twin, outdated_graph_error

_SAMPLED = 1024  # values of each parameter, or nearly twice as many


class CannotRunAgain(RuntimeError):
    """A unit's forward has to run again in backward, but cannot: mostly, something that it depends on has changed.

    Args:
        reason: What has happened.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}. Use `activations='keep'` or `'offload'`, or change it after backward.")


class UnitCall:
    """One call of a unit: what its forward saved, and how to run it again.

    The graph holds the call. The call holds saved tensors by weak references only, so that autograd frees each
    of them when its node has run.

    Args:
        member: The member that is called.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
        saved: The engine's saved-tensor hooks.
        device: The device that forward and backward run on.
        on_repeat: Called with this object when its forward runs again; returns a context manager around that run.
        effects: Records the side effects of the forward.
        checks: Whether to compare checksums of what the two forwards save.
        may_repeat: Whether the forward may run again; if not, nothing is dropped.
        packs_later: Whether `pack_inputs` is called once the call has been entered, so that inputs can be offloaded.

    Attributes:
        member: The member that is called.
        footprint: The device memory that the call takes; set by `conclude`.
    """

    def __init__(
        self,
        member: Member,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        saved: SavedTensors,
        device: torch.device,
        on_repeat: Callable[[UnitCall], AbstractContextManager[None]],
        effects: SideEffects,
        checks: bool,
        may_repeat: bool,
        packs_later: bool,
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
        self._saves_nested = False
        self._effects = effects
        self._inputs = Inputs(saved, args, kwargs, StandIns(self._effects.found))
        self._effects.include(self._inputs.objects)
        if not packs_later:
            self.pack_inputs()
        self._surroundings = Surroundings(device)
        with without_torch_function():
            self._weights = [(twin, twin.changes()) for twin in {entry.weight.twin for entry in member.entries}]
        self._on_device = [(parameter, parameter._version) for parameter in member.parameters_on_device]
        # nobody else looks at their values, and to compare them the host waits for the device
        looks = not effects.trusts_versions
        self._samples = [(parameter, _sample(parameter)) for parameter in member.parameters_on_device if looks]

    # ------------------------------------------------------------------------------------------------ first forward

    def pack_inputs(self) -> None:
        """Have the inputs held for the second forward, on the device or on the host."""
        self._inputs.pack()
        self._held = self._meter.bytes - self._bytes_before

    def pack(self, tensor: Tensor) -> Kept:
        """Hold a tensor until the call is over."""
        self._checkpoints_itself = self._checkpoints_itself or _is_saved_by_a_checkpoint()
        self._saves_nested = self._saves_nested or tensor.is_nested
        kept = Kept(tensor, self._meter)
        self._kept.append(weakref.ref(kept))
        return kept

    def conclude(self, output: Any) -> str | None:
        """Drop what the forward, which is over, has saved, if that can be recomputed and is worth it.

        Returns:
            The obstacle to warn of, in words; None if there is none, or if nothing would have been dropped anyway.
        """
        obstacle = self._obstacle()
        tensors = [kept.tensor for _, kept in self._alive() if kept.tensor is not None]
        known = {storage_key(tensor) for tensor in [*self._inputs.tensors, *tensors_in(output)]}
        is_worth_it = any(storage_key(tensor) not in known for tensor in tensors)
        is_possible = self._is_possible()
        repeatable = obstacle is None and is_worth_it and is_possible
        self.footprint = self._measure_footprint(tensors, repeatable)
        if repeatable:
            self._trained = self._trained_weights()
            if self._checks:
                self._sums = {index: _checksum(kept.get(), self._saved.twins) for index, kept in self._alive()}
            self.drop()
            self._inputs.release()
            return None
        del self.member, self._inputs, self._surroundings, self._effects
        return obstacle if is_worth_it and is_possible else None

    def _obstacle(self) -> str | None:
        """Return what the forward has done that keeps it from running again, in words; None if it has not."""
        obstacle = self._effects.conclude()
        looks_other = any(not torch.equal(_sample(parameter), before) for parameter, before in self._samples)
        if looks_other or self._weights_are_changed():
            self._effects.trusts_versions = False  # look again in the next call
            obstacle = "changes its weights in place"
        if self._inputs.are_changed:
            obstacle = "changes its input in place"
        if self._saves_nested:  # its shape cannot be compared: it has none, or a length that is new each time
            obstacle = "saves a nested tensor"
        scope = scope_that_ends_before_backward()
        return obstacle if scope is None else f"is called under {scope}"

    def _is_possible(self) -> bool:
        """Tell whether the forward could run again; if not, the user need not be told why."""
        # what was changed after it was saved must raise in backward, as it does in plain training
        is_wrong = any(kept.is_changed for _, kept in self._alive())
        has_new_twins = any(twin.weight.twin is not twin for twin, _ in self._weights)  # no longer lowered, say
        hindered = is_wrong or has_new_twins or self._checkpoints_itself
        return self._may_repeat and self._inputs.outlive_the_call and not hindered

    def drop(self) -> None:
        """Release all tensors that can be recomputed."""
        for _, kept in self._alive():
            kept.drop()

    def _measure_footprint(self, tensors: list[Tensor], repeatable: bool) -> Footprint:
        held, saved = self._held, max(0, self._meter.bytes - self._bytes_before - self._held)
        large, large_inputs = (
            min(bytes_worth_a_copy(tensors), held + saved),
            min(bytes_worth_a_copy(self._inputs.tensors), held),
        )
        return Footprint(held, saved, large, held + saved, repeatable, large_inputs)

    def _weights_are_changed(self) -> bool:
        with without_torch_function():
            return any(twin.changes() != changes for twin, changes in self._weights) or any(
                parameter._version != version for parameter, version in self._on_device
            )

    def _trained_weights(self) -> set[Twin]:
        """Return the weights that require a gradient: what a forward saves depends on them."""
        with without_torch_function():
            return {twin for twin, _ in self._weights if twin.weight.master.requires_grad}

    def _alive(self) -> Iterator[tuple[int, Kept]]:
        for index, reference in enumerate(self._kept):
            if (kept := reference()) is not None:
                yield index, kept

    # --------------------------------------------------------------------------------------------------- in backward

    def let_go(self) -> None:
        """Refer to the module no longer: autograd may hold what was dropped, and so this call (see Announcement)."""
        outdated = outdated_graph_error(f"the inputs of {self.member.name!r}")

        def refuse(_: UnitCall) -> NoReturn:
            raise outdated

        vars(self).clear()
        self._on_repeat = refuse

    def unpack(self, kept: Kept) -> Tensor:
        """Return a saved tensor, recomputing it if it was dropped."""
        if kept.tensor is None:
            self._repeat()
        return kept.get()

    def _repeat(self) -> None:
        """Run the forward again until every dropped tensor that is still needed has been recomputed."""
        with self._on_repeat(self):
            if self.has_changed:
                raise CannotRunAgain(_changed_since(self.member.name))
            refill = _Refill(self._kept)
            args, kwargs = self._inputs.rebuild()
            with (
                self._surroundings.restored(),
                self._effects.undone(),
                self._with_original_leaves(),
                torch.enable_grad(),
                saved_tensors_hooks(refill.pack, lambda tensor: tensor),
            ):
                try:
                    self.member.module(*args, **kwargs)
                except Exception as error:  # code in between may have made another exception of `_NothingMissing`
                    if is_out_of_memory(error):
                        raise
                    if refill.missing:
                        raise CannotRunAgain(_failed(self.member.name, error)) from error
            if refill.missing or (self._checks and self._differs()):
                raise CannotRunAgain(_computed_something_else(self.member.name))

    @property
    def has_changed(self) -> bool:
        """Whether something that the forward has read was changed in place since, so that it cannot run again."""
        effects = self._inputs.are_changed or self._effects.cannot_be_undone
        weights = self._weights_are_changed() or self._trained != self._trained_weights()
        return effects or weights

    @contextmanager
    def _with_original_leaves(self) -> Iterator[None]:
        """Put back the leaves that the first forward used: a weight lowered then may be sent as it is by now."""
        others = {
            id(twin.weight): twin for twin, _ in self._weights if twin.parameter is not twin.weight.twin.parameter
        }
        entries = [entry for entry in self.member.entries if id(entry.weight) in others]
        now = [entry.current for entry in entries]
        for entry in entries:
            twin = others[id(entry.weight)]
            self._saved.require(twin)
            entry.current = twin.parameter
        try:
            yield
        finally:
            for entry, parameter in zip(entries, now, strict=True):
                entry.current = parameter

    def _differs(self) -> bool:
        return any(_checksum(kept.get(), self._saved.twins) != self._sums[index] for index, kept in self._alive())


class _NothingMissing(Exception):
    """Ends a second forward once all dropped tensors have been recomputed."""


class _Refill:
    """Fills the gaps that dropped tensors have left with those that a second forward saves."""

    def __init__(self, kept: list[weakref.ref[Kept]]) -> None:
        self._kept = iter(kept)
        self.missing = sum((one := reference()) is not None and one.tensor is None for reference in kept)

    def pack(self, tensor: Tensor) -> Tensor:
        reference = next(self._kept, None)
        kept = None if reference is None else reference()
        tensor = tensor.detach()  # or the second graph would keep itself alive (see `Kept`)
        if kept is not None and kept.tensor is None and kept.fill(tensor):
            self.missing -= 1
            if not self.missing:
                raise _NothingMissing
        return tensor


def _sample(parameter: nn.Parameter) -> Tensor:
    values = parameter.detach().flatten()
    return values[:: max(1, values.numel() // _SAMPLED)].clone()


def _checksum(tensor: Tensor, twins: Container[int]) -> int:
    if tensor.dtype is torch.uint8:  # a kernel's workspace (LSTM), parts of which are uninitialized
        return 0
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if storage_key(tensor) in twins:  # a weight, which may have left the device
        return 0
    return int(tensor.detach().contiguous().flatten().view(torch.uint8).sum(dtype=torch.int64))


def _is_saved_by_a_checkpoint() -> bool:
    """Tell whether the tensor being packed is an input that `torch.utils.checkpoint`, reentrant or not, saves."""
    frame: FrameType | None = sys._getframe(2)
    ours = (SavedTensors.__module__, HostParameter.__module__)
    between = (*ours, "torch.autograd.function")
    while frame is not None and _module_of(frame) in between:
        frame = frame.f_back
    return frame is not None and _module_of(frame) == "torch.utils.checkpoint"


def _module_of(frame: FrameType) -> str | None:
    return frame.f_globals.get("__name__")  # code that torch.compile generated belongs to no module


def _changed_since(name: str) -> str:
    return (
        f"an input or a weight of {name!r} has been modified by an inplace operation, or frozen, between forward and "
        "backward, so its forward cannot run again"
    )


def _failed(name: str, error: Exception) -> str:
    return (
        f"the forward of {name!r} failed when it ran again in backward ({type(error).__name__}: {error}), where it is "
        "cut off from the graph that its inputs came from"
    )


def _computed_something_else(name: str) -> str:
    return (
        f"{name!r} has computed something else when its forward ran again in backward, because something outside of it "
        "has changed in between"
    )
