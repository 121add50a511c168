"""Small plain modules that several zoo entries and tests build on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


class Gated(Block):
    """With a number among its weights."""

    def __init__(self, width: int = WIDTH, hidden: int = 24, dropout: float = 0.0) -> None:
        super().__init__(width, hidden, dropout)
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate


class LoRALinear(nn.Module):
    """A frozen Linear and a trainable low-rank update."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class StashOnContext(torch.autograd.Function):
    """Keeps the weight on ``ctx``, where saved-tensor hooks never see it (fused kernels do this)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gradient = gradient.to(ctx.weight.dtype)  # autocast lowers what happens in forward
        return gradient @ ctx.weight, gradient.t() @ ctx.x.to(gradient.dtype)


class Stashing(nn.Module):
    """A layer over StashOnContext; ``inplace`` edits a view of its output as well, the worst of both."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        out = StashOnContext.apply(x, self.weight)
        return out.view(len(x), -1)[:, :] if self.inplace else out


class Product(torch.autograd.Function):
    """A user's function, whose forward autocast lowers and whose backward uses the weight as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return (gradient.float() @ w.float().t()).to(x.dtype), x.float().t() @ gradient.float()


class Chain(nn.Module):
    """Blocks one after the other, nothing else: the model whose loads can be counted by hand."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Checkpointed(Chain):
    """Each block is under a user's checkpoint."""

    def __init__(self, blocks: Iterable[nn.Module], reentrant: bool = False) -> None:
        super().__init__(blocks)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def chain(length: int = 4, width: int = WIDTH, hidden: int = 24, dropout: float = 0.0) -> Chain:
    """A chain of equal blocks."""
    return Chain(Block(width, hidden, dropout) for _ in range(length))


def rows(count: int = 5, width: int = WIDTH) -> tuple[Tensor]:
    """A batch of random rows for blocks."""
    return (torch.randn(count, width),)
