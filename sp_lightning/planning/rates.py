"""The rates of this machine, which `sp-lightning measure` finds in a minute, and keeps for `plan`.

Copies are those of the engine, the host's step runs on the thread and the cores that a run would use, and both are
measured beside each other, too: they share host memory.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sp_lightning.optim import AdamW
from sp_lightning.optim.layout import GROUP
from sp_lightning.pipeline import available_host_memory
from sp_lightning.pipeline.host_memory import usable_cores
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.devices import full_device
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.weights.buffers import HostBuffer

_COPIED = 2**28  # bytes of a copy
_STEPPED = 2**27  # parameters of a step: far more than caches hold
_TENSORS = 8  # in which these are, as those of a unit
_MULTIPLIED = 8192  # rows and columns
_HOST = torch.device("cpu")
_ROUNDS = 7
_AT_ONCE = 4  # copies, or products, of a round
_SECONDS_TOGETHER = 1.5
# of host memory that is free, the part that may be taken for measuring
_SHARE_OF_HOST = 4
_OF_STEP = {"fp32": 26.0, "int8": 2 * (2 + 2 + 2 * (1 + 4 / GROUP)) + 2}
"""Bytes for each parameter that a step reads and writes, with bf16 weights, the rest of fp32, and such moments."""

# models reach about half of what products of large matrices do
_MODELS_REACH = 0.5


@dataclass(frozen=True)
class Rates:
    """What a machine reaches, in GB/s and TFLOP/s; None is what could not be measured."""

    machine: str  # its device, CPU and cores
    day: str
    host_bandwidth: float  # of the optimizer's exact step, for what it reads and writes
    host_bandwidth_int8: float  # with int8 moments
    host_memory: float  # all cores together
    is_pinned: bool = False
    to_device: float | None = None
    to_host: float | None = None
    both_ways: float | None = None  # together
    # copies both ways, and the exact step on the host, beside each other
    copies_beside_step: float | None = None
    step_beside_copies: float | None = None
    device_step: float | None = None
    device_step_int8: float | None = None
    matmul: float | None = None  # in bf16

    def assumptions(self) -> dict[str, float]:
        """Return what a plan assumes of this machine."""
        beside = (self.copies_beside_step or 0.0) + (self.step_beside_copies or 0.0)
        found = {
            "to_device": self.to_device,
            "to_host": self.to_host,
            "compute": self.matmul and round(_MODELS_REACH * self.matmul, 1),
            "host_bandwidth": self.host_bandwidth,
            "host_bandwidth_int8": self.host_bandwidth_int8,
            "both_ways": self.both_ways,
            "memory_bandwidth": max(self.host_memory, self.host_bandwidth, round(beside, 1)),
            "device_step": self.device_step,
            "device_step_int8": self.device_step_int8,
        }
        return {name: value for name, value in found.items() if value is not None}


def measure(backend: Backend) -> Rates:
    """Measure a device and its host, or the host alone."""
    free = available_host_memory() or 2**33
    # 16 bytes each in an exact step, which is there while the other one is
    parameters = min(_STEPPED, free // _SHARE_OF_HOST // 32)
    exact, int8 = (_Step(_HOST, parameters, moments) for moments in _OF_STEP)
    rates = Rates(
        machine=machine_name(),
        day=date.today().isoformat(),
        host_bandwidth=exact.rate_on_host(backend),
        host_bandwidth_int8=int8.rate_on_host(backend),
        host_memory=_host_memory(_COPIED),
    )
    return rates if backend.device == _HOST else measure_device(rates, backend, exact)


def measure_device(rates: Rates, backend: Backend, step: _Step) -> Rates:
    """Add what a device reaches, and its copies alone and beside a step on the host."""
    copies = _Copies(backend, _COPIED)
    try:
        copies_beside_step, step_beside_copies = _beside(copies, step)
        return replace(
            rates,
            is_pinned=copies.is_pinned,
            to_device=copies.rate([copies.up]),
            to_host=copies.rate([copies.down]),
            both_ways=copies.rate([copies.up, copies.down]),
            copies_beside_step=copies_beside_step,
            step_beside_copies=step_beside_copies,
            device_step=_Step(backend.device, _STEPPED, "fp32").rate_on_device(backend),
            device_step_int8=_Step(backend.device, _STEPPED, "int8").rate_on_device(backend),
            matmul=_matmul(backend, _MULTIPLIED),
        )
    finally:
        copies.close()


def machine_name() -> str:
    """Return what the rates of a machine are kept by: its device, its CPU, and the cores that may be used."""
    device = full_device(None)
    names = [torch.get_device_module(device).get_device_name(device)] if device != _HOST else []
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return ", ".join([*names, cpu, f"{usable_cores()} cores"])


# -------------------------------------------------------------------------------------------------------- what is kept


def rates_file() -> Path:
    """Return the file in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sp_lightning" / "rates.json"


