"""What a plain `pytest` runs, in three minutes on two cores: what is quick by times.json, which has seconds of CPU.

- A test that takes less than 0.25 s runs. So does one that the file does not know, as it is new.
- If all cases of a grid take longer, the cheapest runs if it takes less than a second. A single test is a grid of one.
- If more than four quick cases of a grid take 0.1 s or more, half of these run: those on the diagonals, so that each
  value is there with some others.
- Whatever tests share, such as a server of processes, counts for each of them in full.
- `--all` runs all tests, with a quarter of the random programs (`parts`). Of a grid with more than four cases that
  are not quick, it runs half of these.
- `--nightly` leaves nothing out, and runs each test of gpu/ with everything that may lag.
- A file that is named on the command line runs whole. So does what `-m` selects.

`pytest --all --write-times` measures. test_selection.py asserts that each promise of README.md has a plain test.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent
TIMES = TESTS / "times.json"

QUICK, AT_MOST, NOTICED, FEW = 0.25, 1.0, 0.1, 4

seconds_of: dict[str, list[float]] = json.loads(TIMES.read_text(encoding="utf-8"))
"""The CPU seconds of each case of a test, in the order in which pytest collects them, if one takes 0.1 s or more."""

is_plain_run = is_nightly = False
"""Set before a test file is imported."""


class Tier(IntEnum):
    """The runs that a test is part of: those of its tier, and of all above it."""

    PLAIN = 1
    ALL = 2
    NIGHTLY = 3


class Case(NamedTuple):
    """A test, as times.json knows it."""

    function: str
    number: int
    place: int
    tier: Tier


CASE = pytest.StashKey[Case]()


def parts(count: int) -> range:
    """The parts of which a test with random programs consists: all of them at night, otherwise a quarter."""
    return range(count if is_nightly else count // 4)


def set_run(config: pytest.Config) -> None:
    """Note whether this is a plain run, in which nobody has asked for more, or that of a night."""
    global is_plain_run, is_nightly
    is_nightly = bool(config.getoption("nightly"))
    is_plain_run = not (asks_for_all(config) or any(".py" in argument for argument in config.args))


def asks_for_all(config: pytest.Config) -> bool:
    """Whether nothing is left out, wherever it is."""
    return any(map(config.getoption, ("all", "markexpr", "nightly")))


def tiers_of(seconds: Sequence[float], places: Sequence[int]) -> list[Tier]:
    """The tiers of the cases of a test, by their times and their places in the grid."""
    is_on_diagonal = [place % 2 == 0 for place in places]
    is_noticed = [NOTICED <= each < QUICK for each in seconds]
    is_dear = [each >= QUICK for each in seconds]
    tiers = []
    for each, on_diagonal, noticed, dear in zip(seconds, is_on_diagonal, is_noticed, is_dear, strict=True):
        is_plain = each < QUICK and (not noticed or on_diagonal or sum(is_noticed) <= FEW)
        is_of_all = not dear or on_diagonal or sum(is_dear) <= FEW
        tiers.append(Tier.PLAIN if is_plain else Tier.ALL if is_of_all else Tier.NIGHTLY)
    cheapest = min(seconds)
    if cheapest < AT_MOST:
        tiers[seconds.index(cheapest)] = Tier.PLAIN
    return tiers


def places_of(cases: Sequence[pytest.Item]) -> list[int]:
    """The sum of the places of each case in the lists of `parametrize`, which is the same on a diagonal."""
    lists: defaultdict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    places = []
    for case in cases:
        place = 0
        for mark in case.iter_markers("parametrize"):
            names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
            seen = lists[str(names)]
            place += seen.setdefault(tuple(id(case.callspec.params[name]) for name in names), len(seen))
        places.append(place)
    return places


def note_cases(items: Sequence[pytest.Item]) -> None:
    """Decide for each test in which runs it is."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.removeprefix("tests/").partition("[")[0]].append(item)
    for function, of_function in cases.items():
        known = seconds_of.get(function, [])[: len(of_function)]
        seconds = [*known, *[0.0] * (len(of_function) - len(known))]
        places = places_of(of_function)
        tiers = tiers_of(seconds, places)
        for number, (item, place, tier) in enumerate(zip(of_function, places, tiers, strict=True)):
            item.stash[CASE] = Case(function, number, place, tier)


@cache
def functions_in(path: Path) -> list[str]:
    """The names of the tests in a file."""
    return re.findall(r"(?m)^def (test_\w+)", path.read_text(encoding="utf-8"))


def seconds_of_cases(path: Path, function: str) -> list[float]:
    """What the cases of a test take, as far as they are known."""
    return seconds_of.get(f"{path.relative_to(TESTS).as_posix()}::{function}", [0.0])


def seconds_of_file(path: Path) -> float:
    """What its tests take."""
    return sum(sum(seconds_of_cases(path, function)) for function in functions_in(path))


def has_plain_tests(path: Path) -> bool:
    """Whether a plain run needs to import a file."""
    functions = functions_in(path)
    return not functions or any(min(seconds_of_cases(path, function)) < AT_MOST for function in functions)


def left_out(config: pytest.Config, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests that nobody has asked for."""
    if config.getoption("nightly") or (config.getoption("markexpr") and not config.getoption("all")):
        return []
    if config.getoption("all"):
        return [item for item in items if item.stash[CASE].tier is Tier.NIGHTLY]
    folder = config.invocation_params.dir
    named = {(folder / argument.partition("::")[0]).resolve() for argument in config.args}
    return [item for item in items if item.stash[CASE].tier > Tier.PLAIN and item.path.resolve() not in named]
