"""What docs/limits.md says of hooks: host weights and device tensors meet in torch's error, and one line helps."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy

from ..lightning_modules import trainer
from ..zoo.blocks import WIDTH, Block

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


class Hooked(L.LightningModule):
    """Masks gradients, and computes in hooks and in steps with what lies on the host; `helped` as the page advises."""

    def __init__(self, where: str, helped: bool = True) -> None:
        super().__init__()
        self.where, self.helped = where, helped
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.arange(WIDTH) % 2 > 0)

    def beside(self, tensor: Tensor, other: Tensor) -> Tensor:
        return tensor.to(other.device) if self.helped else tensor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.head(self.blocks(batch))
        if self.where == "a step":
            weight = self.head.weight[:].detach() if self.helped else self.head.weight.detach()
            y = y + F.linear(batch, weight)
        return y.square().mean()

    def on_fit_start(self) -> None:
        if self.where == "a hook on a weight":
            self.head.bias.register_hook(lambda gradient: gradient * self.beside(self.mask, gradient))

    def on_after_backward(self) -> None:
        if self.where == "on_after_backward":
            self.head.bias.grad.mul_(self.beside(self.mask, self.head.bias.grad))

    def on_train_epoch_end(self) -> None:
        if self.where == "a call" and self.helped and isinstance(self.trainer.strategy, SuperpipelineStrategy):
            with self.trainer.strategy.pipeline.step():
                self.call()
        elif self.where == "a call":
            self.call()

    def call(self) -> None:
        with torch.no_grad():
            assert self.blocks(torch.ones(2, WIDTH, device=next(self.parameters()).device)).device == self.device

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(strategy: Any, accelerator: str, where: str, helped: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    module = Hooked(where, helped)
    ours = trainer(strategy, accelerator=accelerator, devices=1, max_epochs=1)
    ours.fit(module, torch.utils.data.DataLoader(torch.randn(12, WIDTH), batch_size=4))
    return [parameter.detach().cpu() for parameter in module.parameters()]


@pytest.mark.parametrize("where", ["a step", "a hook on a weight", "on_after_backward", "a call"])
def test_one_line_helps(where: str, accelerator: str) -> None:
    with pytest.raises(RuntimeError, match="[Ee]xpected all tensors to be on the same device|two devices"):
        fit(SuperpipelineStrategy(k=2), accelerator, where, helped=False)
    expected = fit("auto", accelerator, where)
    torch.testing.assert_close(fit(SuperpipelineStrategy(k=2), accelerator, where), expected)
