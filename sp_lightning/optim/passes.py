"""Passes of the kernel over weights, cut into ranges for several threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from sp_lightning.optim.layout import BLOCK, GROUP
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

    threads = torch.get_num_threads()
    elements = sum(len(each.weight) for each in passes)
    size = max(_LEAST, -(-elements // (threads * _TURNS * BLOCK)) * BLOCK)
    ranges = [each for weight in passes for each in weight.ranges(size)]
    if threads == 1 or len(ranges) == 1:
        for each in ranges:
            step_range(*each)
    else:  # threads of their own for each run: they begin on the cores of this one, and none is left behind
        with ThreadPoolExecutor(min(threads, len(ranges))) as pool:
            list(pool.map(lambda each: step_range(*each), ranges))


def _cut(memory: Any, part: slice) -> Any:
    """Cut an array, or the codes and scales of a moment."""
    if isinstance(memory, tuple):
        return memory[0][part], memory[1][part.start // GROUP : -(-part.stop // GROUP)]
    return None if memory is None else memory[part]
