"""What is written to weights and buffers in a step, also past autograd's count of changes, is never lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.pipeline import Pipeline, PipelineOptions

from .helpers import Run, assert_same_story, attached, note_state
from .lightning_modules import trainer
from .zoo.blocks import WIDTH, Block, Chain, chain

Write = Callable[[nn.Parameter], object]


def clamp(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-0.1, 0.1)


def in_inference_mode(weight: nn.Parameter) -> None:
    with torch.inference_mode():
        weight.data.mul_(0.9)


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
    "data in inference mode": in_inference_mode,
    "one of two aliases": one_of_two_aliases,
    "out=": lambda weight: torch.mul(weight.data, 0.9, out=weight.data),
}


class Writes(Block):
    """Writes to one of its weights in its forward, from some call on."""

    def __init__(self, write: Write, calls_before: int = 0, frozen: bool = False) -> None:
        super().__init__()
        self.write, self.calls_before = write, calls_before
        self.up.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        if self.calls_before <= 0:
            self.write(self.up.weight)
        self.calls_before -= 1
        return super().forward(x)


def train(run: Run, autocast: bool = False) -> None:
    """Steps and an evaluation, under autocast if that is asked for."""
    optimizer = SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            if number == 2:
                run.evaluate("evaluation")
            with run.step():
                loss = run.model(run.rows(number)).square().mean()
        with run.step():
            loss.backward()
        run.note(f"loss {number}", loss)
        optimizer.step()
        optimizer.zero_grad()
        note_state(run.trace, f"step {number}", run.model, [optimizer])


def writers(write: Write, **options: bool | int) -> nn.Module:
    return Chain([Writes(write, **options) for _ in range(4)])


@pytest.mark.filterwarnings("ignore:.*changes its weights in place")
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("name", WRITES)
def test_weights(name: str, activations: str) -> None:
    """They are written back to the host, and a forward that does so does not run again."""
    assert_same_story(train, partial(writers, WRITES[name]), activations=activations)


@pytest.mark.parametrize("resident", [(), ("blocks.1",)])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_are_written_to_later(frozen: bool, resident: tuple[str, ...]) -> None:
    """By then the engine has settled into its ways."""
    assert_same_story(train, partial(writers, WRITES["data"], calls_before=2, frozen=frozen), resident=resident)


@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("name", WRITES)
def test_weights_under_autocast(name: str, calls_before: int) -> None:
    """Weights that travel lowered until something is written to them."""
    assert_same_story(partial(train, autocast=True), partial(writers, WRITES[name], calls_before=calls_before))


def test_data_that_is_only_read() -> None:
    """Costs no copy."""

    def story(run: Run) -> None:
        train(run)
        assert run.pipe is None or run.pipe.stats.host_syncs == 4  # for the gradients of each step

    assert_same_story(story, partial(writers, lambda weight: weight.data.norm()))


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


def test_writes_that_change_nothing() -> None:
    """A weight within its limits is not written back."""

    def story(run: Run) -> None:
        train(run)
        if run.pipe is not None:
            assert run.pipe.stats.write_backs == 0

    assert_same_story(story, partial(writers, lambda weight: weight.data.clamp_(-100, 100)), activations="recompute")


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


AROUND: dict[str, Callable[[nn.Module], object]] = {
    "a view": lambda layer: layer.weight[0].fill_(1),
    "another view": lambda layer: layer.weight.t().mul_(1.1),
    "chunks": lambda layer: layer.weight.chunk(2)[0].zero_(),
    "torch.nn.init": lambda layer: nn.init.orthogonal_(layer.weight),
    "in place": lambda layer: layer.weight.mul_(0.5),
    "an item": lambda layer: layer.weight.__setitem__(1, 2),
    "data": lambda layer: layer.weight.data.mul_(0.5),
    "an item of data": lambda layer: layer.weight.data.__setitem__(1, 3),
    "detached": lambda layer: layer.weight.detach().mul_(0.5),
    "assigned data": lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight], 0.5),
    "out=": lambda layer: torch.add(layer.weight, 1, out=layer.weight),
    "copy": lambda layer: layer.weight.copy_(layer.weight * 2),
    "only read": lambda layer: layer.weight.sum(),
    "a forward": lambda layer: layer(torch.ones(1, WIDTH)),
}


@pytest.mark.parametrize("when", ["before forward", "after the step"])
@pytest.mark.parametrize("first", AROUND)
def test_writes_around_forwards(first: str, when: str) -> None:
    """Some go to the device, through views, and others to the host: each sees what was written before."""

    def story(run: Run, second: str) -> None:
        optimizer = SGD(run.model.parameters(), lr=0.1, momentum=0.9)
        layer = run.model.blocks[1].up
        for number in range(3):
            with run.step():
                if when == "before forward" and number == 1:
                    write(layer, second)
                loss = run.model(run.rows(number)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if when == "after the step" and number == 1:
                    write(layer, second)
            run.note(f"loss {number}", loss)
            note_state(run.trace, f"step {number}", run.model, [optimizer])

    def write(layer: nn.Module, second: str) -> None:
        with torch.no_grad():
            AROUND[first](layer)
            AROUND[second](layer)

    for second in AROUND:
        assert_same_story(partial(story, second=second), lambda: Chain([Block() for _ in range(4)]), debug=False)


class Trains(LightningModule):
    """Trains a network as most do: the optimizer may step in backward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def on_train_end(self) -> None:
        pipeline = getattr(self.trainer.strategy, "pipeline", None)
        self.steps_in_backward = 0 if pipeline is None else pipeline.stats.steps_in_backward

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)


