"""Gradients that nobody has asked for yet: lower dtypes, what is still to be done to them, and their norms."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.gradients.gradient_return import GradientReturn
from sp_lightning.pipeline.stats import Stats

from ..parts import (
    FakeStepper,
    GradientScene,
    InterruptedTicket,
    RecordingBackend,
    gradient_scene,
    host_backend,
    place,
)

BF16 = torch.bfloat16
SHAPES = (40, 30), (7,), (2, 3, 4, 5)
INCOMPLETE = "some are missing"


def random_gradients(scene: GradientScene) -> list[Tensor]:
    """In the dtype in which the device computes them."""
    return [torch.randn_like(twin.parameter) for twin in scene.placed.twins]


# --------------------------------------------------------------------------------------------------------- lower dtypes


def test_lower_gradients_stay_as_they_came() -> None:
    """Half the memory, and half the traffic for the optimizer that reads them."""
    with gradient_scene((1024,), (512,), lowered=BF16) as s:
        s.backward(3, 4)
        assert [s.gradient_return.gradients.get(weight).dtype for weight in s.weights] == [BF16, BF16]
        assert [master.grad for master in s.masters] == [None, None]
        gradients, norms = (1024 + 512) * 2, 256
        assert s.gradient_return.host_bytes() == gradients + norms
        s.gradient_return.gradients.settle()
        assert not s.gradient_return.gradients.settled, "`.grad` is not yet what plain training would have there"
        assert s.gradients() == [[3], [4]]
        assert s.gradient_return.gradients.settled
        assert [master.grad.dtype for master in s.masters] == [torch.float32, torch.float32]


def test_memory_of_lower_gradients_is_used_again() -> None:
    with gradient_scene((64,), lowered=BF16) as s:
        seen = set()
        for _ in range(3):
            s.backward(1)
            seen.add(s.gradient_return.gradients.get(s.weights[0]).data_ptr())
            s.clear()
        assert len(seen) == 1


def test_one_gradient_is_shown_at_a_time() -> None:
    with gradient_scene((3,), (4,), lowered=BF16) as s:
        s.backward(1, 2)
        s.gradient_return.gradients.settle()
        s.gradient_return.gradients.show(s.weights[1])
        assert s.masters[0].grad is None
        assert s.masters[1].grad.tolist() == [2] * 4
        assert s.gradient_return.gradients.get(s.weights[1]) is s.masters[1].grad


@pytest.mark.parametrize("shown_after", [None, 0, 1])
@pytest.mark.parametrize("missing", [None, 0, 1])
def test_sums_of_lower_gradients_are_those_of_plain_training(shown_after: int | None, missing: int | None) -> None:
    """Bit by bit, whether somebody looks in between or not, and whether each batch uses all weights or not."""
    with gradient_scene(*SHAPES, lowered=BF16, delay=0.004) as s:
        expected: list[Tensor | None] = [None] * len(SHAPES)
        for batch in range(4):
            gradients: list[Tensor | None] = [*random_gradients(s)]
            if missing == batch:
                gradients[0] = None
            s.backward(*gradients)
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    total = expected[index]
                    expected[index] = gradient.float() if total is None else total + gradient.float()
            if batch == shown_after:
                s.gradient_return.gradients.show_all()
        s.gradient_return.gradients.show_all()
        assert all(map(torch.equal, [master.grad for master in s.masters], expected))


def test_lower_gradients_that_arrive_several_times_in_one_backward() -> None:
    """Reentrant checkpoints: the sum is the master's, in its dtype."""
    with gradient_scene((3,), (2,), lowered=BF16, delay=0.004) as s:
        s.arrive(256, 1)
        s.arrive(1, None)
        s.arrive(1, 1)
        s.gradient_return.finish()
        assert s.gradient_return.gradients.get(s.weights[0]).dtype is torch.float32
        assert s.gradients() == [[258], [2]]


