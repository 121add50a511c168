"""What is written to weights and buffers in a step, also past autograd's count of changes, is never lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from .helpers import Run, assert_same_story, attached, note_state, train_story
from .planning.parts import Fixed
from .zoo.blocks import WIDTH, Block, Chain

Write = Callable[[nn.Parameter], object]


def clamp(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-0.1, 0.1)


def one_of_two_aliases(weight: nn.Parameter) -> None:
    first, second = weight.data, weight.data
    second.mul_(0.9)
    del first


WRITES: dict[str, Write] = {
    "counted": clamp,
    "data": lambda weight: weight.data.clamp_(-0.1, 0.1),
    "data, not idempotent": lambda weight: weight.data.mul_(0.9),
    "a row of data": lambda weight: weight.data[0].zero_(),
    "a view of data": lambda weight: weight.data.view(-1)[1:2].mul_(0.5),
    "data in inference mode": torch.inference_mode()(lambda weight: weight.data.mul_(0.9)),
    "one of two aliases": one_of_two_aliases,
    "out=": lambda weight: torch.mul(weight.data, 0.9, out=weight.data),
}


@torch.no_grad()
def as_statistics(weight: nn.Parameter) -> None:
    inputs = torch.linspace(-1, 1, 2 * weight.numel()).view(2, -1)
    mean = weight if weight.dim() == 1 else weight.data.view(-1)
    F.batch_norm(inputs, mean, torch.ones(weight.numel()), training=True)


def by_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[...] *= 0.9


@torch.no_grad()
def by_a_fused_optimizer(weight: nn.Parameter) -> None:
    options = {"weight_decay": 0.1, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    torch._fused_sgd_([weight], [torch.ones(weight.shape)], [], **options, **flags)


@torch.no_grad()
def with_the_version_preserved(weight: nn.Parameter) -> None:
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(0.9)


UNCOUNTED: dict[str, Write] = {
    "statistics": as_statistics,
    "numpy": by_numpy,
    "fused optimizer": by_a_fused_optimizer,
    "version preserved": with_the_version_preserved,
}


class Writes(Block):
    """Writes to one of its weights in its forward, from some call on."""

    def __init__(self, write: Write, calls_before: int = 0, frozen: bool = False, trains: bool = False) -> None:
        super().__init__()
        self.write, self.calls_before, self.trains = write, calls_before, trains
        self.up.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        if self.calls_before:
            self.calls_before -= 1  # before the first write alone: a unit whose attributes change keeps what it saves
        elif self.training >= self.trains:
            self.write(self.up.weight)
        return super().forward(x)


train = partial(train_story, evaluates=True, cast_cache=False)


def writers(write: Write, **options: bool | int) -> nn.Module:
    return Chain([Writes(write, **options) for _ in range(4)])


@pytest.mark.filterwarnings("ignore:.*changes its weights in place")
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("name", [*WRITES, *UNCOUNTED])
def test_weights(name: str, activations: str) -> None:
    """They are written back to the host, and a forward that does so does not run again."""
    write = {**WRITES, **UNCOUNTED}[name]
    assert_same_story(train, partial(writers, write), activations=activations)


def after_evaluations(run: Run) -> None:
    """As Lightning's sanity check: a forward that has shown nothing there may write in training."""
    run.model.eval()
    for number in range(3):
        run.evaluate(f"check {number}")
    run.model.train()
    train(run)


def after_calls_without_gradients(run: Run) -> None:
    """As the other network of a pair is trained: the first calls that build a graph are later ones."""
    for number in range(3):
        run.evaluate(f"target {number}")
    train(run)


def outside_of_units(run: Run, write: Write) -> None:
    """In a step, before the unit of the weight is called."""
    for number in range(4):
        with run.step():
            write(run.model.blocks[1].norm.weight)
            run.note(f"output {number}", run.model(run.rows(number)))
    note_state(run.trace, "end", run.model, [])


@pytest.mark.filterwarnings("ignore:.*changes its weights in place")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("name", UNCOUNTED)
@pytest.mark.parametrize("kind", ["frozen", "resident", "served", "lowered", "after evaluations", "without gradients"])
def test_writes_that_torch_does_not_count(kind: str, name: str, activations: str) -> None:
    """Running statistics that are Parameters are written once, also by units that recompute."""
    write = UNCOUNTED[name]
    stories: dict[str, Callable[[Run], None]] = {
        "served": partial(outside_of_units, write=write),
        "lowered": partial(train, autocast=True),
        "after evaluations": after_evaluations,
        "without gradients": after_calls_without_gradients,
    }
    if kind == "served":
        write = clamp
    build = partial(writers, write, frozen=kind == "frozen", trains=kind == "after evaluations")
    resident = ("blocks.1",) if kind == "resident" else ()
    assert_same_story(stories.get(kind, train), build, resident=resident, activations=activations)


@pytest.mark.filterwarnings("ignore:.*changes its attribute")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_units_that_write_and_stay_on_the_device_at_first(activations: str) -> None:
    """They stream from the fourth step on, and are watched from then on."""
    stays = 2, range(4)
    planner = Fixed(stays, stays, stays, (2,))

    def story(run: Run) -> None:
        for number in range(6):
            run.normal_step(f"{number}", None)
        note_state(run.trace, "end", run.model, [])

    assert_same_story(story, partial(writers, UNCOUNTED["numpy"]), planner=planner, activations=activations)


