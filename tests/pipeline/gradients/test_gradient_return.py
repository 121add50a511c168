"""The way home of gradients: added once, never over a kept one, and complete for whoever asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.pipeline.gradients.averaging import ReplicatedWeights
from sp_lightning.pipeline.gradients.gradient_return import GradientReturn
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.stats import Stats

from ..parts import FakeStepper, Placed, RecordingBackend, gradient_scene, host_backend, place


def way_home(
    *placed: Placed, backend: Backend, pin: bool = False, replicated: ReplicatedWeights | None = None
) -> GradientReturn:
    """The way home for the gradients of several units, which nobody steps in backward."""
    returns = GradientReturn(
        [made.unit for made in placed],
        backend,
        Stats(),
        pin,
        lambda: None,
        lambda: None,
        lambda group: None,
        replicated,
    )
    returns.shipping.stepper = FakeStepper()
    for made in placed:
        for twin in made.twins:
            if twin.parameter.requires_grad:
                returns.watch(twin)
    return returns


def test_a_first_gradient_lands_in_place() -> None:
    """One copy for the unit, straight into what becomes `.grad`; no second buffer, no addition."""
    with gradient_scene((2, 3), (4,)) as s:
        s.backward(2, 3)
        assert s.stats.host_syncs == 0, "the host waits for nothing before somebody asks"
        assert s.gradients() == [[2], [3]]
        ((what, (address, nbytes)),) = s.backend.calls
        assert (what, nbytes) == ("download", 512)
        assert s.masters[0].grad.data_ptr() == address
        assert s.masters[1].grad.data_ptr() == address + 256
        assert s.stats.bytes_to_host == nbytes
        assert s.stats.host_syncs == 1


def test_gradients_have_the_strides_and_dtype_of_their_masters() -> None:
    """Fused optimizers ask for both, also for channels_last weights."""
    made = place([torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(3, dtype=torch.float64)])
    returns = way_home(made, backend=made.backend)
    sum(twin.parameter.square().sum() for twin in made.twins).backward()
    returns.finish()
    returns.gradients.settle()
    for weight in made.weights:
        assert weight.master.grad.stride() == weight.master.stride()
        assert weight.master.grad.dtype == weight.master.dtype
        assert weight.master.grad.eq(2).all()
    returns.close()


def test_accumulation_adds_into_the_same_tensor() -> None:
    """`.grad` stays the object that the user may hold."""
    with gradient_scene((3,), (2, 2)) as s:
        s.backward(1, 2)
        held = [master.grad for master in s.masters]
        s.backward(10, 20)
        s.backward(100, 200)
        assert s.gradients() == [[111], [222]]
        assert all(master.grad is tensor for master, tensor in zip(s.masters, held, strict=True))


@pytest.mark.parametrize("accumulates", [False, True])
def test_reading_waits_for_gradients_on_their_way(accumulates: bool) -> None:
    """Backward ends while copies are on their way; it is known which, and nothing counts as settled before."""
    with host_backend(poison=True) as backend, gradient_scene((3,), backend=backend) as s:
        if accumulates:
            s.backward(10)
            s.gradient_return.gradients.settle()
        gate = threading.Event()
        backend._down.submit(lambda: (gate.wait(10), None)[1])
        s.arrive(1)
        if not accumulates:
            assert s.masters[0].grad is None, "before backward ends nobody knows of it"
        s.gradient_return.finish()
        (ticket,) = s.gradient_return.gradients.tickets_of(s.weights)
        assert not ticket.done
        assert not s.gradient_return.gradients.settled
        threading.Timer(0.05, gate.set).start()
        assert s.gradients() == [[11 if accumulates else 1]]
        assert s.gradient_return.gradients.settled
        assert s.gradient_return.gradients.tickets_of(s.weights) == []


def test_tickets_of_one_weight() -> None:
    """An optimizer that steps one unit waits for that one's gradients only."""
    with host_backend() as backend:
        first, second = (place([torch.ones(3)], backend, name=name) for name in "ab")
        returns = way_home(first, second, backend=backend)
        for made in (first, second):
            made.twins[0].parameter.sum().backward()
        returns.finish()
        tickets = [returns.gradients.tickets_of(made.weights) for made in (first, second)]
        assert [len(some) for some in tickets] == [1, 1]
        assert tickets[0] != tickets[1]
        assert returns.gradients.tickets_of([*first.weights, *second.weights]) == [*tickets[0], *tickets[1]]
        returns.close()


@pytest.mark.parametrize("keep", [lambda grad: grad, lambda grad: grad.view(-1), lambda grad: grad.detach()])
def test_a_kept_gradient_is_not_overwritten(keep: Callable[[Tensor], Tensor]) -> None:
    """PCGrad and the like keep old gradients, or views of them."""
    with gradient_scene((2, 2), (3,)) as s:
        s.backward(1, 2)
        s.gradient_return.gradients.settle()
        kept = keep(s.masters[0].grad)
        s.clear()
        s.backward(5, 6)
        assert set(kept.flatten().tolist()) == {1.0}
        assert s.gradients() == [[5], [6]]


