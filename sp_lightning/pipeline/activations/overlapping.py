"""Copies of tensors that overlap in memory, which overlap in the same way.

A module may write to a buffer as a whole, and read it through views: `self.mean, self.var = self.stats.unbind(0)`. A
second forward (effects.py) works with copies of all three, and has to find in the views what it writes to the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sp_lightning.pipeline.torch_private import storage_key

_ALIGNMENT = 16  # bytes of the largest element


def copies_that_overlap(tensors: Iterable[Tensor], copies: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return, for each tensor, another one with the values of its copy; those that overlap do so here as well.

    Args:
        tensors: The tensors.
        copies: For each of them, by its identity, a tensor with the values to take.

    Returns:
        The others, by the identities of the tensors.
    """
    made = {}
    for together in _overlapping(tensors):
        own = [copies[id(tensor)].detach().clone() for tensor in together]
        for tensor, stand_in in zip(together, own if len(own) == 1 else _in_one_memory(together, own), strict=True):
            made[id(tensor)] = stand_in.requires_grad_(copies[id(tensor)].requires_grad)
    return made


def _overlapping(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors that overlap in memory; in each group, the one that begins first comes first."""
    groups: list[list[Tensor]] = []
    by_memory: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if _has_plain_memory(tensor) and (key := storage_key(tensor)):
            by_memory.setdefault(key, []).append(tensor)
        else:
            groups.append([tensor])
    for sharing in by_memory.values():
        end = 0
        for tensor in sorted(sharing, key=_first_byte):
            if _first_byte(tensor) < end:
                groups[-1].append(tensor)
            else:
                groups.append([tensor])
            end = max(end, _end(tensor))
    return groups


def _has_plain_memory(tensor: Tensor) -> bool:
    """Tell whether the bytes of a tensor are its elements, at its strides."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    is_plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or is_lazy)
    return is_plain and tensor.numel() > 0


def _first_byte(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _end(tensor: Tensor) -> int:
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _first_byte(tensor) + (extent + 1) * tensor.element_size()


def _in_one_memory(tensors: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    """Return tensors that overlap as these do, the first of which begins first, with these values."""
    begin = _first_byte(tensors[0]) // _ALIGNMENT * _ALIGNMENT
    memory = torch.empty(max(map(_end, tensors)) - begin, dtype=torch.uint8, device=tensors[0].device)
    made = []
    for tensor, content in zip(tensors, values, strict=True):
        own = memory[_first_byte(tensor) - begin : _end(tensor) - begin].view(tensor.dtype)
        made.append(own.as_strided(tensor.shape, tensor.stride()))
        once = tuple(slice(None if stride else 1) for stride in tensor.stride())  # where it is expanded, it repeats
        made[-1][once] = content[once]
    return made
