"""Features that cross: each two of them meet in some training, which has plain training's bits, and both happen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, combinations, product
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

import sp_lightning.fabric
from sp_lightning import SuperpipelineStrategy, optim
from sp_lightning.pipeline import Engine, HostBackend, Pipeline, PipelineOptions, WindowPlan
from sp_lightning.pipeline.gradients.gradient_memory import three_buffers
from sp_lightning.pipeline.optimizer import visit
from sp_lightning.pipeline.placing import arrangement
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import gradient_bytes

from .helpers import RaiseInBackward, Run, Trace, assert_same_trace, frozen, note_gradients, note_state
from .lightning_modules import trainer
from .planning.parts import Fixed
from .zoo.blocks import Chain, Gated

FACTORS: dict[str, Sequence[Any]] = {
    "loop": ["plain loop", "Fabric", "Trainer"],
    "place": ["streamed", "stays", "visits", "waits", "no room"],
    "flags": ["fixed", "frozen", "thawed", "thawed in each forward"],
    "outside": ["", "used outside", "later used outside"],
    "sizes": ["one is large", "odd"],
    "segments": [1, 2],
    "optimizers": ["fused", "int8", "two", "two in each unit"],
    "fails": ["", "forward", "backward"],
    "step": ["after backward", "in backward", "clipped"],
    "precision": ["32-true", "bf16-mixed"],
    "activations": ["keep", "recompute"],
}
"""The first of each is the plain case. Units wait by a plan, or as the host has no room for their gradients."""
MORE: list[dict[str, Any]] = [
    {"loop": "Fabric", "place": "waits", "flags": "frozen", "step": "clipped", "segments": 2},
    {"place": "no room", "flags": "thawed in each forward", "step": "clipped"},
    {"outside": "later used outside", "precision": "bf16-mixed", "activations": "recompute"},
]
"""Threes that were wrong once."""

MOVED = (1, 2, 3)  # the numbers of units that are not just streamed
BATCHES, ACCUMULATE, USED_FROM, THAWS_AT = 8, 2, 3, 5


def fails_at(how: dict[str, Any]) -> int:
    """The number of the micro-batch that fails: the last one of a step, unless backward has already stepped units."""
    return 2 if how["step"] == "in backward" and how["fails"] == "backward" else 3


class OnPurpose(Exception):
    """Raised in a forward; in a backward it is an interrupt, of which Lightning makes an exit."""


ON_PURPOSE = OnPurpose, KeyboardInterrupt, SystemExit


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few rows, of one value of each factor, in which each two values of different factors meet."""
    both = [product(product([a], factors[a]), product([b], factors[b])) for a, b in combinations(factors, 2)]
    missing = dict.fromkeys(frozenset(pair) for pairs in both for pair in pairs)
    used: Counter[tuple[str, Any]] = Counter()

    def gain(row: dict[str, Any], entry: tuple[str, Any]) -> tuple[int, int]:
        return sum(frozenset([entry, other]) in missing for other in row.items()), -used[entry]

    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in sorted(factors.keys() - row.keys(), key=lambda name: (-len(factors[name]), name)):
            row[name] = max(factors[name], key=lambda value: gain(row, (name, value)))
        for pair in combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        used.update(row.items())
        rows.append({name: row[name] for name in factors})
    return rows


ROWS = all_pairs(FACTORS) + [{name: row.get(name, values[0]) for name, values in FACTORS.items()} for row in MORE]


class Part(Gated):
    """A unit of weights of several sizes."""

    def __init__(self, hidden: int, more: int) -> None:
        super().__init__(hidden=hidden)
        self.more = nn.Parameter(torch.randn(more))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.more.mean()


