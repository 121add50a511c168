"""Segments: host memory of the weights of a unit that are sent in one copy, its frozen ones or its trained ones.

Their gradients are sent in one copy, too (`GradientLayout`).

A segment goes to the device in one copy, so everything that it sends lies together. Weights that are sent in the dtype
in which they are kept are sent from where their masters lie. If autocast lowers a segment, copies in the dtype that is
sent lie together next to the masters. They are written once per change of the masters.

[Note: epochs]
A segment's epoch grows with every change of its masters: an optimizer's step, a write that torch counts, an alias that
code takes and may write to (`p.data`), other memory (`p.data = ...`). The segment notes which epoch is in its place on
the device. So when adapters are updated, a frozen base that is still there is not sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sp_lightning.pipeline.host_memory import release
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.operations import untracked
from sp_lightning.pipeline.processes.box import Box, written_by_follower
from sp_lightning.pipeline.stats import Progress
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.buffers import HostBuffer, as_bytes, lay_out, tensor_in
from sp_lightning.pipeline.weights.weight import Weight

NOTHING = -1  # no epoch
STAGING_BUFFERS = 2  # one is filled while the other is sent
# Each of several processes needs as many for gradients that it receives, and one for a share that it adds up in fp32.
STAGING_OF_SEVERAL = 2 * STAGING_BUFFERS + 1
MEASURED = {torch.float32, torch.bfloat16}  # dtypes of masters whose gradients bring their norms


class Segment:
    """Weights that lie together in host memory, and are sent in one copy."""

    place: Tensor  # the segment's place in device memory

    def __init__(self, weights: Sequence[Weight], memory: HostBuffer) -> None:
        self.weights = list(weights)
        self.epoch = 0  # grows with every change of a master; see [Note: epochs]
        self.epoch_on_device = NOTHING  # the epoch of the weights in the segment's place
        self.memory = memory  # the masters' memory
        # Whether another process owns the masters, which this one shares.
        self.is_stepped_elsewhere = memory.shared is not None and not memory.shared.box.is_keeper
        self._versions: list[int] = []  # the versions of masters when they were last observed
        # Whether something else than a step has changed a master, since processes last exchanged edits.
        self.is_edited = False
        # A weight whose version has changed since then, other than by a step.
        self._written: Weight | None = None
        self._observe_versions()

    def prepare(self, pin: bool) -> None:
        """Prepare the memory that is sent, in the dtypes in which weights are sent now."""
        # The offset of each weight in the memory that is sent, and the bytes of that memory.
        self.offsets, self.nbytes = lay_out([weight.compute_bytes for weight in self.weights])
        # For each weight, the copy that is sent; None where the master itself is sent.
        self.copies: list[Tensor | None] = [None] * len(self.weights)
        # The memory that is sent: the masters' memory, or that of copies in other dtypes.
        self.source = self.memory
        if any(weight.lowered for weight in self.weights):
            self.memory.unpin()
            self.source = self.memory.get_companion("copies", self.nbytes, pin, together=True)
            self.copies = [
                tensor_in(self.source.bytes, offset, weight.layout, weight.compute_dtype)
                for weight, offset in zip(self.weights, self.offsets, strict=True)
            ]
        else:
            if self.memory.shared is None:
                self.memory.release_companion("copies")
            if pin:
                self.memory.pin()
        self.sends_copies = self.source is not self.memory
        self._copied_epoch = NOTHING

    def views(self) -> Iterator[tuple[Weight, Tensor]]:
        """Yield each weight with its values in the place on the device."""
        for weight, offset in zip(self.weights, self.offsets, strict=True):
            yield weight, tensor_in(self.place, offset, weight.current_memory, weight.compute_dtype)

    # -------------------------------------------------------------------------------------------------- their changes

    def detect_changes(self) -> None:
        """Note changes of masters since they were last observed, if torch counts them (guard.py notes the others)."""
        before = self._versions
        if self._observe_versions():
            self.note_edit()
            for weight, known, version in zip(self.weights, before, self._versions, strict=True):
                if version != known:
                    self._written = weight

    def check_shared(self) -> None:
        """Raise if a step would compute with values that others do not have; the owner shares its edits."""
        if self.memory.shared is None:
            return
        if self.is_stepped_elsewhere and self._written is not None:
            raise written_by_follower(self._written.name)
        for weight in self.weights:
            if weight.current_memory is not weight.engine_memory:
                raise RuntimeError(
                    f"Weight {weight.name!r} was given other memory (`weight.data = ...`) that other "
                    "processes do not have. Write into its memory by `weight.data.copy_(...)`."
                )
        if not self.is_stepped_elsewhere:
            self.share_edits()

    def pop_edit(self) -> bool:
        """Tell whether masters were edited since the last call."""
        is_edited, written = self.is_edited, self._written
        self.is_edited = False
        self._written = None
        # this weight was made resident, and another segment tells of its edits
        if self.memory.shared is None:
            return False
        return written is not None if self.is_stepped_elsewhere else is_edited

    def hide_edits(self) -> None:
        """Hide from the other processes what user code writes to masters from now on."""
        shared = self.memory.shared
        if shared is not None and not shared.is_hidden:
            shared.map_own(hides=True)

    def share_edits(self) -> None:
        """Let the other processes see what user code has written to masters; drop it if they are another one's."""
        shared = self.memory.shared
        if shared is not None and shared.is_hidden:
            if not self.is_stepped_elsewhere:
                shared.bytes.copy_(shared.own[: shared.bytes.nbytes])
            shared.map_own(hides=self.is_stepped_elsewhere)

    def note_written_back(self) -> None:
        """Note that changes on the device were written back to a master."""
        self._observe_versions()
        self.is_edited = True

    def _observe_versions(self) -> bool:
        """Observe the masters' versions, and tell whether masters may have changed since the last time.

        A master that is in other memory than the engine's may always have changed.
        """
        before = self._versions
        self._versions = [weight.locate_master() for weight in self.weights]
        return not self._is_in_place or self._versions != before

    @property
    def _is_in_place(self) -> bool:
        """Whether all masters lie in the memory that they were given."""
        is_in_place = True
        for weight in self.weights:
            is_in_place &= weight.current_memory is weight.engine_memory
        return is_in_place

    def note_edit(self) -> None:
        """Note that something else than a step has changed masters, or may do so."""
        self.is_edited = True
        self.epoch += 1

    def note_stepped(self) -> None:
        """Note that an optimizer's step has updated the masters, and the copies that are sent."""
        self._observe_versions()
        self._copied_epoch = self.epoch

    # ----------------------------------------------------------------------------------------------------- the copies

    def refresh_copies(self, stepped: Collection[Weight] = ()) -> None:
        """Refresh the copies that are sent; the step that comes next writes those of `stepped` weights itself."""
        if not self.sends_copies or self._copied_epoch == self.epoch:
            return
        with untracked():
            for weight, copy in zip(self.weights, self.copies, strict=True):
                if copy is not None and weight not in stepped:
                    copy.copy_(weight.current_memory)
        if not stepped:
            self._copied_epoch = self.epoch

    def transfers(self) -> list[tuple[Tensor, Tensor]]:
        """Return the copies to issue, as targets and sources: one copy, unless masters lie in other memory."""
        if self.sends_copies or self._is_in_place:
            return [(self.place, self.source.bytes)]
        transfers = []
        for weight, begin in zip(self.weights, self.offsets, strict=True):
            values = as_bytes(weight.current_memory)
            transfers.append((self.place[begin : begin + values.nbytes], values))
        return transfers

    def of_one(self, weight: Weight, backend: Backend) -> Segment:
        """Return a segment of one of the weights, over its master's memory with the padding, which it does not pin."""
        begin = weight.engine_memory.data_ptr() - self.memory.masters.data_ptr()
        _, nbytes = lay_out([weight.nbytes])
        memory = self.memory.masters[begin : begin + nbytes]
        segment = Segment([weight], HostBuffer(nbytes, backend, pin=False, memory=memory))
        segment.prepare(pin=False)
        return segment


