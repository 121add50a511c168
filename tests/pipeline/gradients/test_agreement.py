"""Whose turn it is: every process comes to the same from what all have said, and nobody is forgotten."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sp_lightning.pipeline.gradients.agreement import Agreement, Message, take_turns


def says(*ready: int, goes_on: bool = True, deferred: Iterable[int] = ()) -> Message:
    return Message(0, goes_on, ready, list(deferred))


def test_processes_with_the_same_gradients() -> None:
    assert take_turns([says(4, 5), says(4, 5)]) == ([4, 5], set(), [])


def test_the_set_with_the_latest_first_layer_comes_first() -> None:
    """Backward begins with the last layer: the others have passed it, or will not come to it."""
    turn = take_turns([says(2, 3), says(4, 5)])
    assert turn.weights == [4, 5]
    assert turn.not_final == {4, 5}, "the first process may come to them yet"


def test_a_process_that_has_ended_brings_no_more_gradients() -> None:
    assert take_turns([says(goes_on=False), says(4, 5)]).not_final == set()


def test_a_set_that_is_part_of_another() -> None:
    """The numbers of a turn are those of one process; who has more keeps the rest for the next turn."""
    turn = take_turns([says(4), says(4, 5, 6), says(5, goes_on=False)])
    assert turn.weights == [5]
    assert turn.not_final == {5}


def test_no_gradients_are_left() -> None:
    turn = take_turns([says(goes_on=False, deferred=[7]), says(goes_on=False, deferred=[3, 7])])
    assert turn == ([], set(), [3, 7])


def test_different_step_counts_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"different numbers of optimizer steps \(\[3, 4\]\)"):
        take_turns([Message(3, True, [1]), Message(4, True, [1])])


numbers = st.lists(st.integers(0, 9), unique=True).map(sorted)


@given(st.builds(Message, st.integers(0, 1 << 30), st.booleans(), numbers, numbers))
def test_messages_survive_encoding(message: Message) -> None:
    assert Message.decoded(message.encoded(10)) == message
    assert message.encoded(10).numel() == Message(0, False, []).encoded(10).numel(), "all send equally much"


@given(st.lists(st.lists(numbers.filter(bool), max_size=4), min_size=1, max_size=3))
def test_every_gradient_has_its_turn(passes: list[list[list[int]]]) -> None:
    """Processes that bring their gradients in any order end together, and each gradient is averaged."""
    agreements = [Agreement(10, lambda: 0, lambda _: answers) for _ in passes]
    coming = [list(own) for own in passes]
    left: list[set[int]] = [set() for _ in passes]
    for _ in range(100):
        for own, brought in zip(left, coming, strict=True):
            if not own and brought:
                own.update(brought.pop(0))
        said = [Message(0, bool(own), sorted(own)) for own in left]
        answers: list[Tensor] = [message.encoded(10) for message in said]
        turns = [
            agreement.next_turn(message.ready, goes_on=message.goes_on)
            for agreement, message in zip(agreements, said, strict=True)
        ]
        assert all(turn == turns[0] for turn in turns)
        if not turns[0].weights:
            break
        for own in left:
            own.difference_update(turns[0].weights)
    assert not any(left)
    assert not any(coming)


def test_weights_that_may_get_more_gradients_are_not_final() -> None:
    """Until the pass ends, in whatever turn that was seen."""
    others = iter([says(5, 6), says(1, 2), says(goes_on=False)])
    agreement = Agreement(10, lambda: 0, lambda mine: [mine, next(others).encoded(10)])
    assert agreement.next_turn([5], goes_on=True).weights == [5]
    assert agreement.is_final([5])
    assert agreement.next_turn([0], goes_on=True).weights == [1, 2]
    assert not agreement.is_final([2, 5])
    assert agreement.is_final([5, 6])
    assert agreement.next_turn([], goes_on=False).weights == []
    agreement.end()
    assert agreement.is_final([1, 2])


def test_the_step_count_is_read_for_each_turn() -> None:
    moments = iter([1, 2])
    sent: list[Tensor] = []
    agreement = Agreement(2, lambda: next(moments), lambda mine: (sent.append(mine), [mine])[1])
    for _ in range(2):
        agreement.next_turn([], goes_on=False)
    assert [message[0].item() for message in sent] == [1, 2]
    assert all(message.device == torch.device("cpu") for message in sent)
