"""The pipeline as a whole, where no other test of the engine looks: edits, life and death of its parts."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.optim import SGD
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.dlpack import to_dlpack

from sp_lightning.pipeline import Pipeline, PipelineOptions
from sp_lightning.pipeline.optimizer.staying import move_all_but_parameters

from .. import helpers
from ..processes import run_python
from .parts import RecordingBackend


def layers(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)])


attached = partial(helpers.attached, units=nn.Linear)  # each linear layer is a unit


def gradients_of_one_step(pipeline: Pipeline) -> list[Tensor]:
    pipeline.module.zero_grad()
    with pipeline.step():
        pipeline.module(torch.ones(1, 8)).square().mean().backward()
    return [p.grad.clone() for p in pipeline.module.parameters()]


@contextmanager
def over_a_backend(model: nn.Module) -> Iterator[tuple[Pipeline, RecordingBackend]]:
    backend = RecordingBackend()
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(k=2, units=nn.Linear), backend=backend)
    yield pipeline, backend
    pipeline.detach()


@pytest.mark.parametrize("where", ["upload", "download"])
def test_a_copy_that_fails_leaves_the_pipeline_ready(where: str) -> None:
    """The error surfaces, the next step is right and has all buffers, and detach works."""
    with over_a_backend(model := layers()) as (pipeline, backend):
        expected = gradients_of_one_step(pipeline)
        staging = pipeline._engine.stream.routes.staging
        room = staging.nbytes()
        with torch.no_grad():
            next(model.parameters()).add_(0)
        backend.fail_next(where, OSError("the bus is gone"))
        with pytest.raises(OSError, match="the bus is gone"):
            gradients_of_one_step(pipeline)
        assert all(map(torch.equal, gradients_of_one_step(pipeline), expected))
        assert staging.nbytes() == room


@pytest.mark.parametrize("goes_on", [True, False])
def test_units_that_cannot_be_arranged_anew(goes_on: bool) -> None:
    """Memory runs out: the error surfaces, gradients stay, and the next step is right, as is what detach gives back."""
    with over_a_backend(model := layers()) as (pipeline, backend):
        expected = gradients_of_one_step(pipeline)
        full = mock.patch.object(backend, "allocate", side_effect=torch.OutOfMemoryError("full"))
        with full, pytest.raises(torch.OutOfMemoryError, match="full"):
            pipeline._engine.rearrange()
        assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))
        if goes_on:
            assert all(map(torch.equal, gradients_of_one_step(pipeline), expected))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


METHODS = [
    "step", "record", "in_all_processes", "meet_processes", "weights_changed", "reset", "summary", "plain_classes"
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_a_detached_pipeline_does_nothing_but_say_so(name: str) -> None:
    """It attached itself again, and nothing undid that."""
    with attached(model := layers()) as pipeline:
        model(torch.ones(1, 8))
    with pytest.raises(RuntimeError, match="was detached, and its module is a plain one again"):
        getattr(pipeline, name)().__enter__()
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


def test_a_sparse_gradient_of_the_users() -> None:
    with attached(model := layers()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight = model[0].weight
        weight.grad = torch.ones_like(weight).to_sparse()
        with pytest.raises(RuntimeError, match="Weight '0.weight' got a sparse gradient. Make it dense"):
            optimizer.step()


def test_detach_twice_and_in_the_middle_of_a_step() -> None:
    model = layers()
    with attached(model) as pipeline:
        with pipeline.step():
            model(torch.ones(1, 8))
            pipeline.detach()
            assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
        pipeline.detach()
    assert {type(module) for module in model} == {nn.Linear}
    model(torch.ones(1, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


_ENDS_WHILE_STEPPING = """
import torch
from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions

class Backend(HostBackend):
    def close(self):
        self.drain()  # as the one for accelerators does
        super().close()

model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
optimizer = torch.optim.Adam(model.parameters())
Pipeline(model, "cpu", options=PipelineOptions(k=2, units="Linear"), backend=Backend())
for _ in range(3):
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_process_may_end_without_detach() -> None:
    """A thread that was still stepping when the interpreter ended used to abort it."""
    assert run_python("-W", "ignore", "-c", _ENDS_WHILE_STEPPING, PYTHONPATH=os.pathsep.join(sys.path)) == ("", "")


def test_a_conversion_in_a_step_is_an_error() -> None:
    with attached(model := layers()) as pipeline, pipeline.step():
        model(torch.ones(1, 8))
        model[1].weight.data = torch.ones(8, 8, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="Convert the module between steps"):
            model(torch.ones(1, 8))


