"""Side effects of a forward, recorded so that it can run again as if for the first time.

BatchNorm updates its running statistics, spectral_norm goes one power iteration further, a key/value cache grows, a
user's hook appends to a list, a layer counts its calls. A forward that runs again in backward must begin with all of
that as it was before the first run, and must not leave a second trace.

What may change is found by looking: at the module's attributes and buffers, at attributes of its weights, at what its
hooks hold, at the objects among its inputs. All of these may lead to other modules: a hook that is a method of the
model leads to everything but the other units, which are left out, since it would take too long to look at all units in
each unit's call. For lists, dicts, sets and attributes a shallow copy shows what has changed; a module's own tensors
are copied whole, since they change in place, unless they are very large. After the forward, copies of tensors that it
has not changed are forgotten. All other contents are still remembered, as code between forward and backward may change
what the forward has read: a temperature that is annealed, a cache that the model fills with what its blocks have
computed. What no object leads to is not seen: global variables, files. An iterator cannot be put back.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from io import IOBase
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.activations.overlapping import copies_that_overlap
from sp_lightning.pipeline.activations.places import (
    PLAIN,
    Place,
    attributes_of_module,
    attributes_of_weights,
    is_user_defined,
    places_of,
)
from sp_lightning.pipeline.units.tensors import tensor_bytes

_SMALL = 1 << 16  # bytes; running statistics are smaller, masks and position tables larger
MAX_OBJECTS = 20_000  # in attributes; a data set has more, and looking at them would take longer than a step


class _Held(NamedTuple):
    """A tensor as it was before the forward, with a copy if it belongs to the module or has no version counter."""

    tensor: Tensor
    version: int | None
    copy: Tensor | None

    @property
    def may_have_changed(self) -> bool:
        """Whether the tensor may have changed, which is assumed of every tensor with a small copy.

        BatchNorm updates its running statistics without incrementing their version.
        """
        is_small = self.copy is not None and tensor_bytes(self.copy) <= _SMALL
        return is_small or self.version is None or self.tensor._version != self.version


class SideEffects:
    """The side effects of one forward. Create it before that forward, and call `conclude` after it.

    Args:
        module: The module whose forward it is.
        inputs: The arguments of that forward.
        largest: Size in bytes of the largest tensor of the module that is copied; if a larger one is changed, that
            cannot be undone.
        units: Identities of modules that are not looked at as parts of another one.
        trusts_versions: Whether every change of a large tensor counts in its version, unlike `buffer.data.mul_(0.9)`;
            None if that is to be found out, by comparing contents, for which the host waits.

    Attributes:
        trusts_versions: The same; what was found out after `conclude`.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Iterable[Any] = (),
        largest: int = 1 << 22,
        units: Set[int] = frozenset(),
        trusts_versions: bool | None = None,
    ) -> None:
        self.trusts_versions = trusts_versions
        self._largest = largest
        self._before: list[tuple[Place, Any]] = []  # places and their contents
        self._held: dict[int, _Held] = {}
        self._changed: list[Tensor] = []  # in place, by the forward
        self._copies: dict[int, Tensor] = {}  # of the changed tensors, by their identity
        self._seen: set[int] = set()
        self._units = units
        self._changes_contents = False
        self._has_scripted_buffers = False
        self._holds_iterators = False
        self._elsewhere = 0  # how many hooks and other modules have led to what is looked at
        self._looked_at = 0
        self._modes: list[tuple[nn.Module, bool]] = []
        own = list(module.modules())
        self._seen.update(map(id, own))  # first, as the model that one of them leads to leads to all of them
        for inner in own:
            self._look_at_module(inner)
        self._look_into(attributes_of_weights(own), own=True)
        self._elsewhere += 1
        for inner, _ in self._modes:  # which grows by the modules that hooks lead to
            for hooks in (inner._forward_pre_hooks, inner._forward_hooks):  # a forward may register more, once
                self._look_into_dict(hooks, own=False)
            for marks in (
                inner._forward_pre_hooks_with_kwargs,
                inner._forward_hooks_with_kwargs,
                inner._forward_hooks_always_called,
            ):
                if marks:  # a hook that is gone in backward takes its mark along
                    self._look_into_dict(marks, own=False)
        self._elsewhere -= 1
        self._watched: list[_Held] = []
        self.include(inputs)

    @property
    def found(self) -> Set[int]:
        """The objects that were looked at, by identity; empty after `conclude`."""
        return self._seen

    def include(self, inputs: Iterable[Any]) -> None:
        """Look at these arguments of the forward as well; call it before the forward."""
        others = set(self._held)
        for value in inputs:
            self._look_at(value, own=False)
        self._watched += [held for key, held in self._held.items() if key not in others]

    def conclude(self) -> str | None:
        """Find out what the forward has changed, and forget the copies of all other tensors.

        Returns:
            The reason why the changes cannot be undone, in words; None if they can.
        """
        changed = self._changed_tensors()
        if self._looked_at > MAX_OBJECTS:
            return f"has more than {MAX_OBJECTS} objects in its attributes"
        self._held.clear()
        self._seen.clear()
        self._changed = [held.tensor for held in changed if held.copy is not None]
        self._copies = {id(held.tensor): held.copy for held in changed if held.copy is not None}
        self._changes_contents = any(not place.is_same(content, place.read()) for place, content in self._before)
        lost = [held.tensor for held in changed if held.copy is None]
        if lost:
            return f"changes a tensor of shape {list(lost[0].shape)} in place"
        if self._holds_iterators:
            return "has an iterator, which cannot be put back"
        return "has a scripted part with buffers" if self._has_scripted_buffers else None

    def _changed_tensors(self) -> list[_Held]:
        """Return the tensors that may have changed."""
        changed = [held for held in self._held.values() if held.may_have_changed]
        if self.trusts_versions:
            return changed
        others = [held for held in self._held.values() if held.copy is not None and not held.may_have_changed]
        if self.trusts_versions is None:
            others = [held for held in others if not torch.equal(held.tensor, cast("Tensor", held.copy))]
            self.trusts_versions = not others
        return changed + others

    @property
    def cannot_be_undone(self) -> bool:
        """Whether a tensor that an object among the inputs leads to was changed in place since."""
        return any(held.tensor._version != held.version for held in self._watched)

    def _differing(self, before: list[tuple[Place, Any]]) -> list[tuple[Place, Any]]:
        return [
            (place, content)
            for place, content in before
            if not place.is_same(content, place.read()) or self._has_copies(place.values(content))
        ]

    def _has_copies(self, values: Iterable[Any]) -> bool:
        return bool(self._copies) and any(id(value) in self._copies for value in values)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore the state from before the forward for the duration of the block; then return to the present one.

        Others may have put something back in the meantime, such as a model that clears what its blocks have collected.
        What runs in the block will change it once more.
        """
        copies = copies_that_overlap(self._changed, self._copies)
        before = self._differing(self._before)
        # a forward that changed no contents will not do so in the block, either
        now = [(place, place.read()) for place, _ in (self._before if self._changes_contents else before)]
        modes = [(module, module.training) for module, _ in self._modes]
        try:
            for place, content in before:
                place.write(place.with_copies(content, copies))
            _set_modes(self._modes)
            yield
        finally:
            for place, content in self._differing(now):
                place.write(content)
            _set_modes(modes)

    # ------------------------------------------------------------------------------------------------- looking around

    def _look_at_module(self, module: nn.Module) -> None:
        self._modes.append((module, module.training))
        if isinstance(module, torch.jit.ScriptModule):  # its buffers are in C++, where nothing can stand in for them
            self._has_scripted_buffers |= any(True for _ in module.buffers(recurse=False))
            return
        self._look_into(attributes_of_module(module), own=True)
        if module._modules:
            # each of them is looked at by itself
            self._before += [(place, place.read()) for place in places_of(module._modules)]
        if module._buffers:
            self._look_into_dict(module._buffers, own=True)

    def _look_at(self, value: Any, own: bool) -> None:
        """Record what an object contains, and look at that in turn.

        Args:
            value: The object.
            own: Whether it belongs to a module, so that its tensors are worth a copy. Those of an input or a hook are
                not: a cache may be large.
        """
        if id(value) in self._seen or self._looked_at > MAX_OBJECTS:
            return
        self._seen.add(id(value))
        self._looked_at += 1
        if isinstance(value, Tensor):
            self._hold(value, own)
        elif isinstance(value, nn.Module):  # which is not below this one: a hook's, or the model
            self._elsewhere += 1
            self._look_at_module(value)
            self._look_into(attributes_of_weights([value]), own=True)
            for child in value._modules.values():
                if id(child) not in self._units:
                    self._look_at(child, own)
            self._elsewhere -= 1
        elif isinstance(value, (tuple, frozenset)):
            for item in value:
                self._look_at(item, own and not isinstance(item, Tensor))  # a copy could not take its place
        elif isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self._look_at(part, own)
        elif isinstance(value, types.MethodType):
            for half in (value.__self__, value.__func__):
                self._look_at(half, own)
        elif isinstance(value, types.FunctionType) and is_user_defined(value):
            for holder in (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)):
                self._look_at(holder, own)
        elif isinstance(value, weakref.ref):
            referent = weakref.ref.__call__(value)  # of a `WeakMethod`, the object; its own call makes a method of it
            self._look_at(referent, own and not isinstance(referent, Tensor))
        elif places := places_of(value):
            for place in places:
                self._look_into(place, own)
        elif isinstance(value, Iterator) and not isinstance(value, IOBase):
            # a hook may lead to the model or a callback, and these to the Trainer, which has iterators of its own
            self._holds_iterators |= not self._elsewhere

    def _look_into_dict(self, content: dict[Any, Any], own: bool) -> None:
        for place in places_of(content):
            self._look_into(place, own)

    def _look_into(self, place: Place, own: bool) -> None:
        content = place.read()
        self._before.append((place, content))
        for value in place.values(content):
            if type(value) not in PLAIN:
                self._look_at(value, own)

    def _hold(self, tensor: Tensor, own: bool) -> None:
        has_version = not tensor.is_inference()
        if isinstance(tensor, nn.Parameter) or not (has_version or torch.is_inference_mode_enabled()):
            return  # an inference tensor cannot be changed outside of inference mode
        is_worth_it = (own or not has_version) and tensor.grad_fn is None and tensor_bytes(tensor) <= self._largest
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad) if is_worth_it else None
        self._held[id(tensor)] = _Held(tensor, tensor._version if has_version else None, copy)


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training
