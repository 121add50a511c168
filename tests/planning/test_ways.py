"""The choice of what happens to activations: within the budget, and no choice that is within it is cheaper.

And what each way is said to hold and to cost.
"""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_lightning.pipeline.activations.memory import Footprint
from sp_lightning.pipeline.options import Policy
from sp_lightning.planning import Machine, UnitWork
from sp_lightning.planning.choose import choose_ways
from sp_lightning.planning.cost import Way
from sp_lightning.planning.memory import peak
from sp_lightning.planning.ways import ways_of

sizes = st.integers(0, 20)


@st.composite
def ways_of_a_unit(draw: st.DrawFn) -> list[Way]:
    """Keeping costs nothing; the others hold less, and cost."""
    held, saved = draw(sizes), draw(sizes)
    ways = [Way("keep", held + saved, held + saved, 0.0)]
    if draw(st.booleans()):
        ways.append(Way("recompute", held, held + saved, float(draw(sizes))))
    if draw(st.booleans()):
        ways.append(
            Way(
                "offload",
                draw(st.integers(0, held)),
                held + saved,
                float(draw(sizes)),
                saved,
                draw(st.integers(0, saved)),
            )
        )
    return ways


models = st.lists(ways_of_a_unit(), max_size=5)


@given(models, sizes.map(lambda size: 5 * size))
def test_it_is_the_cheapest_of_all(units: list[list[Way]], budget: int) -> None:
    """Against all choices there are."""
    chosen = choose_ways(units, budget)
    assert len(chosen) == len(units)
    assert all(way in ways for way, ways in zip(chosen, units, strict=True))
    fitting = [ways for ways in product(*units) if peak(ways) <= budget]
    if fitting:
        assert peak(chosen) <= budget
        assert sum(way.seconds for way in chosen) == min(sum(way.seconds for way in ways) for ways in fitting)
    else:
        assert peak(chosen) == min(peak(ways) for ways in product(*units))


@pytest.mark.parametrize(
    ("call", "machine", "policies"),
    [
        (Footprint(30, 70, 100, 100, True), None, ["keep", "recompute"]),
        (Footprint(30, 70, 100, 100, False), Machine(1, 1, 1), ["keep", "offload"]),
        (Footprint(30, 70, 0, 100, True), Machine(1, 1, 1), ["keep", "recompute", "recompute_offload"]),
        (Footprint(30, 0, 0, 30, False), Machine(1, 1, 1), ["keep"]),
    ],
)
def test_ways_that_would_be_the_same_are_not_told_apart(
    call: Footprint, machine: Machine | None, policies: list[Policy]
) -> None:
    assert [way.policy for way in ways_of(UnitWork("", 10), [call], 1.0, machine)] == policies


def test_members_of_a_unit_follow_its_policy_as_far_as_they_can() -> None:
    """The first one's inputs are the batch, which stays; the second one cannot run again."""
    calls = [Footprint(1, 10, 11, 11, True), Footprint(2, 20, 0, 22, False)]
    ways = ways_of(UnitWork("", 10), calls, 2.0, Machine(1, 1, 1), inputs_stay=True)
    assert [(way.policy, way.held, way.leaving, way.working) for way in ways] == [
        ("keep", 33, 0, 33),
        ("recompute", 23, 0, 23),
        ("offload", 23, 10, 33),
    ]
