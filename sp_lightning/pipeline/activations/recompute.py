"""Recomputation: a unit's forward runs again in backward, so that its saved tensors need not be held.

[Note: decided when a call is over]
While a unit's forward runs, everything that autograd saves is held. The engine decides only when the call is over, and
all of it has been seen, whether to drop these tensors and keep the inputs alone. So it need not know in advance what a
forward must not do twice: a forward that changes its inputs in place, or appends to a list, keeps its saved tensors
from its first call on. The peak is the same as if tensors had been dropped at once, because backward needs a whole unit
as well. `torch.utils.checkpoint` around a unit would have to decide at the beginning.

[Note: run again]
Backward asks for the first tensor that was dropped. The engine calls the unit again, through its gate, as a user's own
checkpoint would call it: with the same inputs, and the promises of contract.py. The tensors that the second forward
saves take the place of the dropped ones, in the same order, and the forward ends as soon as none is missing. The first
two times it runs to its end, and its output is compared with that of the first forward. The graph of the second forward
is thrown away; gradients flow through the first.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from sp_lightning.pipeline.activations import offload
from sp_lightning.pipeline.activations.contract import (
    Inputs,
    Snapshot,
    Surroundings,
    are_other,
    numbers_of,
    requiring_gradients,
)
from sp_lightning.pipeline.activations.offload import Footprint
from sp_lightning.pipeline.activations.saved import Kept, SavedTensors
from sp_lightning.pipeline.lanes.backend import Backend, is_out_of_memory
from sp_lightning.pipeline.lanes.lanes import Kind
from sp_lightning.pipeline.operations import Args, Kwargs, tensors_in
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import (
    scope_that_ends_before_backward,
    storage_key,
    without_torch_function,
)
from sp_lightning.pipeline.units.unit import Member
from sp_lightning.pipeline.weights.weight import Life, Twin, outdated_graph_error

# After this many looks in a row that find no change, a member's calls are not looked at any more. Outputs of second
# forwards are compared with those of the first this many times. A first call may make things that are used from then
# on; a change in a later call is a habit.
_LOOKS = 2


@dataclass
class SecondForwards:
    """The findings from calls about running forwards again, by the names of members."""

    saved: SavedTensors
    backend: Backend
    stats: Stats
    calls: Counter[str] = field(default_factory=Counter)  # calls that have ended
    # looks in a row that have found nothing
    clean_looks: Counter[str] = field(default_factory=Counter)
    # second forwards whose outputs were compared with the first's
    comparisons: Counter[str] = field(default_factory=Counter)
    # members for which something was in the way; they keep their saved tensors from then on
    unrepeatable: set[str] = field(default_factory=set)


class UnitCall:
    """One call of a member: the tensors that its forward saved, and a way to run it again.

    It is held by the graph, and refers to saved tensors weakly, so that autograd frees each when its node has run; and
    to the member, on which a graph may be kept (see [Note: what nodes hold] in calls/backward.py).
    """

    def __init__(self, shared: SecondForwards, member: Member, args: Args, kwargs: Kwargs) -> None:
        self.saved: list[ref[Kept]] = []  # what the forward saves, in order
        self.may_be_dropped = False  # whether that can be recomputed; decided when the call is over
        self._member = ref(member)
        # twins that the call computes with
        self._twins = [entry.weight.twin for entry in member.entries]
        self._shared = shared
        self._bytes_before = shared.stats.activation_bytes
        self._inputs = Inputs(shared.saved, args, kwargs)
        self._input_bytes = shared.stats.activation_bytes - self._bytes_before
        modules = list(member.module.modules())
        self._look: Snapshot | None = None
        if shared.clean_looks[member.name] < _LOOKS and member.name not in shared.unrepeatable:
            self._look = Snapshot(modules, pytree.tree_leaves((args, kwargs)))
        self._surroundings = Surroundings(shared.backend.device, modules, self._inputs.weights)
        self._state = _state_of(self._twins)
        with without_torch_function():
            self._were_trained = [twin.weight.master.requires_grad for twin in self._twins]
        # numbers of the outputs; None unless the second forward's are compared with them
        self._outputs: list[Tensor] | None = None
        # tensors that the first forward has saved and the second has not yet
        self._gaps: Iterator[Kept | None] = iter(())
        self._missing = 0  # dropped tensors that the second forward has not saved yet

    @property
    def member(self) -> Member:
        """The member, unless the module was detached, or attached again, since."""
        member = self._member()
        if member is None:
            raise outdated_graph_error("what a unit has saved")
        return member

    def _alive(self) -> list[Kept]:
        """Return the saved tensors that autograd still needs, in order."""
        entries = (reference() for reference in self.saved)
        return [kept for kept in entries if kept is not None]

    # ------------------------------------------------------------------------------------------------ first forward

    def conclude(self, output: Any, warns: bool) -> None:
        """Decide, when the forward is over, whether recomputing its tensors is possible, and worth it."""
        self.may_be_dropped = self._is_worth_it(output) and self._is_repeatable(warns)
        if self._look is not None:
            self._shared.stats.host_syncs += self._shared.backend.device.type != "cpu"
            self._look = None
        if not self.may_be_dropped:
            del self._inputs, self._surroundings
            self._input_bytes = 0  # the call does not hold inputs any more
        elif self._shared.comparisons[self.member.name] < _LOOKS:
            self._outputs = numbers_of(output)

    def footprint(self) -> Footprint:
        """Return the memory that the call takes, before any of it is dropped."""
        held = self._input_bytes
        saved = max(0, self._shared.stats.activation_bytes - self._bytes_before - held)
        charges = {kept.charge for kept in self._alive()}
        sizes = [charge.nbytes for charge in charges if charge is not None]
        large = min(sum(size for size in sizes if size >= offload.MIN_OFFLOAD_BYTES), held + saved)
        return Footprint(held, saved, large, held + saved, self.may_be_dropped)

    def drop(self) -> None:
        """Drop the tensors that autograd still needs, if they can be recomputed."""
        if self.may_be_dropped:
            for kept in self._alive():
                kept.drop()

    def _is_worth_it(self, output: Any) -> bool:
        """Tell whether dropping the saved tensors would free memory, and hide nothing."""
        kept = self._alive()
        if any(entry.is_changed for entry in kept):
            return False  # such a change must raise in backward, as it does in plain training
        saved = [storage_key(entry.tensor) for entry in kept if entry.tensor is not None]
        # an output with hidden objects cannot be compared with that of the second forward
        hidden: list[Any] = []
        held_anyway = self._inputs.storages.union(map(storage_key, tensors_in(output, hidden)))
        return not hidden and not held_anyway.issuperset(saved)

    def _is_repeatable(self, warns: bool) -> bool:
        """Tell whether the forward can run again; members for which this was tried often enough are not tried again."""
        name = self.member.name
        shared = self._shared
        obstacle = self._obstacle()
        shared.calls[name] += 1
        shared.clean_looks[name] = shared.clean_looks[name] + 1 if obstacle is None else 0
        if name in shared.unrepeatable:
            return False
        if obstacle is not None and shared.calls[name] > 1:
            shared.unrepeatable.add(name)
            if warns:
                warnings.warn(
                    f"`activations`: {name!r} {obstacle}, so its forward cannot run a second time. "
                    "The tensors that it saves for backward stay on the GPU.",
                    stacklevel=2,
                )
        return obstacle is None

    def _obstacle(self) -> str | None:
        """Return the reason, as a phrase, why the forward cannot run again; None if it can."""
        modules = list(self.member.module.modules())
        if any(module._forward_pre_hooks or module._forward_hooks for module in modules):
            return "has forward hooks"
        if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
            return "has a part that is scripted"  # in C++, nothing can take a buffer's place
        if any(kept.tensor is not None and kept.tensor.is_nested for kept in self._alive()):
            # its shape cannot be compared: it has none, or a new one each time
            return "saves a nested tensor"
        if self._inputs.changeable is not None:
            kind = self._inputs.changeable
            reason = "which may change, or has attributes of its own"
            return f"is given a {kind!r}, {reason} (if it is a cache, set `use_cache=False`)"
        if self._inputs.are_changed:
            return "changes its input in place"
        twins = [entry.weight.twin for entry in self.member.entries]
        # Writes that torch does not count are in no version.
        are_written = any(entry.weight.changes_unseen for entry in self.member.every_entry)
        if are_written or _state_of(twins) != self._state:
            return "changes its weights in place, or how they are sent"
        if self._surroundings.are_changed:
            return "changes a large buffer in place, or a parameter that is not streamed"
        scope = scope_that_ends_before_backward()
        if scope is not None:
            return f"is called under {scope}"
        return None if self._look is None else self._look.obstacle()

    # --------------------------------------------------------------------------------------------------- in backward

    def repeat(self) -> None:
        """Run the forward again until every dropped tensor that is still needed has been recomputed."""
        shared = self._shared
        member = self.member
        # the lowered twin where a weight is no longer lowered: for the other one, autocast would save its own cast
        twins = [twin if twin.life is Life.IN_GRAPHS else twin.weight.twin for twin in self._twins]
        are_changed = self._inputs.are_changed or self._surroundings.are_changed
        if are_changed or _state_of(twins) != self._state:
            raise self._cannot(
                f"an input, a buffer or a weight of {member.name!r} has been modified by an "
                "inplace operation, or sent in another dtype, between forward and backward, so its "
                "forward cannot run again"
            )
        shared.stats.recomputed += 1
        shared.backend.trace.begin_computing(Kind.FORWARD, member.unit_name, is_recomputed=True)
        self._gaps = (reference() for reference in self.saved)
        self._missing = sum(1 for kept in self._alive() if kept.tensor is None)
        args, kwargs = self._inputs.rebuild(shared.saved)
        packing = saved_tensors_hooks(self._fill_gap, lambda tensor: tensor)
        flags: list[tuple[Tensor, bool]] = []
        for twin, was_trained in zip(twins, self._were_trained, strict=True):
            flags += [(twin.weight.master, was_trained), (twin.parameter, was_trained)]
        is_other = False
        try:
            with (
                self._surroundings.restored(),
                requiring_gradients(flags),
                member.computing_with(twins),
                torch.enable_grad(),
                packing,
            ):
                output = member.module(*args, **kwargs)
                if self._outputs is not None:
                    shared.comparisons[member.name] += 1
                    shared.stats.host_syncs += shared.backend.device.type != "cpu"
                    is_other = are_other(self._outputs, numbers_of(output))
        except Exception as error:
            # code in between may have made another exception of `_NothingMissing`
            if is_out_of_memory(error):
                raise
            if self._missing or self._outputs is not None:
                raise self._cannot(
                    f"the forward of {member.name!r} failed when it ran again in backward "
                    f"({type(error).__name__}: {error}). It is cut off there from the graph of "
                    "its inputs"
                ) from error
        if self._missing or is_other:
            raise self._cannot(
                f"{member.name!r} has computed something else when its forward ran again in backward. "
                "Something that it depends on has changed in between, such as an attribute, a global "
                "variable, a closure, or a class attribute"
            )
        shared.backend.trace.begin_computing(Kind.BACKWARD, member.unit_name)

    def _cannot(self, reason: str) -> RuntimeError:
        """Have later calls of the member hold their saved tensors; return the error for this one."""
        self._shared.unrepeatable.add(self.member.name)
        return RuntimeError(f"{reason}. Use `activations='keep'` or `'offload'`, or change it after backward.")

    def _fill_gap(self, tensor: Tensor) -> Tensor:
        """Put the tensors of the second forward, in order, in place of the dropped ones."""
        kept = next(self._gaps, None)
        tensor = tensor.detach()  # or the second graph would keep itself alive (see `Kept`)
        if kept is not None and kept.misses(tensor):
            kept.fill(tensor, self._shared.saved.meter)
            self._missing -= 1
            if not self._missing and self._outputs is None:
                raise _NothingMissing
        return tensor


def _state_of(twins: Iterable[Twin]) -> list[tuple[int, int]]:
    """Return all that changes with weights: their leaves (if no longer lowered), and their values.

    Those that stay on the device are plain parameters, which `Surroundings` watches.
    """
    with without_torch_function():
        return [(id(twin.parameter), twin.version()) for twin in twins]


class _NothingMissing(Exception):
    """Ends a second forward once all dropped tensors have been recomputed."""
