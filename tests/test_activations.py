"""`activations`: the numbers of plain training, no forward run more than twice, and a fraction of the memory."""

from __future__ import annotations

import gc
import random
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import SGD

from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.activations.contract import are_other, numbers_of
from sp_lightning.pipeline.activations.offload import Footprint
from sp_lightning.planning import AutoPlanner

from .every_test import collect_until
from .helpers import Plan, Run, assert_exact, assert_same_story, attached, memory_with, note_gradients, note_state
from .zoo import CASES
from .zoo.blocks import WIDTH, Block, Chain, Checkpointed, chain

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")

# ---------------------------------------------------------------------------------------------- how often, and whether

calls: Counter[str] = Counter()  # a global variable, which nothing restores


class Counted(Block):
    """A unit that counts its forwards."""

    def forward(self, x: Tensor) -> Tensor:
        calls["all"] += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "forwards", "recomputed"),
    [
        (lambda: Chain(Counted() for _ in range(3)), [6, 5, 5], 3 + 2 + 2),
        # a user's checkpoint is enough
        (lambda: Checkpointed(Counted() for _ in range(3)), [6, 6, 6], 0),
        (lambda: Checkpointed((Counted() for _ in range(3)), reentrant=True), [6, 6, 6], 0),
    ],
)
def test_a_forward_runs_twice(build: Callable[[], nn.Module], forwards: list[int], recomputed: int) -> None:
    """Once in forward and once in backward, but for that of the last unit, once it is known what comes after it."""
    counts = []
    with attached(build(), activations="recompute") as pipe:
        for step in range(3):
            calls.clear()
            with pipe.step():
                pipe.module(Run.rows(step).requires_grad_()).square().mean().backward()
            counts.append(calls["all"])
    assert counts == forwards
    assert pipe.stats.recomputed == recomputed


@pytest.mark.parametrize(
    ("outputs", "recomputed"),
    [
        (lambda model, x: (model(x) for _ in range(2)), 3 + 2 + 2 * (2 + 2)),  # a backward for each
        (lambda model, x: [model(x) + model(2 * x)], 6 + 5 + 5),
        (lambda model, x: [model(x), model(2 * x)], 6 + 6 + 6),  # the earlier one first
        (lambda model, x: [model(x), torch.no_grad()(lambda: model(x))()][:1], 3 + 3 + 3),
        (lambda model, x: [torch.tanh(model(x).repeat(1, 20))], 3 + 3 + 3),  # much is saved after the last unit
    ],
)
def test_what_backward_begins_with_is_not_recomputed(
    outputs: Callable[[nn.Module, Tensor], Iterable[Tensor]], recomputed: int
) -> None:
    def story(run: Run) -> None:
        for seed in range(3):
            with run.step():
                for output in outputs(run.model, run.rows(seed)):
                    output.square().mean().backward()
            note_state(run.trace, f"step {seed}", run.model, [])
        if run.pipe is not None:
            assert run.pipe.stats.recomputed == recomputed

    assert_same_story(story, lambda: chain(3), activations="recompute")


# ------------------------------------------------------------------------------------------ what a second forward finds


class MovesBuffers(Block):
    """Updates running statistics, reads what it updates, and replaces a buffer."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.wide = nn.BatchNorm1d(20_000, affine=False)  # whose statistics have no version either
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.ema.mul_(0.9).add_(x.detach().mean(0))
        self.scale = self.scale * 1.5
        self.wide(x.new_ones(2, 20_000))
        return torch.tanh(self.batch_norm(super().forward(x)) * self.scale + self.ema + self.wide.running_mean[0])


class MakesBuffers(Block):
    """Has a buffer only once it was called, another one that is None until then, and a mode that it switches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "calls"):
            self.register_buffer("calls", torch.zeros(()))
        self.calls += 1
        self.mean = x.detach().mean(0) if self.mean is None else self.mean * 0.9 + x.detach().mean(0)
        y = self.drop(super().forward(x + self.mean)) * self.calls
        self.drop.train(not self.drop.training)
        return y


