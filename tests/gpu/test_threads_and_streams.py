"""One thread and one stream compute: units that return CPU tensors, and models that use several streams or threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from sp_lightning.pipeline import Pipeline, PipelineOptions

from ..helpers import PATIENCE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

WIDTH, ROWS = 128, 64
POLICIES = pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])


class Unit(nn.Module):
    """Two layers, whose output may go to the CPU, and on from there."""

    def __init__(self, end: str = "") -> None:
        super().__init__()
        self.up, self.down, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), end

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.relu(self.up(x)))
        if self.end:
            x = x.cpu()
        return torch.sigmoid(x) if self.end == "sigmoid on the CPU" else x


class Heads(nn.Module):
    """A trunk with several heads, which return CPU tensors, as code does that saves GPU memory."""

    def __init__(self, end: str, trunk: int = 3) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Unit() for _ in range(trunk))
        self.heads = nn.ModuleList(Unit(end) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.trunk:
            x = x + unit(x)
        return torch.stack([head(x).square().mean() for head in self.heads]).sum()


class Towers(nn.Module):
    """Two towers, as CLIP's, which meet on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        towers = ([Unit() for _ in range(3)] + [Unit("on the CPU")] for _ in range(2))
        self.left, self.right = (nn.Sequential(*tower) for tower in towers)

    def forward(self, x: Tensor) -> Tensor:
        return (self.left(x) * self.right(x)).mean()


class OnStreams(nn.Module):
    """Its units, or the two halves of each, compute on two streams, which are joined as torch's documents say."""

    def __init__(self, parts: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.left, self.right = parts(), parts()
        self.side = torch.cuda.Stream()

    def __deepcopy__(self, memo: Any) -> OnStreams:
        other = OnStreams(lambda: nn.Identity())
        other.left, other.right = copy.deepcopy([self.left, self.right], memo)
        return other

    def forward(self, x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            x.record_stream(self.side)
            right = self.right(x)
        left = self.left(x)
        main.wait_stream(self.side)
        right.record_stream(main)
        return left + right


MODELS: dict[str, Callable[[], nn.Module]] = {
    "heads": lambda: Heads("on the CPU"),
    "heads alone": lambda: Heads("on the CPU", trunk=0),
    "heads that go on there": lambda: Heads("sigmoid on the CPU"),
    "towers": Towers,
}


def gradients(
    call: Callable[[Tensor], Tensor],
    x: Tensor,
    backward: Callable[[Tensor], None] = Tensor.backward,
    of: nn.Module | None = None,
) -> list[Tensor]:
    """What a step brings."""
    model = of or call
    assert isinstance(model, nn.Module)
    model.zero_grad()
    backward(call(x).mean())
    return [parameter.grad.cpu() for parameter in model.parameters()]


def compare(make: Callable[[], nn.Module], device: torch.device, steps: int, activations: Any) -> None:
    """Streamed and plain gradients have the same bits; no access lacks an order, or the second device would say so."""
    torch.manual_seed(0)
    plain = make().to(device)
    streamed = copy.deepcopy(plain)
    with Pipeline(streamed, device, options=PipelineOptions(k=2, units=Unit, activations=activations)) as pipe:
        for step in range(steps):
            x = torch.randn(ROWS, WIDTH, device=device)
            assert all(map(torch.equal, gradients(plain, x), gradients(streamed, x))), step
        assert pipe.stats.loads > 2 * steps


@POLICIES
@pytest.mark.parametrize("name", MODELS)
def test_units_that_return_cpu_tensors(name: str, activations: str, cuda: torch.device) -> None:
    """Autograd would run the CPU's part of their graph in a second thread, which overwrites what the first reads."""
    compare(MODELS[name], cuda, 12, activations)


def chain() -> nn.Sequential:
    return nn.Sequential(*(Unit() for _ in range(4)))


def test_units_on_two_streams_are_refused(cuda: torch.device) -> None:
    """One stream would overwrite weights that the other is about to read. The next step, on one stream, is right."""
    model = OnStreams(chain)
    with Pipeline(model, cuda, options=PipelineOptions(k=2, units=Unit)):
        x = torch.randn(ROWS, WIDTH, device=cuda)
        with pytest.raises(RuntimeError, match=r"Unit 'right\.0' is computed on another stream"):
            model(x)
        model.side = torch.cuda.current_stream()
        plain = copy.deepcopy(model).to(cuda)
        plain.side = model.side
        assert all(map(torch.equal, gradients(plain, x), gradients(model, x)))


@POLICIES
def test_a_unit_that_uses_two_streams_is_refused(activations: Any, cuda: torch.device) -> None:
    """What it computes on the second one would be used on the first without a wait. Inference is right."""
    model = nn.Sequential(*(OnStreams(Unit) for _ in range(6)))
    plain = copy.deepcopy(model).to(cuda)
    x = torch.randn(ROWS, WIDTH, device=cuda)
    with Pipeline(model, cuda, options=PipelineOptions(k=2, units=OnStreams, activations=activations)):
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        with pytest.raises(RuntimeError, match="is computed on another stream than the one that was current"):
            gradients(model, x)
    torch.cuda.empty_cache()  # the allocator looks only now whether `record_stream` still holds any


@POLICIES
def test_a_forward_may_be_on_another_stream(activations: str, cuda: torch.device) -> None:
    """All of it, in each second step; its backward is called where another one is current."""
    side = torch.cuda.Stream()
    torch.manual_seed(0)
    plain = chain().to(cuda)
    streamed = copy.deepcopy(plain)
    with Pipeline(streamed, cuda, options=PipelineOptions(k=2, units=Unit, activations=activations)):
        for step in range(6):
            x = torch.randn(ROWS, WIDTH, device=cuda)
            stream = side if step % 2 else torch.cuda.current_stream()

            def on_the_stream(model: nn.Module, x: Tensor = x, stream: Any = stream) -> list[Tensor]:
                return gradients(partial(joined, model, stream), x, of=model)

            assert all(map(torch.equal, on_the_stream(plain), on_the_stream(streamed))), step


def joined(model: nn.Module, stream: Any, x: Tensor) -> Tensor:
    """What a model returns that computes on a stream, which is joined as torch's documents say."""
    main = torch.cuda.current_stream()
    stream.wait_stream(main)
    x.record_stream(stream)
    with torch.cuda.stream(stream):
        output: Tensor = model(x)
    main.wait_stream(stream)
    output.record_stream(main)
    return output


def test_backward_in_another_thread(cuda: torch.device) -> None:
    """It need not be the one that has called the model, as long as the two take turns."""

    def in_a_thread(loss: Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join(PATIENCE)

    torch.manual_seed(0)
    model = Heads("on the CPU")
    plain = copy.deepcopy(model).to(cuda)
    with Pipeline(model, cuda, options=PipelineOptions(k=2, units=Unit)):
        for step in range(6):
            x = torch.randn(ROWS, WIDTH, device=cuda)
            assert all(map(torch.equal, gradients(plain, x), gradients(model, x, in_a_thread))), step


def test_a_backward_that_autograd_runs_in_several_threads_is_refused(cuda: torch.device) -> None:
    """C++ code may call it past torch's functions for Python."""
    model = chain()
    with Pipeline(model, cuda, options=PipelineOptions(k=2, units=Unit)):
        loss = model(torch.randn(ROWS, WIDTH, device=cuda)).mean()
        with pytest.raises(AssertionError, match="may use several threads"):
            Variable._execution_engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), False, True)
