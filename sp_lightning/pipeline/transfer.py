"""Copies between host and device: what the engine asks of a kind of device (accelerator.py, emulated.py).

Nothing here knows what is copied or when: the pipeline decides, the backend keeps the order right.

[Note: ordering of copies]
A copy to the device starts after all work that was given to the device before it (the slot's last reader is among
it), and computing waits for the copy's ticket before it reads the slot. A copy to the host starts after all work
given before it (the gradients are among it). Those are the only two orders the engine needs, and both are kept on
the device: `upload`, `download` and `wait` never make the host wait. `synchronize` does; whoever calls it counts it.

The emulated device keeps the same two orders with threads, so that a missing wait or a slot given away too early
shows as a wrong number on a laptop, not only on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

_POISON = 0xFF  # every float made of these bytes is NaN, every signed integer -1


class Ticket(ABC):
    """One copy on its way."""

    @abstractmethod
    def join(self) -> None:
        """Block the calling thread until the copy is done; for worker threads."""


class Backend(ABC):
    """What the engine asks of a kind of device.

    Args:
        device: The device to compute on.
        poison: Fill memory that holds nothing with NaN, so that a read of it cannot go unseen.
    """

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        self.device = device
        self.poison = poison

    def allocate(self, nbytes: int) -> Tensor:
        """Device memory as bytes."""
        # the sanity check comes first, in inference mode, and memory made there is of no use to training
        with torch.inference_mode(False):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if self.poison:
                memory.fill_(_POISON)
            return memory

    @abstractmethod
    def upload(self, target: Tensor, source: Tensor) -> Ticket:
        """Copy bytes to the device, after everything computed so far."""

    @abstractmethod
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        """Copy bytes to the host, after everything computed so far."""

    @abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """Make what is computed from now on wait for the copy; the host goes on."""

    def synchronize(self, ticket: Ticket) -> None:
        """Make the host wait for the copy."""
        ticket.join()

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

    def free_memory(self) -> int | None:
        """Bytes of device memory that can be had now, if that is known."""
        return None

    @abstractmethod
    def drain(self) -> None:
        """Block until no copy is on its way."""

    def close(self) -> None:
        """Give back threads and streams."""
        self.drain()
