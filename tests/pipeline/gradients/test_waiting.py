"""Gradients that wait on the device until their unit is updated: plain training's bits, and no host memory for them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning import optim, superpipeline
from sp_lightning.pipeline import Planner
from sp_lightning.pipeline.gradients import routes
from sp_lightning.pipeline.gradients.segment_gradients import Gradient

from ...helpers import PATIENCE, assert_same_trace, attached, is_block
from ...lightning_modules import fit_placed
from ...planning.parts import BLOCKS, Fixed, train_placed
from ...zoo.blocks import WIDTH, Chain, Gated, chain

OPTIMIZERS: dict[str, Any] = {
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "int8": partial(optim.AdamW, lr=1e-2, moments="int8"),
}


HALF = (1, 3, 5)


@pytest.mark.parametrize("waiting", [range(7), HALF], ids=["all", "half"])
@pytest.mark.parametrize(
    ("optimizer", "precision", "clip", "accumulate"),
    [
        ("fused", "32-true", 0.01, 1), ("fused", "bf16-mixed", None, 4),
        ("fused", "bf16-true", 0.01, 4), ("foreach", "32-true", 0.01, 4),
        ("foreach", "bf16-mixed", 0.01, 1), ("foreach", "bf16-true", None, 4),
        ("SGD", "bf16-true", 0.01, 1), ("SGD", "bf16-mixed", 0.01, 4), ("SGD", "32-true", None, 1),
        ("int8", "32-true", None, 4), ("int8", "bf16-mixed", 0.01, 4),
        ("int8", "bf16-true", 0.01, 1),
    ],
)  # fmt: skip
def test_the_numbers_of_plain_training(
    optimizer: str, precision: str, clip: float | None, accumulate: int, waiting: Any
) -> None:
    """And what waits goes to the host once a step; without clipping or accumulation nothing has to."""
    make = OPTIMIZERS[optimizer]
    expected, _ = fit_placed(make, None, precision, clip, accumulate)
    actual, stats = fit_placed(make, Fixed((2, (), (), waiting)), precision, clip, accumulate)
    assert_same_trace(expected, actual)
    waits = clip is not None or accumulate > 1
    assert stats.late_gradients == (6 * len([n for n in waiting if n < 6]) if waits else 0)


UNIT = 4 * (2 * 16 + 2 * 16 * 48 + 48 + 16)  # bytes of the gradients of a unit, nearly
SOME = 6 * UNIT + 3 * UNIT  # three buffers for what waits, three landing buffers, and room for three units


@pytest.fixture(name="little_host_memory")
def _little_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "sp_lightning.pipeline.window.arrangement.room_for_gradients"
    monkeypatch.setattr(where, lambda *_, **__: 1.05 * SOME)


@pytest.mark.usefixtures("little_host_memory")
@pytest.mark.parametrize("training", [{"clip": 0.01}, {"accumulate": 3}, {"clip": 0.01, "accumulate": 2}], ids=str)
def test_before_a_plan_backward_decides(training: dict[str, Any]) -> None:
    """What the host has no room for waits, in each step, within the budget of the device."""
    taken: list[tuple[int, float]] = []

    class Looks(Planner):
        def before_step(self, engine: Any, builds_graph: bool) -> None:
            taken.append((engine.memory.nbytes_for("gradients"), engine.left_for_gradients()))

    make = OPTIMIZERS["fused"]
    expected, _ = train_placed(make, None, **training)
    actual, stats = train_placed(make, Looks(), memory_budget=250_000, activations="recompute", **training)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert 0 < stats.late_gradients < stats.optimizer_steps * BLOCKS
    assert all(on_host <= SOME - 3 * UNIT and left >= 0 for on_host, left in taken)


@pytest.mark.usefixtures("little_host_memory")
def test_an_error_says_that_there_is_room_nowhere() -> None:
    """In backward, with the unit's name; the next step is right, where there is room again."""
    model = chain(4)
    pipeline = superpipeline(model, "cpu", units=is_block, memory_budget=20_000)
    pipeline.waiting.limit(10_000)
    with pytest.raises(
        RuntimeError, match=r"Neither CPU nor GPU memory has room for the gradients of 'blocks.[0-3]': .*LoRA"
    ):
        model(torch.ones(2, WIDTH)).sum().backward()
    pipeline.waiting.host_bytes = 1e9
    model(torch.ones(2, WIDTH)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    pipeline.detach()


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_device_without_memory_for_sums_leaves_them_to_the_host(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the middle of a unit on."""
    added: list[Gradient] = []

    def runs_out(gradient: Gradient, tensor: Tensor, more_comes: bool) -> None:
        added.append(gradient)
        if len(added) % 29 == 0:
            raise torch.OutOfMemoryError("no memory")
        add(gradient, tensor, more_comes)

    add = routes.add_on_device
    monkeypatch.setattr(routes, "add_on_device", runs_out)
    planner = Fixed((2, (), (), range(BLOCKS)))
    expected, _ = train_placed(OPTIMIZERS["int8"], None, accumulate=3, clip=clip)
    actual, stats = train_placed(OPTIMIZERS["int8"], planner, accumulate=3, clip=clip)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert len(added) > 29
    assert 0 < stats.late_gradients < stats.optimizer_steps * BLOCKS


@pytest.mark.parametrize("visits", [False, True])
def test_gradients_that_somebody_looks_at(visits: bool) -> None:
    """Between backward and the step they are the user's, on the host; hooks see each sum."""
    seen: list[Tensor] = []

    def look(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        weight = model.get_parameter("blocks.1.up.weight")
        assert weight.grad is not None
        seen.append(weight.grad.clone())
        if step == 2:
            weight.grad.mul_(0.5)
        if step == 3:
            model.get_parameter("blocks.4.up.weight").register_post_accumulate_grad_hook(
                lambda weight: seen.append(weight.grad.clone())
            )

    planner = Fixed((2, (), (1, 4) if visits else (), range(BLOCKS)))
    make = partial(optim.AdamW, lr=1e-2)
    expected, _ = train_placed(make, None, accumulate=2, between=look)
    actual, stats = train_placed(make, planner, accumulate=2, between=look)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(seen[len(seen) // 2 :], seen[: len(seen) // 2], rtol=0, atol=0)
    assert stats.late_gradients > 0
    assert bool(stats.visits) is visits


@pytest.mark.parametrize("waiting", [(2,), range(BLOCKS)], ids=["one", "all"])
@pytest.mark.parametrize("is_trained", [lambda micro: micro > 0, lambda micro: micro == 0], ids=["thawed", "frozen"])
def test_weights_that_are_frozen_or_thawed_between_micro_batches(is_trained: Any, waiting: Any) -> None:
    """Thawed ones are a second segment of their unit; frozen ones keep the norms of earlier gradients."""

    def before_batch(micro: int, model: nn.Module) -> None:
        model.get_submodule("blocks.2.down").requires_grad_(is_trained(micro))

    # The landing buffer for the large block is the only one that is large enough for either of its segments.
    hidden = [48, 48, 192, 48, 48, 48]
    how: dict[str, Any] = {"clip": 0.01, "accumulate": 3, "before_batch": before_batch, "hidden": hidden}
    expected, _ = train_placed(OPTIMIZERS["fused"], None, **how)
    actual, stats = train_placed(OPTIMIZERS["fused"], Fixed((2, (), (), waiting)), **how)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert stats.late_gradients == 7 * len(waiting)


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.usefixtures("little_host_memory")
def test_landing_buffers_that_grow_in_a_step() -> None:
    """Most of the model is thawed while gradients of the rest wait."""

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 16)).square().sum().backward()
            model.requires_grad_(True)
        optimizer.step()

    model = Chain(Gated(16, 48) for _ in range(BLOCKS)).requires_grad_(False)
    for block in model.blocks:
        block.gate.requires_grad_(True)
    train(plain := copy.deepcopy(model))
    with superpipeline(model, "cpu", units=is_block, memory_budget=250_000) as pipeline:
        pipeline.waiting.limit(1_000)
        train(model)
        assert pipeline.stats.late_gradients == BLOCKS
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


class GivesView(torch.autograd.Function):
    """Returns a view of the weight itself as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        return gradient, weight.view(-1).view_as(weight)


class Viewed(Gated):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.own = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(GivesView.apply(x, self.own))


def test_a_gradient_that_lies_in_memory_of_others() -> None:
    """Another unit gets that memory before the optimizer reads the gradient."""

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        for _ in range(3):
            model(torch.ones(2, 16)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # which leaves them as they are
            optimizer.step()
            optimizer.zero_grad()

    model = Chain(Viewed(16, 48) for _ in range(BLOCKS))
    train(plain := copy.deepcopy(model))
    with attached(model, Fixed((2, (), (), range(BLOCKS)))) as pipeline:
        train(model)
        assert pipeline.stats.late_gradients > 0
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


class Reversed(Chain):
    """Blocks that are called the other way round, which the first call shows."""

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


@pytest.mark.usefixtures("little_host_memory")
def test_weights_stay_where_they_are_while_gradients_wait() -> None:
    """What was learned, or planned, changes places when the optimizer has used them: the host has no room for them."""
    model = Reversed(Gated(16, 48) for _ in range(BLOCKS))
    pipeline = superpipeline(model, "cpu", units=is_block, memory_budget=250_000, activations="recompute")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    placed = []
    for step in range(2):
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
            placed.append(pipeline.stats.arrangements)
        optimizer.step()
        assert pipeline.stats.late_gradients > step, "also those of the first step"
        optimizer.zero_grad()
    assert placed == [1, 1, 2, 2]
    pipeline.detach()
