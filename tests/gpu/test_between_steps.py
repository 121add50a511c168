"""Code that combines weights and gradients, on the host, with what lies on the device, where plain training has all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.overrides import BaseTorchFunctionMode
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.pipeline._private import remove_function_mode

from ..lightning_modules import trainer
from ..zoo.blocks import WIDTH, Block

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


Kind = TypeVar("Kind", bound="Base")


class Base(L.LightningModule):
    """Blocks in a row. Buffers of a mask, a bound, and of what hooks note."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", (torch.arange(WIDTH) % 3 > 0).float())
        self.register_buffer("bound", torch.tensor(0.2))
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.blocks(batch)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.head(self.blocks(batch)).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, foreach=False)


class MasksGradients(Base):
    def on_after_backward(self) -> None:
        self.head.weight.grad *= self.mask


class ReplacesGradients(Base):
    def on_after_backward(self) -> None:
        self.head.weight.grad = torch.where(self.mask > 0, self.head.weight.grad, 0)


class SumsUpSquares(Base):
    """As for Fisher information."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen += self.head.weight.grad.square()
        self.head.weight.grad.div_(1 + self.seen)


class MasksWeights(Base):
    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.head.weight.data.mul_(self.mask)


class BoundsWeights(Base):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        with torch.no_grad():
            self.head.weight.clamp_(-self.bound, self.bound)
            self.head.bias.copy_(torch.minimum(self.head.bias, self.mask))


class StepsByItself(Base):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        with torch.no_grad():
            self.head.weight.add_(torch.outer(self.mask, self.mask), alpha=0.01)


class LooksAtFeatures(Base):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.seen += F.linear(self.mask.expand(WIDTH, WIDTH), self.head.weight, self.head.bias)

    def on_validation_epoch_end(self) -> None:
        self.seen += self.head.weight.abs()


class BoundsRows(Base):
    """By operations that write to an operand which is not the first."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        F.embedding(self.mask.long(), self.head.weight, max_norm=0.3)

    def on_validation_epoch_end(self) -> None:
        torch.mul(self.mask, self.bound, out=self.head.bias.data)


class Average(Base):
    """An average of weights in buffers, as latent diffusion has it: each is made like its weight, and changed there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(0.5))
        for name, parameter in list(self.named_parameters()):
            self.register_buffer(self.shadow(name), parameter.detach().clone())

    def shadow(self, name: str) -> str:
        return f"shadow_{name}".replace(".", "_")

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        shadows = dict(self.named_buffers())
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                shadows[self.shadow(name)] = shadows[self.shadow(name)].type_as(parameter)
                shadows[self.shadow(name)].sub_((1 - self.decay) * (shadows[self.shadow(name)] - parameter))


class AverageOfAll(Average):
    """Many tensors in one operation."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        shadows = dict(self.named_buffers())
        names = [self.shadow(name) for name, _ in self.named_parameters()]
        torch._foreach_lerp_([shadows[name] for name in names], [p.data for p in self.parameters()], 0.5)
        torch._foreach_mul_([self.head.bias.data, self.head.weight.data], [self.mask, self.mask])


class Prunes(Base):
    """By a callback of Lightning's, which compares and multiplies weights and masks, and rewinds weights."""

    def configure_callbacks(self) -> list[L.Callback]:
        pruned = [(layer, "weight") for layer in (*(block.up for block in self.blocks), self.head)]
        return [
            callbacks.ModelPruning(
                "l1_unstructured", pruned, amount=0.3, use_lottery_ticket_hypothesis=lambda epoch: epoch
            )
        ]


class PrunesForGood(Base):
    def on_train_end(self) -> None:
        prune.l1_unstructured(self.head, "weight", amount=0.3)
        prune.remove(self.head, "weight")


class MasksGradientsByHand(Base):
    """In the middle of a step, in which units are called again."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in batch.chunk(2):
            self.manual_backward(super().training_step(part, batch_idx))
            self.head.weight.grad *= self.mask
        optimizer.step()
        optimizer.zero_grad()
        self.seen += self.head.weight.data.square()


class UsesWeightsWithoutHistory(Base):
    """Past their unit's call: as targets of another branch, or as a codebook."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        target = F.linear(self.blocks(batch), self.head.weight.detach(), self.head.bias.data)
        self.seen = self.seen.type_as(self.head.weight) + (target.T @ target).detach()
        return F.mse_loss(super().training_step(batch, batch_idx), target.mean()) + target.square().mean()


