"""Models that hooks call with inputs where they find the weights, on the host, and copies that steps make of models."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy

from ..lightning_modules import trainer
from ..zoo.blocks import WIDTH, Block

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


class Base(L.LightningModule):
    """Notes what hooks compute, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Tensor] = []
        self.build()

    def build(self) -> None:
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.125, foreach=False)

    def note(self, output: Tensor) -> None:
        assert output.device == self.device
        self.noted.append(output.detach().cpu().float())

    @property
    def weights_device(self) -> torch.device:
        return next(self.parameters()).device


class MakesSamples(Base):
    """As Lightning's own example of a GAN does: noise is made like a weight, and may need a gradient."""

    def build(self) -> None:
        super().build()
        self.noise = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        noise = self.noise.type_as(self.blocks[0].up.weight)
        with torch.no_grad():
            self.note(self.blocks(noise))
        leaf = noise.clone().requires_grad_()
        self.blocks(leaf).sum().backward()
        self.zero_grad()
        self.noted.append(leaf.grad.cpu())

    def on_train_epoch_end(self) -> None:
        self.on_train_batch_end(None, self.noise, 0)


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(4, WIDTH)
        self.block = Block()

    def forward(self, x: Tensor, time: Tensor, mask: Tensor) -> Tensor:
        output: Tensor = torch.where(mask[:, None], self.block(x) + self.times(time), x)
        return output


class Denoises(Base):
    """Integers that in plain training are on the device, as is everything else."""

    def build(self) -> None:
        super().build()
        self.timed = Timed()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        times = torch.arange(len(batch), device=self.device) % 4
        return self.timed(self.blocks(batch), times, times > 0).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).to(self.weights_device)
        times = torch.arange(3, device=self.weights_device)
        with torch.no_grad():
            self.note(self.timed(x, times, times > 0))
            self.note(self.timed(self.blocks(x), times, mask=times < 2))


class Packed(nn.Module):
    """Lengths are on the host, wherever the rest is. The first operation writes to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x.relu_(), lengths, batch_first=True)
        output: Tensor = self.linear(packed.data)
        return output


class EncodesSequences(Base):
    def build(self) -> None:
        super().build()
        self.packed = Packed()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        sequences = batch.unsqueeze(1).repeat(1, 3, 1)
        return self.packed(self.blocks(sequences), torch.tensor([3, 2, 1, 1])).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        with torch.no_grad():
            sequences = torch.linspace(-1, 1, 6 * WIDTH).view(2, 3, WIDTH)
            self.note(self.packed(sequences.to(self.device), torch.tensor([3, 2])))
            sequences = sequences.to(self.weights_device)
            self.note(self.packed(sequences, lengths=torch.tensor([3, 2])))
            self.noted.append(sequences.cpu())


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, pad_token_id=0
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    """Encoder and decoder have one embedding, and the decoder's inputs are of another origin than its encoder's."""
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


class Generates(Base):
    """With prompts where transformers' `model.device` says."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        ids = (batch[:, :5].abs() * 30).long() + 1
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        ids = torch.tensor([[3, 4, 5], [6, 7, 8]]).to(self.model.device)
        for beams in (1, 2):
            generated = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, num_beams=beams, do_sample=False
            )
            self.noted.append(generated.cpu())


class GeneratesWithLlama(Generates):
    def build(self) -> None:
        self.model = llama()


class GeneratesWithT5(Generates):
    def build(self) -> None:
        self.model = t5()


class UsesOtherWeights(Base):
    """In place of its own, by `functional_call`: weights without a graph, and others that are made of them."""

    def look(self, batch: Tensor) -> None:
        weights = {name: weight.detach() for name, weight in self.blocks.named_parameters()}

        def loss(weights: dict[str, Tensor]) -> Tensor:
            output: Tensor = torch.func.functional_call(self.blocks, weights, (batch,))
            return output.square().mean()

        slopes = torch.func.grad(loss)(weights)
        fast = {name: (weight - 0.125 * slopes[name]).requires_grad_() for name, weight in weights.items()}
        with torch.enable_grad():
            slopes = torch.autograd.grad(loss(fast), list(fast.values()))
        self.note(loss(weights))
        self.noted += [slope.cpu() for slope in slopes]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.look(batch)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.look(batch)


class AdaptsACopy(Base):
    """As meta-learning does: what a step copies it computes with, and trains, on the device."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        adapted = copy.deepcopy(self.blocks)
        optimizer = torch.optim.SGD(adapted.parameters(), lr=0.125, momentum=0.5, foreach=False)
        for _ in range(2):
            with torch.enable_grad():
                adapted(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        self.note(adapted(batch))
        return super().training_step(batch, batch_idx) + (self.blocks(batch) - adapted(batch).detach()).abs().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "kind",
    [
        MakesSamples,
        Denoises,
        EncodesSequences,
        GeneratesWithLlama,
        GeneratesWithT5,
        UsesOtherWeights,
        AdaptsACopy,
    ],
)
def test_what_is_on_the_device_in_plain_training_works(kind: type[Base], accelerator: str) -> None:
    """And with the same results, but for rounding: torch's optimizers have other kernels on the host."""
    streamed, plain = trained(kind, accelerator, streamed=True), trained(kind, accelerator, streamed=False)
    assert len(streamed) > 3
    torch.testing.assert_close(streamed, plain)


def trained(kind: type[Base], accelerator: str, streamed: bool) -> list[Tensor]:
    torch.manual_seed(0)
    module = kind()
    units = ["Block", "Timed", "Packed"] if hasattr(module, "blocks") else None
    strategy = SuperpipelineStrategy(k=2, units=units) if streamed else "auto"
    rows = torch.linspace(-1, 1, 12 * WIDTH).view(12, WIDTH)
    quiet = trainer(strategy, accelerator=accelerator, devices=1, max_epochs=1, num_sanity_val_steps=2)
    quiet.fit(module, DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4))
    return [*module.noted, *(value.cpu() for value in module.state_dict().values())]
