"""Gradients averaged over processes: always what each process has by itself, averaged afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import reduce
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from sp_lightning.optim.passes import pieces
from sp_lightning.pipeline import Pipeline, PipelineOptions, Processes
from sp_lightning.pipeline.gradients.buffers import LandingBuffers
from sp_lightning.pipeline.processes import sums
from sp_lightning.pipeline.processes.sums import SharedSums
from sp_lightning.pipeline.torch_private import parts_of

from ...helpers import Trace, assert_close_trace, assert_same_trace, note_gradients, torchs_defaults
from ...processes import in_processes
from ...random_graphs import Example, default_dtype, examples
from ...zoo.blocks import WIDTH, Block
from ...zoo.quantized import Int8Linear
from ..parts import PendingTicket, RecordingBackend
from .parts import Model, assert_averages_closely, average_gradients, chain, train


def assert_averages(build: Model, options: PipelineOptions | None = None, **how: Any) -> None:
    options = options or PipelineOptions(k=2, debug=True)
    # of several passes, each process adds the first one's gradients before any adds the second one's
    compare = assert_same_trace if how.get("accumulate", 1) == 1 else assert_close_trace
    compare(train(build, None, **how), train(build, options, **how))


# --------------------------------------------------------------------------------------------------- random graphs


def drawn(count: int) -> list[Example]:
    """The same random examples in all processes; none has a gradient that comes too late, which is an error."""
    found: list[Example] = []

    @seed(1)
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
    for example in drawn(12):
        options = PipelineOptions(
            k=example.k,
            k_prime=example.k_prime,
            units=example.units,
            activations=example.activations,  # type: ignore[arg-type]
            debug=True,
        )
        accumulate, clip = example.plan.accumulate, example.plan.clip
        with default_dtype(example.dtype):
            assert_averages(example.model, options, accumulate=accumulate, clip=clip, in_backward=clip is None)


def test_random_graphs() -> None:
    in_processes([random_graphs])


# ----------------------------------------------------------------------------------------------------- single things


class SparseRows(nn.Module):
    """Each process looks up other rows, and one of them none at all in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=True)
        self.block = Block().requires_grad_(False)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if self.steps == 1 and dist.get_rank() == 1:
            return self.block(x.requires_grad_() * 2)
        numbers = torch.tensor([dist.get_rank(), 3, 5])
        return self.block(x[:3] + self.table(numbers))


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
        assert_averages_closely(on_a_machine=on_a_machine)


def under_another_default_dtype() -> None:
    """Units have so many weights that their norms, if they were of that dtype, would leave too little room."""
    with torchs_defaults(torch.bfloat16):
        assert_averages(lambda: nn.Sequential(*(nn.Sequential(*map(nn.LayerNorm, [WIDTH] * 50)) for _ in range(5))))


def added_up_by_the_last() -> None:
    """The others leave gradients where they have landed, so that the sum is read and written once."""
    model, is_last, added = nn.Linear(WIDTH, WIDTH), dist.get_rank() == 3, Mock(wraps=pieces)
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(model, on_a_machine=4) as pipeline, patch.object(sums, "pieces", added):
        for _ in range(3):
            pipeline.meet_processes()
            model(torch.randn(5, WIDTH)).square().mean().backward()
            optimizer.step()
    assert added.call_count == (3 * 2 if is_last else 0)


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
        assert pipeline.stats.steps_in_backward == 49 * 5, "not the step in which units are arranged anew"


def traffic_of_two_machines() -> None:
    """One process of each sends the sums of all."""
    model = chain()
    with attached(model, on_a_machine=2) as pipeline:
        for _ in range(2):
            model(torch.randn(5, WIDTH)).square().mean().backward()
        sums = 2 * sum(weight.nbytes for weight in model.parameters())
        assert pipeline.processes.bytes_to_other_machines == (0 if dist.get_rank() % 2 else sums)


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
    assert_averages(Tied)


class Hooked(nn.Module):
    """A user's hook masks a gradient: it is called with the process's own, as in plain training."""

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


def looked_at_twice() -> None:
    """What is shown of a sum that is not complete is a copy, which is taken back when more is added."""
    torch.manual_seed(0)
    model = chain(2)
    plain = copy.deepcopy(model)
    weight = model[0].up.weight
    torch.manual_seed(dist.get_rank())
    with attached(model, on_a_machine=2) as pipeline:
        for pipeline.processes.averages in (False, False, True):
            x = torch.randn(5, WIDTH)
            for each in (model, plain):
                each(x).square().mean().backward()
            assert [weight.grad is not None for _ in range(2)] == [True, True]
        for ours, alone in zip(model.parameters(), plain.parameters(), strict=True):
            dist.all_reduce(alone.grad)
            torch.testing.assert_close(ours.grad, alone.grad / dist.get_world_size())