MODULES = [
    MasksGradients, ReplacesGradients, SumsUpSquares, MasksWeights, BoundsWeights, StepsByItself, LooksAtFeatures,
    BoundsRows, Average, AverageOfAll, Prunes, PrunesForGood, MasksGradientsByHand, UsesWeightsWithoutHistory,
]  # fmt: skip


AVERAGING = [partial(callbacks.StochasticWeightAveraging, 0.1, swa_epoch_start=1, device=None)]
if hasattr(callbacks, "WeightAveraging"):
    AVERAGING += [callbacks.WeightAveraging, partial(callbacks.EMAWeightAveraging, decay=0.5)]


@pytest.mark.parametrize("average", AVERAGING)
def test_averages_of_weights_lie_where_these_are(average: Callable[[], L.Callback], accelerator: str) -> None:
    """By default, as a second model on the device would take the memory that streaming saves."""
    devices: set[str] = set()

    class Averaged(Base):
        def configure_callbacks(self) -> list[L.Callback]:
            return [average()]

        def on_train_end(self) -> None:
            found = next(each for each in self.trainer.callbacks if hasattr(each, "_average_model"))
            devices.update(weight.device.type for weight in found._average_model.parameters())

    _, streamed = trained(Averaged, accelerator, streamed=True)
    assert devices == {"cpu"}
    _, plain = trained(Averaged, accelerator, streamed=False)
    # torch has another formula for averages on a device: `_foreach_lerp_`
    torch.testing.assert_close(streamed, plain)


@pytest.mark.parametrize("kind", MODULES)
def test_hooks_find_all_on_one_device(kind: type[Base], accelerator: str) -> None:
    """As in plain training, and with the same results: weights, buffers and what was logged."""
    # torch computes powers and the optimizer's step on the host in another order than on a real device
    _, streamed = trained(kind, accelerator, streamed=True)
    _, plain = trained(kind, accelerator, streamed=False)
    torch.testing.assert_close(streamed, plain)


def trained(kind: type[Kind], accelerator: str, streamed: bool) -> tuple[Kind, dict[str, Tensor]]:
    """A module after two epochs, with its weights and buffers, and the last validation's loss."""
    torch.manual_seed(0)
    module = kind()
    strategy = SuperpipelineStrategy(k=2, units=["Block", "Linear"]) if streamed else "auto"
    rows = torch.linspace(-1, 1, 12 * WIDTH).view(12, WIDTH)
    quiet = trainer(strategy, accelerator=accelerator, devices=1, max_epochs=2, num_sanity_val_steps=2)
    quiet.fit(module, DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=6))
    state = {name: value.cpu().clone() for name, value in module.state_dict().items()}
    return module, {**state, "val_loss": quiet.callback_metrics["val_loss"].cpu()}


class Looks(Base):
    """Notes the modes on its thread's stack: in a step, and in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks: dict[str, int] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.look("step")
        loss = super().training_step(batch, batch_idx)
        self.alias = self.head.weight.detach()
        self.look("step with an alias")
        self.head.register_forward_pre_hook(lambda *_: self.look("unit"))
        return loss + self.head(batch).sum()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.look("hook")

    def look(self, where: str) -> None:
        self.stacks[where] = torch.overrides._len_torch_function_stack()


class Fails(Base):
    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        raise ValueError("of the user's")


def test_steps_are_left_alone(accelerator: str) -> None:
    """They call thousands of operations. Nothing stays after the run, nor after one that fails."""
    module, _ = trained(Looks, accelerator, streamed=True)
    assert module.stacks == {"step": 0, "step with an alias": 1, "unit": 0, "hook": 1}
    with pytest.raises(ValueError, match="of the user's"):
        trained(Fails, accelerator, streamed=True)
    assert torch.overrides._len_torch_function_stack() == 0


class EntersAMode(Looks):
    """Its mode lies above ours when the next step begins, and when the run ends."""

    def on_train_start(self) -> None:
        self.mode = BaseTorchFunctionMode()
        self.mode.__enter__()


def test_modes_of_others_stay(accelerator: str) -> None:
    """Wherever ours lies among them."""
    module, _ = trained(EntersAMode, accelerator, streamed=True)
    assert module.stacks == {"step": 1, "step with an alias": 2, "unit": 1, "hook": 2}
    assert remove_function_mode(module.mode)
