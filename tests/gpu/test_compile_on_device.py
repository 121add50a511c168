"""Compiled units on a real device: bit-equal to the same compiled blocks that live there."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from sp_lightning.pipeline import Pipeline, PipelineOptions

from ..helpers import assert_same_trace
from ..second_device import IN_USE, some
from ..zoo import CASES, Case
from ..zoo.blocks import Chain
from .parts import OnDevice, Streamed, train_case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


class CompiledOnDevice(OnDevice):
    """The reference, with its blocks compiled."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        for block in self.model.blocks:
            block.compile()


@pytest.mark.parametrize("activations", some(["recompute", "keep", "offload"], 3))
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_blocks_are_exact(backend: str, activations: str, device: torch.device) -> None:
    """In fp32: under autocast the first forward is not compiled, and what is compiled casts in other places."""
    if backend == "inductor" and IN_USE:
        pytest.skip("inductor writes no code for the second device")
    case = CASES["chain"]
    with torch.compiler.set_stance("default", force_backend=backend):
        torch._dynamo.reset()
        expected = train_case(case, device, CompiledOnDevice(case, device), None)
        torch._dynamo.reset()
        options = PipelineOptions(k=2, units="Block", compile=True, activations=activations)  # type: ignore[arg-type]
        streamed = Streamed(case, device, options)
        with streamed.pipe:
            actual = train_case(case, device, streamed, None)
            assert streamed.pipe.stats.loads > 0
    assert_same_trace(expected, actual)


@cache
def compiled_attention() -> Any:
    """When a test asks for it: the call imports inductor, which takes seconds."""
    return torch.compile(flex_attention)


class Attention(nn.Module):
    """Attends with a function that is compiled on its own, as it must be on long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return x + self.out(compiled_attention()(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("enabled", [False, True], ids=["fp32", "bf16-mixed"])
def test_flex_attention_trains(enabled: bool, device: torch.device) -> None:
    """An operation of higher order, watched in a first forward and compiled from there on."""
    if IN_USE:
        pytest.skip("flex_attention refuses the second device")
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Chain(Attention() for _ in range(4)).to(device)
    torch.manual_seed(0)
    model = Chain(Attention() for _ in range(4))
    x = torch.randn(2, 128, 64, device=device)
    with Pipeline(model, device, options=PipelineOptions(k=2, units=Attention)) as pipe:
        for _ in range(3):
            losses = []
            for runner in (plain, model):
                with pipe.step(), torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False):
                    loss = runner(x).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=1e-3)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.to(device), theirs.grad, rtol=5e-2, atol=1e-2)
