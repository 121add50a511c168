"""Passes of the kernels over weights and gradients, cut into ranges for several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_lightning.optim.layout import BLOCK, GROUP, fills_memory, flat
from sp_lightning.optim.rules import Scaling

_LEAST = 256 * BLOCK  # elements that are worth another thread
_TURNS = 4  # ranges for each thread, as not all of them are equally fast


class Pass(NamedTuple):
    """The update of one weight; memory is as `kernels.step_range` takes it."""

    rule: Any
    weight: Any
    low: Any
    gradient: Any
    first: Any
    second: Any
    lowered: Any
    scaling: Scaling = Scaling()
    seed: int = 0  # of random rounding

    def ranges(self, size: int) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of the kernel for ranges of the weight."""
        memory = self.weight, self.low, self.gradient, self.first, self.second, self.lowered
        for start in range(0, len(self.weight), size):
            part = slice(start, start + size)
            yield self.rule, *(_cut(each, part) for each in memory), self.scaling, self.seed, start


def run(passes: Sequence[Pass]) -> None:
    """Update weights, on as many threads as torch uses in this one."""
    from sp_lightning.optim.kernels import step_range  # numba takes its time

    size = _size(sum(len(each.weight) for each in passes))
    _share(step_range, [each for weight in passes for each in weight.ranges(size)])


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
        from sp_lightning.optim.kernels import add_range

        memory, size = (flat(total, total), flat(gradient, total)), _size(count)
        _share(add_range, [tuple(each[at : at + size] for each in memory) for at in range(0, count, size)])


def _size(elements: int) -> int:
    """Return how many of so many elements a thread takes at once."""
    return max(_LEAST, -(-elements // (torch.get_num_threads() * _TURNS * BLOCK)) * BLOCK)


def _share(kernel: Callable[..., None], ranges: Sequence[tuple[Any, ...]]) -> None:
    threads = min(torch.get_num_threads(), len(ranges))
    if threads <= 1:
        for each in ranges:
            kernel(*each)
    else:  # threads of their own for each run: they begin on the cores of this one, and none is left behind
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda each: kernel(*each), ranges))


def _cut(memory: Any, part: slice) -> Any:
    """Cut an array, or the codes and scales of a moment."""
    if isinstance(memory, tuple):
        return memory[0][part], memory[1][part.start // GROUP : -(-part.stop // GROUP)]
    return None if memory is None else memory[part]
