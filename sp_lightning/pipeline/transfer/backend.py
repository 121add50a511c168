"""Copies between host and device: what the engine asks of a kind of device (accelerator.py, emulated.py).

Nothing here knows what is copied or when: the pipeline decides, the backend keeps the order right.

[Note: ordering of copies]
A copy to the device starts after all work that was given to the device before it (the slot's last reader is among
it), and computing waits for the copy's ticket before it reads the slot. A copy to the host starts after all work
given before it (the gradients are among it). Both orders are kept on the device, so `upload` and `download` never make
the host wait, and `wait` only until a copy that follows work on the host has been given to the device. `synchronize`
waits for the device; whoever calls it counts it.

Computing is one queue: what has waited for a copy once need not do so again. On several streams of a device at a time
a model cannot compute, as a slot is free to be written to when the stream that asks for it is past its last reader.

Work on host memory (adding gradients up, stepping the optimizer) is done by one thread, what is needed soonest first,
each piece after the copies that it needs. A copy to the device can be told to start after such work: so the thread
that computes waits for neither.

The emulated device keeps the same two orders with threads, so that a missing wait or a slot given away too early
shows as a wrong number on a laptop, not only on a GPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.transfer.lanes import Lanes, Ticket
from sp_lightning.pipeline.transfer.trace import Trace

_POISON = 0xFF  # every float made of these bytes is NaN, every signed integer -1


class Backend(Lanes):
    """What the engine asks of a kind of device.

    Args:
        device: The device to compute on.
        poison: Fill memory that holds nothing with NaN, so that a read of it cannot go unseen.

    Attributes:
        trace: Writes down what was asked for, while somebody wants to know.
    """

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        super().__init__()
        self.device = device
        self.poison = poison
        self.trace = Trace(self)

    def allocate(self, nbytes: int) -> Tensor:
        """Device memory as bytes."""
        # the sanity check comes first, in inference mode, and memory made there is of no use to training
        with torch.inference_mode(False):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if self.poison:
                memory.fill_(_POISON)
            return memory

    @abstractmethod
    def upload(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        """Copy bytes to the device, after everything computed so far, and after some work on the host."""

    @abstractmethod
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        """Copy bytes to the host, after everything computed so far."""

    @abstractmethod
    def work(
        self,
        job: Callable[[], None],
        after: Sequence[Ticket] = (),
        nbytes: int = 0,
        cleanup: Callable[[], None] | None = None,
        rank: int = 0,
    ) -> Ticket:
        """Run a job on the thread for work on host memory, after these tickets.

        Args:
            job: What to do.
            after: What has to be done before.
            nbytes: Bytes of host memory that it reads and writes; a device whose time is simulated asks for it.
            cleanup: What to do then in any case, also if something before it has failed.
            rank: Of jobs that can be done, those of a lower rank come first, and of the same rank those given first.
        """

    def gather_free_memory(self) -> None:
        """Before memory is allocated that stays: what is free becomes as few and as large pieces as it can."""

    def invalidate(self, memory: Tensor) -> None:
        """Memory that nobody may read any more; poisoned when debugging."""
        if self.poison:
            memory.fill_(_POISON)

    @property
    def can_pin(self) -> bool:
        """Whether page-locked host memory makes copies faster."""
        return False

    def pin(self, memory: Tensor) -> bool:
        """Page-lock host memory in place; False if that is not possible or not needed."""
        return False

    def unpin(self, memory: Tensor) -> None:
        """Undo a `pin` that returned True."""
        raise NotImplementedError(f"{type(self).__name__} pins nothing.")

    def total_memory(self) -> int | None:
        """Bytes of device memory, if that is known."""
        return None

    @property
    def runs_out(self) -> bool:
        """Whether an operation may fail for want of device memory, whatever is known of it."""
        return False

    def free_memory(self) -> int | None:
        """Bytes of device memory that can be had now, if that is known."""
        return None

    def memory_in_use(self) -> int | None:
        """Bytes of device memory that are allocated, where that is known; the most is counted from now on."""
        return None

    def most_memory_in_use(self) -> int | None:
        """The most bytes of device memory that were allocated since `memory_in_use` was asked."""
        return None

    def close(self) -> None:
        """Give back threads and streams."""
        self.drain()
