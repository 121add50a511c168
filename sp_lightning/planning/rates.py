"""The speeds of a machine that recorded steps do not show: for the planner, and for `plan --measure`.

They are those of copies up, copies down, both at once, and the host's steps alone and during copies. All of it is work
in the lanes of a backend, over memory of its own. Blocks on the host are far larger than caches: values in a cache need
no memory, and so would not show that copies and steps share memory.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from sp_lightning.optim import AdamW
from sp_lightning.pipeline import Backend, Kind
from sp_lightning.pipeline.lanes.accelerator import full_device, make_backend
from sp_lightning.pipeline.lanes.lanes import Job
from sp_lightning.pipeline.weights.buffers import HostBuffer
from sp_lightning.planning.work import Machine

_BLOCK = 1 << 28  # bytes of a copy
_SECONDS = 0.01  # time that a copy may take between two steps
_PARTS = 8  # parts of a block, which come one after the other to the same place on the device
_TIMES = 3
_STEPPED = 2**26  # parameters of a step that is measured
_OF_STEP = 26  # bytes for each of them that it reads and writes
_COPIES = (Kind.STATE_UP, Kind.STATE_DOWN)
_HARDLY_SLOWER = 0.95  # factor of a rate that counts as no difference


def probe(backend: Backend, machine: Machine, is_pinned: bool) -> Machine:
    """Return the machine with the rates that copies and the host's memory show when these share it.

    Host memory is pinned if the memory that the engine sends is. A rate of the machine that is 0 is not known yet.
    """
    aligned = 256 * _PARTS
    size = max(aligned, int(min(_BLOCK, _SECONDS * (machine.to_device or math.inf))) // aligned * aligned)
    buffers = [HostBuffer(size, backend, is_pinned) for _ in range(4)]
    try:
        memory = [buffer.bytes.zero_() for buffer in buffers]
        rates = partial(_rates, backend, _work(backend, *memory))
        rates(*_COPIES, Kind.STEP)  # the first time everything is slower
        alone = {kind: rates(kind)[kind] for kind in (*_COPIES, Kind.STEP)}
        copying = rates(*_COPIES)
        all_at_once = rates(*_COPIES, Kind.STEP)
    finally:
        backend.drain()
        for buffer in buffers:
            buffer.release()
    host_memory = math.inf
    if any(all_at_once[kind] < _HARDLY_SLOWER * rate for kind, rate in (alone | copying).items()):
        # the optimizer's own steps may use more of it than this one
        faster = max(1.0, machine.host / alone[Kind.STEP])
        host_memory = sum(all_at_once[kind] for kind in _COPIES) + faster * all_at_once[Kind.STEP]
    return replace(
        machine,
        to_device=max(machine.to_device, alone[Kind.STATE_UP]),
        to_host=max(machine.to_host, alone[Kind.STATE_DOWN]),
        both=sum(copying.values()),
        host_memory=host_memory,
    )


def _work(
    backend: Backend, source: Tensor, target: Tensor, weight: Tensor, gradient: Tensor
) -> dict[Kind, partial[Job]]:
    """Return work of all kinds that share memory: copies of these tensors, and a step on the host."""
    size = source.nbytes
    arriving, leaving = backend.allocate(2 * size // _PARTS).zero_().view(2, -1).unbind()

    def up() -> None:
        for part in source.view(_PARTS, -1):
            backend.copy(arriving, part)

    def down() -> None:
        for part in target.view(_PARTS, -1):
            backend.copy(part, leaving)

    def step() -> None:
        weight.view(torch.float32).add_(gradient.view(torch.float32))

    return {
        Kind.STATE_UP: partial(Job, up, nbytes=size),
        Kind.STATE_DOWN: partial(Job, down, nbytes=size),
        Kind.STEP: partial(Job, step, nbytes=3 * size),
    }


def _rates(backend: Backend, work: dict[Kind, partial[Job]], *kinds: Kind) -> dict[Kind, float]:
    """Return the bytes per second of each of these kinds of work, while all of them are under way."""
    backend.drain()
    with backend.trace.record() as recording:
        for _ in range(_TIMES):
            for kind in kinds:
                ask = backend.trace.work if kind is Kind.STEP else backend.trace.submit_to_lane
                ask(kind, "probe", work[kind]())
    spans = {kind: [span for span in recording.spans if span.kind is kind] for kind in kinds}
    begin = max(of_kind[0].begin for of_kind in spans.values())
    end = min(of_kind[-1].end for of_kind in spans.values())
    rates = dict.fromkeys(kinds, 0.0)
    for span in recording.spans if end > begin else ():
        within = max(0.0, min(end, span.end) - max(begin, span.begin))
        rates[span.kind] += span.nbytes * within / max(span.end - span.begin, 1e-9) / (end - begin)
    return {kind: rate or math.inf for kind, rate in rates.items()}  # it may take no time at all


# ---------------------------------------------------------------------------------------------------- `plan --measure`


def measure() -> dict[str, float]:
    """Measure the device and its host, or the host alone; return the rates that `plan` is to assume, in GB/s."""
    machine = measured_machine()
    assumed = {
        "host_bandwidth": machine.host,
        "link": machine.to_device,
        "memory_bandwidth": machine.host_memory,
    }
    # what is 0 has no device, and what is infinite was too fast to be seen
    return {name: float(f"{rate / 1e9:.3g}") for name, rate in assumed.items() if 0 < rate < math.inf}


def measured_machine() -> Machine:
    """Measure the device and its host; the rates of copies are 0 without a device."""
    with closing(make_backend(full_device(None), "auto", processes=1, debug=False)) as backend:
        work = {Kind.STEP: _step_of_adamw()}
        _rates(backend, work, Kind.STEP)  # a kernel is compiled
        machine = Machine(0.0, 0.0, _rates(backend, work, Kind.STEP)[Kind.STEP])
        return machine if backend.device.type == "cpu" else probe(backend, machine, is_pinned=True)


def _step_of_adamw() -> partial[Job]:
    """Return a step of AdamW on the host, over bf16 weights with the other bits of fp32 next to them."""
    weight = nn.Parameter(torch.ones(_STEPPED, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 0.01)
    return partial(Job, AdamW([weight]).step, nbytes=_OF_STEP * _STEPPED)
