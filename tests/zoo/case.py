"""What a zoo entry is: a seeded model, deterministic batches, and how one trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

Batch = dict[str, Tensor] | tuple[Tensor, ...]


def call_with_batch(model: nn.Module, batch: Batch) -> Any:
    """Call the model the way users do: a dict is keyword arguments, a tuple positional ones."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def own_loss(output: Any, batch: Batch) -> Tensor:
    """The loss a transformers model computed by itself."""
    return output.loss


def sum_of_squares(output: Any, batch: Batch) -> Tensor:
    """A loss that gives every element of the output its own gradient."""
    return output.float().square().mean()


def adamw(model: nn.Module) -> list[Optimizer]:
    """One AdamW with weight decay: a zero gradient in place of None would show in the weights."""
    return [AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.1, fused=True)]


def adamw_loop(model: nn.Module) -> list[Optimizer]:
    """AdamW without the fused kernel, for dtypes that it does not take."""
    return [AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.1, foreach=False)]


@dataclass(frozen=True)
class Case:
    """One family of models or one way of training, small enough to train in milliseconds.

    Args:
        name: what the tests call it.
        build: makes the model; called under a fixed seed.
        batch: makes one batch; called under a seed of its own for each batch.
        loss: the loss from the output of ``call`` and the batch.
        call: how the model is called.
        optimizers: made from the attached model, as users do.
        backward: forward and backward of one micro-batch, where that is more than one loss; returns what to compare.
        train_step: a whole manual step with its optimizers (GAN); replaces forward, backward and optimizer step.
        seen: anything else the user can see at the end (what own hooks logged, say).
        units: a unit policy for models whose modules do not show what a unit is.
        accumulate: backwards per optimizer step.
        clip: clip gradients to this norm.
        streams: false where every weight is touched outside its unit, so that all of them end up resident.
        heavy: run one window, not two.
        autocast: exact under bf16 autocast, too.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any, Batch], Tensor] = sum_of_squares
    call: Callable[[nn.Module, Batch], Any] = call_with_batch
    optimizers: Callable[[nn.Module], list[Optimizer]] = adamw
    backward: Callable[[nn.Module, Batch], Iterable[Tensor]] | None = None
    train_step: Callable[[nn.Module, Batch, list[Optimizer]], Iterable[Tensor]] | None = None
    seen: Callable[[nn.Module], Any] | None = None
    units: Any = None
    streams: bool = True
    accumulate: int = 2
    clip: float | None = None
    heavy: bool = False
    autocast: bool = False

    def model(self, seed: int = 0) -> nn.Module:
        """A fresh model, the same for the same seed."""
        torch.manual_seed(seed)
        return self.build()

    def batches(self, count: int) -> list[Batch]:
        """The first ``count`` batches, fresh tensors at every call."""
        result = []
        for index in range(count):
            # not `torch.manual_seed`, which notes the whole stack for each kind of device that is not in use
            torch.default_generator.manual_seed(1000 + index)
            result.append(self.batch())
        return result

    def step(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of one batch."""
        return self.loss(self.call(model, batch), batch)

    def forward_backward(
        self, model: nn.Module, batch: Batch, around_forward: AbstractContextManager[Any] | None = None
    ) -> list[Tensor]:
        """Forward and backward of one micro-batch; ``around_forward`` is autocast, or nothing."""
        around_forward = around_forward or nullcontext()
        if self.backward is not None:
            with around_forward:
                return list(self.backward(model, batch))
        with around_forward:
            loss = self.step(model, batch)
        loss.backward()
        return [loss]
