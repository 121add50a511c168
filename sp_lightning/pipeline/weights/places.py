"""Where groups lie on the device: one arena that streamed groups share.

[Note: places in the arena]
A group has the same place for as long as the plan is in force, so raw aliases of its weights (a tensor stashed on an
autograd `ctx`, one held by a checkpoint) are valid from its load to the end of its backward. Places are chosen so that
any `window` consecutive groups do not overlap: with equal sizes, "group g has slot g mod k"; with unequal sizes, a
large embedding does not inflate every slot, and lies beside the last groups, too, as it may be the head. Groups whose
places overlap cannot be on the device at once: loading one evicts the others. Evicting moves nothing, because the host
has the truth.

A unit that is kept travels alone, to a place of its own outside of the arena. It is loaded when its weights have
changed, in the order of use like all others, and never evicted.

    12 blocks, k = 3      slot 0   slot 1   slot 2
    forward of block 4      3        4        5      <- 5 arrives while 4 computes
    forward of block 5      6        4        5      <- 3 is done: its slot takes 6
    ...
    backward of block 11    9       10       11      <- the last three stay for the turn
    backward of block 10    9       10        8
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def travel_together(units: int, k_prime: int, alone: Collection[int] = ()) -> list[list[int]]:
    """Divide units into lists that travel together: up to `k_prime` neighbors, whose gradients arrive in succession.

    Args:
        units: How many units there are.
        k_prime: How many travel together.
        alone: Numbers of units that travel alone.
    """
    parts: list[list[int]] = []
    for unit in range(units):
        full = not parts or len(parts[-1]) == k_prime or parts[-1][-1] in alone
        if full or unit in alone:
            parts.append([])
        parts[-1].append(unit)
    return parts


def place_in_arena(sizes: Sequence[int], window: int) -> tuple[list[int], int]:
    """Choose offsets such that any `window` consecutive pieces do not overlap.

    Nor do the last pieces and the first ones, if that takes no more memory: after the last unit comes the first one
    where it is also the head (tied embeddings), and in inference.

    Args:
        sizes: Bytes of the pieces, in the order in which they are used.
        window: How many consecutive pieces must fit side by side.

    Returns:
        The offsets, and the size of the arena: never more than `window` times the largest piece.
    """
    offsets, arena = _first_fit(sizes, window, cyclic=False)
    slot = max(sizes, default=0)
    if arena > window * slot:  # unlucky sizes can leave holes; equal slots never do
        return [index % window * slot for index in range(len(sizes))], window * slot
    cyclic = _first_fit(sizes, window, cyclic=True)
    return cyclic if cyclic[1] <= arena else (offsets, arena)


def _first_fit(sizes: Sequence[int], window: int, cyclic: bool) -> tuple[list[int], int]:
    """Place each piece at the lowest offset at which it overlaps none of its neighbors that have a place already."""
    offsets: list[int] = []
    for index, size in enumerate(sizes):
        neighbors = {*range(max(0, index - window + 1), index)}
        if cyclic:
            neighbors.update(range(min(index, index + window - len(sizes))))
        taken = sorted((offsets[other], offsets[other] + sizes[other]) for other in neighbors)
        offset = 0
        for start, end in taken:
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets.append(offset)
    return offsets, max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)


def overlaps(offsets: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Return, for each piece of an arena, the numbers of the other pieces that overlap it."""
    places = [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
    return [
        [other for other, (begin, end) in enumerate(places) if other != number and begin < last and first < end]
        for number, (first, last) in enumerate(places)
    ]