class Net(Chain):
    """Computes its loss, in which weights may be used outside of their units; things change between micro-batches."""

    def __init__(self, how: dict[str, Any]) -> None:
        sizes, more = ((8, 8, 64, 8, 8), 24) if how["sizes"] == "one is large" else ((1, 64, 127, 64, 1), 1600)
        super().__init__(Part(size, more) for size in sizes)
        self.how, self.number = how, -1
        for block in self.blocks if how["segments"] == 2 else ():
            block.up.requires_grad_(False)
        if how["flags"].startswith("thawed"):
            self._set_flags(False)

    def _set_flags(self, requires_grad: bool) -> None:
        self.blocks[2].up.requires_grad_(requires_grad)
        self.blocks[3].requires_grad_(requires_grad)

    def begin_batch(self) -> None:
        """Freeze and thaw, before each micro-batch."""
        self.number += 1
        if self.how["flags"] == "frozen":
            self.blocks[1].norm.requires_grad_(self.number % 2 == 0)
        if self.how["flags"].startswith("thawed"):
            self._set_flags(self.how["flags"] == "thawed" and self.number >= THAWS_AT)

    @property
    def is_last(self) -> bool:
        """Whether a step follows."""
        return self.number % ACCUMULATE == ACCUMULATE - 1

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        if self.how["flags"] == "thawed in each forward":
            self._set_flags(True)
        given, fails = x, self.how["fails"] if self.number == fails_at(self.how) else ""
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 2 and fails == "forward":
                raise OnPurpose
            if number == 2 and fails == "backward":
                x = RaiseInBackward.apply(x, KeyboardInterrupt)
        loss = x.float().square().mean()
        begins = {"": BATCHES, "used outside": 0, "later used outside": USED_FROM}
        if self.number >= begins[self.how["outside"]]:
            loss = loss + F.linear(given, self.blocks[1].up.weight).float().square().mean()
        return loss

    def make_optimizers(self) -> list[Optimizer]:
        """One, or two that divide units among them, or the weights of each unit."""
        kind = self.how["optimizers"]
        units = [list(block.parameters()) for block in self.blocks]
        halves = units[::2], units[1::2]
        if kind == "two in each unit":
            halves = [unit[::2] for unit in units], [unit[1::2] for unit in units]
        ours, fused = partial(optim.AdamW, lr=1e-2), partial(AdamW, lr=1e-2, fused=True)
        if self.how["precision"] != "32-true" and self.how["step"] == "clipped":
            fused = partial(ours, weight_decay=0.1)  # Lightning clips no others under autocast
        if kind.startswith("two"):
            return [make(chain.from_iterable(half)) for make, half in zip((fused, ours), halves, strict=True)]
        return [fused(self.parameters()) if kind == "fused" else ours(self.parameters(), moments="int8")]


class Watches(Fixed):
    """Notes what happens; without a plan where there is no room."""

    def __init__(self, place: str) -> None:
        self.place = place
        numbers = {"stays": (MOVED,), "visits": ((), MOVED), "waits": ((), (), MOVED)}.get(place, ())
        super().__init__((2,), (2, *numbers))
        self.engines: dict[int, Engine] = {}
        self.segments = 0

    @override
    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        self.engines[id(engine)] = engine
        self.segments = max(self.segments, *(len(unit.segments) for unit in engine.arrangement.units))
        plan = super().before_step(engine, builds_graph)
        return None if self.place == "no room" else plan

    def count(self, name: str) -> int:
        """A counter, of all pipelines."""
        return sum(getattr(engine.stats, name) for engine in self.engines.values())


def take_steps(
    net: Net, trace: Trace, optimizers: Sequence[Optimizer], loss_of: Any, backward: Any, clip: Callable[[Any], object]
) -> None:
    """A loop of one's own."""
    for number in range(BATCHES):
        net.begin_batch()
        try:
            loss = loss_of(Run.rows(number))
            backward(loss)
        except ON_PURPOSE:
            net.zero_grad()
            trace["failed"] = number
            continue
        trace[f"loss {number}"] = frozen(loss)
        for optimizer in optimizers if net.is_last else ():
            if net.how["step"] == "clipped":
                clip(optimizer)
            optimizer.step()
            optimizer.zero_grad()


def options_of(how: dict[str, Any]) -> dict[str, Any]:
    return {
        "k": "auto",
        "units": [Part],
        "activations": how["activations"],
        "memory_budget": 10**7 if how["place"] == "no room" else None,
        "overlap_optimizer": how["step"] != "after backward",
    }


def in_plain_loop(how: dict[str, Any], planner: Watches | None, trace: Trace) -> tuple[Net, list[Optimizer]]:
    net, pipeline = Net(how), None
    if planner is not None:
        backend, options = HostBackend(poison=True, max_delay=0.001), PipelineOptions(**options_of(how))
        pipeline = Pipeline(net, "cpu", options=options, backend=backend, planner=planner)
    optimizers = net.make_optimizers()

    def loss_of(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=how["precision"] == "bf16-mixed", cache_enabled=False):
            return net(x)

    def backward(loss: Tensor) -> None:
        scope: AbstractContextManager[Any] = nullcontext()
        if pipeline is not None and how["step"] == "clipped":
            scope = pipeline.optimizers.clipping.measuring_norms()
        elif pipeline is not None and how["step"] == "in backward" and net.is_last and len(optimizers) == 1:
            scope = pipeline.optimizers.stepping_in_backward(optimizers[0])
        with scope:
            loss.backward()

    def clip(optimizer: Optimizer) -> None:
        clip_grad_norm = nn.utils.clip_grad_norm_ if pipeline is None else pipeline.optimizers.clipping.clip_grad_norm
        clip_grad_norm([weight for group in optimizer.param_groups for weight in group["params"]], 0.01)

    with pipeline or nullcontext():
        take_steps(net, trace, optimizers, loss_of, backward, clip)
    return net, optimizers


