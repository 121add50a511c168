"""Passes of the kernels over weights and gradients, shared by several threads.

The threads are numba's, not Python's: each of those would need Python's lock to begin, beside a thread that hardly ever
gives it away. On a machine with 16 cores that took a third of the time of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sp_lightning.optim.layout import BLOCK, fills_memory
from sp_lightning.optim.rules import INFINITY, MOMENTUM, NO_SCALING, Kind, Memory, Rule, Scaling

_LEAST = 256 * BLOCK  # elements that are worth another thread
_ONE_AT_A_TIME = threading.Lock()  # the threads that numba has where there is no OpenMP serve one caller at a time


class Pass(NamedTuple):
    """The update of one weight, whose tensors all lie alike in memory."""

    rule: Rule
    memory: Memory
    scaling: Scaling = NO_SCALING
    seed: int | None = None  # of random rounding; None for rounding to the nearest

    @property
    def kind(self) -> Kind:
        """What kernel it takes."""
        rule, memory, scaling, seed = self
        operations = 2 if scaling.then != 1 or scaling.limit != INFINITY else int(scaling.factor != 1)
        widths = (0 if each is None else each.itemsize for each in memory[:6])
        return Kind(rule.update, bool(rule.penalty != 0), operations, seed is not None, *widths)


def run(passes: Sequence[Pass]) -> None:
    """Update weights, on as many threads as torch uses in this one: in one call, if all of them are of one kind."""
    from sp_lightning.optim.kernels import kernel_of, step_shares  # numba takes its time

    alike: dict[tuple[Kind, Rule, Scaling, int], list[Memory]] = {}
    for each in passes:
        alike.setdefault((each.kind, each.rule, each.scaling, each.seed or 0), []).append(each.memory)
    for (kind, rule, scaling, seed), of_kind in alike.items():
        ranges, begins = _share([memory.weight.numel() for memory in of_kind], torch.get_num_threads())
        if not ranges:
            continue
        addresses = [[0 if tensor is None else tensor.data_ptr() for tensor in memory] for memory in of_kind]
        arrays = (np.array(rows, dtype=np.int64) for rows in (addresses, ranges, begins))
        with _on_threads(len(begins) - 1):  # the others would be woken, and waited for
            step_shares(kernel_of(kind), rule, scaling, *arrays, seed)


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
    share = max(_LEAST, -(-sum(sizes) // threads))
    ranges, begins, left = [], [0], share
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + -(-left // BLOCK) * BLOCK)
            ranges.append((number, start, stop))
            left -= stop - start
            start = stop
            if left <= 0:
                begins.append(len(ranges))
                left = share
    return ranges, begins if begins[-1] == len(ranges) else [*begins, len(ranges)]


def add(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient, which may be in another dtype, to a sum of gradients."""
    if total.dtype == gradient.dtype or total.stride() != gradient.stride() or not fills_memory(total):
        total.add_(gradient)
    elif find_spec("numba") is None or (total.dtype, gradient.dtype) != (torch.float32, torch.bfloat16):
        for part, added in pieces(total, gradient):
            part.add_(added)
    else:
        run([Pass(Rule.of(MOMENTUM, lr=-1), Memory(total, None, gradient, None, None, None))])


def pieces(total: Tensor, *gradients: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of all that fit into the caches of all threads, where one operation leaves them to the next."""
    if any(total.stride() != gradient.stride() for gradient in gradients) or not fills_memory(total):
        yield total, *gradients
        return
    count, size = total.numel(), _LEAST * torch.get_num_threads()
    yield from zip(*(torch.split(each.as_strided((count,), (1,)), size) for each in (total, *gradients)), strict=True)