def test_memory_is_used_again() -> None:
    """`zero_grad(set_to_none=True)` and the next backward allocate nothing."""
    with gradient_scene((2, 2), (3,)) as s:
        addresses = set()
        for _ in range(3):
            s.backward(1, 2)
            addresses.add(s.masters[0].grad.data_ptr())
            s.clear()
        assert len(addresses) == 1


def test_a_weight_without_a_gradient_keeps_none() -> None:
    """A zero gradient would be wrong: AdamW would decay the weight."""
    with gradient_scene((3,), (2,), (4,)) as s:
        s.backward(1, None, 3)
        assert s.gradients() == [[1], None, [3]]
        s.backward(None, 5, 3)
        assert s.gradients() == [[1], [5], [6]]


def test_frozen_weights_take_no_room() -> None:
    """A unit's gradients leave when those of its trainable weights are there."""
    backend = RecordingBackend()
    made = place([nn.Parameter(torch.ones(1000), requires_grad=False), torch.ones(3)], backend)
    returns = way_home(made, backend=backend)
    made.twins[1].parameter.sum().backward()
    assert backend.said("download") == ["download"]
    returns.finish()
    norms = 256
    assert returns.device_bytes() <= 2 * (256 + norms)
    assert made.weights[1].master.grad.tolist() == [1, 1, 1]
    returns.close()


def test_several_arrivals_in_one_backward_are_added() -> None:
    """Reentrant checkpoints accumulate once per recomputation."""
    with gradient_scene((3,), (2,)) as s:
        s.arrive(1, 2)
        s.arrive(10, None)
        s.arrive(100, 200)
        s.gradient_return.finish()
        assert s.gradients() == [[111], [202]]
        assert s.arrivals == 5


@pytest.mark.parametrize("unset", [True, False])
def test_lowered_gradients_are_added_in_the_masters_dtype(unset: bool) -> None:
    """They travel in bf16 and are summed in fp32: 256 + 1 is not 256."""
    with gradient_scene((5,), lowered=torch.bfloat16) as s:
        s.backward(256)
        assert s.gradients() == [[256]]
        assert s.masters[0].grad.dtype is torch.float32
        assert s.stats.bytes_to_host == 256
        if unset:
            s.clear()
        s.backward(1)
        assert s.gradients() == [[1 if unset else 257]]


def test_sparse_gradients_stay_sparse() -> None:
    """And are added up over arrivals and micro-batches."""
    with gradient_scene((4, 2)) as s:
        twin = s.placed.twins[0]
        for _ in range(2):
            for row in (1, 1, 3):
                nn.functional.embedding(torch.tensor([row]), twin.parameter, sparse=True).sum().backward()
            s.gradient_return.finish()
        assert s.masters[0].grad.is_sparse
        assert s.masters[0].grad.to_dense()[:, 0].tolist() == [0, 4, 0, 2]


@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["sparse-first", "dense-first"])
@pytest.mark.parametrize("one_backward", [True, False])
def test_sparse_and_dense_gradients_of_one_weight(order: tuple[bool, bool], one_backward: bool) -> None:
    """A tied embedding: what autograd makes of both is dense."""
    with gradient_scene((4, 2)) as s:
        for sparse in order:
            twin = s.placed.twins[0].parameter
            loss = nn.functional.embedding(torch.tensor([1]), twin, sparse=True) if sparse else 2 * twin
            loss.sum().backward()
            if not one_backward:
                s.gradient_return.finish()
        if one_backward:
            s.gradient_return.finish()
        assert s.masters[0].grad.to_dense()[:, 0].tolist() == [2, 3, 2, 2]


def test_users_hooks_see_the_hosts_gradient_in_autograds_order() -> None:
    """Tensor hooks may change it; hooks after accumulation see `.grad` complete."""
    with gradient_scene((3,), (2,)) as s:
        seen: list[tuple[str, object]] = []
        for index, master in enumerate(s.masters):
            name = f"weight {index}"
            master.register_hook(lambda grad, name=name: (seen.append((name, grad.clone())), 10 * grad)[1])
            master.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.append((f"{name} done", p.grad.clone()))
            )
        s.backward(1, 2)
        assert s.gradients() == [[10], [20]]
        s.backward(1, 2)
        assert s.gradients() == [[20], [40]]
        first = [(name, value[0].item()) for name, value in seen[:4]]
        assert sorted(first) == [("weight 0", 1), ("weight 0 done", 10), ("weight 1", 2), ("weight 1 done", 20)]
        assert [name.endswith("done") for name, _ in first] == [False, True, False, True]