def in_fabric(how: dict[str, Any], planner: Watches | None, trace: Trace) -> tuple[Net, list[Optimizer]]:
    strategy: Any = "auto"
    if planner is not None:
        strategy = sp_lightning.fabric.SuperpipelineStrategy(**options_of(how), debug=True)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=how["precision"])
    net = Net(how)
    optimizers = net.make_optimizers()
    with mock.patch("sp_lightning.fabric_strategy.AutoPlanner", return_value=planner):
        model, *set_up = fabric.setup(net, *optimizers)
    take_steps(net, trace, set_up, model, fabric.backward, partial(fabric.clip_gradients, model, max_norm=0.01))
    return net, optimizers


class Module(L.LightningModule):
    def __init__(self, how: dict[str, Any], trace: Trace) -> None:
        super().__init__()
        self.net, self.trace = Net(how), trace
        self.automatic_optimization = not how["optimizers"].startswith("two")

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.net.begin_batch()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch)
        self.trace[f"loss {self.net.number}"] = frozen(loss)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers() if self.net.is_last else ():
                if self.net.how["step"] == "clipped":
                    self.clip_gradients(optimizer, gradient_clip_val=0.01)
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> list[Optimizer]:
        return self.net.make_optimizers()


def in_trainer(how: dict[str, Any], planner: Watches | None, trace: Trace) -> tuple[Net, list[Optimizer]]:
    """Another Trainer goes on after what fails."""
    module, arguments = Module(how, trace), {}
    if module.automatic_optimization:
        arguments["accumulate_grad_batches"] = ACCUMULATE
        arguments["gradient_clip_val"] = 0.01 if how["step"] == "clipped" else None
    begin = 0
    for end in [fails_at(how) + 1, BATCHES] if how["fails"] else [BATCHES]:
        strategy = "auto" if planner is None else SuperpipelineStrategy(**options_of(how), debug=True)
        ours = trainer(strategy, max_epochs=1, precision=how["precision"], **arguments)
        may_fail: Any = pytest.raises(ON_PURPOSE) if end < BATCHES else nullcontext()
        with mock.patch("sp_lightning.strategy.AutoPlanner", return_value=planner), may_fail:
            ours.fit(module, DataLoader([Run.rows(number) for number in range(begin, end)], batch_size=None))
        if end < BATCHES:
            module.zero_grad()
        begin = end
    return module.net, ours.optimizers


LOOPS = {"plain loop": in_plain_loop, "Fabric": in_fabric, "Trainer": in_trainer}


def room_for_half(units: Sequence[Unit], present: int, some_may_wait: bool) -> float:
    """Host memory for landing buffers, and for half of the gradients."""
    sizes = [gradient_bytes(unit.weights) for unit in units]
    return sum(three_buffers(sizes)) + sum(sizes) / 2


@pytest.mark.parametrize("how", ROWS, ids=lambda how: ", ".join(str(value) for value in how.values() if value))
def test_each_pair_meets(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "PIECE", 4096)  # a unit takes several, which end within weights
    if how["place"] == "no room":
        monkeypatch.setattr(arrangement, "room_for_gradients", room_for_half)
    planner, traces = Watches(how["place"]), (Trace(), Trace())
    for ours, trace in zip((None, planner), traces, strict=True):
        torch.manual_seed(1)
        net, optimizers = LOOPS[how["loop"]](how, ours, trace)
        note_gradients(trace, "end", dict(net.named_parameters()))
        note_state(trace, "end", net, optimizers)
    assert_same_trace(*traces)
    assert_happened(how, planner)


def assert_happened(how: dict[str, Any], planner: Watches) -> None:
    place, count = how["place"], planner.count
    learned = [engine.learned for engine in planner.engines.values()]
    has_one = not how["optimizers"].startswith("two")
    steps = BATCHES // ACCUMULATE - bool(how["fails"] and fails_at(how) % ACCUMULATE)
    assert count("loads") > 0
    assert count("optimizer_steps") == steps * (2 - has_one)
    assert (max(on_device for _, on_device in planner.seen) > 0) == (place == "stays")
    # a visit is a step of all of its unit
    assert (count("visits") > 0) == (place == "visits" and how["optimizers"] != "two in each unit")
    # where the host makes the first step, gradients of units that visit have waited, too
    assert place == "visits" or (count("late_gradients") > 0) == (place in ("waits", "no room"))
    assert how["segments"] == 1 or planner.segments == 2
    assert not how["outside"] or place == "stays" or any(each.used_outside for each in learned)
    assert any(each.casts.lowered for each in learned) == (how["precision"] == "bf16-mixed")
    assert (count("recomputed") > 0) == (how["activations"] == "recompute")
    assert (count("steps_in_backward") > 0) == (how["step"] == "in backward" and how["loop"] != "Fabric" and has_one)
