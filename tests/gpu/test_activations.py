"""Activations that are computed again or wait on the host, on a real device: less memory, and what is predicted."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from typing import get_args

import pytest
import torch

from sp_lightning.pipeline.activations import offload
from sp_lightning.pipeline.options import Policy
from sp_lightning.planning.memory import peak as activation_peak
from sp_lightning.planning.memory import ways_of

from ..second_device import IN_USE
from ..zoo.blocks import Block, Chain
from .parts import BLOCKS, ROWS, WIDTH, big_chain, micro_step, on_device

pytestmark = pytest.mark.gpu


def test_dropout_on_the_device_is_the_same_twice(device: torch.device) -> None:
    """The device has a random generator of its own."""
    gradients = []
    for policy in ("keep", "recompute"):
        torch.manual_seed(0)
        model = Chain(Block(64, 128, dropout=0.5) for _ in range(6))
        torch.manual_seed(1)
        with on_device(model, device, activations=policy) as pipe:
            for seed in range(2):
                micro_step(pipe, torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).to(device))
            assert pipe.stats.recomputed == (6 + 5 if policy == "recompute" else 0)
        gradients.append([parameter.grad for parameter in model.parameters()])
        gradients[-1].append(torch.rand(1, device=device).cpu())  # the generator is where plain training leaves it
    assert all(map(torch.equal, *gradients))


class Unsteady(Block):
    """Computes something else each time, by that much: the rounding of another order, or what a state has changed."""

    by = 0.0
    sign = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Unsteady.sign *= -1
        return torch.tanh(super().forward(x) * (1 + Unsteady.sign * self.by))


@pytest.mark.parametrize(
    ("by", "autocast", "is_said"), [(1e-5, False, False), (2e-3, True, False), (1e-2, False, True), (1e-1, True, True)]
)
def test_what_is_rounded_otherwise_is_no_other_result(
    by: float, autocast: bool, is_said: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of atomics have another order each time, which nobody could answer with an error."""
    monkeypatch.setattr(Unsteady, "by", by)
    error = pytest.raises(RuntimeError, match="has computed something else") if is_said else nullcontext()
    with on_device(Chain(Unsteady(64, 128) for _ in range(3)), device, activations="recompute") as pipe:
        x = torch.randn(8, 64, device=device)
        with pipe.step(), error:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = pipe.module(x).square().mean()
            loss.backward()


class Wide(Block):
    """Saves far more than its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        for _ in range(6):
            hidden = torch.tanh(hidden * 1.1)
        return x + self.down(hidden)


def peak(model: Chain, device: torch.device, rows: int, activations: str) -> tuple[int, int]:
    """What a step takes beyond what is there between steps: as torch counts it, and as the engine does."""
    api = torch.get_device_module(device)
    x = torch.randn(rows, WIDTH, device=device)
    with on_device(model, device, activations=activations) as pipe:
        micro_step(pipe, x[:ROWS])  # buffers that stay are made
        pipe.module.zero_grad()
        api.synchronize()
        before = api.memory_allocated()
        api.reset_peak_memory_stats()
        pipe.stats.clear()
        micro_step(pipe, x)
        return api.max_memory_allocated() - before, pipe.stats.activation_peak_bytes


def test_peak_memory(device: torch.device) -> None:
    """A quarter of what is kept otherwise, at most; and the engine counts what torch counts."""
    (kept, kept_counted), (recomputed, counted) = (
        peak(Chain(Wide(WIDTH, WIDTH) for _ in range(BLOCKS)), device, 32 * ROWS, policy)
        for policy in ("keep", "recompute")
    )
    assert recomputed <= 0.25 * kept
    assert counted <= 0.25 * kept_counted
    assert kept_counted <= kept <= 1.3 * kept_counted


def test_peak_memory_of_what_waits_on_the_host(device: torch.device) -> None:
    """Of what is kept otherwise, a third at most; weights and gradients on their way are the same in all."""
    rows = (16 if IN_USE else 128) * ROWS
    kept, offloaded = (peak(big_chain(), device, rows, policy)[0] for policy in ("keep", "offload"))
    assert offloaded <= 0.35 * kept


def test_what_is_predicted_is_enough(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done with each unit's activations, each of which is as large as the gradient of a weight."""
    monkeypatch.setattr(offload, "MIN_OFFLOAD_BYTES", 4 * WIDTH)  # so that a norm's statistics leave at any width
    api, random = torch.get_device_module(device), Random(0)
    x = torch.randn(WIDTH, WIDTH, device=device)
    model = Chain(Wide(WIDTH, WIDTH) for _ in range(BLOCKS))
    with on_device(model, device, activations="auto", memory_budget=1 << 34) as pipe:
        for _ in range(3):
            micro_step(pipe, x)
        auto = pipe._engine.activations.auto
        for _ in range(8):
            chosen = {
                name: random.choice(ways_of([call], 1.0, get_args(Policy), inputs_stay=name == "blocks.0"))
                for name, call in auto.footprints().items()
            }
            auto.policies = {name: way.policy for name, way in chosen.items()}
            api.synchronize()
            before = api.memory_allocated() - x.nbytes  # which the first unit holds
            api.reset_peak_memory_stats()
            micro_step(pipe, x)
            taken = api.max_memory_allocated() - before
            predicted = activation_peak([*chosen.values()], auto.turn_bytes) + auto.outside_bytes
            assert taken <= predicted, [way.policy for way in chosen.values()]
