"""Gradients averaged over processes: always what each process has by itself, averaged afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from sp_lightning.pipeline import Pipeline, PipelineOptions, Processes
from sp_lightning.pipeline.processes.averages import SharedSums
from sp_lightning.pipeline.torch_private import parts_of

from ...helpers import assert_close_trace, assert_same_trace, torchs_defaults
from ...processes import in_processes
from ...random_graphs import Example, examples
from ...zoo.blocks import WIDTH, Block
from ...zoo.quantized import Int8Linear
from .parts import Model, chain, train


def assert_averages(build: Model, options: PipelineOptions | None = None, **how: Any) -> None:
    """Of several passes, each process adds the first one's gradients before any adds the second one's."""
    is_close = how.get("accumulate", 1) > 1 or dist.get_world_size() > 2
    compare = partial(assert_close_trace, atol=1e-6) if is_close else assert_same_trace
    compare(train(build, None, **how), train(build, options or PipelineOptions(k=2, debug=True), **how))


# --------------------------------------------------------------------------------------------------- random graphs


def drawn(count: int) -> list[Example]:
    """The same random examples in all processes; none has a gradient that comes too late, which is an error."""
    found: list[Example] = []

    quietly = {"suppress_health_check": list(HealthCheck), "deadline": None}

    @seed(1)
    @settings(max_examples=count, database=None, phases=[Phase.generate], **quietly)
    @given(examples())
    def collect(example: Example) -> None:
        if "average" not in str(example.trees):  # a forward of one process may not write to weights that all share
            found.append(example)

    collect()
    return found


def random_graphs() -> None:
    """Processes leave out different layers ("some"), and use weights several times in one backward ("reentrant")."""
    for example in drawn(12):
        windows = {"k": example.k, "k_prime": example.k_prime, "units": example.units}
        options = PipelineOptions(**windows, activations=example.activations, debug=True)  # type: ignore[arg-type]
        accumulate, clip = example.plan.accumulate, example.plan.clip
        with torchs_defaults(example.dtype):
            assert_averages(example.model, options, accumulate=accumulate, clip=clip, in_backward=clip is None)


@pytest.mark.usefixtures("server")
def test_random_graphs() -> None:
    in_processes([random_graphs])


# ----------------------------------------------------------------------------------------------------- single things


class SparseRows(nn.Module):
    """One process looks up rows, the other does not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=True)
        self.block = Block().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.requires_grad_() * 2 if dist.get_rank() else x[:3] + self.table(torch.tensor([0, 3, 5])))


def sparse_gradients() -> None:
    """In all processes, as those without any would wait for the others."""
    model = SparseRows()
    with attached(model) as pipeline:
        loss = model(torch.randn(5, WIDTH)).square().mean()
        with pytest.raises(RuntimeError, match="Sparse gradients are not averaged"), pipeline.in_all_processes():
            loss.backward()
        pipeline.reset()


def four() -> None:
    """With more than two processes, the order of sums is another one; of two machines each has one copy."""
    for on_a_machine in (1, 2, 4):
        assert_averages(chain, on_a_machine=on_a_machine)


class InAnyOrder(nn.Module):
    """Calls its layers in an order that other processes do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def forward(self, x: Tensor) -> Tensor:
        for number in torch.randperm(5, generator=self.generator).tolist():
            x = self.layers[number](x)
        return x


def in_backward() -> None:
    """Units are stepped when all processes have added their gradients, in whatever orders.

    Nobody waits for that to give the place of a unit, or a buffer, to one for which the others wait.
    """
    model = InAnyOrder()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    with attached(model, on_a_machine=2, units=[nn.Linear], debug=True) as pipeline:
        for _ in range(50):
            pipeline.meet_processes()
            with pipeline.optimizers.stepping_in_backward(optimizer):
                model(torch.randn(5, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert pipeline.stats.steps_in_backward == 50 * 5


class HookedInOne(nn.Module):
    """A user's hook changes what has been added up, and one process alone uses the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain(3)
        self.blocks[0].up.weight.register_post_accumulate_grad_hook(_mask)

    def forward(self, x: Tensor) -> Tensor:
        used = self.blocks if dist.get_rank() == 0 else self.blocks[1:]
        return reduce(lambda y, block: block(y), used, x)