def test_a_sum_is_kept_at_home() -> None:
    """Once there is a sum, gradients have no other home, from the first one on: the sum, and a buffer."""
    with gradient_scene((1024,), lowered=BF16) as s:
        for _ in range(2):
            for _ in range(3):
                s.backward(1)
            assert s.gradients() == [[3]]
            assert s.gradient_return.host_bytes() == (4096 + 256) + (2048 + 256)
            s.clear()


def test_lower_gradients_of_weights_that_change() -> None:
    """Other weights take part: memory for what is under way stays until it has landed."""
    with gradient_scene((300,), (200,), lowered=BF16, delay=0.01) as s:
        s.masters[1].requires_grad_(False)
        s.backward(1, None)
        s.clear()
        s.masters[1].requires_grad_(True)
        s.backward(2, 3)
        s.clear()
        s.masters[0].requires_grad_(False)
        s.backward(None, 5)
        assert s.gradients() == [None, [5]]


# --------------------------------------------------------------------------------------------------- scaled and clipped


@pytest.mark.parametrize("lowered", [None, BF16])
@pytest.mark.parametrize("read", ["shown", "taken"])
def test_scaling_is_applied_once_and_in_order(lowered: torch.dtype | None, read: str) -> None:
    """By whoever reads first, on the gradient in the master's dtype: unscaled, multiplied, then clipped."""
    with gradient_scene((40, 30), lowered=lowered) as s:
        (gradient,) = random_gradients(s)
        inverse, factor = torch.tensor(0.125), torch.tensor(0.7)
        s.backward(gradient)
        s.gradient_return.gradients.multiply(s.weights, inverse)
        s.gradient_return.gradients.multiply(s.weights, factor)
        s.gradient_return.gradients.clamp(s.weights, 0.05)
        expected = gradient.float().mul_(inverse).mul_(factor).clamp_(-0.05, 0.05)
        assert not s.gradient_return.gradients.settled
        if read == "taken":
            taken, scaling = s.gradient_return.gradients.take(s.weights[0])
            assert taken.dtype is gradient.dtype
            stepped_with = taken.float() if lowered else taken  # as the optimizer does, which writes it back
            scaling.apply_(stepped_with)
            assert torch.equal(stepped_with, expected)
        for _ in range(2):
            s.gradient_return.gradients.show_all()
            assert torch.equal(s.masters[0].grad, expected)
        assert not s.gradient_return.gradients.take(s.weights[0])[1]


def test_only_the_given_weights_are_scaled() -> None:
    with gradient_scene((3,), (4,)) as s:
        s.backward(8, 8)
        s.gradient_return.gradients.multiply(s.weights[:1], torch.tensor(0.5))
        s.gradient_return.gradients.multiply(s.weights, torch.tensor(0.5))
        assert s.gradients() == [[2], [4]]


def test_weights_scaled_alike_share_a_scaling() -> None:
    """So they can be stepped as one."""
    with gradient_scene((3,), (4,), (5,)) as s:
        s.backward(1, 1, 1)
        s.gradient_return.gradients.multiply(s.weights, torch.tensor(0.5))
        s.gradient_return.gradients.clamp(s.weights[:2], 0.1)
        scalings = [s.gradient_return.gradients.take(weight)[1] for weight in s.weights]
        assert scalings[0] is scalings[1] is not scalings[2]


def test_without_anything_to_do_gradients_are_shared_as_they_are() -> None:
    with gradient_scene((3,), (4,)) as s:
        s.backward(1, 2)
        taken = [s.gradient_return.gradients.take(weight) for weight in s.weights]
        assert [gradient is master.grad for (gradient, _), master in zip(taken, s.masters, strict=True)] == [True, True]
        assert not any(scaling for _, scaling in taken)


