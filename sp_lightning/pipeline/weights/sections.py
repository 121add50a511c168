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

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import nn

SECTION = 1 << 25
"""Elements in a section. At 64 MiB or more, what a copy costs whatever its size does not count.

Whole vectors of a processor: kernels may round the elements beside them differently.
"""


class HasMaster(Protocol):
    """What matters here of a weight.

    Attributes:
        master: Its Parameter on the host.
    """

    master: nn.Parameter


class Cut(NamedTuple):
    """A place between two sections.

    Attributes:
        weight: The weight that is cut; all weights before it lie before the cut.
        elements: How many of its elements do.
    """

    weight: HasMaster
    elements: int


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


def count_sections(weights: Sequence[HasMaster]) -> int:
    """Return the number of sections that a step of these weights, or a copy of all of them, is divided into."""
    return 1 + sum(len(cuts_in(weight.master.numel())) for weight in weights)


def divide(
    weights: Sequence[HasMaster], offsets: Sequence[int], dtypes: Sequence[torch.dtype], nbytes: int
) -> list[Section]:
    """Return the sections of memory where these weights lie at these offsets in these dtypes."""
    cuts: list[Cut | None] = []
    ends = [0]
    for weight, offset, dtype in zip(weights, offsets, dtypes, strict=True):
        for elements in cuts_in(weight.master.numel()):
            cuts.append(Cut(weight, elements))
            ends.append(offset + elements * dtype.itemsize)
    return [Section(cut, *extent) for cut, extent in zip([*cuts, None], pairwise([*ends, nbytes]), strict=True)]
