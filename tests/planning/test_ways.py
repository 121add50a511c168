"""The choice of what happens to activations: within the budget, and no choice that is within it is cheaper."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from sp_lightning.planning.choose import choose_ways
from sp_lightning.planning.cost import Way
from sp_lightning.planning.memory import peak

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
    chosen = choose_ways(tuple(map(tuple, units)), budget)
    assert len(chosen) == len(units)
    assert all(way in ways for way, ways in zip(chosen, units, strict=True))
    fitting = [ways for ways in product(*units) if peak(ways) <= budget]
    if fitting:
        assert peak(chosen) <= budget
        assert sum(way.seconds for way in chosen) == min(sum(way.seconds for way in ways) for ways in fitting)
    else:
        assert peak(chosen) == min(peak(ways) for ways in product(*units))