@pytest.mark.parametrize("lowered", [None, BF16])
def test_dropping_a_gradient_drops_its_scaling(lowered: torch.dtype | None) -> None:
    """`zero_grad`, and the next one starts anew."""
    with gradient_scene((3,), lowered=lowered) as s:
        s.gradient_return.shipping.measures_norms = True
        s.backward(8)
        s.gradient_return.gradients.multiply(s.weights, torch.tensor(0.5))
        s.clear()
        assert s.gradient_return.gradients.get(s.weights[0]) is None
        assert s.gradient_return.gradients.norms_of(s.weights) is None
        s.gradient_return.gradients.settle()
        assert s.gradient_return.gradients.settled
        s.backward(8)
        assert s.gradients() == [[8]]


@pytest.mark.parametrize("lowered", [None, BF16])
def test_a_gradient_dropped_while_it_is_on_its_way(lowered: torch.dtype | None) -> None:
    """The next one must not be overtaken by it, in the same memory."""
    with gradient_scene((300,), (20,), lowered=lowered, delay=0.01) as s:
        for value in range(1, 6):
            s.clear()
            s.backward(value, 10 * value)
            if value % 2:
                s.backward(value, None)
        assert s.gradients() == [[10], [50]]


@pytest.mark.parametrize("lowered", [None, BF16])
@pytest.mark.parametrize("what", ["multiplied", "clipped"])
def test_a_gradient_that_is_added_to_is_not_scaled_again(lowered: torch.dtype | None, what: str) -> None:
    """What was to be done to the first batch's is not done to the second's."""
    with gradient_scene((3,), lowered=lowered) as s:
        s.backward(8)
        if what == "multiplied":
            s.gradient_return.gradients.multiply(s.weights, torch.tensor(0.5))
        else:
            s.gradient_return.gradients.clamp(s.weights, 4.0)
        s.backward(8)
        assert s.gradients() == [[12]]


def test_clipping_by_value_keeps_its_position() -> None:
    """Clipped by value, then multiplied, is not multiplied, then clipped."""
    with gradient_scene((3,)) as s:
        s.backward(8)
        s.gradient_return.gradients.clamp(s.weights, 4.0)
        s.gradient_return.gradients.multiply(s.weights, torch.tensor(0.5))
        assert s.gradients() == [[2]]


def test_clipping_twice_is_clipping_by_the_least() -> None:
    with gradient_scene((3,)) as s:
        s.backward(8)
        s.gradient_return.gradients.clamp(s.weights, 1.0)
        s.gradient_return.gradients.clamp(s.weights, 4.0)
        assert s.gradients() == [[1]]


# ---------------------------------------------------------------------------------------------------------------- norms


def plain_norm(gradient: Tensor, like: nn.Parameter) -> Tensor:
    """What `clip_grad_norm_` would compute of this gradient, as `.grad` of its master."""
    plain = torch.empty_like(like).copy_(gradient)
    return torch.linalg.vector_norm(plain, 2.0)


