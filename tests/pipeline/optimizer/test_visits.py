"""Units that visit the device to be stepped: same bits, in pieces, whatever is done with gradients and in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from sp_lightning import optim
from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.optimizer import pieces

from ...helpers import is_block
from ...planning.parts import Fixed
from ...zoo.blocks import chain

BLOCKS = 6
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": partial(AdamW, lr=1e-2, fused=True),
    "Adam": partial(Adam, lr=1e-2, weight_decay=0.1, fused=True),
    "SGD": partial(SGD, lr=1e-1, momentum=0.9, fused=True),
    "without state": partial(SGD, lr=1e-1, fused=True),
    "ours": partial(optim.AdamW, lr=1e-2),
    "ours, Lion": partial(optim.Lion, lr=1e-3),
    "ours, int8": partial(optim.SGD, lr=1e-1, momentum=0.9, moments="int8"),
}
Done = tuple[list[Tensor], dict[str, Any]]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block takes several, which end within weights."""
    monkeypatch.setattr(pieces, "PIECE", 1024)


def attach(model: nn.Module, visiting: Sequence[int], kept: Sequence[int] = (), k: int = 2) -> Pipeline:
    options = PipelineOptions(units=is_block)
    planner = Fixed((2, 1), (k, 1, kept, (), visiting))
    return Pipeline(model, "cpu", options=options, backend=HostBackend(poison=True, max_delay=0.002), planner=planner)


def train(
    make: Callable[[Any], Optimizer],
    visiting: Sequence[int] | None,
    *,
    clip: bool = False,
    in_backward: bool = False,
    accumulate: int = 1,
    dtype: torch.dtype = torch.float32,
    between: Callable[[int, nn.Module, Optimizer], None] = lambda step, model, optimizer: None,
    **options: Any,
) -> tuple[list[Tensor], dict[str, Any], int]:
    torch.manual_seed(0)
    model = chain(BLOCKS, 16, 48).to(dtype)
    pipeline = None if visiting is None else attach(model, visiting, **options)
    optimizer = make(model.parameters())
    losses = []
    for step in range(6):
        for micro in range(accumulate):
            scope: Any = nullcontext()
            if pipeline is not None and in_backward and micro == accumulate - 1:
                scope = pipeline.optimizers.stepping_in_backward(optimizer)
            elif pipeline is not None and clip:
                scope = pipeline.optimizers.clipping.measuring_norms()
            torch.manual_seed(10 * step + micro)
            loss = model(torch.randn(4, 16, dtype=dtype)).square().mean()
            with scope:
                loss.backward()
            losses.append(loss.detach())
        if clip and pipeline is not None:
            pipeline.optimizers.clipping.clip_grad_norm(model.parameters(), 0.01)
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        between(step, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    visits = 0 if pipeline is None else pipeline.stats.visits
    if pipeline is not None:
        pipeline.detach()
    return [*losses, *(p.detach().clone() for p in model.parameters())], optimizer.state_dict()["state"], visits


def assert_same(make: Callable[[Any], Optimizer], visiting: Sequence[int], **options: Any) -> int:
    """Both trainings have the same bits; returns the number of visits."""
    expected, expected_state, _ = train(make, None, **{k: v for k, v in options.items() if k not in ("kept", "k")})
    actual, state, visits = train(make, visiting, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
    return visits


WAYS = [(clip, early, micro) for clip, early in [(False, False), (False, True), (True, False)] for micro in (1, 2)]
SOME = [(True, False, 1), (False, True, 2)]


@pytest.mark.parametrize(
    ("name", "clip", "in_backward", "accumulate"),
    [(name, *way) for name in OPTIMIZERS for way in (WAYS if name in ("AdamW", "ours") else SOME)],
)
def test_a_visit_has_the_bits_of_a_step_on_the_host(name: str, clip: bool, in_backward: bool, accumulate: int) -> None:
    visits = assert_same(
        OPTIMIZERS[name], [0, 1, 2, 4], clip=clip, in_backward=in_backward, accumulate=accumulate, kept=[4], k=3
    )
    assert visits == 4 * 5, "from the second step on"


@pytest.mark.parametrize("name", ["ours", "ours, int8"])
def test_weights_in_bf16(name: str) -> None:
    assert assert_same(OPTIMIZERS[name], range(BLOCKS), dtype=torch.bfloat16) == BLOCKS * 5


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


@pytest.mark.parametrize("clip", [False, True])
def test_gradients_and_masters_are_seen_as_ever(clip: bool) -> None:
    assert_same(OPTIMIZERS["AdamW"], range(BLOCKS), between=look, clip=clip)


def test_gradients_stay_on_the_device_and_state_moves_once() -> None:
    model = chain(BLOCKS, 16, 48)
    pipeline = attach(model, [0, 1])
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
