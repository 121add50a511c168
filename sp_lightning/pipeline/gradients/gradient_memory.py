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


class LandingBuffer(GradientMemory):
    """Memory on the host, through which gradients of one unit after the other pass.

    Attributes:
        users: The number of users: who has reserved it, or has gradients in it or on their way into it.
        turn: The number of its last reservation among those of all buffers.
        last_reader: The last job that reads it, as far as that is known.
    """

    def __init__(self, host: HostBuffer, released: threading.Condition) -> None:
        super().__init__(host.bytes)
        self.host = host
        self.users = 0
        self.turn = 0
        self.last_reader: Ticket | None = None
        self._released = released

    def release(self) -> None:
        """Free the buffer for its next user: its gradients have been read."""
        with self._released:
            self.users = max(0, self.users - 1)
            self._released.notify_all()