def note_stepped(segments: Iterable[Segment], weights: Iterable[Weight]) -> None:
    """Note that masters have changed by a step."""
    with torch.inference_mode(False), without_torch_function():
        increment_version([weight.master for weight in weights])
        for segment in segments:
            segment.note_stepped()


def sent_together(weights: Iterable[Weight]) -> list[list[Weight]]:
    """Divide a unit's weights into those that are sent together: the frozen ones, and the trained ones."""
    parts: dict[bool, list[Weight]] = {False: [], True: []}
    for weight in weights:
        parts[weight.master.requires_grad].append(weight)
    return [part for part in parts.values() if part]


class HostMemory:
    """The masters' memory, and the memory next to it. Masters that stay together do not move.

    Processes that share masters share copies, too. All of them make memory at the same moments, in the same order.

    After an exception in the middle, such as a KeyboardInterrupt, each master has its values, where it was or in
    memory that this object knows.
    """

    def __init__(self, backend: Backend, box: Box | None, progress: Progress) -> None:
        self.progress = progress  # shows how it is filled
        self._backend = backend
        self._box = box
        self.is_shared = box is not None  # whether several processes share it
        self._buffers: list[HostBuffer] = []
        # The address that each master was given, by the master's identity.
        self.addresses: dict[int, int] = {}
        self._is_new = False  # whether memory was made since this process last waited for values

    @property
    def staging_buffers(self) -> int:
        """The number of buffers on the device for gradients on their way."""
        if self._box is None:
            return STAGING_BUFFERS
        if self._box.count > 1:
            return STAGING_OF_SEVERAL
        # The share of a process that is alone on its machine is all sums: twice the bytes of gradients, at most.
        return 2 * STAGING_OF_SEVERAL

    def nbytes_for(self, purpose: str) -> int:
        """Return the bytes next to masters that serve this purpose."""
        return sum(buffer.companions[purpose].nbytes for buffer in self._buffers if purpose in buffer.companions)

    def gather(self, weights: Sequence[Weight], segments: Sequence[Segment]) -> Sequence[Segment]:
        """Return the segments of a unit's weights: those that it has, if the same weights are still sent together.

        The memory that they send is pinned if that is possible.
        """
        parts = sent_together(weights)
        if parts != [segment.weights for segment in segments]:
            for segment in segments:
                segment.copies.clear()
            segments = list(map(self._segment, parts))
        for segment in segments:
            segment.prepare(pin=True)
        return segments

    def _segment(self, weights: Sequence[Weight]) -> Segment:
        """Make a segment of weights, whose masters move into its memory."""
        offsets, nbytes = lay_out([weight.nbytes for weight in weights])
        names = [weight.name for weight in weights]
        shared = None if self._box is None else self._box.share(nbytes, names)
        memory = HostBuffer(nbytes, self._backend, False, shared)
        self._buffers.append(memory)
        self._is_new = True
        copied = [weight.master.data for weight in weights]
        for weight, offset in zip(weights, offsets, strict=True):
            place = tensor_in(memory.masters, offset, weight.layout, weight.dtype)
            if self._box is None:
                weight.point_master_to(place, address=self.addresses.get(id(weight.master)))
            else:  # processes share all masters, also those that the user has given other memory
                weight.point_master_to(place, is_filled=not self._box.is_keeper)
            weight.stays_on_device = False
        release(copied)
        return Segment(weights, memory)

    def keep(self, segments: Sequence[Segment]) -> None:
        """Keep the memory of these segments, and release all other memory, in which there are no masters any more."""
        weights = [weight for segment in segments for weight in segment.weights]
        self.addresses = {id(weight.master): weight.engine_memory.data_ptr() for weight in weights}
        kept = {segment.memory for segment in segments}
        for memory in [memory for memory in self._buffers if memory not in kept]:
            memory.release()
            self._buffers.remove(memory)

    def wait_for_values(self) -> None:
        """Wait until the process that owns the weights has moved them into memory that is shared."""
        if self._box is not None and self._is_new:
            self._box.gather()
        self._is_new = False


