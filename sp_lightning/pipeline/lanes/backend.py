"""The interface to a kind of device: copies between it and the host, and work on host memory.

accelerator.py and emulated.py implement it. Nothing here knows what is copied or when: the pipeline decides that, and
the backend keeps the order right.

[Note: ordering of copies]
A host-to-device copy starts after all work that was given to the device before it, the slot's last reader included,
and computing waits for the copy's ticket before it reads the slot. A device-to-host copy starts after all work given
before it, the kernels that produce the gradients included. Both orders are kept on the device, so `upload` and
`download` of pinned memory never block the host. `synchronize` blocks it until the copy is done; callers count it.

Computing is a single queue: once it has waited for a copy, it need not wait again. A model cannot compute on several
streams of a device at once, because a slot may be overwritten as soon as the stream that asks for it is past the
slot's last reader.

Work on host memory (accumulating gradients, stepping the optimizer) runs on one thread, most urgent first, each job
after the copies that it needs. A host-to-device copy can be told to start after such a job. Then this thread issues
it, before any other job, and `wait` blocks the host until it has: computing cannot wait for what has no event yet. It
holds up no other copy meanwhile. So copies to the device need not keep their order: before another copy into the same
memory is asked for, computing has to wait for the earlier one.

The emulated device keeps the same orders with threads, so that a missing wait, or a slot given away too early, shows
as a wrong number on a laptop, not only on a GPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.lanes.lanes import Lanes, Ticket
from sp_lightning.pipeline.lanes.trace import Trace

_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
)
_POISON = 0xFF  # every float made of these bytes is NaN, every signed integer -1
BEFORE_OTHER_WORK = -1  # the rank of a copy that comes after work; steps have their place in the forward


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that the device has no memory left.

    The driver and libraries take memory of their own, and report in their own words that there is none.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


class Backend(Lanes):
    """A device, as the engine sees it. With `poison`, unused memory is filled with NaN, so that a read is noticed."""

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        super().__init__()
        self.device = device
        self.poison = poison
        self.trace = Trace(self)

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate device memory, as bytes."""
        # Lightning's sanity check comes first, in inference mode, and training cannot use tensors made there.
        with torch.inference_mode(False):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if self.poison:
                memory.fill_(_POISON)
            return memory

    @abstractmethod
    def upload(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        """Copy bytes to the device, after everything computed so far and, if given, after a job on the host."""

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
        """Run a job on the thread for work on host memory.

        Args:
            job: The work.
            after: Tickets that have to be done before it starts. If one of them failed, the job fails with it.
            nbytes: Bytes of host memory that it reads and writes; only devices with simulated time use this.
            cleanup: Called afterwards in any case, even if the job or one of the tickets has failed.
            rank: Of the jobs that are ready, the lowest rank runs first, and among equals the one submitted first.
        """

    def gather_free_memory(self) -> None:
        """Merge free memory into as few and as large blocks as possible, before long-lived memory is allocated."""

    def invalidate(self, memory: Tensor) -> None:
        """Declare that nobody may read this memory any more: it is poisoned when debugging."""
        if self.poison:
            memory.fill_(_POISON)

    @property
    def can_pin(self) -> bool:
        """Whether pinned (page-locked) host memory makes copies faster."""
        return False

    def pin(self, memory: Tensor) -> bool:
        """Pin host memory in place; return False if that is impossible or pointless."""
        return False

    def unpin(self, memory: Tensor) -> None:
        """Undo a `pin` that returned True."""
        raise NotImplementedError(f"{type(self).__name__} pins nothing.")

    def total_memory(self) -> int | None:
        """Return the bytes of device memory, or None if unknown."""
        return None

    def free_memory(self) -> int | None:
        """Return the bytes of device memory that can be allocated now, or None if unknown."""
        return None

    def usable_memory(self) -> int | None:
        """Return the bytes of device memory that are allocated or can be, or None if unknown."""
        return None

    def peak_memory(self) -> int | None:
        """Return the peak of allocated bytes so far, or None if unknown."""
        return None

    def reset_peak_memory(self) -> int | None:
        """Count the peak of allocated bytes anew; return the bytes that are allocated now, or None if unknown."""
        return None

    def peak_since_reset(self) -> int | None:
        """Return the peak of allocated bytes since the last call of `reset_peak_memory`, or None if unknown."""
        return None

    def allocation_retries(self) -> int:
        """Return how often the allocator ran out of memory, freed its cache and tried again; 0 if unknown."""
        return 0

    def close(self) -> None:
        """Finish all work, and release what the backend holds."""
        self.drain()
