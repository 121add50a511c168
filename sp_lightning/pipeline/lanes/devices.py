"""The CPU as a device, which is also the emulated device of the tests; and the choice of a backend."""

from __future__ import annotations

import ctypes
import os
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from sp_lightning.pipeline.host_memory import usable_cores
from sp_lightning.pipeline.lanes.accelerator import AcceleratorBackend
from sp_lightning.pipeline.lanes.at_work import use_threads
from sp_lightning.pipeline.lanes.backend import BEFORE_OTHER_WORK, UPDATE_KINDS, Backend
from sp_lightning.pipeline.lanes.lanes import Job, Kind, Ticket, Worker


class HostBackend(Backend):
    """The CPU as the device: "device" memory is other host memory, and copies run on threads.

    Training with `accelerator="cpu"` uses it as it is. With `max_delay` and `poison` it is the emulated device that
    the tests use as a race detector: each copy and each job on the host is delayed at random, by at most `max_delay`
    seconds, and unused memory is full of NaN.
    """

    def __init__(
        self,
        poison: bool = False,
        max_delay: float = 0.0,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        worker = partial(Worker, max_delay=max_delay, seed=seed)
        host = worker("superpipeline-host", partial(use_threads, threads))
        super().__init__(torch.device("cpu"), poison, host)
        self._up = worker("superpipeline-upload")
        self._down = worker("superpipeline-download")
        self._update_lanes = {kind: worker(f"superpipeline-{kind.label}") for kind in UPDATE_KINDS}
        self._copying = (self._up, self._down, *self._update_lanes.values())

    @override
    def upload(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        self.invalidate(target)
        copy = partial(copy_memory, target, source)
        if after is None:
            return self._up.submit(Job(copy))
        return self._host.submit(Job(copy, [after], rank=BEFORE_OTHER_WORK))

    @override
    def download(self, target: Tensor, source: Tensor) -> Ticket:
        self.invalidate(target)
        return self._down.submit(Job(partial(copy_memory, target, source)))

    @override
    def submit_to_lane(self, kind: Kind, job: Job) -> Ticket:
        return self._update_lanes[kind].submit(job)

    @override
    def copy(self, target: Tensor, source: Tensor) -> None:
        copy_memory(target, source)

    @override
    def wait(self, ticket: Ticket) -> None:
        # this thread *is* the device's compute stream, so blocking it keeps the order on the device
        ticket.join()

    @override
    def drain(self) -> None:
        for worker in (self._host, *self._copying):
            worker.drain()

    @override
    def close(self) -> None:
        super().close()
        for worker in self._copying:
            worker.close()


def copy_memory(target: Tensor, source: Tensor) -> None:
    """Copy host memory; `Tensor.copy_` would start a second pool of OpenMP threads in a second thread."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)


def full_device(device: torch.device | str | None) -> torch.device:
    """Return the device with its index; by default the current accelerator if torch has streams for it, or the CPU."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        if not hasattr(torch.get_device_module(device), "Stream"):
            device = "cpu"
    try:
        return torch.empty(0, device=device).device  # a tensor's device has an index
    except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
        # Torch's message may list all kinds of devices that it has ever known.
        reason = "It knows no such device." if "Expected one of" in str(error) else str(error).partition("\n")[0]
        raise ValueError(f"`device={str(device)!r}` is not a device that this torch can use. {reason}") from error


def make_backend(
    device: torch.device,
    host_threads: int | Literal["auto"],
    processes: int,
    debug: bool,
) -> Backend:
    """Make the backend for a device, on a machine that this number of `processes` share.

    `debug` poisons unused memory, and delays copies on the emulated device.
    """
    threads = _threads(device, processes) if host_threads == "auto" else host_threads
    if device.type == "cpu":
        return HostBackend(poison=debug, max_delay=0.002 if debug else 0.0, threads=threads)
    return AcceleratorBackend(device, poison=debug, threads=threads)


# One core in four, and at least one, is left to the training loop and data loaders.
_SHARE_OF_LOOP = 4


def _threads(device: torch.device, processes: int) -> int | None:
    """Choose how many threads share an operation on host memory, while another one launches kernels; None for torch's.

    On the CPU, sums have to be those of plain training. `torchrun` uses the variable that users set to grant one thread
    to each of its processes.
    """
    is_set_by_user = "OMP_NUM_THREADS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    if device.type == "cpu" or is_set_by_user:
        return None
    cores = max(1, usable_cores() // processes)
    return max(1, cores - max(1, cores // _SHARE_OF_LOOP))
