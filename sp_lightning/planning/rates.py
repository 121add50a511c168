"""How fast a machine is where recorded steps do not show it: for the planner, and for `sp-lightning measure`.

Copies up, copies down, both at once; the host's steps alone and beside them; steps on the device. All of it is work in
the lanes of a backend, over memory of its own. Blocks on the host are far larger than caches: what lies in one needs no
memory, so nobody would see that memory is shared.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sp_lightning.optim import AdamW
from sp_lightning.optim.layout import GROUP
from sp_lightning.pipeline import Backend, Kind, available_host_memory
from sp_lightning.pipeline.host_memory import usable_cores
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.planning.work import Machine

_BLOCK = 1 << 28  # bytes of a copy
_SECONDS = 0.01  # that a copy may take between two steps
_PARTS = 8  # of a block, which come one after the other to the same place on the device
_TIMES = 3
_STEPPED = 2**27  # parameters of a step that `measure` makes, in tensors as those of a unit
_TENSORS = 8
_SHARE_OF_HOST = 64  # bytes of host memory that is free, for each of these parameters
_OF_STEP = {"fp32": 26.0, "int8": 2 * (2 + 2 + 2 * (1 + 4 / GROUP)) + 2}
"""Bytes for each parameter that a step reads and writes, with bf16 weights, the rest of fp32, and such moments."""
_COPIES = (Kind.STATE_UP, Kind.STATE_DOWN)
_HARDLY_SLOWER = 0.95  # of a rate


class _Work(NamedTuple):
    job: Callable[[], None]
    nbytes: int  # that it reads and writes


def probe(backend: Backend, machine: Machine, is_pinned: bool) -> Machine:
    """Return the machine with the rates that copies, the host's memory and the device show when they share them.

    Host memory is page-locked if what is sent is. A rate of the machine that is 0 is not known yet.
    """
    aligned = 256 * _PARTS
    size = max(aligned, int(min(_BLOCK, _SECONDS * (machine.to_device or math.inf))) // aligned * aligned)
    buffers = [HostBuffer(size, backend, is_pinned) for _ in range(4)]
    try:
        memory = [buffer.bytes.zero_() for buffer in buffers]
        rates = partial(_rates, backend, _work(backend, *memory))
        rates(*_COPIES, Kind.STEP, Kind.VISIT)  # the first time everything is slower
        alone = {kind: rates(kind)[kind] for kind in (*_COPIES, Kind.STEP, Kind.VISIT)}
        copying = rates(*_COPIES)
        all_at_once = rates(*_COPIES, Kind.STEP)
    finally:
        backend.drain()
        for buffer in buffers:
            buffer.release()
    host_memory = math.inf
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


def _work(backend: Backend, source: Tensor, target: Tensor, weight: Tensor, gradient: Tensor) -> dict[Kind, _Work]:
    """Return work of all kinds that steps are made of: copies of these, a step on the host, and one on the device."""
    size = source.nbytes
    arriving, leaving, *numbers = backend.allocate(5 * size // _PARTS).zero_().view(5, -1).unbind()
    first, second, third = (number.view(torch.float32) for number in numbers)

    def up() -> None:
        for part in source.view(_PARTS, -1):
            backend.copy(arriving, part)

    def down() -> None:
        for part in target.view(_PARTS, -1):
            backend.copy(part, leaving)

    def visit() -> None:
        """Do what AdamW does with a weight and its two moments, in torch's operations."""
        second.lerp_(first, 0.1)
        third.mul_(0.9).addcmul_(first, first, value=0.1)
        first.mul_(0.9).sub_(second.div(third.sqrt().add_(1.0)))

    def step() -> None:
        weight.view(torch.float32).add_(gradient.view(torch.float32))

    return {
        Kind.STATE_UP: _Work(up, size),
        Kind.STATE_DOWN: _Work(down, size),
        Kind.VISIT: _Work(visit, 6 * size // _PARTS),
        Kind.STEP: _Work(step, 3 * size),
    }


def _rates(backend: Backend, work: dict[Kind, _Work], *kinds: Kind) -> dict[Kind, float]:
    """Return the bytes per second of each of these kinds of work, while all of them are under way."""
    backend.drain()
    with backend.trace.record() as recording:
        for _ in range(_TIMES):
            for kind in kinds:
                ask = backend.trace.work if kind is Kind.STEP else backend.trace.beside
                ask(kind, "probe", work[kind].job, [], work[kind].nbytes)
    spans = {kind: [span for span in recording.spans if span.kind is kind] for kind in kinds}
    begin = max(of_kind[0].begin for of_kind in spans.values())
    end = min(of_kind[-1].end for of_kind in spans.values())
    rates = dict.fromkeys(kinds, 0.0)
    for span in recording.spans if end > begin else ():
        within = max(0.0, min(end, span.end) - max(begin, span.begin))
        rates[span.kind] += span.nbytes * within / max(span.end - span.begin, 1e-9) / (end - begin)
    return {kind: rate or math.inf for kind, rate in rates.items()}  # it may take no time at all


# --------------------------------------------------------------------------------------------- `sp-lightning measure`


@dataclass(frozen=True)
class Rates:
    """What a machine reaches, in GB/s."""

    machine: str  # its device, CPU and cores
    day: str
    assumptions: dict[str, float]  # that a plan makes of this machine


def measure(backend: Backend) -> Rates:
    """Measure a device and its host, or the host alone."""
    found: dict[str, float] = {}
    has_device = backend.device.type != "cpu"
    if has_device:
        machine = probe(backend, Machine(0.0, 0.0, 0.0), is_pinned=True)
        names = ("to_device", "to_host", "both_ways", "memory_bandwidth")
        rates = (machine.to_device, machine.to_host, machine.both, machine.host_memory)
        found = {name: rate for name, rate in zip(names, rates, strict=True) if rate < math.inf}
    for moments in _OF_STEP:
        suffix = "" if moments == "fp32" else f"_{moments}"
        work = {Kind.STEP: _step_of_adamw("cpu", moments), Kind.VISIT: _step_of_adamw(backend.device, moments)}
        for kind, name in ((Kind.STEP, "host_bandwidth"), (Kind.VISIT, "device_step"))[: 1 + has_device]:
            _rates(backend, work, kind)  # kernels are compiled
            found[name + suffix] = _rates(backend, work, kind)[kind]
    known = {name: float(f"{rate / 1e9:.3g}") for name, rate in found.items()}
    return Rates(machine_name(backend.device), date.today().isoformat(), known)


def _step_of_adamw(device: torch.device | str, moments: str) -> _Work:
    """Return a step of AdamW over bf16 weights with all bits of fp32 beside them, and such moments."""
    size = max(1, min(_STEPPED, (available_host_memory() or 2**33) // _SHARE_OF_HOST) // _TENSORS)
    weights = [nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device=device)) for _ in range(_TENSORS)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.01)
    optimizer = AdamW(weights, moments=moments)

    def step() -> None:
        optimizer.step()

    return _Work(step, int(_OF_STEP[moments] * size * _TENSORS))


def machine_name(device: torch.device) -> str:
    """Return what the rates of a machine are kept by: its device, its CPU, and the cores that may be used."""
    name = "no GPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return f"{name}, {platform.processor() or platform.machine()}, {usable_cores()} cores"


def rates_file() -> Path:
    """Return the file in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sp_lightning" / "rates.json"


def keep(rates: Rates) -> None:
    """Write the rates of this machine."""
    rates_file().parent.mkdir(parents=True, exist_ok=True)
    rates_file().write_text(json.dumps(asdict(rates), indent=2), encoding="utf-8")


def kept_rates(device: torch.device) -> Rates | None:
    """Return the rates of this machine, if they were measured."""
    file = rates_file()
    if not file.exists():
        return None
    try:
        rates = Rates(**json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is not what `sp-lightning measure` writes: measure anew, or delete it") from error
    return rates if rates.machine == machine_name(device) else None
