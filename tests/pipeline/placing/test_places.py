"""Places in the arena: neighbors in the order of use never overlap, and nothing is wasted."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sp_lightning.pipeline.placing.places import place_in_arena

SIZES = st.lists(st.integers(1, 50).map(lambda n: 256 * n), max_size=20)


@given(SIZES, st.integers(1, 25))
@example([256, 512, 256, 768], 3)
def test_neighbors_never_overlap(sizes: list[int], window: int) -> None:
    """Any `window` pieces in a row are there at once; the arena holds every piece and is not above window * largest."""
    offsets, arena = place_in_arena(sizes, window)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    for first in range(len(sizes)):
        for second in range(first + 1, min(first + window, len(sizes))):
            assert ends[first] <= offsets[second] or ends[second] <= offsets[first]
    assert all(offset >= 0 and offset % 256 == 0 for offset in offsets), "sizes are aligned, so places must be, too"
    assert max(ends, default=0) <= arena <= window * max(sizes, default=0)


def test_a_large_piece_does_not_inflate_every_slot() -> None:
    """An embedding of ten blocks and twelve blocks, k = 2: eleven blocks' bytes, not twenty."""
    _, arena = place_in_arena([10] + [1] * 12, 2)
    assert arena == 11


@pytest.mark.parametrize("blocks", [12, 13])
@pytest.mark.parametrize("window", [2, 3])
def test_the_first_piece_may_come_after_the_last(window: int, blocks: int) -> None:
    """A tied embedding is used again as the head, while the last blocks are there."""
    offsets, arena = place_in_arena([10] + [1] * blocks, window)
    assert min(offsets[1 - window :]) >= offsets[0] + 10
    assert arena == 10 + window - 1
