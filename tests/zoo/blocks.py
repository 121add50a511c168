"""Small plain modules that several zoo entries and tests build on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

WIDTH = 12


class Block(nn.Module):
    """A pre-norm residual MLP block, the shape of what is streamed in real models."""

    def __init__(self, width: int = WIDTH, hidden: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Chain(nn.Module):
    """Blocks one after the other, nothing else: the model whose loads can be counted by hand."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def chain(length: int = 4, width: int = WIDTH, hidden: int = 24, dropout: float = 0.0) -> Chain:
    """A chain of equal blocks."""
    return Chain(Block(width, hidden, dropout) for _ in range(length))


def rows(count: int = 5, width: int = WIDTH) -> tuple[Tensor]:
    """A batch of random rows for blocks."""
    return (torch.randn(count, width),)