class Rearranges(Block):
    """Has a tensor in place of its weight until it has saved all: a forward that ends then leaves it there."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight
        del self.up.weight
        self.up.weight = weight * 0.9
        y = super().forward(x)
        del self.up.weight
        self.up.weight = weight
        return y


class Sparse(Block):
    """Has a sparse buffer, and makes up others: no storage, no `nbytes` and no bytes to add up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("neighbors", torch.ones(5, 5).triu().to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return sum(torch.sparse.mm(each, y) for each in (self.neighbors, torch.eye(len(x)).to_sparse()))


class ReadsTwice(torch.autograd.Function):
    """`ctx.saved_tensors` unpacks everything at each use; `torch.utils.checkpoint` would refuse the second one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient * ctx.saved_tensors[1], gradient * ctx.saved_tensors[0]


class Reading(Block):
    def forward(self, x: Tensor) -> Tensor:
        return ReadsTwice.apply(super().forward(x), torch.sigmoid(x))


@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("kind", [MovesBuffers, MakesBuffers, Rearranges, Sparse, Reading])
def test_buffers_move_once_and_random_numbers_are_the_same(kind: type[nn.Module], policy: str) -> None:
    """A second forward begins with those of the first, and leaves all as it finds it."""

    def story(run: Run) -> None:
        torch.manual_seed(0)
        optimizer = SGD(run.model.parameters(), lr=0.1)
        for step in range(3):
            run.normal_step(f"step {step}", optimizer, seed=step)
            run.note(f"step {step} / generator", torch.rand(1))
        if run.pipe is not None:
            assert run.pipe.stats.recomputed == (3 + 2 + 2 if "recompute" in policy else 0)

    assert_same_story(story, lambda: Chain(kind() for _ in range(3)), activations=policy)


class Attends(Block):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)[None, None].chunk(3, -1)
        return super().forward(nn.functional.scaled_dot_product_attention(q, k, v)[0, 0])


def test_which_kernel_attends_in_the_models_forward_only() -> None:
    def story(run: Run) -> None:
        for step in range(2):
            with run.step():
                x = run.rows(step)
                with sdpa_kernel(SDPBackend.MATH):
                    output = run.model(x)
                output.square().mean().backward()
            note_gradients(run.trace, f"step {step}", dict(run.model.named_parameters()))
        if run.pipe is not None:
            assert run.pipe.stats.recomputed == 3 + 2
        assert torch.backends.cuda.flash_sdp_enabled()

    assert_same_story(story, lambda: Chain(Attends() for _ in range(3)), activations="recompute")


# ------------------------------------------------------------------------------------------- what does not run twice


class ChangesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class ChangesItsWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.norm.bias.add_(0.1)
        return super().forward(x)


class ChangesALargeBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(200_000))

    def forward(self, x: Tensor) -> Tensor:
        self.table += 1
        return super().forward(x) * self.table[0]


class WritesToStrided(Block):
    """Has a parameter that is not streamed, as its memory is not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.stat = nn.Parameter(torch.zeros(WIDTH, 2)[:, 0], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.stat += x.mean(0)
        return super().forward(x)


class Swaps(Block):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Tanh(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        self.one, self.other = self.other, self.one
        return self.one(super().forward(x))


class CountsInASlot(Block):
    __slots__ = ("calls",)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * self.calls


class CountsInItself(Block, dict):
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def forward(self, x: Tensor) -> Tensor:
        self["calls"] = self.get("calls", 0) + 1
        return super().forward(x) * self["calls"]


class Draws(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (random.random() + numpy.random.rand())


class KeepsALoss(Block):
    """As the layers of a mixture of experts; the loss reaches nodes in its graph."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.balance = y.square().mean()
        return y * self.balance


class Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.up.register_forward_hook(lambda module, args, output: self.seen.append(output.detach()))


class Cache:
    """What layers compute, for the next ones."""

    def __init__(self) -> None:
        self.layers: list[SimpleNamespace] = []


class GrowsACache(Block):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        x = super().forward(x + sum(layer.states for layer in cache.layers))
        cache.layers.append(SimpleNamespace(states=x))
        return x


class ParametrizedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.up)


class Starting(Chain):
    """Gives the first block something that it may change, and each block a cache if it wants one."""

    def forward(self, x: Tensor) -> Tensor:
        x, cache = x + 0, Cache()
        with parametrize.cached() if isinstance(self.blocks[1], ParametrizedBlock) else nullcontext():
            for block in self.blocks:
                x = block(x, cache) if isinstance(block, GrowsACache) else block(x)
        return x


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ChangesItsInput, "changes its input in place"),
        (ChangesItsWeight, "changes its weights in place"),
        (ChangesALargeBuffer, "changes a large buffer in place"),
        (WritesToStrided, "in place, or a parameter that is not streamed"),
        (Swaps, "replaces a part of itself"),
        (CountsInASlot, "has slots"),
        (CountsInItself, "has slots, or is a dict"),
        (Draws, "draws random numbers that are not torch's"),
        (KeepsALoss, "changes its attribute 'balance'"),
        (Hooked, "has forward hooks"),
        (GrowsACache, "'Cache', which may change.*set `use_cache=False`"),
        (ParametrizedBlock, r"is called under `parametrize.cached\(\)`"),
    ],
)
def test_activations_of_units_that_cannot_run_twice_are_kept(kind: type[nn.Module], reason: str) -> None:
    """From the first call on, and said once for each unit; every number is right."""

    def story(run: Run) -> None:
        optimizer = SGD(run.model.parameters(), lr=0.1)
        random.seed(1)
        numpy.random.seed(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                run.normal_step(f"step {step}", optimizer, seed=step)
        if run.pipe is not None:
            assert run.pipe.stats.recomputed == (0 if kind is ParametrizedBlock else 2 + 1 + 1)
            said = [str(warning.message) for warning in caught if "cannot run a second time" in str(warning.message)]
            said = [text for text in said if "'blocks.1'" in text or "'blocks.2'" in text]
            assert len(said) == 2, said
            assert all(re.search(reason, text) for text in said)

    build: Callable[[], nn.Module] = lambda: Starting([Block(), kind(), kind(), Block()])  # noqa: E731
    assert_same_story(story, build, activations="recompute")


@pytest.mark.parametrize(
    ("before", "between"),
    [
        (lambda block: None, lambda block: block.requires_grad_(False)),
        (lambda block: block.up.requires_grad_(False), lambda block: block.requires_grad_(True)),
        (lambda block: None, lambda block: block.eval()),
    ],
    ids=["frozen", "thawed", "evaluated"],
)
def test_flags_and_modes_are_those_of_the_first_forward(
    before: Callable[[nn.Module], object], between: Callable[[nn.Module], object]
) -> None:
    """A second forward saves what the first one did, and leaves them as they are by then."""

    def story(run: Run) -> None:
        for step in range(3):
            before(run.model.blocks[1])
            with run.step():
                loss = run.model(run.rows(step)).square().mean()
                between(run.model.blocks[1])
                loss.backward()
            note_gradients(run.trace, f"step {step}", dict(run.model.named_parameters()))
            run.model.requires_grad_(True).train().zero_grad()
        if run.pipe is not None:
            assert run.pipe.stats.recomputed == 3 + 2 + 2

    assert_same_story(story, lambda: Chain(Block(dropout=0.5) for _ in range(3)), activations="recompute")


switch = {"value": 0}  # a global variable


class ReturnsMore(Block):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y if switch["value"] == 0 else (y, -y)


def test_another_number_of_outputs_is_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with attached(Chain([Block(), ReturnsMore()]), activations="recompute") as pipe, pipe.step():
        loss = pipe.module(Run.rows(0)).sum()
        monkeypatch.setitem(switch, "value", 1)
        with pytest.raises(RuntimeError, match="'blocks.1' has computed something else .*such as an attribute"):
            loss.backward()


class Subclass(Tensor):
    pass


def test_outputs_are_compared_whole() -> None:
    """Imaginary parts, what sparse tensors and subclasses lie in, and other shapes or dtypes."""
    ones = torch.ones(2, 2)
    for first, second in [
        (ones + 1j, ones + 6j),
        (ones.to_sparse(), (2 * ones).to_sparse()),
        (ones.as_subclass(Subclass), (2 * ones).as_subclass(Subclass)),
        (ones, ones[0]),
        (ones, ones.double()),
    ]:
        assert not are_other(numbers_of(first), numbers_of(first))
        assert are_other(numbers_of(first), numbers_of(second))


CHANGES: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "input": lambda _, x: x.add_(1),
    "bias": torch.no_grad()(lambda model, _: model.blocks[1].up.bias.add_(1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_inputs_and_weights_changed_before_backward_raise(change: Callable[[nn.Module, Tensor], object]) -> None:
    """Plain training may allow it, where nobody saved what is changed: a clear error instead of other numbers."""
    model, says = chain(3), r"'blocks.\d' has been modified by an inplace .* `activations='keep'`"
    with attached(model, activations="recompute") as pipe:
        with pipe.step():
            x = Run.rows(0)
            loss = model(x).square().mean()
            change(model, x)
            with pytest.raises(RuntimeError, match=says):
                loss.backward()
        with pipe.step():
            model(x).square().mean().backward()


# ---------------------------------------------------------------------------------------------------------- exceptions

bomb: list[type[BaseException]] = []  # a global variable


class Bomb(Counted):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if bomb and calls["all"] > 1:
            raise bomb.pop()("on purpose")
        return torch.tanh(x)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_second_forward(error: type[BaseException]) -> None:
    """The next step is right, and nothing of the last one is left."""

    def story(run: Run) -> None:
        optimizer = SGD(run.model.parameters(), lr=0.1)
        run.normal_step("before", optimizer, seed=1)
        if run.pipe is not None:
            calls.clear()
            bomb.append(error)
            with pytest.raises(error, match="on purpose"), run.step():
                run.model(run.rows(9)).square().mean().backward()
            run.model.zero_grad()
            gc.collect()
            assert run.pipe.stats.activation_bytes == 0
        run.normal_step("after", optimizer, seed=3)

    assert_same_story(story, lambda: Chain([Block(), Bomb(), Block()]), activations="recompute")


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What only the garbage collector would free counts as leaked."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("policy", ["keep", "recompute", "offload", "auto"])
@pytest.mark.usefixtures("without_collector")
def test_a_graph_that_is_dropped_frees_everything(policy: str) -> None:
    """A saved output that held its own node would keep itself alive for good."""
    seen: list[StorageWeakRef] = []

    class Watched(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(self.norm(x)))
            seen.append(StorageWeakRef(hidden.untyped_storage()))
            return x + self.down(hidden)

    model = Chain(Watched() for _ in range(3))
    with attached(model, activations=policy, debug=False) as pipe:
        for backward in (False, True):
            with pipe.step():
                loss = model(Run.rows(0)).square().mean()
                assert (pipe.stats.activation_bytes > 0) is (policy != "auto"), "which counts only what it measures"
                if backward:
                    loss.backward()
                del loss
            assert pipe.stats.activation_bytes == 0
            assert all(storage.expired() for storage in seen)


@pytest.mark.parametrize("place", ["attribute", "buffer"])
def test_an_output_that_is_kept_on_its_block_does_not_keep_it(place: str) -> None:
    """Nor the graph, whose nodes Python's collector does not see: they do not refer to the block."""
    model = chain(3)
    with attached(model, activations="recompute") as pipe:
        with pipe.step():
            output = model.blocks[0](Run.rows(0))
            model.blocks[1](output)
        if place == "attribute":
            model.blocks[0].last = output
        else:
            model.blocks[0].register_buffer("last", output)
    gone = weakref.ref(model.blocks[0]), weakref.ref(output)
    del model, output, pipe
    collect_until(lambda: not any(reference() for reference in gone))
    assert not any(reference() for reference in gone)


# ---------------------------------------------------------------------------------------------------------------- auto


def with_room(monkeypatch: pytest.MonkeyPatch, nbytes: int | None) -> None:
    """Let the emulated device tell how much memory is free; activations may take 90 % of it."""
    monkeypatch.setattr(HostBackend, "memory", lambda self: memory_with(nbytes))


@pytest.mark.parametrize("room", [0, 100_000, 10**9])
@pytest.mark.parametrize("name", ["gpt2-tied", "stochastic-depth", "two-graphs"])
@pytest.mark.filterwarnings("ignore:superpipeline. .* are available")
def test_choosing_is_exact(name: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While units are measured, and whatever is chosen then."""
    with_room(monkeypatch, room)
    options = PipelineOptions(k=2, k_prime=1, debug=True)
    assert_exact(CASES[name], options, Plan.of(CASES[name], sanity=True, steps=4), planner=AutoPlanner())


def train_with_room(
    monkeypatch: pytest.MonkeyPatch, room: int | None, steps: int = 5, rows: Sequence[int] = (64,)
) -> tuple[list[int], list[int], Pipeline]:
    """Peaks and recomputed calls of each step of a chain of twelve blocks, which save 36 KiB and more each."""
    with_room(monkeypatch, room)
    model = chain(12)
    optimizer = SGD(model.parameters(), 0.1)
    with attached(model, AutoPlanner(), activations="auto") as pipe:  # with `debug`, all steps count
        peaks, recomputed = [], []
        for step in range(steps):
            pipe.stats.clear()
            with pipe.step():
                model(torch.randn(rows[step % len(rows)], WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(pipe.stats.activation_peak_bytes)
            recomputed.append(pipe.stats.recomputed)
        return peaks, recomputed, pipe


@pytest.mark.parametrize(
    ("rows", "expected"),
    [((64,), [12, 12, 12, 0, 0]), ((16, 16, 16, 16, 64, 64, 16), [12, 12, 12, 0, 12, 0, 0])],
    ids=["of one size", "larger ones"],
)
def test_with_room_for_everything_units_are_measured_and_then_kept(
    rows: Sequence[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger batch recomputes, and is measured, before more is kept of it; smaller ones go on as chosen."""
    peaks, recomputed, _ = train_with_room(monkeypatch, 10**9, len(expected), rows)
    assert recomputed == expected
    assert peaks[0] < 0.4 * max(peaks)


def test_without_a_planner_everything_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody chooses, and there is a limit."""
    with_room(monkeypatch, 10**9)
    with attached(chain(12), activations="auto") as pipe:
        for _ in range(4):
            pipe.module(Run.rows(0)).square().mean().backward()
        assert pipe.stats.recomputed == 4 * 12


def test_several_backward_passes_of_a_step_do_not_add_up() -> None:
    """As of a GAN: what a unit has saved is free before its next forward, but calls in one graph add up."""

    def footprints(*passes: int) -> dict[str, Footprint]:
        with attached(chain(3), activations="auto", memory_budget="1GiB") as pipe:
            for _ in range(2):
                with pipe.step():
                    for calls in passes:
                        torch.stack([pipe.module(Run.rows(0)).sum() for _ in range(calls)]).sum().backward()
            return pipe._engine.activations.auto.footprints()

    assert footprints(1, 3, 2) == footprints(3) != footprints(1)


class DependsOnAGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if switch["value"] == 0 else x * 2


def test_auto_does_not_recompute_again_what_could_not_be_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was planned."""
    with_room(monkeypatch, 0)
    with attached(Chain([Block(), DependsOnAGlobal(), Block(), Block()]), activations="auto") as pipe:
        for step in range(5):
            with pipe.step():
                loss = pipe.module(Run.rows(0)).square().mean()
                switch["value"] = int(step == 1)
                with pytest.raises(RuntimeError, match="'blocks.1' has computed") if step == 1 else nullcontext():
                    loss.backward()
                switch["value"] = 0
        assert pipe._engine.activations.auto.in_use["blocks.1"] != "recompute"
        assert pipe._engine.activations.auto.in_use["blocks.0"] == "recompute"
