"""The planned figures of the pages: all of one run of plan_machines.py, and those of the planner as it is now."""

from __future__ import annotations

import json

import plan_machines
import pytest
import replay

FIGURES = json.loads(plan_machines.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", plan_machines.PAGES, ids=lambda page: page.name)
def test_pages_have_the_figures_that_were_planned(page):
    """Else `python tools/plan_machines.py --pages` writes them."""
    text = page.read_text(encoding="utf-8")
    assert plan_machines.with_figures(text, FIGURES) == text


def test_each_figure_is_on_a_page():
    texts = [page.read_text(encoding="utf-8") for page in plan_machines.PAGES]
    places = {place[2] for text in texts for place in plan_machines.PLACE.finditer(text)}
    assert places == plan_machines.FIGURES.keys()


def test_no_range_is_upside_down():
    """Of all planned figures, also where the search at the higher speed misses the plan of the lower one."""
    rows = [
        *FIGURES["machines"],
        FIGURES["users"],
        FIGURES["more"],
        FIGURES["drives"],
        *(row.values() for row in FIGURES["offers"]),
    ]
    cells = [cell for row in rows for cell in row]
    speeds = [cell["speed"].replace(",", "").split(" to ") for cell in cells if cell["fits"]]
    ranges = [(float(speed[0]), float(speed[-1])) for speed in speeds] + FIGURES["replay"]
    assert len(ranges) > 100
    assert [speed for speed in ranges if speed[0] > speed[1]] == []


@pytest.mark.parametrize(("number", "column"), [(0, 0), (2, 2), (7, 6)])
def test_figures_are_those_of_the_planner(number: int, column: int):
    """Some of them. If they differ, `python tools/plan_machines.py` plans all again, in 17 minutes."""
    (cell,) = plan_machines.plan_machine(number, [plan_machines.MODELS[column]])
    assert FIGURES["machines"][number][column] == cell


def test_figures_of_offers_are_those_of_the_planner():
    some = plan_machines.plan_offers(*plan_machines.OFFERED[0], 1)
    assert some == {model: FIGURES["offers"][0][model] for model in some}


def test_figures_of_users_are_those_of_the_planner():
    for number in (1, -1):
        assert FIGURES["users"][number] == plan_machines.plan_user(plan_machines.USERS[number])
    for number in (-1, 18):
        assert FIGURES["replay"][number] == [round(speed) for speed in replay.predicted(replay.RUNS[number])]
