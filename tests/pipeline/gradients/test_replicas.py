"""Gradients averaged over processes: always what each process has by itself, averaged afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor, nn
from torch.optim import SGD, SparseAdam

from sp_lightning.pipeline import Pipeline, PipelineOptions, Replicas
from sp_lightning.pipeline.torch_private import parts_of

from ...helpers import Trace, assert_same_trace, note_gradients, note_state
from ...processes import in_processes
from ...random_graphs import Example, examples
from ...zoo.blocks import WIDTH, Block
from ...zoo.quantized import Int8Linear
from .parts import Model, assert_averages_closely, average_gradients, chain, rows, train


def assert_averages(build: Model, options: PipelineOptions | None = None, **how: Any) -> None:
    options = options or PipelineOptions(k=2, debug=True)
    assert_same_trace(train(build, None, **how), train(build, options, **how))


# --------------------------------------------------------------------------------------------------- random graphs


def drawn(count: int) -> list[Example]:
    """The same random examples in all processes."""
    found: list[Example] = []

    @seed(0)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(examples())
    def collect(example: Example) -> None:
        found.append(example)

    collect()
    return found


def random_graphs() -> None:
    """Processes leave out different layers ("some"), and use weights several times in one backward ("reentrant")."""
    for example in drawn(40):
        options = PipelineOptions(
            k=example.k,
            k_prime=example.k_prime,
            units=example.units,
            activations=example.activations,  # type: ignore[arg-type]
            debug=True,
        )
        accumulate, clip = example.plan.accumulate, example.plan.clip
        expected = train(example.model, None, accumulate, clip=clip)
        actual = train(example.model, options, accumulate, clip=clip)
        # A weight may be finished at different moments of backward: then parts of its gradient are averaged one after
        # the other, and sums round otherwise.
        if "reentrant" in str(example.trees) or ("some" in str(example.trees) and accumulate > 1):
            assert list(expected) == list(actual)
            for label, value in expected.items():
                assert (value is None) == (actual[label] is None), (label, example)
                if isinstance(value, Tensor):
                    torch.testing.assert_close(actual[label], value, rtol=1e-4, atol=1e-5)
        else:
            assert_same_trace(expected, actual)


def test_random_graphs() -> None:
    in_processes([random_graphs])


# ----------------------------------------------------------------------------------------------------- single things


class SparseRows(nn.Module):
    """Each process looks up other rows, and one of them none at all in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=True)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if self.steps == 1 and dist.get_rank() == 1:
            return x.requires_grad_() * 2
        numbers = torch.tensor([dist.get_rank(), 3, 5])
        return x[:3] + self.table(numbers)


def sparse_gradients() -> None:
    assert_averages(SparseRows, make_optimizer=lambda model: SparseAdam(model.parameters()))


def three() -> None:
    """With more than two processes the order of sums is the collective operation's."""
    assert_averages_closely()


