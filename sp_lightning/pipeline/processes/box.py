"""The processes of one machine: masters, and the copies that are sent, exist once, in memory that they share.

The first of them, the *keeper*, makes each piece of memory without a name (`memfd_create`), and the others open it
through the keeper's entry in /proc. So nothing lies in /dev/shm, whose size containers limit, and nothing is left when
the processes have ended, even by a crash. Only the keeper updates weights, for all.

User code has another mapping of the same memory. Between steps, the system copies each page that it writes to, and no
other process sees that copy. When processes meet, all get the pages of the keeper's user code.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.stats import readable_bytes

_COUNTER_BYTES = 64  # the bytes of each process's counter, behind the shared memory: a cache line
_PAUSE = 50e-6  # seconds between two looks at another process's counter
_SECONDS_BETWEEN_CHECKS = 0.2  # seconds between two checks whether all processes are alive
_MAP_FIXED = 0x10  # Linux's; Python has no name for it


class Box:
    """The processes of this machine, and the memory that they share."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        if sys.platform != "linux":
            raise OSError(
                "Several devices need Linux, because their processes share the model's memory. Use one device."
            )
        self.rank = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self.is_keeper = self.rank == 0
        self._group = group
        self._timeout = timeout.total_seconds()
        # Why this process cannot wait for the others any more.
        self.failure: RuntimeError | None = None
        self._next_check = 0.0  # when to check next whether all processes are alive
        self._processes: list[Path] = []  # the entry in /proc of each process
        self._processes = [Path(f"/proc/{process}") for process in self.gather(os.getpid())]

    def share(self, nbytes: int, names: Sequence[str]) -> SharedMemory:
        """Return new memory that all processes have.

        All have to ask for the same pieces, in the same order, for weights of the same names.

        Raises:
            OSError: If there is not enough memory.
            RuntimeError: If another process asks for other memory.
        """
        size = (-(-nbytes // _COUNTER_BYTES) + self.count) * _COUNTER_BYTES
        path = why_failed = ""
        file = None
        if self.is_keeper:
            try:
                file = _new_file(size)
                path = f"/proc/{os.getpid()}/fd/{file}"
            except OSError as error:
                why_failed = str(error)
        everyones = self.gather(((list(names), nbytes), path, why_failed))
        if not all(isinstance(request, tuple) for request in everyones):
            raise RuntimeError("Another process of this machine could not place its weights. See its error.")
        keepers, path, why_failed = everyones[0]
        if why_failed:
            raise OSError(why_failed)
        for rank, (others, _, _) in enumerate(everyones):
            if others != keepers:
                raise RuntimeError(
                    f"Processes 0 and {rank} of this machine place their weights differently: "
                    f"{keepers[0][:1]} and {others[0][:1]} come next. Freeze, add or convert the same "
                    "weights in all processes."
                )
        try:
            with torch.inference_mode(False):
                memory, own = (
                    torch.from_file(path, shared=shared, size=size, dtype=torch.uint8) for shared in (True, False)
                )
                own_file = os.open(path, os.O_RDWR)
        except RuntimeError as error:
            raise OSError(
                "The processes of this machine cannot share memory. They have to run in one "
                "container, as one user, or as machines of one device each (`num_nodes`). "
                f"{error}"
            ) from error
        self.gather()  # all processes have opened the file afterwards
        if file is not None:
            os.close(file)
        counters = memory[-self.count * _COUNTER_BYTES :].view(torch.int64)
        return SharedMemory(self, names, memory[:nbytes], own, own_file, counters.view(self.count, -1)[:, 0])

    def gather(self, own: Any = None, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Gather an object from each process, or from each one of another group, in the order of their ranks."""
        group = group or self._group
        everyones: list[Any] = [None] * dist.get_world_size(group)
        with self.failures_explained():
            dist.all_gather_object(everyones, own, group=group)
        return everyones

    @contextmanager
    def failures_explained(self) -> Iterator[None]:
        """Raise an error if this process cannot work with the others in the block, and say why not."""
        if self.failure is not None:
            raise self.failure
        try:
            yield
        except RuntimeError:
            time.sleep(_SECONDS_BETWEEN_CHECKS)  # a process that ends closes its connections first
            self._check_alive()
            raise

    def _check_alive(self) -> None:
        for rank, process in enumerate(self._processes):
            if has_ended(process / "stat"):
                self.failure = RuntimeError(
                    f"Process {rank} of this machine has ended. It shares the weights with the others."
                )
                raise self.failure

    def wait_briefly(self, since: float) -> None:
        """Give the others a moment; note a failure if one of them has ended, or the wait was too long."""
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _SECONDS_BETWEEN_CHECKS
            self._check_alive()
        if now > since + self._timeout:
            self.failure = RuntimeError(
                f"Process {self.rank} of this machine has waited for the others for "
                f"{self._timeout:.0f} s. One of them hangs, or runs backward or steps less often "
                "than this one. See the strategy's `timeout`."
            )
        time.sleep(_PAUSE)


def _new_file(nbytes: int) -> int:
    """Make a file of memory without a name."""
    file = os.memfd_create("superpipeline", os.MFD_CLOEXEC)
    try:
        # All pages are allocated now: a page that is missing later would end the process.
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        os.close(file)
        raise OSError(f"{readable_bytes(nbytes)} of memory to share: {error}") from error
    return file


def has_ended(status: Path) -> bool:
    """Tell by its entry in /proc whether a process has ended; it may still be known to the one that started it."""
    try:
        return status.read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def written_by_follower(name: str) -> RuntimeError:
    """Make the error for a write to a weight by a process that does not own it."""
    return RuntimeError(
        f"Weight {name!r} was written to in a process that shares it with process 0 of this machine, within a step, or "
        "not in that process. Write between training steps, in a hook such as `on_train_batch_end`, and in all "
        "processes. In a loop of your own, call `pipeline.meet_processes()` before you evaluate."
    )


@dataclass(eq=False)
class SharedMemory:
    """A piece of memory that all processes of a machine share.

    Attributes:
        box: The processes.
        names: The names of the weights that it is for.
        bytes: The memory.
        own: The same memory once more, for user code. While this `is_hidden`, only this process sees what it writes
            there: the system copies a page that it writes to. In other processes than the keeper it always is.
        close_file: Closes the file of the memory, for memory that user code never writes to.
        counters: For each process, the last generation that it has published.
        generation: The generation of the memory when all work that this process has submitted is done.
    """

    box: Box
    names: Sequence[str]
    bytes: Tensor
    own: Tensor
    file: int
    counters: Tensor
    generation: int = 0

    def __post_init__(self) -> None:
        self.map_own(hides=not self.box.is_keeper)
        self.close_file = weakref.finalize(self, os.close, self.file)

    def map_own(self, hides: bool) -> None:
        """Make the `own` memory of this process the shared memory again, and hide what is written there from now on.

        Aliases of the memory stay valid.
        """
        place = ctypes.c_void_p(self.own.data_ptr()), ctypes.c_size_t(self.own.nbytes)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        kind = _MAP_FIXED | (mmap.MAP_PRIVATE if hides else mmap.MAP_SHARED)
        if ctypes.CDLL(None).mmap(*place, access, kind, self.file, ctypes.c_long(0)) == -1:
            raise OSError("The system could not map memory that processes share.")
        self.is_hidden = hides

    def publish(self, number: int) -> None:
        """Tell the others that this process has published a generation."""
        self.counters[self.box.rank] = number


class CounterTicket(Ticket):
    """A ticket that is done when all of these counters, in memory that processes share, have reached a number."""

    def __init__(self, box: Box, counters: Tensor, number: int) -> None:
        self._box = box
        self._counters = counters
        self._number = number
        self._since: float | None = None  # when the first wait for it began

    @override
    def join(self) -> None:
        while not self._is_reached:
            if self._box.failure is not None:
                raise self._box.failure
            self.join_briefly()

    @override
    def join_briefly(self) -> None:
        if not self.done:
            self._since = self._since or time.monotonic()
            self._box.wait_briefly(self._since)

    @property
    @override
    def done(self) -> bool:
        return self._box.failure is not None or self._is_reached

    @property
    def _is_reached(self) -> bool:
        return bool((self._counters >= self._number).all())
