"""The way home of gradients: added once, never over a kept one, shown only when they have landed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.gradients import GradientReturn, _cast_and_add
from sp_lightning.pipeline.stats import Stats

from .parts import Placed, RecordingBackend, host_backend, place


class Scene:
    """One unit of weights of ones whose gradients come home."""

    def __init__(self, backend: RecordingBackend, *shapes: tuple[int, ...], lowered: torch.dtype | None = None) -> None:
        self.backend = backend
        self.placed: Placed = place([torch.ones(shape) for shape in shapes], backend, lowered)
        self.weights = [weight.master for weight in self.placed.weights]
        self.stats = Stats()
        self.arrivals = 0
        self.returns = GradientReturn([self.placed.unit], backend, self.stats, False, self._count)
        for twin in self.placed.twins:
            self.returns.watch(twin)
        backend.calls.clear()

    def _count(self) -> None:
        self.arrivals += 1

    def arrive(self, *values: float | None) -> None:
        """Autograd finishes gradients of these values; none for None."""
        pairs = zip(self.placed.twins, values, strict=True)
        loss = sum((twin.parameter * value).sum() for twin, value in pairs if value is not None)
        loss.backward()

    def backward(self, *values: float | None) -> None:
        self.arrive(*values)
        self.returns.finish()

    def gradients(self) -> list[list[float] | None]:
        return [None if master.grad is None else sorted(set(master.grad.flatten().tolist())) for master in self.weights]


@contextmanager
def scene(*shapes: tuple[int, ...], lowered: torch.dtype | None = None) -> Iterator[Scene]:
    made = Scene(RecordingBackend(), *shapes, lowered=lowered)
    try:
        yield made
    finally:
        made.returns.close()


def test_a_first_gradient_lands_in_place() -> None:
    """One copy for the unit, straight into what becomes `.grad`; no second buffer, no addition."""
    with scene((2, 3), (4,)) as s:
        s.backward(2, 3)
        assert s.gradients() == [[2], [3]]
        ((what, (address, nbytes)),) = s.backend.calls
        assert (what, nbytes) == ("download", 512)
        assert s.weights[0].grad.data_ptr() == address
        assert s.weights[1].grad.data_ptr() == address + 256
        assert s.stats.bytes_to_host == 512
        assert s.stats.host_syncs == 1


def test_gradients_have_the_strides_and_dtype_of_their_masters() -> None:
    """Fused optimizers ask for both, also for channels_last weights."""
    made = place([torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(3, dtype=torch.float64)])
    returns = GradientReturn([made.unit], made.backend, Stats(), False, lambda: None)
    for twin in made.twins:
        returns.watch(twin)
    sum(twin.parameter.square().sum() for twin in made.twins).backward()
    returns.finish()
    for weight in made.weights:
        assert weight.master.grad.stride() == weight.master.stride()
        assert weight.master.grad.dtype == weight.master.dtype
        assert weight.master.grad.eq(2).all()
    returns.close()


def test_accumulation_adds_into_the_same_tensor() -> None:
    """`.grad` stays the object that the user may hold."""
    with scene((3,), (2, 2)) as s:
        s.backward(1, 2)
        held = [master.grad for master in s.weights]
        s.backward(10, 20)
        s.backward(100, 200)
        assert s.gradients() == [[111], [222]]
        assert all(master.grad is tensor for master, tensor in zip(s.weights, held, strict=True))


def test_nothing_is_shown_before_it_has_landed() -> None:
    with scene((3,)) as s:
        s.arrive(1)
        assert s.weights[0].grad is None
        s.returns.finish()
        assert s.gradients() == [[1]]


@pytest.mark.parametrize("keep", [lambda grad: grad, lambda grad: grad.view(-1), lambda grad: grad.detach()])
def test_a_kept_gradient_is_not_overwritten(keep: Callable[[Tensor], Tensor]) -> None:
    """PCGrad and the like keep old gradients, or views of them."""
    with scene((2, 2), (3,)) as s:
        s.backward(1, 2)
        kept = keep(s.weights[0].grad)
        for master in s.weights:
            master.grad = None
        s.backward(5, 6)
        assert set(kept.flatten().tolist()) == {1.0}
        assert s.gradients() == [[5], [6]]


def test_memory_is_used_again() -> None:
    """`zero_grad(set_to_none=True)` and the next backward allocate nothing."""
    with scene((2, 2), (3,)) as s:
        addresses = set()
        for _ in range(3):
            s.backward(1, 2)
            addresses.add(s.weights[0].grad.data_ptr())
            for master in s.weights:
                master.grad = None
        assert len(addresses) == 1


def test_a_weight_without_a_gradient_keeps_none() -> None:
    """A zero gradient would be wrong: AdamW would decay the weight."""
    with scene((3,), (2,), (4,)) as s:
        s.backward(1, None, 3)
        assert s.gradients() == [[1], None, [3]]
        s.backward(None, 5, 3)
        assert s.gradients() == [[1], [5], [6]]


def test_frozen_weights_take_no_room() -> None:
    """A unit's gradients leave when those of its trainable weights are there."""
    backend = RecordingBackend()
    made = place([nn.Parameter(torch.ones(1000), requires_grad=False), torch.ones(3)], backend)
    returns = GradientReturn([made.unit], backend, Stats(), False, lambda: None)
    returns.watch(made.twins[1])
    made.twins[1].parameter.sum().backward()
    assert backend.said("download") == ["download"]
    returns.finish()
    assert returns.device_bytes() <= 2 * 256
    assert made.weights[1].master.grad.tolist() == [1, 1, 1]
    returns.close()


