"""The order of uses: what is expected next, before and after it has been seen."""

from __future__ import annotations

import pytest

from sp_lightning.pipeline.weights.order import Order, Pass

F, B, N = Pass.FORWARD, Pass.BACKWARD, Pass.INFERENCE


def step(forward: list[int]) -> list[tuple[int, Pass]]:
    return [*((member, F) for member in forward), *((member, B) for member in reversed(forward))]


def seen(members: int, *steps: list[tuple[int, Pass]], then: list[tuple[int, Pass]] | None = None) -> Order:
    """An order that has seen whole steps, and the beginning of another one."""
    order = Order(members)
    for uses in (*steps, then or []):
        order.begin_step()
        for use in uses:
            order.visit(*use)
    return order


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([], [0]),
        ([(0, F)], [1, 2, 2, 1, 0, 0]),
        ([(2, F)], [2, 1, 0, 0]),
        ([(1, B)], [0, 0, 1]),
        ([(1, N)], [2, 0, 1]),
    ],
)
def test_before_anything_is_known(uses: list[tuple[int, Pass]], expected: list[int]) -> None:
    """Forwards go up, backwards down, a forward without a graph starts over."""
    assert seen(3, then=uses).upcoming(len(expected)) == expected


@pytest.mark.parametrize("forward", [[2, 0, 1], [0, 1, 2, 0, 1, 2], [1, 1, 0], [0, 2]])
def test_a_step_like_the_last_one_is_expected_however_often_units_are_called(forward: list[int]) -> None:
    """From each of its uses on, past its end."""
    uses = step(forward)
    once = [use for number, use in enumerate(uses) if use[1] is F or use != uses[number - 1]]
    for number in range(1, len(once)):
        order = seen(3, uses, uses, then=once[:number])
        assert order.upcoming(4) == [member for member, _ in (once[number:] + once)[:4]]


def test_after_the_last_use_a_step_like_it_is_expected() -> None:
    order = seen(3, step([2, 0, 1]))
    order.begin_step()
    assert order.upcoming(3) == [2, 0, 1]


def test_a_dropped_layer_is_skipped_and_comes_back() -> None:
    usual, dropped = step([0, 1, 2, 3]), [(0, F), (2, F)]
    assert seen(4, usual, then=dropped).upcoming(2) == [3, 3]
    assert seen(4, usual, step([0, 2, 3]), step([0, 1, 2, 3]), then=[(0, F)]).upcoming(2) == [1, 2]


def test_steps_are_distinguished_by_their_beginning() -> None:
    """Validation in between, in another order, changes nothing in what training expects."""
    train, validate = step([0, 2]), [(1, N), (0, N)]
    assert seen(3, train, train, validate, then=train[:1]).upcoming(3) == [2, 2, 0]


def test_without_members_nothing_is_expected() -> None:
    assert Order(0).upcoming(9) == []


def test_a_long_text_does_not_fill_memory() -> None:
    """Generating one is one step; beyond the limit the order of modules is expected."""
    order = seen(2, [(0, N), (1, N)] * 1000)
    assert order.upcoming(4) == [0, 1, 0, 1]
    assert sum(map(len, order._records.values())) <= 32


def test_what_an_exception_ended_says_nothing_of_what_comes() -> None:
    order = seen(3, step([2, 0, 1]), then=[(2, F)])
    order.abandon()
    assert order.upcoming(2) == [0, 1]
    order.begin_step()
    order.visit(2, F)
    assert order.upcoming(2) == [0, 1]
