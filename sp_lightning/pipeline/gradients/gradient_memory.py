"""Memory for the gradients of one unit: beside its masters, in a staging buffer, or in a landing buffer."""

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
    """The host memory that gradients of a segment stay in, in one of two buffers, each made when first needed.

    If gradients come in the masters' dtypes, `arrived` is for sums, too. Else sums take the place of what arrived, and
    from then on also the first gradients of a step go there, through a landing buffer.

    Attributes:
        arrived: The memory for gradients as they came, which the device writes; None if there is none.
        sums: The memory for what was added up, in the masters' dtypes; None if there is none.
    """

    def __init__(self, masters: HostBuffer) -> None:
        self.arrived: GradientMemory | None = None
        self.sums: GradientMemory | None = None
        self._masters = masters

    @property
    def any(self) -> GradientMemory | None:
        """The memory, with or without gradients in it; None if there is none."""
        return self.sums or self.arrived

    def for_arrived(self, layout: GradientLayout) -> GradientMemory:
        """Return the memory for gradients as they come."""
        if self.arrived is None:
            self.arrived = self._make(layout, pin=True)
        return self.arrived

    def make_sums(self, layout: GradientLayout, pin: bool) -> GradientMemory:
        """Make the memory for sums of another dtype than that in which gradients come."""
        assert self.any is None
        self.sums = self._make(layout, pin)
        return self.sums

    def _make(self, layout: GradientLayout, pin: bool) -> GradientMemory:
        buffer = self._masters.get_companion("gradients", layout.nbytes, pin=False)
        if pin:
            buffer.pin()
        return GradientMemory(buffer.bytes)

    def release(self) -> None:
        """Release the memory; gradients in it keep it."""
        self._masters.release_companion("gradients")
        self.forget()

    def forget(self) -> None:
        """Forget the memory, without releasing it."""
        self.arrived = self.sums = None

    def contains(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in the memory; one without elements lies nowhere else."""
        if self.any is None:
            return False
        start = self.any.bytes.data_ptr()
        return not tensor.numel() or start <= tensor.data_ptr() < start + self.any.bytes.nbytes


class LandingBuffer(GradientMemory):
    """Memory on the host, through which gradients of one unit after the other pass.

    Attributes:
        users: The number of users: who has reserved it, or has gradients in it or on their way into it.
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
        """Free the buffer, whoever has reserved it."""
        self._awaits_reader = False
        self.users = 0

    def release(self) -> None:
        """Free the buffer for its next user: its gradients have been read."""
        with self._released:
            self.users = max(0, self.users - 1)
            self._released.notify_all()