class Tied(nn.Module):
    """Two parameters in one memory stay on the device, and one of them is not used by everybody."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(2 * WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.first.weight = nn.Parameter(memory[:WIDTH])
        self.second.weight = nn.Parameter(memory[:WIDTH])
        self.blocks = chain(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return self.first(x) if dist.get_rank() else self.first(x) + self.second(x)


def parameters_that_stay_on_the_device() -> None:
    for accumulate in (1, 2):
        assert_averages(Tied, accumulate=accumulate)


class Hooked(nn.Module):
    """A user's hook masks a gradient: it is called with what was averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain(3)
        self.blocks[1].up.weight.register_hook(lambda gradient: gradient * (torch.arange(len(gradient))[:, None] > 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class HookedInOne(nn.Module):
    """The same where one process alone uses the weight, and the hook changes what has been added up."""

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
    for accumulate in (1, 2):
        assert_averages(Hooked, accumulate=accumulate)
    assert_averages(HookedInOne)


def mixed_dtypes() -> None:
    assert_averages(lambda: chain().to(torch.float64), batch=lambda generator: rows(generator).double())


def accumulation() -> None:
    for accumulate in (2, 3):
        assert_averages(chain, accumulate=accumulate)


def gradients_that_were_read_in_between() -> None:
    """Sums are taken back from wherever they are, also if somebody has looked at them."""
    traces = []
    for streamed in (False, True):
        torch.manual_seed(0)
        model, replicas = chain(), Replicas()
        pipeline = (
            Pipeline(model, "cpu", options=PipelineOptions(k=2, debug=True), replicas=replicas) if streamed else None
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        for micro in range(2):
            replicas.accumulates = micro == 0
            model(rows(generator)).square().mean().backward()
            if micro == 0:
                for parameter in model.parameters():
                    parameter.grad *= 0.5
        if pipeline is None:
            average_gradients(model)
        trace: Trace = {}
        note_gradients(trace, "end", dict(model.named_parameters()))
        traces.append(trace)
        if pipeline is not None:
            pipeline.detach()
    assert_same_trace(*traces)


def sums_that_were_dropped() -> None:
    """`zero_grad` between micro-batches: what comes then is a gradient like any other."""
    traces = []
    for streamed in (False, True):
        torch.manual_seed(0)
        model, replicas = chain(), Replicas()
        trace: Trace = {}
        pipeline = Pipeline(model, "cpu", options=PipelineOptions(k=2), replicas=replicas) if streamed else None
        optimizer, generator = SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(dist.get_rank())
        for accumulates in (True, False, False):
            replicas.accumulates = accumulates
            optimizer.zero_grad()
            model(rows(generator)).square().mean().backward()
        if pipeline is None:
            average_gradients(model)
        optimizer.step()
        note_state(trace, "end", model, [optimizer])
        traces.append(trace)
        if pipeline is not None:
            pipeline.detach()
    assert_same_trace(*traces)


def a_pass_of_one_process_alone() -> None:
    """It is not averaged, nobody waits for it, and hooks see it, also between micro-batches."""
    if dist.get_rank() == 0:
        return
    traces = []
    with mock.patch.object(Replicas, "broadcast_module"):  # takes all processes
        for streamed in (False, True):
            torch.manual_seed(0)
            model, replicas = Hooked(), Replicas()
            pipeline = Pipeline(model, "cpu", options=PipelineOptions(k=2), replicas=replicas) if streamed else None
            replicas.averages, replicas.accumulates = False, True
            optimizer = SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.randn(5, WIDTH)).square().mean().backward()
            trace: Trace = {}
            note_gradients(trace, "step", dict(model.named_parameters()))
            optimizer.step()
            note_state(trace, "end", model, [optimizer])
            traces.append(trace)
            if pipeline is not None:
                pipeline.detach()
    assert_same_trace(*traces)


class Elsewhere(nn.Module):
    """In one process a weight is used outside of its unit, and so has left it: units differ from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x + self.blocks[1].up.weight.square().sum() if dist.get_rank() else x


def other_units() -> None:
    for accumulate in (1, 2):
        assert_averages_closely(Elsewhere, accumulate=accumulate)
        assert_averages_closely(Elsewhere, accumulate=accumulate, make_optimizer=lambda m: SGD(m.parameters(), lr=0.1))


class Counted(nn.Module):
    """Blocks of several weights each, in two dtypes, and what is summed up on the host after backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain(3)
        self.last = Block().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x).double())


def as_few_operations_as_possible() -> None:
    """For a unit one message between hosts and one sum on the device; sums of micro-batches come back in one copy."""
    model, replicas = Counted(), Replicas()
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(k=2, units=Block), replicas=replicas)
    uploads: list[Tensor] = []
    upload = pipeline._backend.upload

    def note(target: Tensor, source: Tensor, after: Any = None) -> Any:
        uploads.append(source)
        return upload(target, source, after)

    units = 4
    largest = max(sum(p.nbytes for p in block.parameters()) for block in (*model.blocks, model.last))
    for accumulates, comes_back in ((True, False), (False, True), (False, False)):
        replicas.accumulates = accumulates
        loss = model(torch.randn(5, WIDTH)).square().mean()
        uploads.clear()
        loads = pipeline.stats.loads
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
            mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as messages,
            mock.patch.object(pipeline._backend, "upload", note),
        ):
            loss.backward()
        assert sums.call_count == (0 if accumulates else units)
        assert messages.call_count == (1 if accumulates else units + 1), "and one when backward is over"
        assert len(uploads) == pipeline.stats.loads - loads + units * comes_back
        assert pipeline._engine.stream.device_bytes() < 2.5 * largest, "two staging buffers"
    pipeline.detach()