def test_several_arrivals_in_one_backward_are_added() -> None:
    """Reentrant checkpoints accumulate once per recomputation."""
    with scene((3,), (2,)) as s:
        s.arrive(1, 2)
        s.arrive(10, None)
        s.arrive(100, 200)
        s.returns.finish()
        assert s.gradients() == [[111], [202]]
        assert s.arrivals == 5


@pytest.mark.parametrize("unset", [True, False])
def test_lowered_gradients_are_added_in_the_masters_dtype(unset: bool) -> None:
    """They travel in bf16 and are summed in fp32: 256 + 1 is not 256."""
    with scene((5,), lowered=torch.bfloat16) as s:
        s.backward(256)
        assert s.weights[0].grad.dtype is torch.float32
        assert s.stats.bytes_to_host == 256
        if unset:
            s.weights[0].grad = None
        s.backward(1)
        assert s.gradients() == [[1 if unset else 257]]


@pytest.mark.parametrize("count", [1, 5, (1 << 18) - 1, 1 << 18, (1 << 18) + 1])
def test_casting_and_adding_piece_by_piece(count: int) -> None:
    """Below, at and above the size of a piece."""
    total, arrived = torch.zeros(count), torch.ones(count, dtype=torch.bfloat16)
    _cast_and_add(total, arrived)
    assert total.eq(1).all()


def test_sparse_gradients_come_home_sparse() -> None:
    """And are added up over arrivals and micro-batches."""
    with scene((4, 2)) as s:
        twin = s.placed.twins[0]
        for _ in range(2):
            for row in (1, 1, 3):
                nn.functional.embedding(torch.tensor([row]), twin.parameter, sparse=True).sum().backward()
            s.returns.finish()
        assert s.weights[0].grad.is_sparse
        assert s.weights[0].grad.to_dense()[:, 0].tolist() == [0, 4, 0, 2]


@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["sparse-first", "dense-first"])
@pytest.mark.parametrize("one_backward", [True, False])
def test_sparse_and_dense_gradients_of_one_weight(order: tuple[bool, bool], one_backward: bool) -> None:
    """A tied embedding: what autograd makes of both is dense."""
    with scene((4, 2)) as s:
        for sparse in order:
            twin = s.placed.twins[0].parameter
            loss = nn.functional.embedding(torch.tensor([1]), twin, sparse=True) if sparse else 2 * twin
            loss.sum().backward()
            if not one_backward:
                s.returns.finish()
        if one_backward:
            s.returns.finish()
        assert s.weights[0].grad.to_dense()[:, 0].tolist() == [2, 3, 2, 2]


