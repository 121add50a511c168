"""The CPU as a device, which is also the emulated device of the tests."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline.lanes.backend import BEFORE_OTHER_WORK, Backend
from sp_lightning.pipeline.lanes.cores import ANYWHERE, HostCores
from sp_lightning.pipeline.lanes.lanes import Ticket, Worker


class HostBackend(Backend):
    """The CPU as the device: "device" memory is other host memory, and copies run on threads.

    Training with `accelerator="cpu"` uses it as it is. With `max_delay` and `poison` it is the emulated device that
    the tests use as a race detector: before a copy or a job on the host comes a random delay of at most so many
    seconds, and unused memory is full of NaN.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        poison: bool = False,
        max_delay: float = 0.0,
        seed: int = 0,
        cores: HostCores = ANYWHERE,
    ) -> None:
        super().__init__(device or torch.device("cpu"), poison)
        self._max_delay = max_delay
        self._random = random.Random(seed)
        self._up = Worker("superpipeline-upload")
        self._down = Worker("superpipeline-download")
        self._host = Worker("superpipeline-host", cores.occupy)

    @override
    def upload(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        copy = self._copy(target, source)
        return self._up.submit(copy) if after is None else self._host.submit(copy, [after], rank=BEFORE_OTHER_WORK)

    @override
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        return self._down.submit(self._copy(target, source))

    def _copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        self.invalidate(target)
        return self._delayed(lambda: copy_memory(target, source))

    @override
    def work(
        self,
        job: Callable[[], None],
        after: Sequence[Ticket] = (),
        nbytes: int = 0,
        cleanup: Callable[[], None] | None = None,
        rank: int = 0,
    ) -> Ticket:
        return self._host.submit(self._delayed(job), after, cleanup, rank)

    def _delayed(self, job: Callable[[], None]) -> Callable[[], None]:
        if not self._max_delay:
            return job
        delay = self._random.uniform(0, self._max_delay)

        def delayed() -> None:
            time.sleep(delay)
            job()

        return delayed

    @override
    def wait(self, ticket: Ticket) -> None:
        # this thread *is* the device's compute stream, so blocking it keeps the order on the device
        ticket.join()

    @override
    def drain(self) -> None:
        self._down.drain()
        self._host.drain()
        self._up.drain()

    @override
    def close(self) -> None:
        self._down.close()
        self._host.close()
        self._up.close()


def copy_memory(target: Tensor, source: Tensor) -> None:
    """Copy host memory; `Tensor.copy_` would start a second pool of OpenMP threads in a second thread."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
