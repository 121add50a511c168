"""The processes of one machine, which have masters and the copies that are sent in one copy, in memory that they share.

The first of them, the *keeper*, makes each piece of memory without a name (`memfd_create`), and the others open it
through the keeper's entry in /proc. So nothing lies in /dev/shm, whose size containers limit, and nothing is left when
the processes have ended, however they do. Only the keeper writes to weights: it steps them for all.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.stats import readable_bytes

_COUNTER_BYTES = 64  # of each process, behind the shared memory: a cache line
_PAUSE = 50e-6  # seconds between two looks at what another process has done
_LOOK_FOR_OTHERS = 0.2  # seconds between two looks whether all processes live


class Box:
    """The processes of this machine, and the memory that they share."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        if sys.platform != "linux":
            raise OSError("Several devices need Linux, where processes can share the model's memory. Use one device.")
        self.rank = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self.is_keeper = self.rank == 0
        self._group = group
        self._timeout = timeout.total_seconds()
        self.failure: RuntimeError | None = None  # why the others cannot be waited for any more
        self._look = 0.0  # when to look next whether all live
        self._processes: list[Path] = []  # what the system tells of each
        self._processes = [Path(f"/proc/{process}") for process in self.gather(os.getpid())]

    def share(self, nbytes: int, names: Sequence[str]) -> SharedMemory:
        """Return new memory that all processes have.

        All have to ask for the same pieces, in the same order, for weights of the same names.

        Raises:
            OSError: If there is not so much memory.
            RuntimeError: If another process asks for other memory.
        """
        size = (-(-nbytes // _COUNTER_BYTES) + self.count) * _COUNTER_BYTES
        place = failed = ""
        file = None
        if self.is_keeper:
            try:
                file = _new_file(size)
                place = f"/proc/{os.getpid()}/fd/{file}"
            except OSError as error:
                failed = str(error)
        everyones = self.gather((list(names), nbytes, place, failed))
        if not all(isinstance(each, tuple) for each in everyones):
            raise RuntimeError("Another process of this machine could not place its weights; see its error.")
        wanted, size_there, place, failed = everyones[0]
        if failed:
            raise OSError(failed)
        for index, (others, others_size, _, _) in enumerate(everyones):
            if (others, others_size) != (wanted, size_there):
                raise RuntimeError(
                    f"Processes 0 and {index} of this machine place their weights differently: "
                    f"{wanted[:1]} and {others[:1]} come next. Freeze, add or convert the same "
                    "weights in all processes."
                )
        try:
            memory = _open(place, size)
        except RuntimeError as error:
            raise OSError(
                "The processes of this machine cannot share memory: they have to run in one "
                f"container, as one user, or as machines of one device each (`num_nodes`). {error}"
            ) from error
        self.gather()  # all have opened it
        if file is not None:
            os.close(file)
        counters = memory[-self.count * _COUNTER_BYTES :].view(torch.int64)
        return SharedMemory(self, names, memory[:nbytes], counters.view(self.count, -1)[:, 0])

    def gather(self, own: Any = None, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Return what each process, or each of another group, has given, by their ranks, when all have."""
        group = group or self._group
        everyones: list[Any] = [None] * dist.get_world_size(group)
        try:
            dist.all_gather_object(everyones, own, group=group)
        except RuntimeError:
            self._check_alive()
            raise
        return everyones

    def _check_alive(self) -> None:
        for rank, process in enumerate(self._processes):
            if has_ended(process / "stat"):
                self.failure = RuntimeError(f"Process {rank} of this machine, which shares the weights, has ended.")
                raise self.failure

    def wait_briefly(self, since: float) -> None:
        """Give the others a moment, and note whether they have failed, or were waited for too long."""
        now = time.monotonic()
        if now >= self._look:
            self._look = now + _LOOK_FOR_OTHERS
            self._check_alive()
        if now > since + self._timeout:
            self.failure = RuntimeError(
                f"Process {self.rank} of this machine has waited for the others for "
                f"{self._timeout:.0f} s. One of them hangs, or runs backward or steps less often "
                "than this one; see the strategy's `timeout`."
            )
        time.sleep(_PAUSE)


def _new_file(nbytes: int) -> int:
    """Make a file of memory without a name."""
    file = os.memfd_create("superpipeline", os.MFD_CLOEXEC)
    try:
        # now: a page that cannot be had later would end the process
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        os.close(file)
        raise OSError(f"{readable_bytes(nbytes)} of memory to share: {error}") from error
    return file


def _open(place: str, nbytes: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.from_file(place, shared=True, size=nbytes, dtype=torch.uint8)


def has_ended(status: Path) -> bool:
    """Tell by its entry in /proc whether a process has ended; it may still be known to the one that started it."""
    try:
        return status.read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


class SharedMemory:
    """A piece of memory that all processes have.

    Attributes:
        box: The processes.
        names: The weights that it is for.
        bytes: The memory.
        counters: How far each process has come with it.
        generation: The number of the masters that will lie in it when all is done that this process has asked for.
    """

    def __init__(self, box: Box, names: Sequence[str], memory: Tensor, counters: Tensor) -> None:
        self.box = box
        self.names = names
        self.bytes = memory
        self.generation = 0
        self.counters = counters

    def publish(self, number: int) -> None:
        """Tell the others that this process has come so far."""
        self.counters[self.box.rank] = number

    def when_published(self, number: int) -> Ticket:
        """Return a ticket that is done when the keeper has come so far."""
        return CounterTicket(self.box, self.counters[:1], number)


class CounterTicket(Ticket):
    """A ticket that is done when counters in memory that processes share have all come to a number."""

    def __init__(self, box: Box, counters: Tensor, number: int) -> None:
        self._box = box
        self._counters = counters
        self._number = number
        self._since: float | None = None  # when somebody began to wait for it

    @override
    def join(self) -> None:
        while not self.done:
            self.join_briefly()
        if not self._is_reached and self._box.failure is not None:
            raise self._box.failure

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
