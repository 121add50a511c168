"""Where gradients go: one row for each case that decides."""

from __future__ import annotations

from itertools import product

import pytest

from sp_lightning.pipeline.gradients.route import Route, choose_route

ANY = None

# what does not matter in a row is left open
TABLE = [
    # first, lower, complete, fills home, used up
    ((False, ANY, ANY, ANY, ANY), Route.SUM),
    ((True, False, ANY, True, ANY), Route.HOME),
    ((True, False, ANY, False, ANY), Route.SUM),
    ((True, True, ANY, ANY, True), Route.OPTIMIZER),
    ((True, True, True, ANY, False), Route.HOME_AS_THEY_CAME),
    ((True, True, False, ANY, False), Route.SUM),
]


@pytest.mark.parametrize("case", list(product([True, False], repeat=5)))
def test_every_case_has_one_route(case: tuple[bool, ...]) -> None:
    rows = [
        route
        for row, route in TABLE
        if all(wanted is ANY or wanted == given for wanted, given in zip(row, case, strict=True))
    ]
    first, lower, complete, fills_home, used_up = case
    chosen = choose_route(first=first, lower=lower, complete=complete, fills_home=fills_home, used_up=used_up)
    assert rows == [chosen]


def test_routes_that_stay_at_home() -> None:
    assert [route for route in Route if route.stays] == [Route.HOME, Route.HOME_AS_THEY_CAME]
