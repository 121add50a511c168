"""What a plan from shapes says fits, does: random models, with as little memory as it asks for."""

from __future__ import annotations

import gc
import io
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import sp_lightning
from sp_lightning import Assumptions, SuperpipelineStrategy, loss_in_slices, plan
from sp_lightning.optim import on_device
from sp_lightning.pipeline.optimizer import visit
from sp_lightning.planning import measure
from sp_lightning.planning.assumptions import OF_CONTEXT, OF_SYSTEM, as_sold
from sp_lightning.planning.report import Row
from sp_lightning.trainer import checkpoint_io

from ..lightning_modules import trainer
from ..second_device import IN_USE
from ..zoo.quantized import Int8Weight
from .test_memory_limits import LITTLE, room

pytestmark = pytest.mark.gpu

SLACK = 1.03  # of what is said to be enough
STEPS = 6


@dataclass
class Drawn:
    """A model, how it is trained, and the plan for that."""

    config: LlamaConfig
    rows: int
    row: Row


def draw(seed: int) -> Drawn:
    """Draw a model and its training; its device has room for a part of it, but for enough."""
    draw = random.Random(seed)
    while True:
        config = LlamaConfig(
            vocab_size=draw.choice([512, 2048, 6000]),
            hidden_size=draw.choice([128, 256]),
            intermediate_size=draw.choice([384, 1024]),
            num_hidden_layers=draw.randint(4, 12),
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=draw.random() < 0.3,
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        rows, length = draw.randint(1, 4), draw.choice([64, 128])
        numbers = sum(weight.numel() for weight in model.parameters())
        given = Assumptions(
            host_memory="64GiB",
            link=draw.choice([6.0, 25.0]),
            compute=draw.choice([0.5, 5.0, 50.0]),
            host_bandwidth=draw.choice([2.0, 20.0]),
            precision=draw.choice(["bf16-mixed", "32-true", "bf16-true"]),
            gradient_clip_val=draw.choice([None, 1.0]),
            accumulate=draw.choice([1, 1, 2]),
            tokens=rows * length,
            length=length,
            loss=draw.choice(["whole", "chunked"]),
            device_memory=OF_CONTEXT + int(numbers * draw.uniform(3, 16)) + 2**22,
        )
        if given.precision == "bf16-true":
            given = replace(given, moments=draw.choice([None, "fp32", "int8"]))
        row = plan(model, given).rows[0]
        if row.step is not None:
            return Drawn(config, rows, row)


class Model(L.LightningModule):
    """The model that was drawn; notes what the host holds, and what stays on the device, as each step begins."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.given, self.rows = drawn.row.given, drawn.rows
        self.model = LlamaForCausalLM(drawn.config)
        if self.given.loss == "chunked":
            loss_in_slices(self.model)
        self.host_bytes = self.late_gradients = 0
        self.living: list[int] = []

    def bytes_on_host(self) -> int:
        """Return what weights, gradients and optimizer state take of the host."""
        trainer: Any = self._trainer
        pipeline = getattr(getattr(trainer, "strategy", None), "pipeline", None)
        if pipeline is not None:
            counted = pipeline.summary()
            on_host: int = counted.host_bytes + counted.host_gradient_bytes + counted.optimizer_bytes
            return on_host
        optimizers = [] if trainer is None else trainer.optimizers
        tensors = [*self.parameters(), *tree_leaves([optimizer.state for optimizer in optimizers])]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor) and tensor.device.type == "cpu")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        pipeline: Any = self.trainer.strategy.pipeline  # type: ignore[attr-defined]
        self.late_gradients = pipeline.stats.late_gradients
        self.host_bytes = max(self.host_bytes, self.bytes_on_host())
        self.living.append(len(pipeline.summary().living))
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.given.moments is None:
            return torch.optim.AdamW(self.parameters())
        return sp_lightning.optim.AdamW(self.parameters(), moments=self.given.moments)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stepped at once is scaled as well: 200 MB are no tenth of 24 GB."""
    for module in (on_device, visit, measure):
        monkeypatch.setattr(module, "PIECE", 2**16)


def fit(model: Model, accelerator: str, device: torch.device) -> int:
    """Train it on a device with the memory that is planned for; the most that it took."""
    given = model.given
    api = torch.get_device_module(device)
    gc.collect()
    before = api.memory_allocated(device)
    api.reset_peak_memory_stats(device)
    length = given.tokens // model.rows
    words = torch.randint(model.model.config.vocab_size, (model.rows * STEPS * given.accumulate, length))
    with room(device, given.device_bytes - OF_CONTEXT + LITTLE):
        ours = trainer(
            SuperpipelineStrategy(memory_budget=given.device_room),
            accelerator=accelerator, devices=1, precision=given.precision, max_steps=STEPS,
            gradient_clip_val=given.gradient_clip_val, accumulate_grad_batches=given.accumulate,
        )  # fmt: skip
        ours.fit(model, DataLoader(words, batch_size=model.rows))
    return api.max_memory_allocated(device) - before


def host_of(model: Model, limit: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host with so much memory; what the model takes of it, whenever somebody asks."""
    taken: list[int] = []

    def free() -> int:
        taken.append(model.bytes_on_host())
        return limit - taken[-1]

    for where in ("trainer.host_memory", "pipeline.placing.places", "planning.planner"):
        monkeypatch.setattr(f"sp_lightning.{where}.available_host_memory", free)
    monkeypatch.setattr("sp_lightning.pipeline.host_memory.available_host_memory", free)
    return taken


@pytest.mark.parametrize("seed", range(2 if IN_USE else 40))  # 40 take 20 minutes there
def test_what_is_planned_to_fit_does(seed: int, accelerator: str, device: torch.device) -> None:
    drawn = draw(seed)
    model, step = Model(drawn), drawn.row.step
    assert step is not None
    assert fit(model, accelerator, device) <= SLACK * (model.given.device_bytes - OF_CONTEXT)
    assert model.host_bytes <= SLACK * step.host_bytes


EIGHT = 8.19e9  # parameters of the model that is scaled down, with its device and host: 24 or 16 GiB and 64 GiB
SIZES = {"hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 10, "num_attention_heads": 4}
CONFIG = LlamaConfig(vocab_size=1400, num_key_value_heads=2, tie_word_embeddings=False, **SIZES)


@cache
def shaped() -> tuple[nn.Module, int]:
    """The model without memory, and how many parameters it has."""
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    return model, sum(weight.numel() for weight in model.parameters())


def given_for(device_memory: int, of_host: float, **options: Any) -> tuple[Drawn, int]:
    """The plan for that much memory, and what it leaves of the host."""
    words: dict[str, Any] = {"precision": "bf16-true", "moments": "int8", "tokens": 128, "length": 64}
    memory = {"device_memory": OF_CONTEXT + device_memory, "host_memory": as_sold(OF_SYSTEM + int(of_host))}
    row = plan(shaped()[0], Assumptions(**memory, **words, **options)).rows[0]
    assert row.step is not None
    return Drawn(CONFIG, 2, row), row.given.host_room


@pytest.mark.parametrize(("device_gib", "accumulate"), [(24, 2)] if IN_USE else [(24, 1), (24, 8), (16, 8)])
def test_clipped_and_accumulated_where_host_memory_is_short(
    device_gib: int, accumulate: int, accelerator: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in the shape of an 8B one: gradients wait on the device, at least in the first steps."""
    scale = 2**30 * shaped()[1] / EIGHT
    how = {"gradient_clip_val": 1.0, "accumulate": accumulate}
    drawn, limit = given_for(int(device_gib * scale) + 2**22, 58 * scale, **how)
    model = Model(drawn).bfloat16()
    taken = host_of(model, limit, monkeypatch)
    assert fit(model, accelerator, device) <= SLACK * (model.given.device_bytes - OF_CONTEXT)
    assert max(model.host_bytes, *taken) <= SLACK * limit
    assert model.late_gradients > 0


class Saves(Model):
    """Saves a checkpoint in the midst of training."""

    path: Path
    weights: dict[str, Tensor]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.trainer.save_checkpoint(self.path)
            self.weights = {name: weight.detach().cpu().clone() for name, weight in self.named_parameters()}
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("clip", [1.0] if IN_USE else [None, 1.0])
def test_units_stay_from_the_first_step_on_where_host_memory_is_short(
    clip: float | None, accelerator: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Checkpoints hold what there is no room to copy, and state for which there is none stays when training ends."""
    numbers = shaped()[1]
    drawn, limit = given_for(8 * numbers + 2**25, 4.4 * numbers, gradient_clip_val=clip)
    model = Saves(drawn).bfloat16()
    model.path = tmp_path / "saved.ckpt"
    taken = host_of(model, limit, monkeypatch)
    fit(model, accelerator, device)
    assert 0 < model.living[0] <= min(model.living)
    assert max(model.host_bytes, *taken) <= SLACK * limit
    assert all(weight.device.type == "cpu" for weight in model.parameters())
    states = [tree_leaves(optimizer.state) for optimizer in model.trainer.optimizers]
    assert any(value.device == device for state in states for value in state), "where there is no room for it"
    saved = torch.load(model.path, weights_only=False)
    tensors = [leaf for leaf in tree_leaves(saved) if isinstance(leaf, Tensor)]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    assert all(torch.equal(saved["state_dict"][name], weight) for name, weight in model.weights.items())


def test_what_is_written_from_the_device_is_on_the_cpu_in_the_file(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a part of some memory, and a tensor that consists of others; what is no weight is where it was."""
    monkeypatch.setattr(checkpoint_io, "has_room_for", lambda nbytes: False)
    values = torch.arange(8.0, device=device)
    weights = {"part": values[3:], "quantized": Int8Weight.of(torch.randn(4, 4)).to(device)}
    file: Any = io.BytesIO()
    state = checkpoint_io.state_dict_on_host({**weights})
    assert state["part"].device == device, "there is no room for a copy"
    checkpoint_io._write({"state_dict": state, "own": torch.ones(2, device=device)}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    loaded = saved["state_dict"]
    assert saved["own"].device == device
    assert {weight.device.type for weight in (*loaded.values(), loaded["quantized"].integers)} == {"cpu"}
    assert torch.equal(loaded["part"], values[3:].cpu())