def test_a_hook_that_is_called_runs_in_the_calling_thread() -> None:
    """A user's code does not run in the engine's worker."""
    with gradient_scene((3,)) as s:
        threads: list[threading.Thread] = []
        s.masters[0].register_hook(lambda grad: threads.append(threading.current_thread()))
        s.backward(1)
        assert threads == [threading.current_thread()]


def test_abandoned_gradients_are_forgotten() -> None:
    """After an exception nothing of the interrupted backward is added, and what was there stays."""
    with gradient_scene((3,), (2,)) as s:
        s.backward(1, 2)
        s.arrive(50, None)
        s.gradient_return.ship_all_but([])
        s.gradient_return.abandon()
        s.clear()
        s.backward(3, 4)
        assert s.gradients() == [[3], [4]]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_with_a_graph_is_refused() -> None:
    """create_graph=True would leave a graph on a gradient that lives on the host."""
    with (
        gradient_scene((3,)) as s,
        pytest.raises(RuntimeError, match=r"create_graph=True.*'unit.0'.*torch.autograd.grad"),
    ):
        s.placed.twins[0].parameter.square().sum().backward(create_graph=True)


def test_gathered_gradients_leave_when_backward_moves_on() -> None:
    """Gradients do not pile up on the device while a unit misses one of its weights."""
    with gradient_scene((3,), (2,)) as s:
        s.arrive(1, None)
        s.gradient_return.ship_all_but([s.placed.unit])
        assert s.backend.said("download") == []
        s.gradient_return.ship_all_but([])
        assert s.backend.said("download") == ["download"]
        s.gradient_return.finish()
        assert s.gradients() == [[1], None]


def test_many_units_share_two_staging_buffers() -> None:
    """Memory on the device does not grow with the model; a staging buffer is not filled before its copy has left."""
    with host_backend(poison=True, max_delay=0.004) as backend:
        units = [place([torch.ones(50), torch.ones(7)], backend, name=f"unit {index}") for index in range(6)]
        returns = way_home(*units, backend=backend)
        for step in range(1, 4):
            for index, made in enumerate(units):
                sum((twin.parameter * (index + 1)).sum() for twin in made.twins).backward()
            returns.finish()
            returns.gradients.settle()
            for index, made in enumerate(units):
                assert all(weight.master.grad.eq(step * (index + 1)).all() for weight in made.weights)
        norms = 256
        assert returns.device_bytes() == 2 * (512 + norms)
        returns.close()


def pretend_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has the same gradients; sums are written when they are waited for."""

    def all_gather(answers: list[Tensor], message: Tensor, group: Any) -> None:
        for answer in answers:
            answer.copy_(message)

    def all_reduce(tensor: Tensor, async_op: bool) -> Any:
        return SimpleNamespace(wait=lambda: tensor.mul_(2))

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)


def test_a_staging_buffer_is_not_filled_before_it_was_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the next unit but one came."""
    pretend_two_processes(monkeypatch)
    backend = RecordingBackend()
    units = [place([torch.ones(50)], backend, name=f"unit {index}") for index in range(3)]
    weights = [made.weights[0] for made in units]
    returns = way_home(*units, backend=backend, replicated=ReplicatedWeights(Replicas(), weights, [], lambda: 0))
    for index, made in enumerate(units):
        (made.twins[0].parameter * (index + 1)).sum().backward()
    returns.finish()
    assert [weight.master.grad.unique().tolist() for weight in weights] == [[1], [2], [3]]
    returns.close()


def test_a_landing_buffer_is_not_filled_before_it_was_added() -> None:
    """The worker is slower than backward: the next copy into a buffer waits for it."""
    with host_backend(poison=True) as backend:
        units = [place([torch.ones(50)], backend, name=f"unit {index}") for index in range(5)]
        returns = way_home(*units, backend=backend)
        work = backend.work
        backend.work = lambda job, *rest: work(lambda: (time.sleep(0.004), job())[1], *rest)  # type: ignore[method-assign]
        for made in units:
            made.weights[0].master.grad = torch.ones(50)
        for index, made in enumerate(units):
            (made.twins[0].parameter * index).sum().backward()
        returns.finish()
        returns.gradients.settle()
        assert returns.host_bytes() == 2 * 512, (
            "two buffers, whatever the number of units, and no homes: `.grad` is there"
        )
        assert all(made.weights[0].master.grad.eq(index + 1).all() for index, made in enumerate(units))
        returns.close()


def test_page_locked_memory_is_given_back() -> None:
    backend = RecordingBackend(can_pin=True)
    made = place([torch.ones(3)], backend)
    returns = way_home(made, backend=backend, pin=True)
    for _ in range(3):
        made.twins[0].parameter.sum().backward()
        returns.finish()
    assert backend.pinned
    returns.close()
    assert not backend.pinned
    assert made.weights[0].master.grad.tolist() == [3, 3, 3]
