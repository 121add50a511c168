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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_lightning.optim.layout import BLOCK, Moment, fills_memory, flat
from sp_lightning.optim.rules import Scaling

_LEAST = 256 * BLOCK  # elements that are worth another thread
_ONE_AT_A_TIME = threading.Lock()  # the threads that numba has where there is no OpenMP serve one caller at a time


class Pass(NamedTuple):
    """The update of one weight, whose tensors all lie alike in memory."""

    rule: Any
    weight: Tensor
    low: Tensor | None
    gradient: Tensor
    first: Moment
    second: Moment
    lowered: Tensor | None
    scaling: Scaling = Scaling()
    seed: int | None = None  # of random rounding; None for rounding to the nearest

    @property
    def memory(self) -> tuple[Moment, ...]:
        """What the kernel reads and writes."""
        return self.weight, self.low, self.gradient, self.first, self.second, self.lowered

    def addresses(self) -> Iterator[int]:
        """Yield two addresses for each of these: of a tensor, or of codes and their scales."""
        for each in self.memory:
            codes, scales = each if isinstance(each, tuple) else (each, None)
            yield 0 if codes is None else codes.data_ptr()
            yield 0 if scales is None else scales.data_ptr()


def run(passes: Sequence[Pass]) -> None:
    """Update weights, on as many threads as torch uses in this one: in one call, if all of them are of one kind."""
    alike: dict[Any, list[Pass]] = {}
    for each in passes:
        kinds = tuple(_kind(memory) for memory in each.memory)
        alike.setdefault((each.rule, each.scaling, each.seed, kinds), []).append(each)
    for (rule, scaling, seed, kinds), of_kind in alike.items():
        _run_alike(rule, scaling, seed, kinds, of_kind)


def _run_alike(rule: Any, scaling: Scaling, seed: int | None, kinds: tuple[Any, ...], passes: Sequence[Pass]) -> None:
    import numpy as np

    from sp_lightning.optim.kernels import step_shares  # numba takes its time

    ranges, begins = _share([each.weight.numel() for each in passes], torch.get_num_threads())
    if not ranges:
        return
    addresses = np.array([[*each.addresses()] for each in passes], dtype=np.int64)
    numbers = np.array(ranges, dtype=np.int64), np.array(begins, dtype=np.int64)
    with _on_threads(len(begins) - 1):  # the others would be woken, and waited for
        step_shares(rule, tuple(map(_empty, kinds)), addresses, *numbers, scaling, seed)


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
    """Share elements of weights among threads.

    Returns:
        Ranges of them, each with the number of its weight, its begin and its end; and the first range of each share.
    """
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


def _kind(memory: Moment) -> Any:
    if isinstance(memory, tuple):
        return tuple(map(_kind, memory))
    return None if memory is None else memory.dtype


@cache
def _empty(kind: Any) -> Any:
    """Return empty memory of a kind, by whose type the kernel is chosen."""
    if isinstance(kind, tuple):
        return tuple(map(_empty, kind))
    return None if kind is None else flat(torch.empty(0, dtype=kind))


def add(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient, which may be in another dtype, to a sum of gradients."""
    count = total.numel()
    if total.dtype == gradient.dtype or total.stride() != gradient.stride() or not fills_memory(total):
        total.add_(gradient)
    elif find_spec("numba") is None or (total.dtype, gradient.dtype) != (torch.float32, torch.bfloat16):
        parts = (torch.split(each.as_strided((count,), (1,)), _LEAST) for each in (total, gradient))
        for part, added in zip(*parts, strict=True):
            part.add_(added)  # it is cast in the cache
    else:
        from sp_lightning.optim.kernels import add_bits

        with _on_threads(max(1, min(torch.get_num_threads(), count // _LEAST))):
            add_bits(flat(total), flat(gradient))