class GradientLayout:
    """A layout of gradients in memory: one behind the other, and then their norms, which are sent with them.

    Attributes:
        norms_at: The offset of the norms, in bytes.
        nbytes: The bytes of gradients and norms.
    """

    def __init__(self, weights: Sequence[Weight], dtypes: Sequence[torch.dtype]) -> None:
        self.dtypes = list(dtypes)
        # These are tensors of the same forms, and not the weights: those would stay in memory as long as this object.
        self._forms = [
            torch.empty_strided(weight.layout.size(), weight.layout.stride(), device="meta") for weight in weights
        ]
        sizes = [weight.layout.numel() * dtype.itemsize for weight, dtype in zip(weights, dtypes, strict=True)]
        offsets, self.nbytes = lay_out([*sizes, len(sizes) * torch.float32.itemsize])
        self._offsets = offsets[:-1]
        self.norms_at = offsets[-1]
        self.norm_dtype = norm_dtype_of(weights)

    def views(self, memory: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return bytes of `memory` as the gradients, and as their norms."""
        slots = zip(self._offsets, self._forms, self.dtypes, strict=True)
        norms = torch.empty(len(self.dtypes), device="meta")
        gradients = [tensor_in(memory, offset, form, dtype) for offset, form, dtype in slots]
        return gradients, tensor_in(memory, self.norms_at, norms, torch.float32)


def norm_dtype_of(weights: Iterable[Weight]) -> torch.dtype | None:
    """Return the dtype in which torch would compute norms of gradients: the masters'; None if they are not measured."""
    dtypes = {weight.dtype for weight in weights}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= MEASURED else None


def gradient_bytes(weights: Iterable[Weight], are_sums: bool = False) -> int:
    """Return the bytes of the gradients of a unit's weights as they are sent to the host, or of sums, and of norms."""
    trained = [weight for weight in weights if weight.master.requires_grad]
    dtypes = [weight.dtype if are_sums else weight.compute_dtype for weight in trained]
    return GradientLayout(trained, dtypes).nbytes