def weights_after_training(module: LightningModule, strategy: Any, precision: Any = "32-true") -> list[Tensor]:
    data = DataLoader(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)), batch_size=4)
    trainer(strategy, precision=precision).fit(module, data)
    return list(module.parameters())


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_in_a_checkpoint_whose_unit_is_stepped_in_backward(frozen: bool) -> None:
    """What was written to them is there before they are stepped."""
    results = []
    for strategy in ("auto", SuperpipelineStrategy(k=1, units=ChecksPoint)):
        torch.manual_seed(0)
        module = Trains(Chain([ChecksPoint(Writes(scale, frozen=frozen), reentrant=False) for _ in range(4)]))
        results.append(weights_after_training(module, strategy))
    assert all(map(torch.equal, *results))
    assert module.steps_in_backward == 4 * 4


class Convolves(nn.Module):
    """A block of operations for which autograd saves the weights themselves; of a linear layer's, it saves a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.tanh(self.conv(x[:, None])))[:, 0]


class EditsBetween(Trains):
    """Changes weights after the forward, in a hook that comes before backward."""

    def __init__(self, edit: Write, block: type[nn.Module]) -> None:
        super().__init__(Chain([block() for _ in range(4)]))
        self.edit = edit

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        for parameter in self.net.parameters():
            self.edit(parameter)


def scale(weight: nn.Parameter) -> None:
    weight.data.mul_(0.9)


def replace(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.9


def edited_between(strategy: Any, edit: Write, precision: Any, block: type[nn.Module]) -> list[Tensor]:
    torch.manual_seed(0)
    return weights_after_training(EditsBetween(edit, block), strategy, precision)


CANNOT_RUN_AGAIN = "or a weight of 'net.blocks.3' has been modified.*cannot run again"
BETWEEN = "weight '{}' was changed between forward and backward"


@pytest.mark.parametrize(
    ("edit", "block", "activations", "precision", "error"),
    [
        (scale, Block, "keep", "32-true", None),
        (scale, Block, "offload", "32-true", None),
        (
            replace,
            Block,
            "keep",
            "32-true",
            "weight 'net.blocks.3.down.weight' was changed between forward and backward",
        ),
        (replace, Convolves, "keep", "32-true", None),
        (replace, Convolves, "offload", "32-true", None),
        (replace, Convolves, "recompute", "32-true", CANNOT_RUN_AGAIN),
    ],
)
def test_data_that_is_changed_between_forward_and_backward(
    edit: Write, block: type[nn.Module], activations: Any, precision: str, error: str | None
) -> None:
    """No error in plain training, where backward uses what forward has left; here that may be gone.

    Given other memory, a weight that autograd has saved itself, and not a view of it, has its new values in backward.
    """
    strategy = SuperpipelineStrategy(k=2, units=block, activations=activations)
    if error is None:
        expected = edited_between("auto", edit, precision, block)
        assert all(map(torch.equal, expected, edited_between(strategy, edit, precision, block)))
        return
    with pytest.raises(RuntimeError, match=error):
        edited_between(strategy, edit, precision, block)


class AveragesBetween(Trains):
    """Averages weights, past their versions, in a hook that comes before backward, as EMA libraries do."""

    def __init__(self) -> None:
        ends = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8, bias=False)) for _ in range(2)]
        blocks = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4)]
        super().__init__(nn.Sequential(ends[0], *blocks, ends[1]))
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        for average, parameter in zip(self.average.parameters(), self.net.parameters(), strict=True):
            average.data.lerp_(parameter.data, 0.1)


@pytest.mark.parametrize(("activations", "precision"), [("recompute", "32-true"), ("keep", "bf16-mixed")])
def test_averages_that_travel_with_weights_may_change_between_forward_and_backward(
    activations: Any, precision: Any
) -> None:
    """Small modules share a unit; one that computes with none of what has changed is not refused."""
    results = []
    for strategy in ("auto", SuperpipelineStrategy(k=2, activations=activations)):
        torch.manual_seed(0)
        module = AveragesBetween()
        data = DataLoader(torch.randn(12, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)
        trainer(strategy, precision=precision).fit(module, data)
        results.append(list(module.parameters()))
    assert all(map(torch.equal, *results))


def test_memory_that_is_swapped_within_a_step() -> None:
    """Weights are sent from where they lie; what somebody holds of them stays as it is."""
    model = Chain([Block() for _ in range(4)])
    pipe = Pipeline(model, "cpu", options=PipelineOptions(k=2, units=Block))
    weight = model.blocks[1].up.weight
    before, x = weight.detach().clone(), torch.ones(1, WIDTH)
    try:
        with pipe.step(), torch.no_grad():
            whole, held = model(x), weight.data
            weight.data = weight.data * 0.5
            assert not torch.equal(model(x), whole)
            weight.data = held
            assert torch.equal(model(x), whole)
        assert torch.equal(weight, before)
    finally:
        pipe.detach()


class StepsItself(nn.Module):
    """Steps its own weight in its forward, as codebooks with an optimizer of their own do."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(8, WIDTH))
        self.optimizer = SGD([self.codes], lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        (self.codes[:5] - x.detach()).square().mean().backward()
        self.optimizer.step()
        return x + self.codes.detach().mean()


@pytest.mark.parametrize("resident", [(), ("blocks.1",)])
def test_weights_that_are_stepped_in_their_own_forward(resident: tuple[str, ...]) -> None:
    """It would go on with the old values."""
    model = Chain([Block(), StepsItself(), Block()])
    pipe = Pipeline(model, "cpu", options=PipelineOptions(k=1, units=(Block, StepsItself), resident=resident))
    with pytest.raises(RuntimeError, match="SGD is to step weight 'blocks.1.codes' inside of a forward"):
        model(Run.rows(0))
    pipe.detach()


class Offsets(Chain):
    """A chain with two weights of its own, which it uses itself."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(3)])
        self.shift = nn.Parameter(torch.randn(4, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale + self.shift[:1])


@pytest.mark.parametrize("next_event", ["a write to a weight beside it", "a step", "neither"])
def test_views_that_are_written_to_outside_of_units(next_event: str) -> None:
    """Whatever else makes the weight's copy on the device outdated before the step is over."""

    def story(run: Run) -> None:
        optimizer = SGD(run.model.parameters(), lr=0.1, momentum=0.9)
        for number in range(3):
            with run.step():
                with torch.no_grad():
                    run.model.shift[0].mul_(0.5)
                    if next_event == "a write to a weight beside it":
                        run.model.scale.mul_(1.5)
                loss = run.model(run.rows(number)).square().mean()
                loss.backward()
                if next_event == "a step":
                    with torch.no_grad():
                        run.model.shift[0].mul_(0.5)
                    optimizer.step()
            run.note(f"loss {number}", loss)
            if next_event != "a step":
                optimizer.step()
            optimizer.zero_grad()
            note_state(run.trace, f"step {number}", run.model, [optimizer])

    assert_same_story(story, Offsets)


class WritesBeside(Block):
    """Writes to a weight of its own and to one of another block, and calls that one, or not."""

    def __init__(self, other: Block, calls: bool) -> None:
        super().__init__()
        self.others, self.calls = [other], calls  # no child

    def forward(self, x: Tensor) -> Tensor:
        (other,) = self.others
        with torch.no_grad():
            self.up.weight.data.clamp_(-0.1, 0.1)
            other.up.weight.mul_(0.9)
        x = super().forward(x)
        return x + other(x) if self.calls else x


@pytest.mark.filterwarnings("ignore:.*changes its weights in place")
@pytest.mark.parametrize("calls", [False, True])
def test_weights_that_travel_together_are_written_to_on_host_and_device(calls: bool) -> None:
    """What the one write makes outdated is sent again without losing the other."""

    def pairs() -> nn.Module:
        others = [Block() for _ in range(3)]
        return Chain([block for other in others for block in (WritesBeside(other, calls), other)])

    assert_same_story(train, pairs, k=2, k_prime=2, units=[Block])


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_weights_that_are_swapped_for_averages_and_back_past_their_versions(steps: int, activations: str) -> None:
    """As averaging callbacks do around a validation, in which some units are still on the device and others are not."""

    def story(run: Run) -> None:
        optimizer = SGD(run.model.parameters(), 0.1)
        averages = [parameter.detach().clone() for parameter in run.model.parameters()]

        def swap() -> None:
            for parameter, average in zip(run.model.parameters(), averages, strict=True):
                kept = parameter.data.clone()
                parameter.data.copy_(average)
                average.copy_(kept)

        for epoch in range(3):
            for step in range(steps):
                run.normal_step(f"{epoch} / {step}", optimizer, step)
            swap()
            run.evaluate(f"{epoch} / averaged")
            swap()
            for parameter, average in zip(run.model.parameters(), averages, strict=True):
                average.lerp_(parameter.data, 0.1)

    for k in (1, 2, 3):
        assert_same_story(story, chain, k=k, activations=activations)


def written_in_backward(write: Write, name: str = "up") -> Chain:
    """Blocks of which one layer's weight is written to when backward has passed it."""
    model = chain()

    def hook(layer: nn.Module, *_: Any) -> None:
        write(layer.weight)

    for block in model.blocks[1:]:  # the first one's input needs no gradient, so its hooks come before its backward
        block.get_submodule(name).register_full_backward_hook(hook)
    return model


@pytest.mark.parametrize("name", ["counted", "data"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_hooks_on_backward_of_modules(k: int, name: str) -> None:
    """They run when backward is about to leave a unit."""

    assert_same_story(train, lambda: written_in_backward(WRITES[name]), k=k)


def test_hooks_on_backward_of_modules_that_are_stepped_in_backward() -> None:
    """The step should follow the write, and it cannot be told before that there will be one."""

    def train_with(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        strategy = SuperpipelineStrategy(k=1, units=[Block], **options)
        return weights_after_training(Trains(written_in_backward(clamp, "norm")), strategy)

    torch.manual_seed(0)
    expected = weights_after_training(Trains(written_in_backward(clamp, "norm")), "auto")
    assert all(map(torch.equal, expected, train_with(overlap_optimizer=False)))
    with pytest.raises(RuntimeError, match="was changed in backward after the optimizer had stepped it"):
        train_with()
