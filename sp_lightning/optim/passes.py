"""Passes over weights and gradients; on the CPU several threads share those of the kernels.

The threads are numba's, not Python's: each of those would need Python's lock to begin, beside a thread that hardly ever
gives it away. On a machine with 16 cores that took a third of the time of a step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from sp_lightning.optim.layout import BLOCK, fills_memory
from sp_lightning.optim.on_device import step_on_device
from sp_lightning.optim.rules import Kind, Memory, Pass, Rule, Scaling, kind_of
from sp_lightning.optim.updates import MomentumUpdate

_LEAST = 256 * BLOCK  # elements that are worth another thread
_ADDED = {"lr": -1, "weight_decay": 0, "momentum": 0, "dampening": 0}  # with which a step adds the gradient
# the threads that numba has where there is no OpenMP serve one caller at a time
_ONE_AT_A_TIME = threading.Lock()


def run(passes: Sequence[Pass]) -> None:
    """Update weights: on the CPU by kernels, on an accelerator by torch's operations."""
    on_host: list[Pass] = []
    for step in passes:
        if step.memory.weight.device.type == "cpu":
            on_host.append(step)
        else:
            step_on_device(step)
    if on_host:
        _run_kernels(on_host)


def _run_kernels(passes: Sequence[Pass]) -> None:
    """Update weights on as many threads as torch uses in this one: in one call, if all of them are of one kind."""
    from sp_lightning.optim.kernels import kernel_of, step_shares  # numba takes its time

    alike: dict[tuple[Kind, Rule, Scaling, int], list[Pass]] = {}
    rules: dict[tuple[int, float], Rule] = {}
    for step in passes:
        key = id(step.group), step.step
        if key not in rules:
            rules[key] = step.update.rule(step.group, step.step)
        kind = kind_of(rules[key], step.memory, step.scaling)
        alike.setdefault((kind, rules[key], step.scaling, step.seed), []).append(step)
    for (kind, rule, scaling, seed), steps in alike.items():
        sizes = [step.memory.weight.numel() for step in steps]
        ranges, begins = _share(sizes, torch.get_num_threads())
        if not ranges:
            continue
        rows = [[*_addresses(step.memory), step.begin] for step in steps]
        arrays = (np.array(numbers, dtype=np.int64) for numbers in (rows, ranges, begins))
        with _on_threads(len(begins) - 1):  # the others would be woken, and waited for
            step_shares(kernel_of(kind), rule, scaling, *arrays, seed)


def _addresses(memory: Memory) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in memory]


@contextmanager
def _on_threads(count: int) -> Iterator[None]:
    """Have kernels run on so many threads in this scope, if numba has as many."""
    import numba

    with _ONE_AT_A_TIME:
        _start_threads()
        before = numba.get_num_threads()
        numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
        try:
            yield
        finally:
            numba.set_num_threads(before)


@cache
def _start_threads() -> None:
    """Have numba start its threads once, in a thread that ends: the one that does so gets their number as torch's, too.

    That is OpenMP's number, and OpenMP is torch's own. With another one, torch's sums would have other bits.
    """
    import numba

    starter = threading.Thread(target=numba.get_num_threads)
    starter.start()
    starter.join()


def _share(sizes: Sequence[int], threads: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Share elements of weights among threads: in ranges, as `step_shares` takes them, and the first of each share."""
    share = max(_LEAST, math.ceil(sum(sizes) / threads))
    room = share  # for elements in the share under way
    ranges: list[tuple[int, int, int]] = []
    begins = [0]
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + math.ceil(room / BLOCK) * BLOCK)
            ranges.append((number, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                begins.append(len(ranges))
                room = share
    if begins[-1] < len(ranges):
        begins.append(len(ranges))
    return ranges, begins


def add(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient, which may be in another dtype, to a sum of gradients."""
    is_widened = (total.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    if total.dtype == gradient.dtype:
        total.add_(gradient)
    elif is_widened and find_spec("numba") is not None and _lie_alike(total, gradient):
        memory = Memory(total, None, gradient, None, None, None)
        run([Pass(MomentumUpdate(), _ADDED, 0, memory)])
    else:
        for part, added in pieces(total, gradient):
            part.add_(added)


def pieces(total: Tensor, *gradients: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of all that fit into the caches of all threads, where one operation leaves them to the next."""
    if not _lie_alike(total, *gradients):
        yield total, *gradients
        return
    flat = [tensor.as_strided((total.numel(),), (1,)) for tensor in (total, *gradients)]
    size = _LEAST * torch.get_num_threads()
    yield from zip(*(torch.split(tensor, size) for tensor in flat), strict=True)


def _lie_alike(total: Tensor, *gradients: Tensor) -> bool:
    strides = {tensor.stride() for tensor in (total, *gradients)}
    return len(strides) == 1 and fills_memory(total)
