"""Where gradients stay: what somebody holds is theirs, and all else is used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.pipeline.gradients.gradient_layout import GradientLayout
from sp_lightning.pipeline.gradients.homes import Home, Homes
from sp_lightning.pipeline.weights.weight import Weight

from ..parts import RecordingBackend, place

FLOAT, BF16 = torch.float32, torch.bfloat16


def weights_of(*tensors: Tensor) -> list[Weight]:
    return [Weight(str(index), nn.Parameter(tensor)) for index, tensor in enumerate(tensors)]


def home_of(*tensors: Tensor, dtype: torch.dtype = FLOAT, backend: RecordingBackend | None = None) -> Home:
    layout = GradientLayout(tuple(weights_of(*tensors)), (dtype,) * len(tensors))
    return Home(layout, backend or RecordingBackend(can_pin=True), pin=True)


def test_gradients_lie_at_home_as_they_travel() -> None:
    """One copy fills them and their norms."""
    home = home_of(torch.ones(5), torch.ones(3, 2).t(), dtype=BF16)
    assert [tensor.dtype for tensor in home.tensors] == [BF16, BF16]
    assert home.tensors[1].stride() == (1, 2)
    assert home.memory.nbytes == 3 * 256
    home.memory.copy_(torch.arange(3 * 256) // 256)
    assert [set(t.flatten().view(torch.uint8).tolist()) for t in [*home.tensors, home.norms]] == [{0}, {1}, {2}]


HOLD: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "a view": lambda tensor: tensor[1:],
    "detached": lambda tensor: tensor.detach(),
    "in a list": lambda tensor: [tensor],
    "as .grad": lambda tensor: shown(nn.Parameter(torch.ones_like(tensor)), tensor),
    "as numpy": lambda tensor: tensor.numpy(),
}


def shown(parameter: nn.Parameter, gradient: Tensor) -> nn.Parameter:
    parameter.grad = gradient
    return parameter


@pytest.mark.parametrize("hold", HOLD.values(), ids=HOLD)
@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_that_is_held_is_not_overwritten(hold: Callable[[Tensor], Any], which: int) -> None:
    """A home whose gradients the user keeps moves out."""
    backend = RecordingBackend(can_pin=True)
    home = home_of(torch.ones(4), torch.ones(6), backend=backend)
    before = home.memory.data_ptr()
    for tensor in home.tensors:
        tensor.fill_(3)
    del tensor
    held = hold(home.tensors[which])
    home.vacate()
    assert home.memory.data_ptr() != before
    assert backend.pinned == {home.memory.data_ptr()}
    home.memory.zero_()
    if isinstance(held, nn.Parameter):
        held = held.grad
    assert set(torch.as_tensor(held[0] if isinstance(held, list) else held).tolist()) == {3}


def test_memory_that_nobody_holds_is_reused() -> None:
    home = home_of(torch.ones(4), torch.ones(6))
    before = home.memory.data_ptr(), [tensor.data_ptr() for tensor in home.tensors]
    parameter = shown(nn.Parameter(torch.ones(4)), home.tensors[0])
    parameter.grad = None
    home.vacate()
    assert (home.memory.data_ptr(), [tensor.data_ptr() for tensor in home.tensors]) == before


POINT_ELSEWHERE: dict[str, Callable[[Tensor], Any]] = {
    "other memory": lambda gradient: torch.zeros_like(gradient),
    "another dtype": lambda gradient: gradient.double(),
    "the same bytes as another dtype": lambda gradient: gradient.view(torch.int32),
    "a part": lambda gradient: gradient[:2],
    "another order": lambda gradient: gradient.t(),
}


def point(gradient: Tensor, elsewhere: Callable[[Tensor], Tensor]) -> None:
    gradient.data = elsewhere(gradient.data)


@pytest.mark.parametrize("elsewhere", POINT_ELSEWHERE.values(), ids=POINT_ELSEWHERE)
def test_a_gradient_that_was_given_other_memory_comes_home_the_next_time(elsewhere: Callable[[Tensor], Tensor]) -> None:
    """`p.grad.data = ...` changes a tensor of the home; the memory of the home is used again."""
    home = home_of(torch.ones(4, 4), torch.ones(6))
    parameter = shown(nn.Parameter(torch.ones(4, 4)), home.tensors[0])
    before = home.memory.data_ptr()
    assert home.consists_of([parameter.grad, home.tensors[1]])
    point(parameter.grad, elsewhere)
    total = parameter.grad
    assert not home.consists_of([total, home.tensors[1]])
    assert not home.is_only_shown(home.layout.weights[0], id(total)), "who gave it its memory may hold that"
    del total
    parameter.grad = None
    home.vacate()
    assert home.memory.data_ptr() == before
    home.memory.copy_(torch.arange(home.memory.nbytes) // 256)
    assert [tensor.view(torch.uint8).unique().tolist() for tensor in home.tensors] == [[0], [1]]
    assert (home.tensors[0].shape, home.tensors[0].stride(), home.tensors[0].dtype) == ((4, 4), (4, 1), FLOAT)


def test_attributes_set_on_a_gradient_go_with_it() -> None:
    home = home_of(torch.ones(4), torch.ones(6))
    home.tensors[0].requires_grad_().label = "mine"
    home.vacate()
    assert not home.tensors[0].requires_grad
    assert not hasattr(home.tensors[0], "label")


@pytest.mark.parametrize("way", ["vacate", "room_for"])
def test_memory_that_the_user_took_from_a_gradient_is_theirs(way: str) -> None:
    """They keep what it had before they gave it other memory."""
    home = home_of(torch.ones(4), torch.ones(6))
    before = home.memory.data_ptr()
    home.tensors[0].fill_(3)
    kept = home.tensors[0].data
    home.tensors[0].data = torch.zeros(4)
    if way == "vacate":
        home.vacate()
        assert home.memory.data_ptr() != before
        home.memory.zero_()
    else:
        home.room_for(home.layout.weights[0]).zero_()
    assert kept.tolist() == [3] * 4


def test_room_where_a_gradient_was_given_other_memory() -> None:
    home = home_of(torch.ones(4), torch.ones(6))
    where = home.tensors[1].data_ptr()
    home.tensors[1].data = torch.zeros(6)
    room = home.room_for(home.layout.weights[1])
    assert room.data_ptr() == where
    assert home.is_only_shown(home.layout.weights[1], id(room))


def test_room_for_one_gradient() -> None:
    """At home if nobody holds what is there; otherwise elsewhere, in the same form."""
    home = home_of(torch.ones(4), torch.ones(6, 2).t())
    first, second = home.layout.weights
    assert home.room_for(second).data_ptr() == home.tensors[1].data_ptr()
    kept = home.tensors[1]
    other = home.room_for(second)
    assert other.data_ptr() != kept.data_ptr()
    assert (other.shape, other.stride(), other.dtype) == (kept.shape, kept.stride(), kept.dtype)
    assert home.room_for(first).data_ptr() == home.tensors[0].data_ptr()


def test_a_gradient_that_is_only_shown() -> None:
    """`.grad` and its home hold it: who looks at `.grad` is noticed, so it may change until then."""
    home = home_of(torch.ones(4), torch.ones(6))
    parameter = shown(nn.Parameter(torch.ones(4)), home.tensors[0])
    total = parameter.grad  # as the engine holds it while it asks
    assert home.is_only_shown(home.layout.weights[0], id(total))


def test_nothing_is_taken_for_held_when_dynamo_has_failed() -> None:
    """It leaves its way of calling functions behind, which counts arguments twice: memory was made anew each step."""
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: torch._dynamo.graph_break(), backend="eager", fullgraph=True)(torch.ones(1))
    torch._dynamo.reset()
    home = home_of(torch.ones(4), torch.ones(6))
    before = home.memory.data_ptr()
    home.vacate()
    assert home.memory.data_ptr() == before


@pytest.mark.parametrize("way", HOLD)
def test_a_held_gradient_is_not_only_shown(way: str) -> None:
    """They would see it change."""
    home = home_of(torch.ones(4), torch.ones(6))
    parameter = shown(nn.Parameter(torch.ones(4)), home.tensors[0])
    total = parameter.grad
    held = HOLD[way](total)
    assert not home.is_only_shown(home.layout.weights[0], id(total))
    del held
    assert home.is_only_shown(home.layout.weights[0], id(total))


def test_a_users_own_gradient_is_not_only_shown() -> None:
    """It is nobody's home: who made it may hold it."""
    home = home_of(torch.ones(4))
    total = torch.ones(4)
    assert not home.is_only_shown(home.layout.weights[0], id(total))


