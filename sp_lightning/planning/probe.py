"""Finds out between two steps how fast a machine is where the recorded steps did not show it, in a tenth of a second.

Copies up, copies down, both at once; the host's memory while it is worked on and copied; steps on the device. Each of
them takes a few milliseconds, in lanes of the engine's backend, with memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sp_lightning.pipeline import Backend, Kind, Span
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.planning.cost import Machine

_MOST = 1 << 25  # bytes of a copy
_PARTS = 32  # of the budget, of which eight or so are taken at once
_SECONDS = 0.003  # that a copy may take
_ALIGNED = 256
_TIMES = 3
_COPIES = (Kind.STATE_UP, Kind.STATE_DOWN)
_HARDLY_SLOWER = 0.95  # of a rate


def probe(backend: Backend, machine: Machine, budget: int, is_pinned: bool) -> Machine:
    """Return the machine with the rates that copies, the host's memory and the device show when they share them.

    It takes a part of the device's budget. Host memory is page-locked if what is sent is: small buffers might be where
    all of a model cannot be.
    """
    most = min(_MOST, budget // _PARTS, _SECONDS * machine.to_device)
    size = max(_ALIGNED, int(most) // _ALIGNED * _ALIGNED)
    on_host = [HostBuffer(size, backend, is_pinned) for _ in range(4)]
    on_device = [backend.allocate(size).zero_() for _ in range(5)]
    try:
        return _Probe(backend, [buffer.bytes.zero_() for buffer in on_host], on_device).machine(machine)
    finally:
        backend.drain()
        for buffer in on_host:
            buffer.release()


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
        self._rates(*self._work)  # the first time everything is slower
        alone = {kind: self._rates(kind)[kind] for kind in self._work}
        copying = self._rates(*_COPIES)
        all_at_once = self._rates(*_COPIES, Kind.STEP)
        host_memory = machine.host_memory
        if any(all_at_once[kind] < _HARDLY_SLOWER * copying.get(kind, alone[kind]) for kind in all_at_once):
            # the optimizer's own steps may use more of it than this one
            faster = max(1.0, machine.host / alone[Kind.STEP])
            host_memory = sum(all_at_once[kind] for kind in _COPIES) + faster * all_at_once[Kind.STEP]
        return replace(
            machine,
            to_device=max(machine.to_device, alone[Kind.STATE_UP]),
            to_host=max(machine.to_host, alone[Kind.STATE_DOWN]),
            both=sum(copying.values()),
            device=alone[Kind.VISIT],
            host_memory=host_memory,
        )

    def _rates(self, *kinds: Kind) -> dict[Kind, float]:
        """Return the bytes per second of each of these kinds of work, while all of them are under way."""
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
        spans = {kind: [span for span in recording.spans if span.kind is kind] for kind in kinds}
        begin = max(of_kind[0].begin for of_kind in spans.values())
        end = min(of_kind[-1].end for of_kind in spans.values())
        if end <= begin:  # it took no time at all
            return dict.fromkeys(kinds, math.inf)
        return {kind: _bytes_within(begin, end, of_kind) / (end - begin) for kind, of_kind in spans.items()}


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


def _bytes_within(begin: float, end: float, spans: Sequence[Span]) -> float:
    nbytes = 0.0
    for span in spans:
        within = min(end, span.end) - max(begin, span.begin)
        nbytes += span.nbytes * max(0.0, within) / max(span.end - span.begin, 1e-9)
    return nbytes
