"""The CPU as a device, which is also the emulated device of the tests."""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline.lanes.backend import BEFORE_OTHER_WORK, Backend
from sp_lightning.pipeline.lanes.lanes import Ticket, Worker, use_threads


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
        threads: int | None = None,
    ) -> None:
        host = Worker("superpipeline-host", partial(use_threads, threads), max_delay, seed)
        super().__init__(device or torch.device("cpu"), poison, host)
        self._up = Worker("superpipeline-upload", max_delay=max_delay, seed=seed)
        self._down = Worker("superpipeline-download", max_delay=max_delay, seed=seed)

    @override
    def upload(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        if self.poison:
            self.invalidate(target)
        copy = partial(copy_memory, target, source)
        return self._up.submit(copy) if after is None else self._host.submit(copy, [after], rank=BEFORE_OTHER_WORK)

    @override
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        if self.poison:
            self.invalidate(target)
        return self._down.submit(partial(copy_memory, target, source))

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
        super().close()
        self._down.close()
        self._up.close()


def copy_memory(target: Tensor, source: Tensor) -> None:
    """Copy host memory; `Tensor.copy_` would start a second pool of OpenMP threads in a second thread."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