def test_users_hooks_see_the_hosts_gradient_in_autograds_order() -> None:
    """Tensor hooks may change it; hooks after accumulation see `.grad` complete."""
    with scene((3,), (2,)) as s:
        seen: list[tuple[str, object]] = []
        for index, master in enumerate(s.weights):
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
    with scene((3,)) as s:
        threads: list[threading.Thread] = []
        s.weights[0].register_hook(lambda grad: threads.append(threading.current_thread()))
        s.backward(1)
        assert threads == [threading.current_thread()]


def test_abandoned_gradients_are_forgotten() -> None:
    """After an exception nothing of the interrupted backward is added, and what was there stays."""
    with scene((3,), (2,)) as s:
        s.backward(1, 2)
        s.arrive(50, None)
        s.returns.ship_all_but([])
        s.returns.abandon()
        s.weights[0].grad = s.weights[1].grad = None
        s.backward(3, 4)
        assert s.gradients() == [[3], [4]]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_with_a_graph_is_refused() -> None:
    """create_graph=True would leave a graph on a gradient that lives on the host."""
    with scene((3,)) as s, pytest.raises(RuntimeError, match=r"create_graph=True.*'unit.0'.*torch.autograd.grad"):
        s.placed.twins[0].parameter.square().sum().backward(create_graph=True)


def test_what_other_units_gathered_leaves_when_backward_moves_on() -> None:
    """Gradients do not pile up on the device while a unit misses one of its weights."""
    with scene((3,), (2,)) as s:
        s.arrive(1, None)
        s.returns.ship_all_but([s.placed.unit])
        assert s.backend.said("download") == []
        s.returns.ship_all_but([])
        assert s.backend.said("download") == ["download"]
        s.returns.finish()
        assert s.gradients() == [[1], None]


def test_many_units_share_a_ring_of_two_pieces() -> None:
    """Memory on the device does not grow with the model; a piece is not filled before its copy has left."""
    with host_backend(poison=True, max_delay=0.004) as backend:
        units = [place([torch.ones(50), torch.ones(7)], backend, name=f"unit {index}") for index in range(6)]
        returns = GradientReturn([made.unit for made in units], backend, Stats(), False, lambda: None)
        for made in units:
            for twin in made.twins:
                returns.watch(twin)
        for step in range(1, 4):
            for index, made in enumerate(units):
                sum((twin.parameter * (index + 1)).sum() for twin in made.twins).backward()
            returns.finish()
            for index, made in enumerate(units):
                assert all(weight.master.grad.eq(step * (index + 1)).all() for weight in made.weights)
        assert returns.device_bytes() == 2 * 512
        returns.close()


def test_a_piece_is_not_filled_before_it_was_added() -> None:
    """The worker is slower than backward: the next copy into a piece waits for it."""
    with host_backend(poison=True) as backend:
        units = [place([torch.ones(50)], backend, name=f"unit {index}") for index in range(5)]
        returns = GradientReturn([made.unit for made in units], backend, Stats(), False, lambda: None)
        accumulate = returns._accumulate
        returns._accumulate = lambda *args: (time.sleep(0.004), accumulate(*args))[1]  # type: ignore[method-assign]
        for made in units:
            made.weights[0].master.grad = torch.ones(50)
            returns.watch(made.twins[0])
        for index, made in enumerate(units):
            (made.twins[0].parameter * index).sum().backward()
        returns.finish()
        assert all(made.weights[0].master.grad.eq(index + 1).all() for index, made in enumerate(units))
        returns.close()


def test_page_locked_memory_is_given_back() -> None:
    backend = RecordingBackend(can_pin=True)
    made = place([torch.ones(3)], backend)
    returns = GradientReturn([made.unit], backend, Stats(), True, lambda: None)
    returns.watch(made.twins[0])
    for _ in range(3):
        made.twins[0].parameter.sum().backward()
        returns.finish()
    assert backend.pinned
    returns.close()
    assert not backend.pinned
    assert made.weights[0].master.grad.tolist() == [3, 3, 3]