# ------------------------------------------------------------------------------------------------------- homes of units


def test_a_unit_has_a_home_for_each_kind_of_gradients() -> None:
    """One for all trainable weights as their masters are, one for exactly those that came as they came."""
    made = place([torch.ones(4), torch.ones(6)])
    unit, (first, second) = made.unit, made.weights
    homes = Homes(made.backend, pin=False)
    home = homes.of(unit, [first])
    assert home.layout.weights == (first, second)
    assert homes.of(unit, [second]) is home
    assert not homes.has_lower(unit)
    lower = homes.in_lower_dtypes(unit, GradientLayout((first,), (BF16,)))
    assert homes.has_lower(unit)
    assert homes.in_lower_dtypes(unit, GradientLayout((first,), (BF16,))) is lower
    assert homes.nbytes() == home.memory.nbytes + lower.memory.nbytes
    homes.give_up_lower(unit)
    assert not homes.has_lower(unit)
    assert homes.nbytes() == home.memory.nbytes


def test_the_memory_of_a_home_that_is_given_up_may_be_used_otherwise() -> None:
    """Unless somebody kept a gradient that lies in it."""
    backend = RecordingBackend(can_pin=True)
    made = place([torch.ones(4), torch.ones(6)], backend)
    backend.pinned.clear()
    homes, layout = Homes(backend, pin=True), GradientLayout(tuple(made.weights), (BF16, BF16))
    left = homes.in_lower_dtypes(made.unit, layout).buffer
    assert homes.give_up_lower(made.unit) is left
    assert left.pinned
    kept = homes.in_lower_dtypes(made.unit, layout).tensors[1]
    assert homes.give_up_lower(made.unit) is None
    assert backend.pinned == {left.bytes.data_ptr()}
    assert kept.numel() == 6


def test_a_home_that_is_outgrown_keeps_its_page_locks_while_copies_may_be_under_way() -> None:
    backend = RecordingBackend(can_pin=True)
    made = place([torch.ones(4), torch.ones(6)], backend)
    made.weights[1].master.requires_grad_(False)
    backend.pinned.clear()
    homes = Homes(backend, pin=True)
    small = homes.of(made.unit, made.weights[:1])
    large = homes.of(made.unit, made.weights)
    assert large is not small
    assert backend.pinned == {small.memory.data_ptr(), large.memory.data_ptr()}
    homes.release_outgrown()
    assert backend.pinned == {large.memory.data_ptr()}
    homes.release()
    assert not backend.pinned
