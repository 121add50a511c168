"""Ways of training: several losses and networks, frozen bases, checkpointing, graphs of graphs, odd optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, RMSprop, SparseAdam
from torch.utils.checkpoint import checkpoint

from .blocks import WIDTH, Block, Chain, LoRALinear, chain, rows
from .case import Batch, Case


class Siamese(nn.Module):
    """One tower called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = chain(3, dropout=0.1)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(self.tower(left)) - self.head(self.tower(right))


def input_gradient_penalty(model: nn.Module, batch: Batch) -> list[Tensor]:
    """WGAN-GP's penalty: the loss holds a gradient, so its backward is a double backward."""
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = out.square().mean() + (gradient.norm(dim=1) - 1).square().mean()
    loss.backward()
    return [loss, gradient]


def weight_gradient_penalty(model: nn.Module, batch: Batch) -> list[Tensor]:
    """A penalty on the gradient with respect to the weights themselves."""
    out = model(*batch)
    gradients = torch.autograd.grad(out.square().mean(), list(model.parameters()), create_graph=True)
    loss = out.mean() + sum(g.square().sum() for g in gradients)
    loss.backward()
    return [loss, *gradients]


def lora() -> nn.Module:
    model = chain(4, dropout=0.1).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = LoRALinear(nn.Linear(WIDTH, 24)), LoRALinear(nn.Linear(24, WIDTH))
    return model


def half_frozen() -> nn.Module:
    """The first blocks frozen: backward ends in the middle of the chain."""
    model = chain(5)
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    model.blocks[3].up.requires_grad_(False)
    return model


class TopK(torch.autograd.Function):
    """Computes with the largest of the weights, and trains more of them (Top-KAST)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, computes: float, trains: float) -> Tensor:
        size = weight.abs()
        ctx.save_for_backward(size >= size.quantile(1 - trains))
        return weight * (size >= size.quantile(1 - computes))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.saved_tensors[0], None, None


class SparseLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, TopK.apply(self.weight, 0.2, 0.5), self.bias).tanh()


class Unused(Chain):
    """A block that is never called and one whose output goes nowhere: their gradients stay None."""

    def __init__(self) -> None:
        super().__init__(Block() for _ in range(3))
        self.never = Block()
        self.nowhere = Block()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.nowhere(x)
        return super().forward(x)


class StochasticDepth(Chain):
    """Whole blocks skipped at random, another one chosen by the data."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-2]:
            if not self.training or torch.rand(()) < 0.6:
                x = block(x)
        return self.blocks[-1 if x.sum() > 0 else -2](x)


class ShuffledOrder(Chain):
    """The order of the blocks changes at every call, so a recorded order is always wrong."""

    def forward(self, x: Tensor) -> Tensor:
        for index in torch.randperm(len(self.blocks)).tolist():
            x = self.blocks[index](x)
        return x


class FrozenEncoder(nn.Module):
    """An encoder that runs under no_grad inside of the training forward, as in many vision-language models."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = chain(3), chain(3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.encoder(x)
        return self.decoder(x) + self.encoder.blocks[0](x).detach()


class MomentumContrast(nn.Module):
    """MoCo: the key encoder follows the query encoder, inside of the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = chain(3), chain(3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.follow()
        with torch.no_grad():
            key = self.key(x)
        return self.query(x) @ key.T

    @torch.no_grad()
    def follow(self) -> None:
        """As MoCo's own code does."""
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1


class CheckpointedBlocks(Chain):
    """Each block, then the rest of the chain as one, under user checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(Block(dropout=0.2) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def rest(x: Tensor) -> Tensor:
            return self.blocks[3](self.blocks[2](x))

        for block in self.blocks[:2]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return checkpoint(rest, x, use_reentrant=self.reentrant)


class CheckpointInside(nn.Module):
    """A checkpoint around a part of a block, inside of its forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 24), nn.Dropout(0.2), nn.GELU(), nn.Linear(24, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant))


class NestedCheckpoint(Chain):
    """A checkpoint around blocks that checkpoint a part of themselves."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(CheckpointInside(reentrant) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def needs_grad(model: nn.Module, batch: Batch) -> Tensor:
    """Reentrant checkpoints need an input that requires grad."""
    return model(*(x.clone().requires_grad_() for x in batch))


def two_losses(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Two backwards over one graph."""
    out = model(*batch)
    first, second = out.square().mean(), out.abs().sum()
    first.backward(retain_graph=True)
    second.backward()
    return [first, second]


