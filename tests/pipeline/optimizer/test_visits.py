"""Units that visit the device to be stepped: same bits, in pieces, whatever is done with gradients and in between."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from sp_lightning import optim
from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.optimizer import pieces

from ...helpers import is_block
from ...planning.parts import BLOCKS, Fixed, Make, train_placed
from ...zoo.blocks import chain

OPTIMIZERS: dict[str, Make] = {
    "AdamW": partial(AdamW, lr=1e-2, fused=True),
    "Adam": partial(Adam, lr=1e-2, weight_decay=0.1, fused=True),
    "SGD": partial(SGD, lr=1e-1, momentum=0.9, fused=True),
    "without state": partial(SGD, lr=1e-1, fused=True),
    "ours": partial(optim.AdamW, lr=1e-2),
    "ours, Lion": partial(optim.Lion, lr=1e-3),
    "ours, int8": partial(optim.SGD, lr=1e-1, momentum=0.9, moments="int8"),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block takes several, which end within weights."""
    monkeypatch.setattr(pieces, "PIECE", 1024)


def assert_same(make: Make, visiting: Sequence[int], k: int = 2, kept: Sequence[int] = (), **options: Any) -> int:
    """Both trainings have the same bits; returns the number of visits."""
    expected, _ = train_placed(make, None, **options)
    actual, stats = train_placed(make, Fixed((2, 1), (k, 1, kept, (), visiting)), **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    return stats.visits


WAYS = [(clip, early, micro) for clip, early in [(None, False), (None, True), (0.01, False)] for micro in (1, 2)]
SOME = [(0.01, False, 1), (None, True, 2)]


@pytest.mark.parametrize(
    ("name", "clip", "in_backward", "accumulate"),
    [(name, *way) for name in OPTIMIZERS for way in (WAYS if name in ("AdamW", "ours") else SOME)],
)
def test_a_visit_has_the_bits_of_a_step_on_the_host(name: str, clip: Any, in_backward: bool, accumulate: int) -> None:
    visits = assert_same(
        OPTIMIZERS[name], [0, 1, 2, 4], clip=clip, in_backward=in_backward, accumulate=accumulate, kept=[4], k=3
    )
    assert visits == 4 * 6, "from the second step on"


@pytest.mark.parametrize("name", ["ours", "ours, int8"])
def test_weights_in_bf16(name: str) -> None:
    assert assert_same(OPTIMIZERS[name], range(BLOCKS), dtype=torch.bfloat16) == BLOCKS * 6


def look(step: int, model: nn.Module, optimizer: Optimizer) -> None:
    """What users look at, and write to, between backward and step."""
    block = model.blocks[step % BLOCKS]
    for parameter in block.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
    if step == 3:
        optimizer.load_state_dict(optimizer.state_dict())
    if step == 4:
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(0.5)
        model.blocks[1].up.weight.data.copy_(model.blocks[2].up.weight.data)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_gradients_and_masters_are_seen_as_ever(clip: float | None) -> None:
    assert_same(OPTIMIZERS["AdamW"], range(BLOCKS), between=look, clip=clip)


def test_gradients_stay_on_the_device_and_state_moves_once() -> None:
    model, planner = chain(BLOCKS, 16, 48), Fixed((2, 1), (2, 1, (), (), [0, 1]))
    backend = HostBackend(poison=True, max_delay=0.002)
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(units=is_block), backend=backend, planner=planner)
    optimizer = AdamW(model.parameters(), fused=True)
    moved = []
    for _ in range(4):
        with pipeline.optimizers.clipping.measuring_norms():
            model(torch.ones(4, 16)).square().mean().backward()
        pipeline.optimizers.clipping.clip_grad_norm(model.parameters(), 0.01)
        before = pipeline.stats.bytes_to_host
        optimizer.step()
        optimizer.zero_grad()
        model.blocks[0].up.weight.sum()  # waits for its step
        moved.append(pipeline.stats.bytes_to_host - before)
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    assert moved[0] == 0
    assert 3 * block <= moved[-1] <= 6.5 * block, "masters and two moments of one unit or two, and no gradient"
    lying = [optimizer.state[p]["exp_avg"].data_ptr() for p in model.blocks[0].parameters()]
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
    assert lying == [optimizer.state[p]["exp_avg"].data_ptr() for p in model.blocks[0].parameters()]
    pipeline.detach()


def test_a_visit_that_cannot_be_asked_for_raises_and_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, planner = chain(BLOCKS, 16, 48), Fixed((2, 1), (2, 1, (), (), [0]))
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(units=is_block), backend=HostBackend(), planner=planner)
    optimizer = AdamW(model.parameters(), fused=True)
    asked = []

    def fail(*_: object) -> None:
        asked.append(1)
        raise RuntimeError("no memory for pieces")

    monkeypatch.setattr(pieces.Pieces, "of", fail)
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
    model(torch.ones(4, 16)).square().mean().backward()
    with pytest.raises(RuntimeError, match="no memory for pieces"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="no memory for pieces"):
        model.blocks[0].up.weight.sum()
    assert len(asked) == 1
    pipeline.detach()
