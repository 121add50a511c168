"""Memory for the gradients of one unit: next to its masters, in a staging buffer, or in a landing buffer."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from torch import Tensor

from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.pipeline.weights.segment import GradientLayout


class GradientMemory:
    """Memory for the gradients of one unit. The tensors in it are made once for each layout."""

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        # The last copy out of it to the host; None if there was none.
        self.ticket: Ticket | None = None
        self._views: WeakKeyDictionary[GradientLayout, tuple[list[Tensor], Tensor]] = WeakKeyDictionary()

    def views(self, layout: GradientLayout) -> tuple[list[Tensor], Tensor]:
        """Return the memory as gradients, and as their norms."""
        views = self._views.get(layout)
        if views is None:
            views = layout.views(self.bytes)
            self._views[layout] = views
        return views


class MemoryBesideMasters:
    """The host memory that gradients of a segment stay in, made when first needed.

    The device writes gradients there as they came. If these are in other dtypes than their masters, memory for sums
    replaces it, and from then on the first gradients of a step go there, too, through a landing buffer.

    Attributes:
        memory: The memory, with or without gradients in it; None if there is none.
        has_sums: Whether it is for sums in other dtypes than those in which gradients come.
    """

    def __init__(self, masters: HostBuffer) -> None:
        self.memory: GradientMemory | None = None
        self.has_sums = False
        self._masters = masters

    def get(self, layout: GradientLayout, pin: bool, has_sums: bool = False) -> GradientMemory:
        """Return the memory; if there is none, make it for this layout."""
        if self.memory is None:
            buffer = self._masters.get_companion("gradients", layout.nbytes, pin=False)
            if pin:
                buffer.pin()
            self.memory = GradientMemory(buffer.bytes)
            self.has_sums = has_sums
        return self.memory

    def release(self) -> None:
        """Release the memory; gradients in it keep it alive."""
        self._masters.release_companion("gradients")
        self.forget()

    def forget(self) -> None:
        """Forget the memory, without releasing it."""
        self.memory = None
        self.has_sums = False

    def contains(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is in the memory; a tensor without elements counts as being there."""
        if self.memory is None:
            return False
        start = self.memory.bytes.data_ptr()
        return not tensor.numel() or start <= tensor.data_ptr() < start + self.memory.bytes.nbytes


class LandingBuffer(GradientMemory):
    """Memory on the host, through which gradients of one unit after the other pass.

    Attributes:
        users: The number of users, each of which has reserved it, or has gradients in it or on their way into it.
        turn: The number of its last reservation among those of all buffers.
        last_reader: The last job that reads it; None if there was none.
    """

    def __init__(self, host: HostBuffer, released: threading.Condition) -> None:
        super().__init__(host.bytes)
        self.host = host
        self.users = 0
        self.turn = 0
        self.last_reader: Ticket | None = None
        self._awaits_reader = False  # whether it was reserved for a job that is not known yet
        self._released = released

    def reserve(self, turn: int) -> None:
        """Reserve it for a job, which comes after the last reader."""
        assert not self._awaits_reader, "one job would overwrite its own gradients"
        self._awaits_reader = True
        self.turn = turn
        self.users += 1

    def set_reader(self, job: Ticket) -> None:
        """Set the job that reads it."""
        self._awaits_reader = False
        self.last_reader = job

    def release_after_exception(self) -> None:
        """Free the buffer, whichever job has reserved it."""
        self._awaits_reader = False
        self.users = 0

    def release(self) -> None:
        """Free the buffer for its next user: its gradients have been read."""
        with self._released:
            self.users = max(0, self.users - 1)
            self._released.notify_all()