def _mask(weight: nn.Parameter) -> None:
    weight.grad *= torch.arange(len(weight))[:, None] > 3


def hooks_on_weights() -> None:
    assert_averages(HookedInOne)


def seen_by_one() -> None:
    """What one process has read as `.grad` is its part of what is added up next; the sum stays that of the other."""
    for looks in range(2):
        torch.manual_seed(0)
        model = chain(2)
        plain = copy.deepcopy(model)
        torch.manual_seed(dist.get_rank())
        with attached(model, on_a_machine=2):
            for _ in range(3):
                x = torch.randn(5, WIDTH)
                for each in (model, plain):
                    each(x).square().mean().backward()
                assert looks != dist.get_rank() or model[0].up.weight.grad is not None
            for weight, alone in zip(model.parameters(), plain.parameters(), strict=True):
                dist.all_reduce(alone.grad)
                torch.testing.assert_close(weight.grad, alone.grad / dist.get_world_size())


class Elsewhere(nn.Module):
    """In one process a weight is used outside of its unit, and so lives on the device from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x + self.blocks[1].up.weight.square().sum() if dist.get_rank() else x


def bytes_on_a_link(on_a_machine: int = 1) -> None:
    """What leaves and reaches a device for gradients in a step under autocast, for each parameter."""
    model = nn.Sequential(*[nn.Linear(256, width) for width in (256, 256, 256, 256, 1024)])
    optimizer = SGD(model.parameters(), lr=0.01)
    exchange, exchanged = dist.all_to_all_single, []

    def counted(received: Tensor, sent: Tensor, **kwargs: Any) -> Any:
        exchanged.append(2 * sent.nbytes * (on_a_machine - 1) // on_a_machine)  # a process keeps its own part
        return exchange(received, sent, **kwargs)

    with attached(model, on_a_machine, units=[nn.Linear]) as pipeline:
        for _ in range(3):
            pipeline.meet_processes()
            exchanged[:] = [-pipeline.stats.bytes_to_host]
            with mock.patch.object(dist, "all_to_all_single", counted), torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(5, 256)).square().mean().backward()
            crossed = sum(exchanged) + pipeline.stats.bytes_to_host
            optimizer.step()
            layout = pipeline.arrangement.layout
            held = pipeline._engine.stream.routes.staging.nbytes() + 4 * 256 * 1024 // on_a_machine
            assert held <= layout.streaming_bytes - layout.device_bytes, "with a share of the largest, in fp32"
            optimizer.zero_grad()
    assert 4 <= crossed / sum(weight.numel() for weight in model.parameters()) <= 4.1


def bytes_on_a_link_of_a_machine() -> None:
    bytes_on_a_link(dist.get_world_size())


def other_units() -> None:
    assert_averages(Elsewhere)


def quantized_weights_of_the_first() -> None:
    """Integers and scales, each as it is."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(Int8Linear(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    Pipeline(model, "cpu", processes=Processes(1)).detach()
    parts = [part for weight in model.parameters() for part in parts_of(weight)]
    dist.all_gather_object(everyones := [None] * dist.get_world_size(), [part.tolist() for part in parts])
    assert all(others == everyones[0] for others in everyones)
    assert [part.dtype for part in parts[:2]] == [torch.int8, torch.float32]


@pytest.mark.usefixtures("server")
def test_single_things() -> None:
    in_processes(
        [hooks_on_weights, seen_by_one, in_backward, bytes_on_a_link, bytes_on_a_link_of_a_machine, other_units]
    )


@pytest.mark.usefixtures("server")
def test_more_than_two() -> None:
    in_processes([four, seen_by_one, bytes_on_a_link_of_a_machine, quantized_weights_of_the_first], count=4)