class Probe(nn.Module):
    """Frozen layers, called in another order than that of the modules, below weights that no unit's call uses."""

    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = layers().requires_grad_(False)
        self.scale = nn.Parameter(torch.linspace(1, 2, 8))
        self.table = nn.Embedding(8, 8)
        self.norm = nn.LayerNorm(8)
        self.use = use

    def loss(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return self.use(self, x).square().sum()


@pytest.mark.parametrize(
    "use",
    [
        lambda model, x: x * model.scale,
        lambda model, x: x + model.scale,
        lambda model, x: x @ model.table.weight,
        lambda model, x: model.norm(x),
        lambda model, x: model.scale * 2,
    ],
)
def test_a_graph_without_units_is_waited_for(use: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """What the forward has shown is taken in before the next one, not before the backward that has a scope of its own.

    The gradient went to a twin that was no more: lost, or an error.
    """

    def story(model: Probe, scope: Callable[[], Any]) -> list[Tensor]:
        optimizer, losses = SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            optimizer.zero_grad()
            with scope():
                loss = model.loss(torch.full((2, 8), 1.0 + step))
            with scope():
                loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]

    model = Probe(use)
    expected = story(copy.deepcopy(model), nullcontext)
    with attached(model) as pipeline:
        life = helpers.made_once(pipeline._engine)
        actual = story(model, pipeline.step)
        assert pipeline.stats.steps == 3
        assert helpers.made_once(pipeline._engine) == life, "the order of layers was learned, and other places"
    assert all(map(torch.equal, expected, actual))


@pytest.mark.parametrize(("frozen", "change"), [(False, "rearrange"), (True, "rearrange"), (True, "place_weights")])
def test_a_graph_of_earlier_places_is_refused(frozen: bool, change: str) -> None:
    """Nobody would ever read its gradients, and the places of its weights are somebody else's by now."""
    model: nn.Module = layers().requires_grad_(False) if frozen else Probe(lambda model, x: x + model.scale)
    name = "(unit '3'|weight '3.weight')" if frozen else "weight 'scale'"
    with attached(model) as pipeline:
        x = torch.ones(2, 8, requires_grad=True)
        with pipeline.step():
            loss = model(x).sum() if frozen else model.loss(x)
        getattr(pipeline._engine, change)()
        with pytest.raises(RuntimeError, match=f"{name} of a graph that was built before"):
            loss.backward()


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_a_backward_after_the_end_says_so(activations: str) -> None:
    """Weights and inputs are elsewhere by then."""
    model = layers()
    with attached(model, activations=activations, units=nn.Linear):
        loss = model(torch.ones(1, 8)).sum()
    with pytest.raises(RuntimeError, match=r"a graph that was built before superpipeline .* in `detach\(\)`"):
        loss.backward()


def test_what_the_root_moves_in_a_to_of_its_own() -> None:
    """A teacher that is no submodule, say, so that its weights are not trained, nor saved; parameters stay."""

    class Distilled(nn.Sequential):
        teacher = (nn.Linear(4, 4),)

        def to(self, *args: Any, **kwargs: Any) -> Distilled:
            self.teacher[0].to(*args, **kwargs)
            return super().to(*args, **kwargs)

    root = Distilled(nn.Linear(4, 4), nn.BatchNorm1d(4))
    move_all_but_parameters(root, torch.device("meta"))
    assert root.teacher[0].weight.is_meta
    assert {buffer.device.type for buffer in root.buffers()} == {"meta"}
    assert {parameter.device.type for parameter in root.parameters()} == {"cpu"}
    assert "_apply" not in vars(root)


class Returns(nn.Module):
    """Returns something that holds its weight."""

    def __init__(self, holder: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.randn(8))
        self.holder = holder

    def forward(self) -> Any:
        return self.holder(self.mean)


DIAGONAL = torch.arange(8)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("holder", "read"),
    [
        (lambda mean: {"a": (mean,)}, lambda output: output["a"][0]),
        (lambda mean: Normal(mean.clone(), 1.0), lambda output: output.mean),
        (lambda mean: torch.sparse_coo_tensor(DIAGONAL[None], mean, (8,)), torch.Tensor.to_dense),
        (lambda mean: torch.sparse_csr_tensor(torch.arange(9), DIAGONAL, mean, (8, 8)), lambda output: output.values()),
        (lambda mean: TwoTensor(torch.ones(8), mean.detach()), lambda output: output.b),
    ],
    ids=["dict", "clone in an object", "sparse", "CSR", "second of two tensors"],
)
def test_a_weight_that_leaves_its_unit_is_cloned(
    holder: Callable[[nn.Parameter], Any], read: Callable[[Any], Tensor]
) -> None:
    """Its place will hold other weights by the time that somebody looks."""
    model = nn.ModuleList(Returns(holder) for _ in range(4))
    expected = [unit.mean.detach().clone() for unit in model]
    with attached(model, k=1, units=Returns) as pipeline, pipeline.step():
        assert all(map(torch.equal, map(read, [unit() for unit in model]), expected))


@pytest.mark.parametrize(
    ("holder", "message"),
    [
        (lambda mean: Normal(mean, 1.0), "one of its weights in an object.*Return a clone"),
        (lambda mean: partial(torch.add, other=mean), "one of its weights in an object.*Return a clone"),
        (lambda mean: mean.detach().numpy(), "one of its weights in an object.*Return a clone"),
        (lambda mean: to_dlpack(mean.detach()), "class 'PyCapsule', which cannot be searched.*tensors themselves"),
        (lambda mean: to_dlpack(torch.ones(2)), None),
        (lambda mean: [*range(100_000), mean.detach()], "class 'list', which cannot be searched.*tensors themselves"),
        (lambda mean: [*range(100_000)], None),
    ],
    ids=["object", "partial", "numpy", "hidden", "hidden, but nothing has a view of it", "large", "large, without one"],
)
def test_a_weight_that_leaves_its_unit_in_an_object_is_refused(
    holder: Callable[[nn.Parameter], Any], message: str | None
) -> None:
    model = nn.ModuleList([Returns(Tensor.clone), Returns(holder)])
    refused = nullcontext() if message is None else pytest.raises(RuntimeError, match=f"'1' returns .*{message}")
    with attached(model, k=1, units=Returns):
        model[0]()
        with refused:
            model[1]()


def test_a_backward_inside_of_a_forward_that_needs_its_place_says_what_to_do() -> None:
    """No unit's weights are overwritten while a call is inside of it."""
    model = layers()
    with attached(model, k=1, debug=False) as pipeline, pipeline.step():
        loss = model[0](torch.ones(1, 8)).sum()
        model[2].register_forward_hook(lambda *_: loss.backward())
        with pytest.raises(RuntimeError, match=r"larger `k`.*`resident`"):
            model[2](torch.ones(1, 8))