class WithStatistics(Block):
    """Its running statistics are Parameters. No output in training depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)
        for name, buffer in list(self.statistics.named_buffers()):
            delattr(self.statistics, name)
            if buffer.is_floating_point():
                setattr(self.statistics, name, nn.Parameter(buffer, requires_grad=False))
        self.statistics.num_batches_tracked = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.statistics(x))


@pytest.mark.filterwarnings("ignore:.*changes its weights in place")
@pytest.mark.parametrize("options", [{"activations": "recompute"}, {"memory_budget": "1GiB"}], ids=str)
def test_statistics_that_are_parameters(options: dict[str, Any]) -> None:
    """Each batch counts once, also if units recompute, where a second output would show no difference."""
    assert_same_story(train, lambda: Chain([WithStatistics() for _ in range(3)]), **options)


@pytest.mark.parametrize("resident", [(), ("blocks.1",)])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_are_written_to_later(frozen: bool, resident: tuple[str, ...]) -> None:
    """By then the engine has settled into its ways."""
    assert_same_story(train, partial(writers, WRITES["data"], calls_before=2, frozen=frozen), resident=resident)


class Keeps(SGD):
    """Steps through aliases that it has taken once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = self.param_groups[0]["params"]
        if not hasattr(self, "aliases"):
            self.aliases = [weight.data for weight in weights]
        for weight, alias in zip(weights, self.aliases, strict=True):
            alias[0] -= weight.grad[0]


class Flat(SGD):
    """Weights are views of one buffer, which it steps as a whole."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = self.param_groups[0]["params"]
        if not hasattr(self, "flat"):
            self.flat = torch.cat([weight.data.flatten() for weight in weights])
            for weight, part in zip(weights, self.flat.split([weight.numel() for weight in weights]), strict=True):
                weight.data = part.view_as(weight)
        self.flat -= 0.1 * torch.cat([weight.grad.flatten() for weight in weights])


def add_a_block(run: Run) -> None:
    """The module is attached as another tree; nobody steps what is new."""
    run.model.blocks.append(Block())


@pytest.mark.parametrize(
    ("cls", "outside", "change"),
    [(Keeps, False, bool), (Flat, False, bool), (Flat, True, bool), (Flat, False, add_a_block)],
    ids=["aliases", "a buffer", "a buffer, and a weight has another place", "a buffer, and another tree"],
)
def test_an_optimizer_that_keeps_the_memory_of_weights(cls: type[SGD], outside: bool, change: Any) -> None:
    def story(run: Run) -> None:
        optimizer = cls(list(run.model.parameters()))
        for number in range(4):  # without a look at weights in between, which would take other aliases
            if number == 2:
                change(run)
            with run.step():
                loss = run.model(run.rows(number)).square().mean()
                if outside:
                    loss = loss + 0.1 * run.model.blocks[1].up.weight.square().sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.note(f"loss {number}", loss)

    assert_same_story(story, lambda: Chain([Block() for _ in range(3)]), k=3)


@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("name", WRITES)
def test_weights_under_autocast(name: str, calls_before: int) -> None:
    """Weights that travel lowered until something is written to them."""
    assert_same_story(partial(train, autocast=True), partial(writers, WRITES[name], calls_before=calls_before))


def test_a_forward_gives_no_weight_other_memory() -> None:
    """`weight.data = ...`; a conversion that has nothing to convert is none."""

    class Assigns(Block):
        assigns = False

        def forward(self, x: Tensor) -> Tensor:
            self.float()
            if self.assigns:
                self.up.weight.data = self.up.weight.data * 2
            return super().forward(x)

    with attached(model := Chain([Assigns() for _ in range(3)])):
        model(Run.rows(0)).sum().backward()
        model.blocks[1].assigns = True
        with pytest.raises(RuntimeError, match=r"weight 'blocks.1.up.weight' other memory.*`weight.data.copy_"):
            model(Run.rows(0))


class ChecksPoint(nn.Module):
    """A user's checkpoint around a block, which backward runs again within the unit."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("unit", [ChecksPoint, Writes])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["counted", "data, not idempotent"])
def test_weights_in_a_checkpoint(name: str, reentrant: bool, frozen: bool, unit: type[nn.Module]) -> None:
    """Within a unit or around one, what runs again in backward writes once more, as in plain training."""

    def build() -> nn.Module:
        return Chain([ChecksPoint(Writes(WRITES[name], frozen=frozen), reentrant) for _ in range(4)])

    assert_same_story(train, build, units=unit)


class WritesToBuffer(Block):
    """Keeps a moving average in a buffer, as codebooks do."""

    def __init__(self, write: Callable[[Tensor], object], elements: int, calls_before: int = 0) -> None:
        super().__init__()
        self.write, self.calls_before = write, calls_before
        self.register_buffer("average", torch.linspace(1, 2, elements))

    def forward(self, x: Tensor) -> Tensor:
        if self.calls_before <= 0:
            self.write(self.average)
        self.calls_before -= 1
        return super().forward(x * self.average.mean())


class NormsLazily(Block):
    """Has buffers without a shape until its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyBatchNorm1d(affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.lazy(x))


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_buffers_of_lazy_modules(activations: str) -> None:
    assert_same_story(train, lambda: Chain([NormsLazily() for _ in range(3)]), activations=activations)


@pytest.mark.parametrize("calls_before", [1, 4])
def test_buffers_that_are_written_to_later(calls_before: int) -> None:
    """By then, a unit's first call has shown nothing."""
    blocks = partial(WritesToBuffer, WRITES["data, not idempotent"], 100_000, calls_before)
    assert_same_story(train, lambda: Chain([blocks() for _ in range(4)]), activations="recompute")


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("elements", [10, 100_000])
@pytest.mark.parametrize("name", WRITES)
def test_buffers(name: str, elements: int, activations: str) -> None:
    """They are written to once for each forward, whether it runs again or not."""
    blocks = partial(WritesToBuffer, WRITES[name], elements)
    assert_same_story(train, lambda: Chain([blocks() for _ in range(4)]), activations=activations)
