"""Units that visit the device to be stepped: same bits, in pieces, whatever is done with gradients and in between."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from sp_lightning import optim
from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.lanes.lanes import Job, Kind, Ticket
from sp_lightning.pipeline.optimizer import visit

from ...helpers import is_block
from ...planning.parts import BLOCKS, Fixed, Make, take_steps, train_placed
from ...zoo.blocks import Gated, chain

OPTIMIZERS: dict[str, Make] = {
    "AdamW": partial(AdamW, lr=1e-2, fused=True),
    "Adam": partial(Adam, lr=1e-2, weight_decay=0.1, fused=True),
    "ours": partial(optim.AdamW, lr=1e-2),
    "ours, int8": partial(optim.AdamW, lr=1e-2, moments="int8"),
    "one moment": partial(optim.Lion, lr=1e-2),
    "one moment, int8": partial(optim.Lion, lr=1e-2, moments="int8"),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block takes several, which end within weights."""
    monkeypatch.setattr(visit, "PIECE", 1024)


def assert_same(
    make: Make, visiting: Sequence[int], k: int = 2, backend: HostBackend | None = None, **options: Any
) -> int:
    """Both trainings have the same bits; returns the number of visits."""
    expected, _ = train_placed(make, None, **options)
    actual, stats = train_placed(make, Fixed((2,), (k, (), visiting)), backend=backend, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    return stats.visits


WAYS = [(clip, early, micro) for clip, early in [(None, False), (None, True), (0.01, False)] for micro in (1, 2)]
SOME = [(0.01, False, 1), (None, True, 2)]


@pytest.mark.parametrize(
    ("name", "clip", "in_backward", "accumulate"),
    [(name, *way) for name in OPTIMIZERS for way in (WAYS if name in ("AdamW", "ours") else SOME)],
)
def test_a_visit_has_the_bits_of_a_step_on_the_host(name: str, clip: Any, in_backward: bool, accumulate: int) -> None:
    visits = assert_same(OPTIMIZERS[name], [0, 1, 2, 4], clip=clip, in_backward=in_backward, accumulate=accumulate, k=3)
    assert visits == 4 * 6, "from the second step on"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_deferred_visits_bring_new_weights(accumulate: int) -> None:
    """What visits in backward is sent once more for the next forward; with the same bits, deferred visits save that."""
    make, visiting = OPTIMIZERS["AdamW"], [0, 1, 2, 4]
    expected, _ = train_placed(make, None, accumulate=accumulate)
    sent = []
    for defers in (False, True):
        planner = Fixed((2,), (3, (), visiting), defers_visits=defers)
        actual, stats = train_placed(make, planner, in_backward=True, accumulate=accumulate)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert stats.visits == 4 * 6
        sent.append(stats.bytes_to_device)
    block = sum(parameter.nbytes for parameter in Gated(16, 48).parameters())
    assert sent[0] - sent[1] >= 4 * 5 * block, "each forward but the last one"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_autocast(name: str) -> None:
    """Norms are sent as they are, beside copies in bf16; what is sent lies in page-locked memory, sums and masters."""
    backend = LocksPages(poison=True, max_delay=0.002)
    visits = assert_same(OPTIMIZERS[name], range(BLOCKS), autocast=True, clip=0.01, accumulate=2, backend=backend)
    assert visits == BLOCKS * 6
    assert backend.copies > 0


class LocksPages(HostBackend):
    """Counts copies of visits between host and device, one side of which lies in page-locked memory, as it has to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pins, self.locked, self.copies = True, dict[int, int](), 0

    def pin(self, memory: Tensor) -> bool:
        self.locked[memory.data_ptr()] = memory.nbytes
        return True

    def unpin(self, memory: Tensor) -> None:
        del self.locked[memory.data_ptr()]

    def copy(self, target: Tensor, source: Tensor) -> None:
        sides = target.data_ptr(), source.data_ptr()
        assert any(begin <= side < begin + size for begin, size in list(self.locked.items()) for side in sides)
        self.copies += 1
        super().copy(target, source)


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


@contextmanager
def visiting(
    units: Sequence[int], backend: HostBackend | None = None, at_first: Sequence[int] = (), **options: Any
) -> Iterator[tuple[nn.Module, Pipeline, Optimizer]]:
    """Blocks, some of which visit."""
    model, planner = chain(BLOCKS, 16, 48), Fixed((2, (), at_first), (options.get("k", 2), (), units))
    backend = backend or HostBackend(poison=True, max_delay=0.002)
    chosen = PipelineOptions(units=is_block, **options)
    with Pipeline(model, "cpu", options=chosen, backend=backend, planner=planner) as pipeline:
        yield model, pipeline, AdamW(model.parameters(), fused=True)


def clipped_backward(model: nn.Module, pipeline: Pipeline) -> list[weakref.ref[Tensor]]:
    """Returns the gradients that stay on the device."""
    model.zero_grad()
    with pipeline.optimizers.clipping.measuring_norms():
        model(torch.ones(4, 16)).square().mean().backward()
    pipeline.optimizers.clipping.clip_grad_norm(model.parameters(), 0.01)
    of_weights = pipeline._engine.stream.gradient_of.values()
    return [
        weakref.ref(gradient.tensor) for gradient in of_weights if gradient.tensor is not None and gradient.is_on_device
    ]


@pytest.mark.parametrize(("k", "order"), [(2, [0, 1, 2, 3, 4, 5]), (1, [1, 2])], ids=["begun", "to begin"])
def test_a_forward_waits_for_new_weights_alone(k: int, order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for state to come down. When it has them, gradients are gone; and no visit looks like a write of its own."""
    monkeypatch.setattr(visit, "PIECE", 1 << 20)  # or the next piece would wait for memory
    gate = threading.Event()

    class Lags(HostBackend):
        def submit_to_lane(self, kind: Kind, job: Job) -> Ticket:
            action, come_down = job.action, partial(gate.wait, 5) if kind is Kind.STATE_DOWN else bool
            job.action = lambda: (come_down(), action())[1]
            return super().submit_to_lane(kind, job)

    with visiting([1], Lags(), k=k, activations="recompute") as (model, pipeline, optimizer):
        for _ in range(3):
            gate.set()
            staying = clipped_backward(model, pipeline)
            gate.clear()
            optimizer.step()
        assert len(staying) == 6
        before = pipeline.stats.recomputed
        with pipeline.step():
            x = torch.ones(4, 16)
            for number in order:
                x = model.blocks[number](x)
        (under_way,) = [unit.update.ticket for unit in pipeline.arrangement.in_window if unit.update.is_on_device]
        assert under_way is not None
        assert not under_way.done
        assert not any(gradient() is not None for gradient in staying)
        gate.set()
        x.sum().backward()
        assert pipeline.stats.recomputed == before + len(order) - 1
        assert pipeline.stats.visits == 2


def test_gradients_stay_on_the_device_and_state_moves_once() -> None:
    with visiting([0, 1]) as (model, pipeline, optimizer):
        moved, lying = [], []
        for _ in range(5):
            clipped_backward(model, pipeline)
            before = pipeline.stats.bytes_to_host
            optimizer.step()
            model.blocks[0].up.weight.sum()  # waits for its step
            moved.append(pipeline.stats.bytes_to_host - before)
            lying.append([optimizer.state[p]["exp_avg"].data_ptr() for p in model.blocks[0].parameters()])
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    assert moved[0] == 0
    assert 3 * block <= moved[-1] <= 6.5 * block, "masters and two moments of one unit or two, and no gradient"
    assert lying[-1] == lying[-2]


@pytest.mark.parametrize(("begins", "delay"), [(False, 0.0), (True, 0.0), (True, 0.02)])
def test_a_visit_that_fails_raises(begins: bool, delay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a step does for which there is no memory. The next step is right, and its units visit."""

    def fail(*_: object) -> None:
        raise RuntimeError("no memory for pieces")

    with visiting([0, 1], HostBackend(max_delay=delay)) as (model, pipeline, optimizer):
        take_steps(model, optimizer, 1)
        monkeypatch.setattr(visit.Visit if begins else visit.Piece, "_send" if begins else "assign_buffer", fail)
        with pytest.raises(RuntimeError, match="no memory for pieces"):
            take_steps(model, optimizer, 2)  # if copies are late, the second one raises
        if begins:
            with pytest.raises(RuntimeError, match="no memory for pieces"):
                model.blocks[0].up.weight.sum()
        monkeypatch.undo()
        before, plain = pipeline.stats.visits, copy.deepcopy(model)
        others = AdamW(plain.parameters(), fused=True)
        others.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        take_steps(model, optimizer, 3)
        take_steps(plain, others, 3)
        assert pipeline.stats.visits == before + 6
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_a_visit_that_fails_in_the_middle_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first piece was asked for when the second one failed; others get the place that it writes to."""
    send, sent, asked = visit.Visit._send, list[object](), list[Ticket]()

    class Slow(HostBackend):
        def submit_to_lane(self, kind: Kind, job: Job) -> Ticket:
            action = job.action
            job.action = lambda: (time.sleep(0.02), action())[1]
            asked.append(super().submit_to_lane(kind, job))
            return asked[-1]

    def fail(self: visit.Visit, *args: Any) -> Any:
        sent.append(self)
        if sent.count(self) == 2:
            raise RuntimeError("no memory for pieces")
        return send(self, *args)

    with visiting([1], Slow()) as (model, pipeline, optimizer):
        for _ in range(2):
            clipped_backward(model, pipeline)
            optimizer.step()
        model.blocks[1].up.weight.sum()
        clipped_backward(model, pipeline)
        with monkeypatch.context() as failing:
            failing.setattr(visit.Visit, "_send", fail)
            with suppress(RuntimeError):  # or whoever waits for the step hears of it
                optimizer.step()
            with pytest.raises(RuntimeError, match="no memory for pieces"):
                model.blocks[1].up.weight.sum()
        assert asked
        assert all(ticket.done for ticket in asked)


def test_two_optimizers_step_a_unit_in_turn() -> None:
    """Each has state of its own, which lies together when it visits."""
    others: dict[nn.Module, Optimizer] = {}

    def step_other(step: int, model: nn.Module, _: Optimizer) -> None:
        other = others.setdefault(model, OPTIMIZERS["Adam"](model.parameters()))
        if step % 2:
            other.step()
            other.zero_grad()

    assert assert_same(OPTIMIZERS["Adam"], [0, 3], between=step_other) == 2 * (3 + 2)
    states = [other.state_dict()["state"] for other in others.values()]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_device_without_memory_for_pieces_leaves_steps_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first units are on their way then; the next step tries again."""
    made: list[int] = []
    make = visit.PieceBuffer.__init__

    def runs_out(self: visit.PieceBuffer, nbytes: int, backend: HostBackend) -> None:
        made.append(nbytes)
        if len(made) <= 2:
            raise torch.OutOfMemoryError("no memory")
        make(self, nbytes, backend)

    monkeypatch.setattr(visit.PieceBuffer, "__init__", runs_out)
    assert assert_same(OPTIMIZERS["ours"], [0, 1, 2, 4]) == 4 * 6 - 2


class WithNothing(nn.Linear):
    """A layer with a weight without elements."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__(16, 16)
        self.requires_grad_(not is_frozen)
        self.nothing = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


@pytest.mark.parametrize("name", ["AdamW", "ours, int8"])
def test_weights_without_elements(name: str) -> None:
    """A unit that trains nothing else is left to the host."""
    model = nn.Sequential(*[WithNothing(is_frozen=number == 2) for number in range(4)])
    plain, planner = copy.deepcopy(model), Fixed((2,), (2, (), range(4)))
    take_steps(plain, OPTIMIZERS[name](plain.parameters()), 4)
    with Pipeline(model, "cpu", options=PipelineOptions(units=[WithNothing]), planner=planner) as pipeline:
        take_steps(model, OPTIMIZERS[name](model.parameters()), 4)
        assert pipeline.stats.visits == 3 * 3
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_state_is_page_locked_from_when_it_is_made() -> None:
    """Of a unit that is to visit from then on; of others, from their first visit."""
    backend = LocksPages()
    with visiting([0, 1], backend, at_first=[0]) as (model, pipeline, optimizer):
        for step in range(2):
            take_steps(model, optimizer, 1)
            for number, block in enumerate(model.blocks):
                start = optimizer.state[block.up.weight]["exp_avg"].data_ptr()
                assert any(0 <= start - begin < size for begin, size in backend.locked.items()) == (number <= step)
            assert pipeline.stats.visits == 2 * step
