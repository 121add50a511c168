"""The order of units: what is expected before anything is known, what is learned, and what is learned anew."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_lightning.pipeline.weights.schedule import Pass, Schedule

Use = tuple[int, Pass]
F, B, I = Pass.FORWARD, Pass.BACKWARD, Pass.INFERENCE  # noqa: E741


def ahead(schedule: Schedule, count: int) -> list[int]:
    """The next members that are expected."""
    return [schedule.expected(schedule.now + 1 + number) for number in range(count)]


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
def test_the_expected_uses_before_the_turn(uses: list[Use], expected: list[int]) -> None:
    """Forward before backward, backward before forward; as it is usually, or as it was seen."""
    schedule = Schedule(3)
    run(schedule, uses)
    assert list(islice(schedule.upcoming_before_the_turn(), 9)) == expected


def test_an_empty_schedule() -> None:
    assert list(Schedule(0).upcoming_before_the_turn()) == []


def test_a_member_used_twice_is_distinguished_by_its_predecessor() -> None:
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


def test_one_exception_is_not_learned() -> None:
    """A layer is dropped at random: the next step that comes to that point is expected to go the usual way."""
    schedule = Schedule(4)
    usual, dropped = [(member, I) for member in range(4)], [(0, I), (1, I), (3, I)]
    run(schedule, usual * 2 + dropped + [(0, I), (1, I)])
    assert ahead(schedule, 2) == [2, 3]
    schedule = Schedule(4)
    run(schedule, usual * 2 + dropped * 2 + [(0, I), (1, I)])
    assert ahead(schedule, 2) == [3, 0]


def test_inference_does_not_disturb_training() -> None:
    """Validation in another order leaves what is known of training alone."""
    schedule = Schedule(3)
    train = [(0, F), (2, F), (2, B), (0, B)]
    run(schedule, train * 2 + [(1, I), (0, I), (1, I)] + train)
    run(schedule, train[:2])
    assert ahead(schedule, 3) == [2, 0, 0]


def test_backward_may_announce_itself_again() -> None:
    """A repeated sign of backward is no other use."""
    schedule = Schedule(3)
    run(schedule, [(0, F), (2, F), (2, B), (2, B), (0, B), (0, B)] * 2 + [(0, F), (2, F), (2, B)])
    assert ahead(schedule, 3) == [0, 0, 2]


def steps(schedule: Schedule, *uses: list[Use]) -> None:
    """Whole steps, one after the other."""
    for step in uses:
        schedule.begin_step()
        run(schedule, step)


def backwards(forward: list[int]) -> list[Use]:
    """A training step with that forward."""
    return [*((member, F) for member in forward), *((member, B) for member in reversed(forward))]


@pytest.mark.parametrize(
    "forward",
    [[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2, 0, 1, 2, 0, 1, 2], [0, 1, 1, 0, 1, 2, 0, 1, 1, 1], [1, 1, 1, 1]],
    ids=str,
)
def test_a_step_like_the_last_one_is_expected_however_often_units_are_called(forward: list[int]) -> None:
    """From each of its uses on, past its end: two uses alone cannot tell the second round from the first."""
    schedule = Schedule(3)
    step = backwards(forward)
    uses = [use for number, use in enumerate(step) if use[1] is F or use != step[number - 1]]
    steps(schedule, step, step)
    schedule.begin_step()
    for number, (member, direction) in enumerate(uses):
        schedule.visit(member, direction)
        coming = [member for member, _ in (*uses[number + 1 :], *uses)]
        assert ahead(schedule, len(coming)) == coming


def test_kinds_of_steps_are_distinguished_by_their_beginning() -> None:
    """Validation in between, with other rounds, changes nothing in what training expects."""
    schedule = Schedule(2)
    train = backwards([0, 1, 0, 1])
    steps(schedule, train, [(0, I), (1, I), (0, I)], [(0, I), (1, I), (0, I)])
    assert ahead(schedule, 4) == [0, 1, 0, 0]
    steps(schedule, train[:3])
    assert ahead(schedule, 6) == [1, 1, 0, 1, 0, 0]


def test_a_step_unlike_the_last_one_is_foreseen_by_its_last_two_uses() -> None:
    """A branch that data decides on: after it what followed the last time is expected, not what was recorded there."""
    schedule = Schedule(4)
    steps(schedule, backwards([0, 1, 3]), backwards([0, 2, 3]), backwards([0, 1, 3]))
    steps(schedule, [(0, F), (2, F)])
    assert ahead(schedule, 2) == [3, 3]
    steps(schedule, [(0, F)])
    assert ahead(schedule, 1) == [2], "the path of the most recent step"


def test_a_step_that_ends_early_is_recorded_as_it_was() -> None:
    schedule = Schedule(3)
    long, short = [(0, I), (1, I), (2, I), (0, I), (1, I)], [(0, I), (1, I)]
    steps(schedule, long, long, short, short)
    assert ahead(schedule, 4) == [0, 1, 0, 1]


def test_the_record_of_a_step_has_a_limit() -> None:
    """Generating a long text is one step; beyond the limit the last two uses decide."""
    schedule = Schedule(2)
    text = [(0, I), (1, I)] * 1000
    steps(schedule, text, text)
    assert schedule.horizon < 100
    assert ahead(schedule, 4) == [0, 1, 0, 1]
    steps(schedule, text[:1001])
    assert ahead(schedule, 4) == [1, 0, 1, 0]


def test_a_look_ahead_covers_a_whole_step() -> None:
    schedule = Schedule(3)
    assert schedule.horizon == 6
    step = [*((member, F) for member in [0, 1, 2] * 3), (2, B), (1, B), (0, B)]
    steps(schedule, step, [])
    assert schedule.horizon == len(step)


def test_the_pair_around_an_exception_is_not_learned() -> None:
    """The pair around an exception is not learned, what was learned before is kept."""
    schedule = Schedule(4)
    run(schedule, [(0, F), (2, F), (3, F)])
    schedule.abandon()
    assert ahead(schedule, 1) == [0]
    run(schedule, [(0, F), (2, F)])
    assert ahead(schedule, 1) == [3]


def test_expectations_have_no_end() -> None:
    """Window asks for twice the members; the stream of expectations must not dry up."""
    assert ahead(Schedule(2), 1000) == [0, 1, 1, 0] * 250


def test_a_use_that_comes_as_expected_keeps_its_number() -> None:
    """And so do those after it: what was found out about them holds."""
    schedule = Schedule(3)
    expected = {number: schedule.expected(number) for number in range(schedule.now + 1, schedule.now + 9)}
    run(schedule, [(0, F), (1, F), (2, F), (2, B), (2, B)])
    assert schedule.now + 1 in expected
    assert {number: schedule.expected(number) for number in expected if number > schedule.now} == {
        number: member for number, member in expected.items() if number > schedule.now
    }


@pytest.mark.parametrize("turn", [lambda s: s.visit(2, F), lambda s: s.abandon()])
def test_unexpected_uses_get_numbers_of_their_own(turn: Callable[[Schedule], None]) -> None:
    schedule = Schedule(3)
    run(schedule, [(0, F)])
    numbers = [schedule.now + 1 + ahead for ahead in range(5)]
    for number in numbers:
        schedule.expected(number)
    turn(schedule)
    assert schedule.now > max(numbers)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([F, B, I])), max_size=60), st.data())
def test_expectations_do_not_depend_on_when_they_are_asked_for(uses: list[Use], data: st.DataObject) -> None:
    """One schedule is asked now and then, the other at the end alone."""
    asked, other = Schedule(4), Schedule(4)
    for use in uses:
        asked.visit(*use)
        other.visit(*use)
        ahead(asked, data.draw(st.integers(0, 12)))
    assert ahead(asked, 12) == ahead(other, 12)
    assert list(islice(asked.upcoming_before_the_turn(), 9)) == list(islice(other.upcoming_before_the_turn(), 9))
