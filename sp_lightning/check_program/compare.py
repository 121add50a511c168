"""Compares a number of two runs, and says how far it is apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_difference(plain: Tensor | None, streamed: Tensor | None) -> float:
    """Return how far two tensors are apart, as a part of the largest number; infinite if one is missing."""
    if plain is None and streamed is None:
        return 0.0
    if plain is None or streamed is None or plain.shape != streamed.shape:
        return math.inf
    apart, largest = _largest_difference(plain, streamed)
    return apart / max(largest, 1e-30)


def describe_difference(plain: Tensor | None, streamed: Tensor | None) -> str:
    """Say by how much a number differs."""
    if not relative_difference(plain, streamed):
        return "differs, but not every time"
    if plain is None or streamed is None:
        missing = "plain" if plain is None else "streamed"
        return f"differs: {missing} training has none"
    if plain.shape != streamed.shape:
        return f"differs: its shape is {tuple(streamed.shape)}, not {tuple(plain.shape)}"
    apart, largest = _largest_difference(plain, streamed)
    return f"differs by up to {apart:.1e} (largest value {largest:.1e})"


def _real(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return torch.view_as_real(dense).double() if dense.is_complex() else dense.double()


def _largest_difference(plain: Tensor, streamed: Tensor) -> tuple[float, float]:
    """Return the largest difference and number; NaN is equal to NaN, and infinitely far from a number."""
    one, other = _real(plain), _real(streamed)
    if not one.numel():
        return 0.0, 0.0
    are_equal = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().nan_to_num(nan=math.inf).masked_fill(are_equal, 0)
    return float(apart.max()), float(one.abs().nan_to_num(nan=0).max())
