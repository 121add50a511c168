"""Finds out between two steps how fast a machine is where the recorded steps did not show it, in a tenth of a second.

Copies up, copies down, both at once; the host's memory while it is worked on and copied; steps on the device. Each of
them takes a few milliseconds, in lanes of the engine's backend, with memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sp_lightning.pipeline import Backend, Kind, Recording
from sp_lightning.planning.cost import Machine

_MOST = 1 << 25  # bytes of a copy
_SECONDS = 0.003  # that a copy may take
_ALIGNED = 256
_TIMES = 3
_HARDLY_SLOWER = 0.95  # of a rate


def probe(backend: Backend, machine: Machine) -> Machine:
    """Return the machine with the rates that copies, the host's memory and the device show when they share them."""
    size = max(_ALIGNED, int(min(_MOST, _SECONDS * machine.to_device)) // _ALIGNED * _ALIGNED)
    on_host = [torch.zeros(size, dtype=torch.uint8, device="cpu") for _ in range(4)]
    on_device = backend.allocate(5 * size).zero_().view(5, size).unbind()
    pinned = [memory for memory in on_host[:2] if backend.pins and backend.pin(memory)]
    try:
        return _Probe(backend, on_host, on_device).machine(machine)
    finally:
        backend.drain()
        for memory in pinned:
            backend.unpin(memory)


class _Probe:
    """Work of all kinds that an optimizer's steps are made of, over memory that nobody else needs."""

    def __init__(self, backend: Backend, on_host: Sequence[Tensor], on_device: Sequence[Tensor]) -> None:
        self._backend = backend
        source, target, *stepped = on_host
        arriving, leaving, *numbers = on_device
        size = source.nbytes
        self._work: dict[Kind, tuple[Callable[[], None], int]] = {
            Kind.STATE_UP: (_Copy(backend, arriving, source), size),
            Kind.STATE_DOWN: (_Copy(backend, target, leaving), size),
            Kind.VISIT: (_DeviceStep(*(memory.view(torch.float32) for memory in numbers)), 2 * len(numbers) * size),
            Kind.STEP: (_HostStep(*(memory.view(torch.float32) for memory in stepped)), 3 * size),
        }

    def machine(self, machine: Machine) -> Machine:
        self._record(*self._work)  # the first time everything is slower
        up = _rate(self._record(Kind.STATE_UP), Kind.STATE_UP)
        down = _rate(self._record(Kind.STATE_DOWN), Kind.STATE_DOWN)
        host = _rate(self._record(Kind.STEP), Kind.STEP)
        device = _rate(self._record(Kind.VISIT), Kind.VISIT)
        copying = self._record(Kind.STATE_UP, Kind.STATE_DOWN)
        both = _rate(copying, Kind.STATE_UP) + _rate(copying, Kind.STATE_DOWN)
        all_at_once = self._record(Kind.STATE_UP, Kind.STATE_DOWN, Kind.STEP)
        beside_host = _rate(all_at_once, Kind.STATE_UP) + _rate(all_at_once, Kind.STATE_DOWN)
        beside_copies = _rate(all_at_once, Kind.STEP)
        host_memory = machine.host_memory
        if beside_host < _HARDLY_SLOWER * both or beside_copies < _HARDLY_SLOWER * host:
            host_memory = beside_host + beside_copies
        return replace(
            machine,
            to_device=max(up, machine.to_device),
            to_host=max(down, machine.to_host),
            both=both,
            device=device,
            host_memory=host_memory,
        )

    def _record(self, *kinds: Kind) -> Recording:
        """Record work of these kinds, all of it at the same time."""
        backend = self._backend
        backend.drain()
        with backend.trace.record() as recording:
            for _ in range(_TIMES):
                for kind in kinds:
                    job, nbytes = self._work[kind]
                    if kind is Kind.STEP:
                        backend.trace.work(kind, "probe", job, [], nbytes)
                    else:
                        backend.trace.beside(kind, "probe", job, [], nbytes)
        return recording


@dataclass(frozen=True)
class _Copy:
    backend: Backend
    target: Tensor
    source: Tensor

    def __call__(self) -> None:
        self.backend.copy(self.target, self.source)


@dataclass(frozen=True)
class _HostStep:
    """Reads two numbers of host memory, and writes one."""

    weight: Tensor
    gradient: Tensor

    def __call__(self) -> None:
        self.weight.add_(self.gradient)


@dataclass(frozen=True)
class _DeviceStep:
    """What AdamW does with a weight and its two moments, in torch's operations."""

    weight: Tensor
    first: Tensor
    second: Tensor

    def __call__(self) -> None:
        self.first.lerp_(self.weight, 0.1)
        self.second.mul_(0.9).addcmul_(self.weight, self.weight, value=0.1)
        root = self.second.sqrt().add_(1.0)
        self.weight.mul_(0.9).sub_(self.first.div(root))


def _rate(recording: Recording, kind: Kind) -> float:
    """Return the bytes per second of the work of a kind."""
    spans = [span for span in recording.spans if span.kind is kind]
    seconds = sum(span.end - span.begin for span in spans)
    return sum(span.nbytes for span in spans) / max(seconds, 1e-9)