def quantized_weights_of_the_first() -> None:
    """Integers and scales, each as it is."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(Int8Linear(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    Pipeline(model, "cpu", replicas=Replicas()).detach()
    parts = [part for weight in model.parameters() for part in parts_of(weight)]
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, [part.tolist() for part in parts])
    assert everyones[0] == everyones[1]
    assert [part.dtype for part in parts[:2]] == [torch.int8, torch.float32]


def buffers_of_the_first() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH))
    model[2].register_buffer("odd", torch.arange(3, dtype=torch.uint8) + dist.get_rank())
    pipeline = Pipeline(model, "cpu", replicas=Replicas())
    model(torch.randn(5, WIDTH) + dist.get_rank())
    pipeline.share_buffers()
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, {name: buffer.clone() for name, buffer in model.named_buffers()})
    assert_same_trace(*everyones)
    assert everyones[1]["2.odd"].tolist() == [0, 1, 2]
    pipeline.detach()


def test_single_things() -> None:
    in_processes(
        [
            sparse_gradients,
            parameters_that_stay_on_the_device,
            hooks_on_weights,
            mixed_dtypes,
            accumulation,
            gradients_that_were_read_in_between,
            sums_that_were_dropped,
            a_pass_of_one_process_alone,
            other_units,
            as_few_operations_as_possible,
            quantized_weights_of_the_first,
            buffers_of_the_first,
        ]
    )


def test_more_than_two() -> None:
    in_processes([three], count=3)


# ----------------------------------------------------------------------------------------------- what cannot be right


@contextmanager
def attached(model: nn.Module) -> Iterator[Pipeline]:
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(k=2), replicas=Replicas())
    try:
        yield pipeline
    finally:
        pipeline.detach()


def other_models() -> None:
    with pytest.raises(ValueError, match="have built different models; the first difference is in"):
        Pipeline(chain(2 + dist.get_rank()), "cpu", replicas=Replicas())


def no_shape_yet() -> None:
    with pytest.raises(ValueError, match=r"Parameter 'weight' has no shape yet"):
        Pipeline(nn.LazyLinear(3), "cpu", replicas=Replicas())


def other_numbers_of_steps() -> None:
    model = chain()
    with attached(model) as pipeline:
        optimizer = SGD(model.parameters(), lr=0.1)
        loss = model(torch.randn(5, WIDTH)).square().mean()
        if dist.get_rank():
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"different numbers of optimizer steps \(\[0, 1\]\)"):
            loss.backward()
        pipeline.reset()


def a_step_before_sums_were_averaged() -> None:
    model = chain()
    with attached(model) as pipeline:
        assert pipeline.replicas is not None
        pipeline.replicas.accumulates = True
        model(torch.randn(5, WIDTH)).square().mean().backward()
        with pytest.raises(RuntimeError, match="would be stepped before it was averaged over processes"):
            SGD(model.parameters(), lr=0.1).step()


def a_graph_on_weights_from_outside_of_a_step() -> None:
    model = chain()
    with attached(model) as pipeline:
        model(torch.randn(5, WIDTH)).square().mean().backward()
        early = sum(weight.square().sum() for weight in model.parameters())
        loss = model(torch.randn(5, WIDTH)).square().mean()
        with pytest.raises(RuntimeError, match="a graph that was built outside of a step"):
            (loss + early).backward()
        pipeline.reset()


def other_strides() -> None:
    """Gradients are added up as they lie in memory."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(2, 2))
    if dist.get_rank():
        model = model.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="the first difference is in '0.weight'"):
        Pipeline(model, "cpu", replicas=Replicas())


def an_exception_while_gradients_are_averaged() -> None:
    """Nothing of the failed pass is in the next one's gradients."""

    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    torch.manual_seed(0)
    model, x = chain(), torch.randn(5, WIDTH) + dist.get_rank()
    model(x).square().mean().backward()
    average_gradients(model)
    expected: Trace = {}
    note_gradients(expected, "step", dict(model.named_parameters()))
    model.zero_grad()
    with attached(model) as pipeline:

        def step() -> None:
            middle = model[:2](x)
            middle.register_hook(fail)
            model[2:](middle).square().sum().backward()

        with pytest.raises(KeyboardInterrupt), pipeline.step():
            step()
        assert pipeline.stats.resets == 1
        model.zero_grad()
        model(x).square().mean().backward()
        actual: Trace = {}
        note_gradients(actual, "step", dict(model.named_parameters()))
        assert_same_trace(expected, actual)


def test_processes_that_disagree_raise() -> None:
    in_processes(
        [
            other_models,
            a_graph_on_weights_from_outside_of_a_step,
            other_strides,
            no_shape_yet,
            other_numbers_of_steps,
            a_step_before_sums_were_averaged,
            an_exception_while_gradients_are_averaged,
        ]
    )