@pytest.mark.parametrize("lowered", [None, BF16])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_norms_are_those_of_plain_training(lowered: torch.dtype | None, count: int) -> None:
    """Bit by bit, of the whole sum; also of channels_last weights, of single numbers and of nothing."""
    tensors = [
        torch.ones(257, 33),
        torch.ones(9),
        torch.ones(8, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.ones(6, 4).t(),
        torch.ones(()),
        torch.ones(0, 4),
    ]
    with host_backend(poison=True, max_delay=0.004) as backend:
        made = place(tensors, backend, lowered)
        returns = GradientReturn([made.unit], backend, Stats(), False, lambda: None, lambda: None, lambda group: None)
        returns.shipping.stepper = FakeStepper()
        returns.shipping.measures_norms = True
        for twin in made.twins:
            returns.watch(twin)
        totals = [torch.zeros_like(weight.master) for weight in made.weights]
        for _ in range(count):
            gradients = [torch.randn_like(twin.parameter) for twin in made.twins]
            sum((twin.parameter * g).sum() for twin, g in zip(made.twins, gradients, strict=True)).backward()
            returns.finish()
            for total, gradient in zip(totals, gradients, strict=True):
                total += gradient.float()
        norms = returns.gradients.norms_of(made.weights)
        returns.gradients.settle()
        assert norms is not None
        for norm, total, weight in zip(norms, totals, made.weights, strict=True):
            assert torch.equal(norm, plain_norm(total, weight.master)), weight.name
        returns.close()


def test_norms_are_read_when_they_have_landed() -> None:
    """They are known at once, as memory that the copy fills."""
    with host_backend(poison=True) as backend, gradient_scene((4,), backend=backend) as s:
        s.gradient_return.shipping.measures_norms = True
        gate = threading.Event()
        backend._down.submit(lambda: (gate.wait(10), None)[1])
        s.backward(2)
        (norm,) = s.gradient_return.gradients.norms_of(s.weights)
        assert norm.isnan()
        gate.set()
        s.gradient_return.gradients.settle()
        assert norm == 4


def test_norms_that_were_not_measured_are_unknown() -> None:
    """Neither of weights without gradients, nor of gradients from before it was asked for."""
    with gradient_scene((4,), (9,)) as s:
        s.backward(1, 1)
        assert s.gradient_return.gradients.norms_of(s.weights) is None
        s.gradient_return.shipping.measures_norms = True
        s.backward(1, None)
        assert s.gradient_return.gradients.norms_of(s.weights) is None
        assert s.gradient_return.gradients.norms_of(s.weights[:1])[0] == 4
        s.backward(None, 1)
        assert [norm.item() for norm in s.gradient_return.gradients.norms_of(s.weights)] == [4, 6]
        assert s.gradient_return.gradients.norms_of([]) == []


def test_a_norm_is_forgotten_when_its_gradient_goes_on_without_it() -> None:
    """Measured in one batch, added to in the next: the old norm is not the sum's."""
    with gradient_scene((4,)) as s:
        s.gradient_return.shipping.measures_norms = True
        s.backward(1)
        s.gradient_return.shipping.measures_norms = False
        s.backward(1)
        assert s.gradient_return.gradients.norms_of(s.weights) is None


FORGETS: dict[str, Callable[[GradientReturn, GradientScene], object]] = {
    "shown": lambda returns, s: returns.gradients.show(s.weights[0]),
    "taken": lambda returns, s: returns.gradients.take(s.weights[0]),
    "dropped": lambda returns, s: returns.gradients.drop(s.weights[0]),
}


@pytest.mark.parametrize("forget", FORGETS.values(), ids=FORGETS)
@pytest.mark.parametrize("lowered", [None, BF16])
def test_a_norm_is_forgotten_when_its_gradient_may_change(
    lowered: torch.dtype | None, forget: Callable[[GradientReturn, GradientScene], object]
) -> None:
    """Who reads a gradient may write to it."""
    with gradient_scene((4,), (9,), lowered=lowered) as s:
        s.gradient_return.shipping.measures_norms = True
        s.backward(1, 1)
        assert s.gradient_return.gradients.norms_of(s.weights) is not None
        forget(s.gradient_return, s)
        assert s.gradient_return.gradients.norms_of(s.weights) is None
        assert s.gradient_return.gradients.norms_of(s.weights[1:])[0] == 3


@pytest.mark.parametrize("batches", [1, 2])
def test_the_norm_of_a_gradient_that_a_hook_changes_is_unknown(batches: int) -> None:
    with gradient_scene((4,), (9,)) as s:
        s.gradient_return.shipping.measures_norms = True
        s.masters[0].register_hook(lambda gradient: 10 * gradient)
        for _ in range(batches):
            s.backward(1, 1)
        assert s.gradient_return.gradients.norms_of(s.weights) is None
        assert s.gradient_return.gradients.norms_of(s.weights[1:])[0] == 3 * batches
        assert s.gradients() == [[10 * batches], [batches]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batches", [1, 2])
def test_norms_of_other_masters_are_not_measured(dtype: torch.dtype, batches: int) -> None:
    """`clip_grad_norm_` would compute them in the masters' dtype."""
    with host_backend() as backend:
        made = place([torch.ones(4, dtype=dtype), torch.ones(4)], backend)
        returns = GradientReturn([made.unit], backend, Stats(), False, lambda: None, lambda: None, lambda group: None)
        returns.shipping.stepper = FakeStepper()
        returns.shipping.measures_norms = True
        for twin in made.twins:
            returns.watch(twin)
        for _ in range(batches):
            sum(twin.parameter.sum() for twin in made.twins).backward()
            returns.finish()
        assert returns.gradients.norms_of(made.weights[:1]) is None
        returns.close()


def test_sparse_gradients_have_no_norm() -> None:
    with gradient_scene((4, 2)) as s:
        s.gradient_return.shipping.measures_norms = True
        s.backward(1)
        nn.functional.embedding(torch.tensor([1]), s.placed.twins[0].parameter, sparse=True).sum().backward()
        s.gradient_return.finish()
        assert s.gradient_return.gradients.norms_of(s.weights) is None


# -------------------------------------------------------------------------------------------------- who holds gradients


@pytest.mark.parametrize("holds", [None, "the gradient", "a view"])
def test_a_held_gradient_is_the_sum_when_backward_ends(holds: str | None) -> None:
    """Nobody can tell when `.grad` changes, as looking at it is noticed; but whoever kept the tensor can."""
    with host_backend(poison=True) as backend, gradient_scene((4,), backend=backend) as s:
        s.backward(1)
        s.gradient_return.gradients.settle()
        held = {None: None, "the gradient": s.masters[0].grad, "a view": s.masters[0].grad[1:]}[holds]
        gate = threading.Event()
        backend._down.submit(lambda: (gate.wait(0.05), None)[1])
        s.backward(10)
        assert s.gradient_return.gradients.settled is (held is not None)
        if held is not None:
            assert set(held.tolist()) == {11}
        gate.set()
        assert s.gradients() == [[11]]


def test_a_users_own_gradient_is_added_to_in_time() -> None:
    """`p.grad = something` in between: it is theirs."""
    with host_backend(poison=True, max_delay=0.01) as backend, gradient_scene((4,), backend=backend) as s:
        own = torch.ones(4)
        s.masters[0].grad = own
        s.backward(10)
        assert own.tolist() == [11] * 4
        assert s.masters[0].grad is own


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("lowered", [None, BF16])
def test_a_gradient_that_was_given_other_memory_is_added_to_there(lowered: torch.dtype | None, held: bool) -> None:
    """`p.grad.data = ...`, with memory that the user may hold, and then looks at when backward ends."""
    with gradient_scene((4,), (3,), lowered=lowered, delay=0.01) as s:
        s.backward(1, 2)
        s.gradient_return.gradients.show_all()
        other: Tensor | None = torch.full((4,), 5.0)
        s.masters[0].grad.data = other
        if not held:
            other = None
        s.backward(10, 20)
        if other is not None:
            assert other.tolist() == [15] * 4
        assert s.gradients() == [[15], [22]]
        s.clear()
        s.backward(7, 8)
        assert s.gradients() == [[7], [8]]
        assert other is None or other.tolist() == [15] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("lowered", [None, BF16])
def test_a_gradient_that_was_given_another_dtype_keeps_it(lowered: torch.dtype | None, dtype: torch.dtype) -> None:
    """Autograd adds to it in the precision of both, and rounds to its dtype; and so until it is cleared."""
    with gradient_scene(*SHAPES, lowered=lowered, delay=0.004) as s:
        s.gradient_return.shipping.measures_norms = True
        expected = []
        s.backward(*random_gradients(s))
        s.gradient_return.gradients.show_all()
        for master in s.masters:
            master.grad.data = master.grad.data.to(dtype)
            expected.append(master.grad.clone())
        for _ in range(2):
            gradients = random_gradients(s)
            s.backward(*gradients)
            for total, gradient in zip(expected, gradients, strict=True):
                total += gradient.float()
            assert s.gradient_return.gradients.norms_of(s.weights) is None
        s.gradient_return.gradients.show_all()
        assert [master.grad.dtype for master in s.masters] == [dtype] * len(SHAPES)
        assert all(map(torch.equal, [master.grad for master in s.masters], expected))
        s.clear()
        gradients = random_gradients(s)
        s.backward(*gradients)
        s.gradient_return.gradients.show_all()
        assert all(map(torch.equal, [master.grad for master in s.masters], [g.float() for g in gradients]))


@pytest.mark.parametrize("lowered", [None, BF16])
def test_a_hook_after_accumulation_sees_a_finished_gradient(lowered: torch.dtype | None) -> None:
    """It is called before backward returns, with `.grad` as plain training would have it."""
    with gradient_scene((4,), (3,), lowered=lowered, delay=0.01) as s:
        seen: list[list[float]] = []
        s.masters[0].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
        for _ in range(3):
            s.backward(1, 2)
        assert seen == [[1] * 4, [2] * 4, [3] * 4]
        assert s.gradients() == [[3], [6]]


# -------------------------------------------------------------------------------------------------- stepped in backward


@pytest.mark.parametrize("lowered", [None, BF16])
def test_a_stepped_units_gradients_go_to_the_stepper(lowered: torch.dtype | None) -> None:
    """Low ones only pass through: no memory of the model's size is made for them."""
    with gradient_scene((1024,), (3,), lowered=lowered) as s:
        s.stepper.wanted.add(s.placed.unit)
        s.backward(5, 6)
        (shipment,) = s.stepper.shipments
        assert list(shipment.weights) == s.weights
        assert [set(gradient.flatten().tolist()) for gradient in shipment.arrived] == [{5}, {6}]
        assert {gradient.dtype for gradient in shipment.arrived} == {lowered or torch.float32}
        assert (shipment.buffer is not None) is (lowered is not None)
        assert s.stepper.calls == ["finish step", "end of backward"]
        if lowered:
            assert [master.grad for master in s.masters] == [None, None]
            assert s.gradient_return.host_bytes() == 2048 + 256 + 256
            shipment.buffer.release()
        else:
            assert s.gradients() == [[5], [6]]


def test_gradients_of_a_stepped_unit_are_kept_where_they_may_be_read() -> None:
    """Then low ones stay where they land, as without the step."""
    with gradient_scene((1024,), (3,), lowered=BF16) as s:
        s.stepper.wanted.add(s.placed.unit)
        s.stepper.keeps_gradients = True
        s.backward(5, 6)
        (shipment,) = s.stepper.shipments
        assert shipment.buffer is None
        assert s.gradient_return.host_bytes() == 2048 + 256 + 256
        assert s.gradients() == [[5], [6]]


def test_the_first_home_becomes_a_landing_buffer() -> None:
    """In the first step nothing can be stepped in backward; making other memory for buffers would take time."""
    with gradient_scene((1024,), (3,), lowered=BF16) as s:
        s.backward(5, 6)
        s.gradient_return.gradients.settle()
        (first,) = s.gradient_return._homes._lower.values()
        memory = first.memory.data_ptr()
        del first
        s.clear()
        s.stepper.wanted.add(s.placed.unit)
        s.backward(7, 8)
        (shipment,) = s.stepper.shipments
        assert shipment.buffer is not None
        assert shipment.buffer.memory.data_ptr() == memory
        assert s.gradient_return.host_bytes() == 2048 + 256 + 256
        shipment.buffer.release()


def test_a_sum_is_given_to_the_stepper() -> None:
    """Of several micro-batches the last one completes it."""
    with gradient_scene((4,), (3,), lowered=BF16) as s:
        s.backward(1, 1)
        s.stepper.wanted.add(s.placed.unit)
        s.backward(1, 1)
        (shipment,) = s.stepper.shipments
        assert shipment.buffer is None
        assert [tensor.tolist() for tensor in shipment.arrived] == [[2] * 4, [2] * 3]
        assert s.gradients() == [[2], [2]]


@pytest.mark.parametrize("why", ["incomplete", "a hook"])
def test_incomplete_gradients_are_not_given_to_the_stepper(why: str) -> None:
    with gradient_scene((4,), (3,), lowered=BF16) as s:
        if why == "a hook":
            s.masters[1].register_hook(lambda gradient: None)
        s.stepper.wanted.add(s.placed.unit)
        s.backward(1, None if why == "incomplete" else 1)
        assert s.stepper.shipments == []
        assert s.gradients() == {"incomplete": [[1], None], "a hook": [[1], [1]]}[why]


@pytest.mark.parametrize("elsewhere", [Tensor.double, lambda gradient: torch.full((3, 2), 1.0).t()])
def test_sums_with_another_kind_of_gradient_are_not_given_to_the_stepper(
    elsewhere: Callable[[Tensor], Tensor],
) -> None:
    """Only the optimizer's own code knows what to do with it."""
    with gradient_scene((2, 3), (3,)) as s:
        s.backward(1, 1)
        s.gradient_return.gradients.show_all()
        s.masters[0].grad.data = elsewhere(s.masters[0].grad.data)
        s.stepper.wanted.add(s.placed.unit)
        s.backward(1, 1)
        assert s.stepper.shipments == []
        assert s.gradients() == [[2], [2]]


@pytest.mark.parametrize("lowered", [None, BF16])
def test_gradients_that_were_not_stepped_are_kept(lowered: torch.dtype | None) -> None:
    """The other unit of its group did not complete."""
    with gradient_scene((4,), (3,), lowered=lowered, delay=0.005) as s:
        s.stepper.wanted.add(s.placed.unit)
        s.stepper.end_of_backward = lambda: [s.gradient_return.shipping.take_back(made) for made in s.stepper.shipments]  # type: ignore[method-assign,return-value]
        s.backward(5, 6)
        s.stepper.wanted.clear()
        s.stepper.shipments.clear()
        assert s.gradients() == [[5], [6]]
        s.backward(5, 6)
        assert s.gradients() == [[10], [12]]


def test_a_gradient_that_comes_too_late_is_an_error() -> None:
    """The weight has taken its step: adding it to the next would be silently wrong."""
    with gradient_scene((4,)) as s:
        s.stepper.stepped.update(s.weights)
        with pytest.raises(RuntimeError, match=r"'unit.0' got another gradient.*`overlap_optimizer=False`"):
            s.arrive(1)
        s.gradient_return.abandon()


def test_a_step_reads_its_gradients_before_the_next_ones_come() -> None:
    """The next backward's first gradients land where the last step reads its own."""
    with gradient_scene((4,)) as s:
        order: list[str] = []
        s.stepper.finish_optimizer = lambda group: order.append("finish step")  # type: ignore[method-assign]
        download = s.backend.download
        s.backend.download = lambda *args: (order.append("download"), download(*args))[1]  # type: ignore[method-assign]
        s.backward(1)
        assert order == ["finish step", "download"]


# ----------------------------------------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("lowered", [None, BF16])
@pytest.mark.parametrize("threads", [True, False])
def test_a_failed_copy_raises_once(lowered: torch.dtype | None, threads: bool) -> None:
    """Who waits for it is told; after `abandon` everything goes on."""
    with gradient_scene((4,), (3,), lowered=lowered, delay=0.0 if threads else None) as s:
        s.backward(1, 1)
        fail_next_download(s.backend)
        s.backward(1, 1)
        with pytest.raises(OSError, match="the bus is gone"):
            s.gradient_return.gradients.settle()
        s.gradient_return.abandon()
        assert s.gradient_return.gradients.tickets_of(s.weights) == []
        s.clear()
        for _ in range(5):
            s.backward(1, 2)
        assert s.gradients() == [[5], [10]]


def test_an_interrupted_wait_for_a_gradient_leaves_it_under_way() -> None:
    """It was forgotten, and the next one went into its memory while it still came."""
    with gradient_scene((4,)) as s:
        gradients, ticket = s.gradient_return.gradients, InterruptedTicket()
        gradients.mark_under_way(s.weights, ticket)
        with pytest.raises(KeyboardInterrupt):
            gradients.wait_until_landed(s.weights)
        assert gradients.tickets_of(s.weights) == [ticket]
        threading.Timer(0.03, ticket.finish).start()
        gradients.wait_until_landed(s.weights)
        assert ticket.done
        assert gradients.tickets_of(s.weights) == []


@pytest.mark.parametrize("what", ["copies", "additions"])
def test_a_failure_does_not_make_backward_wait_for_ever(what: str) -> None:
    """Buffers whose gradients nobody could read are free again: more units follow than there are buffers."""
    with host_backend(poison=True) as backend:
        units = [place([torch.ones(5)], backend, name=f"unit {index}") for index in range(6)]
        returns = GradientReturn(
            [made.unit for made in units], backend, Stats(), False, lambda: None, lambda: None, lambda group: None
        )
        returns.shipping.stepper = FakeStepper()
        for made in units:
            returns.watch(made.twins[0])
            made.twins[0].parameter.sum().backward()
        returns.finish()
        errors: list[BaseException] = []

        def backward() -> None:
            try:
                for _ in range(2):
                    for made in units:
                        made.twins[0].parameter.sum().backward()
                    returns.finish()
                returns.gradients.settle()
            except OSError as error:
                errors.append(error)

        if what == "copies":
            for _ in range(3):
                fail_next_download(backend)
        else:
            work, left = backend.work, iter([fail] * 3)
            backend.work = lambda job, *rest: work(lambda: (job(), next(left, int)()), *rest)  # type: ignore
        thread = threading.Thread(target=backward, daemon=True)
        thread.start()
        thread.join(2)
        hangs = thread.is_alive()
        while thread.is_alive():
            returns._landing_buffers.abandon()
            thread.join(0.01)
        returns.abandon()
        returns.close()
        assert not hangs
        assert len(errors) == 1


def fail() -> None:
    raise OSError("the bus is gone")


def fail_next_download(backend: object) -> None:
    """One copy to the host fails."""
    if isinstance(backend, RecordingBackend):
        backend.fail_next("download", OSError("the bus is gone"))
        return
    download = backend.download  # type: ignore[attr-defined]

    def failing(target: Tensor, source: Tensor) -> object:
        backend.download = download  # type: ignore[attr-defined]
        return backend._down.submit(fail)  # type: ignore[attr-defined]

    backend.download = failing  # type: ignore[attr-defined]


def test_abandoned_gradients_give_back_their_buffers() -> None:
    """Those that went to the optimizer, too, which never came to step them."""
    with gradient_scene((4,), lowered=BF16) as s:
        s.stepper.wanted.add(s.placed.unit)
        s.arrive(1)
        (shipment,) = s.stepper.shipments
        assert shipment.buffer is not None
        assert not shipment.buffer.is_free
        s.gradient_return.abandon()
        assert shipment.buffer.is_free


def test_gradients_that_were_there_survive_an_exception() -> None:
    """A backward that died adds nothing of what had not left, and the next one is right."""
    with gradient_scene((4,), (3,), lowered=BF16, delay=0.004) as s:
        s.backward(1, 2)
        s.arrive(50, None)
        s.gradient_return.abandon()
        s.clear()
        s.backward(3, 4)
        s.backward(3, 4)
        assert s.gradients() == [[6], [8]]


def test_closing_shows_everything() -> None:
    """After `detach` the user's masters have plain gradients."""
    with gradient_scene((4,), (3,), lowered=BF16, delay=0.01) as s:
        s.backward(1, 2)
        s.gradient_return.gradients.multiply(s.weights, torch.tensor(0.5))
    assert [master.grad.tolist() for master in s.masters] == [[0.5] * 4, [1] * 3]