def two_graphs(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Two forwards before the first backward, which is that of the first forward."""
    losses = [model(x).square().mean() for x in (batch[0], batch[0].flip(0))]
    for loss in losses:
        loss.backward()
    return losses


class Gan(nn.Module):
    """Generator and critic, trained by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x))


def gan_optimizers(model: nn.Module) -> list[Optimizer]:
    return [
        Adam(model.generator.parameters(), lr=1e-2, fused=True),
        RMSprop(model.critic.parameters(), lr=1e-2, foreach=False),
    ]


def gan_step(model: nn.Module, batch: Batch, optimizers: list[Optimizer]) -> Iterator[Tensor]:
    """Lightning's manual optimization with toggled requires_grad, and WGAN's clipping of the weights."""
    generator, critic = optimizers
    (x,) = batch

    model.critic.requires_grad_(False)
    loss = -model(x).mean()
    loss.backward()
    generator.step()
    generator.zero_grad()
    torch.clear_autocast_cache()  # autocast up to Lightning 2.5.4 has one, with which plain training uses old weights
    model.critic.requires_grad_(True)
    yield loss

    for _ in range(2):
        model.generator.requires_grad_(False)
        fake = model.generator(torch.randn_like(x)).detach()
        loss = model.critic(fake).mean() - model.critic(x).mean()
        loss.backward()
        critic.step()
        critic.zero_grad()
        for parameter in model.critic.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        torch.clear_autocast_cache()
        model.generator.requires_grad_(True)
        yield loss


class SparseEmbedding(nn.Module):
    """nn.Embedding(sparse=True) and EmbeddingBag(sparse=True) before dense blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(50, WIDTH, sparse=True, mode="sum")
        self.blocks = chain(3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.blocks(self.embedding(ids) + self.bag(ids)[:, None])


def sparse_optimizers(model: nn.Module) -> list[Optimizer]:
    return [
        SparseAdam([model.embedding.weight, model.bag.weight], lr=1e-2),
        SGD(model.blocks.parameters(), lr=1e-2, momentum=0.9, fused=True),
    ]


def ids() -> Batch:
    return (torch.randint(0, 50, (3, 4)),)


CHECKPOINTED: dict[str, Callable[[bool], nn.Module]] = {
    "checkpointed-blocks": CheckpointedBlocks,
    "checkpoint-inside": lambda reentrant: Chain(CheckpointInside(reentrant) for _ in range(4)),
    "nested-checkpoint": NestedCheckpoint,
}

NEEDS_GRAD: dict[str, Any] = {"call": needs_grad, "autocast": True}
CASES = [
    Case("chain", lambda: chain(6, dropout=0.1), rows, clip=0.1, autocast=True),
    Case("siamese", Siamese, lambda: (*rows(), *rows()), autocast=True),
    Case("input-gradient-penalty", lambda: chain(4), rows, backward=input_gradient_penalty),
    Case("weight-gradient-penalty", lambda: chain(3), rows, backward=weight_gradient_penalty, streams=False),
    Case("lora", lora, rows, autocast=True),
    Case("half-frozen", half_frozen, rows),
    Case("top-k", lambda: Chain(SparseLinear(WIDTH, WIDTH) for _ in range(5)), rows, autocast=True),
    Case("unused-parameters", Unused, rows),
    Case("stochastic-depth", lambda: StochasticDepth(Block() for _ in range(7)), rows, accumulate=1, autocast=True),
    Case("frozen-encoder", FrozenEncoder, rows, autocast=True),
    Case("momentum-encoder", MomentumContrast, rows),
    Case("shuffled-order", lambda: ShuffledOrder(Block() for _ in range(5)), rows),
    *(
        Case(f"{name}-{'reentrant' if reentrant else 'plain'}", partial(build, reentrant), rows, **NEEDS_GRAD)
        for reentrant in (False, True)
        for name, build in CHECKPOINTED.items()
    ),
    Case("two-losses", lambda: chain(4, dropout=0.1), rows, backward=two_losses, autocast=True),
    Case("two-graphs", lambda: chain(4, dropout=0.1), rows, backward=two_graphs, autocast=True),
    Case("gan", Gan, rows, optimizers=gan_optimizers, train_step=gan_step),
    Case("sparse-embedding", SparseEmbedding, ids, optimizers=sparse_optimizers, autocast=True),
]
