"""The engine's saved-tensor hooks: they have autograd save a handle in place of every weight.

Autograd saves a weight as the Parameter, as a view of it (`W.t()`) or not at all, depending on the operation. Every
tensor that shares memory with a twin is replaced by a handle. When backward unpacks a handle, it first makes sure that
the weight is on the device. So the engine may give a slot away between forward and backward, and backward brings a
weight that is missing.

Saved-tensor hooks switch off autograd's own check for in-place changes. So the engine does that check, for weights and
for everything else. Autograd calls only the innermost pair of hooks, so the engine passes tensors that are not weights
on to the pair below. A checkpoint gets weights, too: it runs a forward again when the first tensor is asked for and
stops after the last one, and backward reads weights as they are then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol
from weakref import ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.pipeline.activations.offload import Meter, Offloaded, Offloader
from sp_lightning.pipeline.torch_private import SavedTensorHooks, storage_key, top_saved_tensor_hooks
from sp_lightning.pipeline.weights.weight import Handle, Twin, outdated_graph_error


class Recording(Protocol):
    """A unit's call that notes what it saves, and can save it again."""

    saved: list[ref[Kept]]

    def repeat(self) -> None:
        """Have every tensor that was dropped, and is still needed, take its place again."""


class _Backward(Protocol):
    """The object that brings weights for backward."""

    def bring_for_backward(self, twin: Twin) -> None:
        """Bring a weight that backward unpacks to the device."""


class Kept:
    """A saved tensor that is held as it is, with the version that autograd would have checked, and counted."""

    __slots__ = ("__weakref__", "_kind", "charge", "recording", "tensor", "version")

    def __init__(self, tensor: Tensor, meter: Meter, recording: Recording | None) -> None:
        self.recording = recording  # the call that can save it again once it was dropped
        self.charge = meter.hold(tensor) if meter.counts else None
        # the tensor without its node, which may be the one that saves it: a cycle through C++ would never be freed
        self.tensor: Tensor | None = tensor.detach() if tensor.requires_grad else tensor
        self.version = tensor._version
        if recording is not None:
            recording.saved.append(ref(self))

    @property
    def is_changed(self) -> bool:
        """Whether the tensor has been changed in place since it was saved."""
        return self.tensor is not None and self.tensor._version != self.version

    def fill(self, tensor: Tensor, meter: Meter) -> None:
        """Hold another tensor in place of the dropped one."""
        self.tensor = tensor
        self.version = tensor._version
        self.charge = meter.hold(tensor)

    def drop(self) -> None:
        """Release the tensor; another one of its shape and dtype will take its place."""
        if self.tensor is not None:
            self._kind = self.tensor.shape, self.tensor.dtype
            self.tensor = None
            self.charge = None

    def misses(self, tensor: Tensor) -> bool:
        """Tell whether the tensor was dropped, and another one may take its place."""
        return self.tensor is None and self._kind == (tensor.shape, tensor.dtype)


class SavedTensors:
    """The engine's pair of saved-tensor hooks."""

    def __init__(self, meter: Meter, offloader: Offloader) -> None:
        self.meter = meter
        self.twins: dict[int, Twin] = {}  # by the identity of their memory
        # the call under way; None if none of its tensors is to be dropped
        self.recording: Recording | None = None
        self.backward: _Backward | None = None
        self._offloader = offloader

    def pushed(self) -> AbstractContextManager[Any]:
        """Return a scope in which the hooks are pushed, if they are not on top already.

        This happens even while grad mode is off. A validation step may switch it on, and then not only calls of units
        save weights: a double backward does, too.
        """
        outer = top_saved_tensor_hooks()
        if outer is None:
            return saved_tensors_hooks(self.pack, self.unpack)
        on_top = getattr(outer[0], "func", outer[0])
        if getattr(on_top, "__self__", None) is self:
            return nullcontext()
        return saved_tensors_hooks(partial(self._pack_over, outer), self.unpack)

    def are_alone(self) -> bool:
        """Tell whether no other hooks, a user's or a checkpoint's, decide about saved tensors now."""
        outer = top_saved_tensor_hooks()
        return outer is None or getattr(outer[0], "__self__", None) is self

    def close(self) -> None:
        """Drop references to the module: autograd may hold the hooks, with all that they have packed."""
        self.twins = {}
        self.backward = None

    def pack(self, tensor: Tensor) -> Handle | Offloaded | Kept:
        """Return the object that autograd saves in place of a tensor."""
        twin = self.twins.get(storage_key(tensor))
        if twin is not None:
            return Handle(twin, tensor)
        offloaded = self._offloader.pack(tensor) if self._offloader.open else None
        return offloaded or Kept(tensor, self.meter, self.recording)

    def _pack_over(self, outer: SavedTensorHooks, tensor: Tensor) -> Handle | Callable[[], Tensor]:
        """Return the object that autograd saves where other hooks were on top; these get all tensors but weights.

        A weight may leave the device before backward, and other hooks cannot know; only a checkpoint does not keep it.
        """
        pack, unpack = outer
        is_checkpoint = getattr(pack, "__module__", "") == "torch.utils.checkpoint"
        twin = None if is_checkpoint else self.twins.get(storage_key(tensor))
        return partial(unpack, pack(tensor)) if twin is None else Handle(twin, tensor)

    def unpack(self, packed: Any) -> Tensor:
        """Return the saved tensor, ready for backward to read."""
        tensor: Tensor
        if type(packed) is Kept:
            if packed.tensor is None:
                assert packed.recording is not None
                packed.recording.repeat()
            assert packed.tensor is not None
            if packed.tensor._version != packed.version:
                raise _changed_in_place(f"a tensor of shape {list(packed.tensor.shape)}")
            return packed.tensor
        if type(packed) is Handle:
            tensor = packed.alias
            # the twin that is there now, because the leaf may have another place by now
            twin = self.twins.get(packed.key)
            if twin is None:  # all weights have other places since
                raise outdated_graph_error(packed.name)
            if packed.is_changed:
                raise _changed_in_place(packed.name)
        elif isinstance(packed, Offloaded):
            if self.backward is None:  # the module was detached since
                raise outdated_graph_error("what a unit has saved")
            tensor = self._offloader.unpack(packed)
            if packed.is_changed:
                raise _changed_in_place(f"a tensor of shape {list(tensor.shape)}")
            return tensor
        else:  # the hooks below have packed it
            tensor = packed()
            twin = self.twins.get(storage_key(tensor))
        if twin is not None:
            assert self.backward is not None
            self.backward.bring_for_backward(twin)
        return tensor


def _changed_in_place(name: str) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {name} was changed between forward and backward. Enable anomaly detection to "
        "find the operation, with torch.autograd.set_detect_anomaly(True)."
    )
