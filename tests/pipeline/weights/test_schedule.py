"""The order of units: what is expected before anything is known, what is learned, and what is learned anew."""

from __future__ import annotations

from itertools import islice

import pytest

from sp_lightning.pipeline.weights.schedule import Pass, Schedule

Use = tuple[int, Pass]
F, B, I = Pass.FORWARD, Pass.BACKWARD, Pass.INFERENCE  # noqa: E741


def ahead(schedule: Schedule, count: int) -> list[int]:
    """The next members that are expected."""
    return list(islice(schedule.upcoming(), count))


def run(schedule: Schedule, uses: list[Use]) -> None:
    for member, direction in uses:
        schedule.visit(member, direction)


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([], [0, 1, 2, 2, 1, 0, 0, 1]),
        ([(1, F)], [2, 2, 1, 0, 0, 1]),
        ([(2, F)], [2, 1, 0, 0]),
        ([(2, B)], [1, 0, 0, 1, 2]),
        ([(0, B)], [0, 1, 2, 2]),
        ([(1, I)], [2, 0, 1, 2, 0]),
        ([(2, I)], [0, 1, 2]),
    ],
    ids=str,
)
def test_before_anything_is_known(uses: list[Use], expected: list[int]) -> None:
    """Forwards go up, backwards down, a forward without a graph starts over."""
    schedule = Schedule(3)
    run(schedule, uses)
    assert ahead(schedule, len(expected)) == expected


def test_an_order_that_was_seen_is_expected() -> None:
    """Forward 2, 0, 1 is expected as 2, 0, 1 the second time, and so is its backward."""
    schedule = Schedule(3)
    step = [(2, F), (0, F), (1, F), (1, B), (0, B), (2, B)]
    run(schedule, step + step)
    run(schedule, step[:1])
    assert ahead(schedule, 6) == [0, 1, 1, 0, 2, 2]


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([], []),
        ([(0, F)], [1, 2]),
        ([(1, F)], [2]),
        ([(2, F)], []),
        ([(2, B)], [1, 0]),
        ([(0, B)], []),
        ([(0, F), (2, F), (2, B), (0, B)] * 2 + [(0, F)], [2]),
    ],
    ids=str,
)
def test_what_is_expected_before_the_turn(uses: list[Use], expected: list[int]) -> None:
    """Forward before backward, backward before forward; as it is usually, or as it was seen."""
    schedule = Schedule(3)
    run(schedule, uses)
    assert list(islice(schedule.upcoming_before_the_turn(), 9)) == expected


def test_nothing_is_expected_of_nothing() -> None:
    assert list(Schedule(0).upcoming()) == list(Schedule(0).upcoming_before_the_turn()) == []


def test_a_member_used_twice_is_told_by_what_came_before() -> None:
    """Where a shared block comes twice, what follows depends on what came before it."""
    schedule = Schedule(4)
    step = [(0, I), (3, I), (1, I), (3, I), (2, I)]
    run(schedule, step * 2)
    run(schedule, step[:2])
    assert ahead(schedule, 3) == [1, 3, 2]
    run(schedule, step[2:4])
    assert ahead(schedule, 2) == [2, 0]


def test_a_changed_order_is_relearned_where_it_differs() -> None:
    schedule = Schedule(4)
    run(schedule, [(0, I), (1, I), (2, I), (3, I)] * 2)
    run(schedule, [(0, I), (2, I), (1, I), (3, I)] * 2)
    run(schedule, [(0, I)])
    assert ahead(schedule, 4) == [2, 1, 3, 0]


def test_inference_does_not_disturb_training() -> None:
    """Validation in another order leaves what is known of training alone."""
    schedule = Schedule(3)
    train = [(0, F), (2, F), (2, B), (0, B)]
    run(schedule, train * 2 + [(1, I), (0, I), (1, I)] + train)
    run(schedule, train[:2])
    assert ahead(schedule, 3) == [2, 0, 0]


def test_the_same_use_again_is_one_use() -> None:
    """A unit with several members in a row, or a repeated sign of backward, does not count as a loop."""
    schedule = Schedule(3)
    run(schedule, [(0, I), (0, I), (2, I)] * 2 + [(0, I)])
    assert ahead(schedule, 3) == [2, 0, 2]


def test_after_an_exception_nothing_follows_from_what_came_last() -> None:
    """The pair around an exception is not learned, what was learned before is kept."""
    schedule = Schedule(4)
    run(schedule, [(0, F), (2, F), (3, F)])
    schedule.forget_position()
    assert ahead(schedule, 1) == [0]
    run(schedule, [(0, F), (2, F)])
    assert ahead(schedule, 1) == [3]


def test_expectations_have_no_end() -> None:
    """Window asks for twice the members; the stream of expectations must not dry up."""
    assert len(ahead(Schedule(2), 1000)) == 1000


def test_without_members_nothing_is_expected() -> None:
    """Everything may be resident."""
    assert ahead(Schedule(0), 3) == []
