"""Compares the numbers of two runs, and says how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import dropwhile

import torch
from torch import Tensor

from sp_lightning.check_program.observer import Label, Trace

_LEAST = 1e-30  # a difference from zeros is a part of this number


def labels_after_an_update(plain: Trace) -> list[Label]:
    """Return the labels of numbers that come after an update, which a GPU rounds differently from the CPU."""
    later = dropwhile(lambda label: not label.when.startswith("after step"), plain.digests)
    always_equal = ("the batch", "the number of steps")
    return [label for label in later if label.what not in always_equal]


def differences(plain: Trace, other: Trace) -> Iterator[Label]:
    """Yield the labels of numbers that are not those of plain training, in the order in which they were seen."""
    return (label for label, found in other.digests.items() if plain.digests.get(label) != found)


def first_difference(plain: Trace, other: Trace) -> Label | None:
    """Return the label of the first number that is not that of plain training, without those compared by value."""
    return next((label for label in differences(plain, other) if label not in plain.values), None)


def relative_difference(plain: Tensor | None, streamed: Tensor | None) -> float:
    """Return how far two tensors are apart, as a part of the largest number; infinite if one is missing."""
    if plain is None and streamed is None:
        return 0.0
    if plain is None or streamed is None or plain.shape != streamed.shape:
        return math.inf
    one, other = _real(plain), _real(streamed)
    # NaN is equal to NaN, and infinitely far from a number
    are_equal = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().nan_to_num(nan=math.inf).masked_fill(are_equal, 0)
    return float(apart.max()) / max(_largest(plain), _LEAST) if apart.numel() else 0.0


def describe_difference(plain: Tensor | None, streamed: Tensor | None) -> str:
    """Say by how much a number differs."""
    apart = relative_difference(plain, streamed)
    if not apart:
        return "differs, but not every time"
    if plain is None or streamed is None:
        missing = "plain" if plain is None else "streamed"
        return f"differs: {missing} training has none"
    if plain.shape != streamed.shape:
        return f"differs: its shape is {tuple(streamed.shape)}, not {tuple(plain.shape)}"
    largest = _largest(plain)
    return f"differs by up to {apart * max(largest, _LEAST):.1e} (largest value {largest:.1e})"


def _real(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return torch.view_as_real(dense).double() if dense.is_complex() else dense.double()


def _largest(tensor: Tensor) -> float:
    return float(_real(tensor).abs().nan_to_num(nan=0).max()) if tensor.numel() else 0.0