def keep(rates: Rates) -> None:
    """Write the rates of this machine beside those of others, which may have the same home."""
    file = rates_file()
    try:
        kept = _read(file)
    except ValueError:
        kept = {}  # which `measure` is said to mend
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps({**kept, rates.machine: asdict(rates)}, indent=2), encoding="utf-8")
    written.replace(file)


def kept_rates() -> Rates | None:
    """Return the rates of this machine, if they were measured."""
    file = rates_file()
    found = _read(file).get(machine_name())
    if found is None:
        return None
    try:
        return Rates(**found)
    except TypeError as error:
        raise _no_rates(file) from error


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except ValueError as error:
        raise _no_rates(file) from error
    if not (isinstance(kept, dict) and all(isinstance(value, dict) for value in kept.values())):
        raise _no_rates(file)
    return kept


def _no_rates(file: Path) -> ValueError:
    return ValueError(f"{file} is not what `sp-lightning measure` writes: measure anew, or delete it")


# ------------------------------------------------------------------------------------------------------- measuring


class _Copies:
    """Copies in both directions between page-locked memory and the device."""

    def __init__(self, backend: Backend, nbytes: int) -> None:
        self.backend = backend
        self.nbytes = nbytes
        self._host = [HostBuffer(nbytes, backend, pin=True) for _ in range(2)]
        self._device = [backend.allocate(nbytes) for _ in range(2)]
        for buffer in self._host:
            buffer.bytes.fill_(1)  # or it would not be there yet
        self.is_pinned = all(buffer.pinned for buffer in self._host)

    def up(self) -> Ticket:
        """Ask for a copy to the device."""
        return self.backend.upload(self._device[0], self._host[0].bytes)

    def down(self) -> Ticket:
        """Ask for a copy to the host."""
        return self.backend.download(self._host[1].bytes, self._device[1])

    def rate(self, ways: Sequence[Callable[[], Ticket]]) -> float:
        """Return the GB/s of copies that go these ways at once."""

        def copy() -> None:
            for ticket in [way() for _ in range(_AT_ONCE) for way in ways]:
                ticket.join()

        return _in_giga(_AT_ONCE * len(ways) * self.nbytes / _seconds(copy))

    def close(self) -> None:
        """Give the memory back."""
        self.backend.drain()
        for buffer in self._host:
            buffer.release()


class _Step:
    """A step of AdamW over bf16 weights with all bits of fp32 beside them, and such moments."""

    def __init__(self, device: torch.device, parameters: int, moments: str) -> None:
        size = max(1, parameters // _TENSORS)
        weights = [nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device=device)) for _ in range(_TENSORS)]
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.01)
        self._optimizer = AdamW(weights, master="split", moments=moments)
        self.nbytes = _OF_STEP[moments] * size * _TENSORS

    def __call__(self) -> None:
        self._optimizer.step()

    def rate_on_host(self, backend: Backend) -> float:
        """Return the GB/s of host memory of the step, on the thread that steps units."""
        return _in_giga(self.nbytes / _seconds(lambda: backend.work(self).join()))

    def rate_on_device(self, backend: Backend) -> float:
        """Return the same of the step on the device."""
        return _in_giga(self.nbytes / _seconds_on_device(backend, self))


def _beside(copies: _Copies, step: _Step) -> tuple[float, float]:
    """Return the GB/s of copies in both directions, and of steps on the host, as long as both are under way."""
    backend = copies.backend
    begin = time.perf_counter()
    copied = stepped = 0
    while time.perf_counter() - begin < _SECONDS_TOGETHER:
        job = backend.work(step)
        while not job.done:
            for ticket in (copies.up(), copies.down()):
                ticket.join()
            copied += 2
        job.join()
        stepped += 1
    seconds = time.perf_counter() - begin
    return _in_giga(copied * copies.nbytes / seconds), _in_giga(stepped * step.nbytes / seconds)


def _host_memory(nbytes: int) -> float:
    """Return the GB/s at which all cores copy memory, reads and writes together."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.ones_like(source)
    return _in_giga(2 * nbytes / _seconds(lambda: target.copy_(source)))


def _matmul(backend: Backend, size: int) -> float:
    """Return the TFLOP/s of products of large matrices in bf16."""
    left, right = (torch.randn(size, size, device=backend.device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(_AT_ONCE):
            torch.mm(left, right, out=product)

    return round(_AT_ONCE * 2 * size**3 / _seconds_on_device(backend, multiply) / 1e12, 1)


def _seconds(work: Callable[[], object]) -> float:
    """Return the median time of some work; the first rounds touch new memory and compile kernels."""
    seconds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def _seconds_on_device(backend: Backend, work: Callable[[], object]) -> float:
    def marked() -> float:
        begin = backend.mark()
        work()
        return backend.seconds(begin, backend.mark())

    return statistics.median([marked() for _ in range(_ROUNDS)][2:])


def _in_giga(rate: float) -> float:
    return float(f"{rate / 1e9:.3g}")
