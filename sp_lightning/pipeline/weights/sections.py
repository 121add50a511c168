"""Sections of large weights: one is copied while another is stepped.

[Note: sections]
What backward reaches last, forward needs first. In a language model that is the embedding, often the largest unit, and
nothing else is left to do while its gradient goes to the host, its weights are stepped, and they come back. So large
weights are cut: a section is stepped as soon as its gradient has landed, and sent as soon as it is stepped.

    gradients to the host   0  1  2  3
    step                       0  1  2  3
    weights to the device         0  1  2  3
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

SECTION = 1 << 25
"""Elements in a section. At 64 MiB or more, what a copy costs whatever its size does not count.

Whole vectors of a processor: kernels may round the elements beside them differently.
"""

Cut: TypeAlias = tuple[int, int]
"""A place between two sections: the weight that is cut, by the identity of its master, and its elements before that."""


class Section(NamedTuple):
    """A section, as it lies in memory.

    Attributes:
        cut: Where it ends; None for the last one.
        begin: Its first byte.
        end: The byte after its last one.
    """

    cut: Cut | None
    begin: int
    end: int


def cuts_in(elements: int) -> range:
    """Return where a weight with so many elements is cut."""
    return range(SECTION, elements, SECTION)


def count_sections(weights: Iterable[Tensor]) -> int:
    """Return the number of sections that a step of these weights, or a copy of all of them, is divided into."""
    return 1 + sum(len(cuts_in(weight.numel())) for weight in weights)


def divide(
    weights: Sequence[Tensor], offsets: Sequence[int], dtypes: Sequence[torch.dtype], nbytes: int
) -> list[Section]:
    """Return the sections of memory where these weights lie at these offsets in these dtypes."""
    cuts: list[Cut | None] = []
    ends = [0]
    for weight, offset, dtype in zip(weights, offsets, dtypes, strict=True):
        for elements in cuts_in(weight.numel()):
            cuts.append((id(weight), elements))
            ends.append(offset + elements * dtype.itemsize)
    return [Section(cut, *extent) for cut, extent in zip([*cuts, None], pairwise([*ends, nbytes]), strict=True)]