def a_pass_of_one_process_alone() -> None:
    """As in evaluation: it is not averaged, nobody waits for it, and hooks see it."""
    torch.manual_seed(0)
    model, plain = Hooked(), Hooked()
    plain.load_state_dict(model.state_dict())
    with attached(model) as pipeline:
        pipeline.processes.trains = False
        if dist.get_rank():
            for _ in range(2):
                x = torch.randn(5, WIDTH)
                for each in (model, plain):
                    each(x).square().mean().backward()
            traces: list[Trace] = [{}, {}]
            for trace, each in zip(traces, (plain, model), strict=True):
                note_gradients(trace, "step", dict(each.named_parameters()))
            assert_same_trace(*traces)


class Elsewhere(nn.Module):
    """In one process a weight is used outside of its unit, and so lives on the device from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x + self.blocks[1].up.weight.square().sum() if dist.get_rank() else x


def other_units() -> None:
    assert_averages(Elsewhere)


def quantized_weights_of_the_first() -> None:
    """Integers and scales, each as it is."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(Int8Linear(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    Pipeline(model, "cpu", processes=Processes(1)).detach()
    parts = [part for weight in model.parameters() for part in parts_of(weight)]
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, [part.tolist() for part in parts])
    assert everyones[0] == everyones[1]
    assert [part.dtype for part in parts[:2]] == [torch.int8, torch.float32]


def test_single_things() -> None:
    in_processes(
        [
            parameters_that_stay_on_the_device,
            hooks_on_weights,
            seen_by_one,
            looked_at_twice,
            in_backward,
            under_another_default_dtype,
            a_pass_of_one_process_alone,
            other_units,
            quantized_weights_of_the_first,
        ]
    )


def test_more_than_two() -> None:
    in_processes([four, seen_by_one, added_up_by_the_last, traffic_of_two_machines], count=4)


def test_what_is_left_to_other_processes_lies_there_until_their_pass_is_complete() -> None:
    """Meanwhile gradients come through the other half of the buffers, so that nobody waits for another process."""
    buffers, complete = LandingBuffers(RecordingBackend(), box=None), PendingTicket()
    buffers.serve(units=0)
    left, passing = buffers.take(8), buffers.take(8)
    assert buffers.may_leave_one
    left.ticket = complete
    left.release()
    passing.release()
    assert not buffers.may_leave_one
    assert buffers.take(8) is passing
    complete.finish()
    assert buffers.may_leave_one
    assert buffers.take(8) is left


# ----------------------------------------------------------------------------------------------- what cannot be right


@contextmanager
def attached(model: nn.Module, on_a_machine: int = 1, **options: Any) -> Iterator[Pipeline]:
    processes = Processes(on_a_machine)
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(k=2, **options), processes=processes)
    try:
        yield pipeline
    finally:
        pipeline.detach()


def other_models() -> None:
    with pytest.raises(ValueError, match="have built different models; the first difference is in"):
        Pipeline(chain(2 + dist.get_rank()), "cpu", processes=Processes(1))


def no_shape_yet() -> None:
    with pytest.raises(ValueError, match=r"Parameter 'weight' has no shape yet"):
        Pipeline(nn.LazyLinear(3), "cpu", processes=Processes(1))


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
    with attached(model) as pipeline:
        model[1].requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"Weight '1\..*was frozen when the processes of this machine last met"):
            model(torch.randn(5, WIDTH)).square().mean().backward()
        pipeline.reset()


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


def an_addition_that_fails() -> None:
    """Its process says so at once; the others would wait until it has ended, or for their timeout."""
    model = InAnyOrder()
    optimizer = SGD(model.parameters(), lr=0.01)
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(k=2), processes=Processes(2, timedelta(seconds=2)))
    failing = patch.object(SharedSums, "add", side_effect=MemoryError("nothing is left"))
    expected = "nothing is left" if dist.get_rank() else "has waited for the others for 2 s"

    def step() -> None:
        with pipeline.optimizers.stepping_in_backward(optimizer):
            model(torch.randn(5, WIDTH)).square().mean().backward()
        float(model.layers[0].weight.sum())

    with failing if dist.get_rank() else nullcontext(), pytest.raises(RuntimeError, match=expected):
        step()


def test_processes_that_disagree_raise() -> None:
    in_processes(
        [
            other_models,
            a_graph_on_weights_from_outside_of_a_step,
            a_weight_that_was_thawed_unseen,
            a_second_gradient,
            no_shape_yet,
            other_numbers_of_steps,
            sparse_gradients,
            an_exception_while_gradients_are_averaged,
            an_addition_that_fails,
        ]
    )
