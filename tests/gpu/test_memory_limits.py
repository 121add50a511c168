"""A device with little memory: what is chosen fits at once, takes what was expected, and changes no number."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from sp_lightning import SuperpipelineStrategy
from sp_lightning.planning import planner
from sp_lightning.planning.choose import choose
from sp_lightning.planning.work import Machine, Prediction, Workload

from ..second_device import IN_USE

pytestmark = pytest.mark.gpu

STEPS = 6
WIDTH, WORDS, TOKENS = (128, 6_000, 128) if IN_USE else (512, 24_000, 1024)
LITTLE = (40 if IN_USE else 256) << 20  # bytes, beside what a step takes: torch takes memory in pieces of 20 MiB

# What decides whether activations are better sent to the host or computed again.
MACHINES = {
    "fast copies": Machine(1e13, 1e13, 1e13),
    "slow copies": Machine(1e8, 1e8, 1e13),
    "slow host": Machine(1e13, 1e13, 1e9),  # so that units live on the device, or visit
}


class Model(L.LightningModule):
    """A language model whose logits, and what a loss makes of them, are larger than anything else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 10}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, foreach=False)


@contextmanager
def room(device: torch.device, nbytes: int) -> Iterator[None]:
    """A device on which no more than that can be allocated beyond what is there."""
    api = torch.get_device_module(device)
    api.empty_cache()
    total = api.mem_get_info(device)[1]
    api.set_per_process_memory_fraction((api.memory_reserved(device) + nbytes) / total, device)
    try:
        yield
    finally:
        api.set_per_process_memory_fraction(1.0, device)


def fit(
    strategy: SuperpipelineStrategy | str,
    accelerator: str,
    device: torch.device,
    kind: type[Model] = Model,
    steps: int = STEPS,
) -> tuple[list[float], int]:
    """Losses of a training, and the most device memory that it took."""
    api = torch.get_device_module(device)
    gc.collect()
    before = api.memory_allocated(device)
    api.reset_peak_memory_stats(device)
    model = kind()
    words = torch.randint(WORDS, (4 * steps, TOKENS), generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(strategy=strategy, accelerator=accelerator, devices=1, max_steps=steps, barebones=True)
    trainer.fit(model, DataLoader(words, batch_size=4))
    return [float(loss) for loss in model.losses], api.max_memory_allocated(device) - before


@cache
def plain_fit(accelerator: str, device: torch.device) -> tuple[list[float], int]:
    """The same without a limit, where everything stays on the device."""
    return fit("auto", accelerator, device)


@contextmanager
def told_speeds(machine: Machine, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose as if this had been measured: what is chosen does not depend on how busy the machine is."""

    def told(workload: Workload, _: Machine, budget: int, **kwargs: Any) -> Prediction:
        units = []
        for unit in workload.units:
            ways = [replace(way, repeating=1e-3 if way.policy == "recompute" else 0.0) for way in unit.ways]
            units.append(replace(unit, forward_seconds=1e-3, backward_seconds=2e-3, ways=tuple(ways)))
        return choose(replace(workload, units=tuple(units)), machine, budget, **kwargs)

    with patch.context() as patched:
        patched.setattr(planner, "choose", told)
        yield


CHOICES = [*product([0.9, 0.6], MACHINES)]


@pytest.mark.parametrize(("share", "machine"), CHOICES[::5] + CHOICES[2:3] if IN_USE else CHOICES)
def test_the_first_choice_fits(
    share: float, machine: str, accelerator: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is given up, and the plan is right about the memory, though most of it is in no graph."""
    expected, everything = plain_fit(accelerator, device)
    limit = int(share * everything)
    strategy = SuperpipelineStrategy(memory_budget=int(0.9 * limit))
    with room(device, limit + LITTLE), told_speeds(MACHINES[machine], monkeypatch), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*did not suffice")
        losses, peak = fit(strategy, accelerator, device)
    assert peak <= limit
    assert_alike(losses, expected)


def assert_alike(losses: list[float], expected: list[float]) -> None:
    """Equal, where the host's optimizer rounds as the device's does."""
    if IN_USE:
        assert losses == expected
    else:
        torch.testing.assert_close(losses, expected, rtol=2e-2, atol=1e-3)


def test_what_does_not_fit_says_what_helps(accelerator: str, device: torch.device) -> None:
    """With a little more than the least that a step takes, the smallest choices run; with less, an error says so."""
    least = {"k": 1, "activations": "recompute"}
    _, taken = fit(SuperpipelineStrategy(**least), accelerator, device, steps=3)
    with room(device, taken + LITTLE):
        _, peak = fit(SuperpipelineStrategy(**least), accelerator, device, steps=3)
    assert peak <= taken + LITTLE
    with room(device, taken // 2), pytest.raises(torch.OutOfMemoryError, match="this step had .* Use smaller batches"):
        fit(SuperpipelineStrategy(**least), accelerator, device)
