"""Units that live on a real device: their parameters, gradients and state are there, and nothing of them travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from sp_lightning import optim
from sp_lightning.pipeline import Pipeline, PipelineOptions
from sp_lightning.pipeline.optimizer.kinds import BY_ELEMENT
from sp_lightning.planning.memory import bytes_meanwhile

from ..helpers import is_block
from ..planning.parts import Fixed, train_placed
from ..zoo.blocks import chain

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("there", [(1, 4), range(7)], ids=["some", "all"])
def test_they_live_there_and_come_back(there: Sequence[int], fused: bool | None, device: torch.device) -> None:
    """The losses are those of plain training on the device, as far as two optimizers round alike."""
    make, planner = partial(AdamW, lr=1e-2, fused=fused), Fixed((2,), (2,), (2, there))
    seen: list[nn.Module] = []

    def look(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        living = [parameter for number in there if number < 6 for parameter in model.blocks[number].parameters()]
        if step == 4:
            assert all(parameter.device == device for parameter in living)
            assert all(value.device == device for p in living for value in optimizer.state[p].values() if value.dim())
            seen.append(model)

    expected, _ = train_placed(make, None, device, steps=5, clip=0.1)
    actual, _ = train_placed(make, planner, device, steps=5, clip=0.1, between=look)
    assert all(parameter.device.type == "cpu" for parameter in seen[0].parameters())
    assert all(value.device.type == "cpu" for state in actual["state"].values() for value in state.values())
    torch.testing.assert_close(actual["losses"], expected["losses"], rtol=1e-4, atol=1e-6)


def test_they_come_and_go_one_after_another(device: torch.device) -> None:
    """With whatever the optimizer keeps; moving takes no more than what lives there."""
    rows = torch.randn(8, 64, device=device)
    losses: list[list[float]] = []
    for windows in (None, [(2,), (2,), *3 * [(2, range(9))], (2,), (2,), (2, range(9))]):
        torch.manual_seed(0)
        model = chain(8, 64, 1024)
        pipeline = None
        if windows is None:
            model.to(device)
        else:
            pipeline = Pipeline(model, device, options=PipelineOptions(units=is_block), planner=Fixed(*windows))
        optimizer = LBFGS(model.parameters(), 0.01, max_iter=1, history_size=3)

        def closure(model: nn.Module = model, optimizer: LBFGS = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            loss.backward()
            losses[-1].append(loss.item())
            return loss

        losses.append([])
        before = torch.cuda.memory_allocated(device)
        for number in range(9):
            optimizer.step(closure)
            if pipeline is not None and number == 4:
                assert all(parameter.device == device for parameter in model.parameters())
                assert pipeline.summary().host_bytes == 0
                torch.cuda.reset_peak_memory_stats(device)
        if pipeline is not None:
            weights = sum(parameter.nbytes for parameter in model.parameters())
            # state, weights, gradients, two vectors of the line search or a step, a unit that moves, activations
            kept = 2 * 3 + 6
            assert torch.cuda.max_memory_allocated(device) - before < (kept + 3) * weights
            pipeline.detach()
            assert all(
                tensor.device.type == "cpu"
                for tensor in tree_leaves(list(optimizer.state.values()))
                if isinstance(tensor, Tensor)
            )
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-6)


OURS = [partial(optim.AdamW, moments=moments) for moments in ("fp32", "int8")]


@pytest.mark.parametrize("kind", [*BY_ELEMENT, *OURS])
def test_what_a_step_takes_is_counted(kind: Callable[[Any], Optimizer], device: torch.device) -> None:
    weights = [nn.Parameter(torch.randn(512, 512, device=device).bfloat16()) for _ in range(8)]
    optimizer = kind(weights)
    counted = sum(bytes_meanwhile([optimizer], weights))
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        optimizer.step()
    assert torch.cuda.max_memory_allocated(device) - before <= 1.01 * counted
