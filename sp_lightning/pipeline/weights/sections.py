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
from typing import NamedTuple, Protocol

import torch
from torch import nn

SECTION = 1 << 25
"""Elements in a section. At 64 MiB or more, what a copy costs whatever its size does not count."""


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


def cuts_in(elements: int) -> range:
    """Return where a weight with so many elements is cut."""
    return range(SECTION, elements, SECTION)


def find_cuts(weights: Sequence[HasMaster]) -> list[Cut]:
    """Return the places where these weights are cut, in their order in memory."""
    return [Cut(weight, elements) for weight in weights for elements in cuts_in(weight.master.numel())]


def sections_in(weights: Sequence[HasMaster]) -> int:
    """Return the number of sections that a step of these weights, or a copy of all of them, is divided into."""
    return len(find_cuts(weights)) + 1


def cut_offsets(
    cuts: Sequence[Cut], weights: Sequence[HasMaster], offsets: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[int]:
    """Return the offset of each cut in memory where these weights lie at these offsets in these dtypes."""
    where = dict(zip(weights, zip(offsets, dtypes, strict=True), strict=True))
    return [where[cut.weight][0] + cut.elements * where[cut.weight][1].itemsize for cut in cuts]