# ----------------------------------------------------------------------------------------------- what cannot be right


@contextmanager
def attached(model: nn.Module, on_a_machine: int = 1, **options: Any) -> Iterator[Pipeline]:
    processes = Processes(on_a_machine)
    with Pipeline(model, "cpu", options=PipelineOptions(k=2, **options), processes=processes) as pipeline:
        yield pipeline


def other_models() -> None:
    with pytest.raises(ValueError, match="have built different models. The first difference is in"):
        Pipeline(chain(2 + dist.get_rank()), "cpu", processes=Processes(1))


def other_numbers_of_steps() -> None:
    model = chain()
    with attached(model) as pipeline:
        optimizer = SGD(model.parameters(), lr=0.1)
        loss = model(torch.randn(5, WIDTH)).square().mean()
        with pytest.raises(RuntimeError, match=r"different numbers of optimizer steps \(\[0, 1\]\)"):
            (optimizer.step if dist.get_rank() else loss.backward)()
        pipeline.reset()


def a_graph_on_weights_from_outside_of_a_step() -> None:
    model = chain()
    with attached(model) as pipeline:
        model(torch.randn(5, WIDTH)).square().mean().backward()
        early = sum(weight.square().sum() for weight in model.parameters())
        loss = model(torch.randn(5, WIDTH)).square().mean()
        with pytest.raises(RuntimeError, match="a graph that was built outside of a step"):
            (loss + early).backward()
        pipeline.reset()


def a_weight_that_was_thawed_unseen() -> None:
    model = chain()
    model[1].requires_grad_(False)
    with attached(model, on_a_machine=2):
        model[1].requires_grad_(True)
        model(torch.randn(5, WIDTH) + dist.get_rank()).square().mean().backward()
        dist.all_gather_object(everyones := [None, None], [weight.grad for weight in model[1].parameters()])
        assert all(torch.equal(*alike) for alike in zip(*everyones, strict=True))


class Again(nn.Module):
    """A reentrant checkpoint brings the gradients of a layer once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1:](checkpoint(self.layers[1], x, use_reentrant=True))


def a_second_gradient() -> None:
    model = Again()
    with attached(model) as pipeline:
        with pytest.raises(RuntimeError, match=r"Weight 'layers.1.*second gradient.*`use_reentrant=False`"):
            model(torch.randn(5, WIDTH)).square().mean().backward()
        pipeline.reset()


def an_exception_while_gradients_are_averaged() -> None:
    """The others may have finished that pass: the next one says so, and uses nothing of it."""

    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    torch.manual_seed(0)
    model, x = chain(), torch.randn(5, WIDTH) + dist.get_rank()
    with attached(model) as pipeline:

        def step() -> None:
            middle = model[:2](x)
            middle.register_hook(fail)
            model[2:](middle).square().sum().backward()

        with pytest.raises(KeyboardInterrupt), pipeline.step():
            step()
        assert pipeline.stats.resets == 1
        model.zero_grad()
        with pytest.raises(RuntimeError, match="ended with an exception in this one. They cannot train on together"):
            model(x).square().mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())


def a_share_that_cannot_land() -> None:
    """Its error is raised, and not waited for as if another process were late."""
    model = chain()

    def read() -> Tensor | None:
        model(torch.randn(5, WIDTH)).square().mean().backward()
        return model[0].up.weight.grad

    lacks = mock.patch.object(SharedSums, "land", side_effect=MemoryError("full"))
    with lacks, pytest.raises(MemoryError, match="full"), attached(model):
        read()


@pytest.mark.usefixtures("server")
def test_processes_that_disagree_raise() -> None:
    disagree = [other_models, other_numbers_of_steps, a_weight_that_was_thawed_unseen]
    wrong = [a_graph_on_weights_from_outside_of_a_step, a_second_gradient, sparse_gradients]
    in_processes([*disagree, *wrong, an_exception_while_gradients_are_averaged, a_share_that_cannot_land])
