"""A plain `pytest` leaves out what takes long, keeps a test of each promise, and runs whatever somebody asks for."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from .selection import AT_MOST, CASE, TESTS, Case, Tier, functions_in, left_out, seconds_of_cases, tiers_of
from .times import Times


@pytest.mark.parametrize(
    ("seconds", "plain"),
    [
        ([0.0], [0]),
        ([0.2], [0]),
        ([0.9], [0]),
        ([1.1], []),
        ([0.9, 0.6, 3.0], [1]),
        ([1.1, 1.2], []),
        ([0.2, 0.3, 0.0, 9.0], [0, 2]),
        ([0.2, 0.2, 0.2, 0.2], [0, 1, 2, 3]),
        ([0.1, 0.2, 0.1, 0.1, 0.1, 0.0], [0, 2, 4, 5]),
        ([0.2, 0.1, 0.2, 0.2, 0.2, 0.6], [0, 1, 2, 4]),  # the cheapest, wherever it is
    ],
)
def test_the_rule(seconds: list[float], plain: list[int]):
    tiers = tiers_of(seconds, range(len(seconds)))
    assert [number for number, tier in enumerate(tiers) if tier is Tier.PLAIN] == plain
    assert Tier.NIGHTLY not in tiers


def test_of_many_that_take_long_half_run_at_night_alone():
    plain, of_all, nightly = Tier
    seconds = [0.9, 0.5, 0.4, 0.8, 0.7, 0.0, 0.6]
    assert tiers_of(seconds, range(7)) == [of_all, nightly, of_all, nightly, of_all, plain, of_all]
    assert tiers_of(seconds[:4], range(4)) == [of_all, of_all, plain, of_all]


@pytest.mark.parametrize("letter", "abcd")
@pytest.mark.parametrize(("number", "name"), [(1, "one"), (2, "two"), (3, "three")])
def test_half_of_a_grid_has_each_value(letter: str, number: int, name: str, request: pytest.FixtureRequest):
    """This is one, of which nine cases are on the diagonals; a new test without measured times runs whole."""
    assert request.node.stash[CASE].tier is Tier.PLAIN
    assert request.node.stash[CASE].place == "abcd".index(letter) + number - 1


MANY = ["tests/pipeline", "tests/test_overlap.py"]


@pytest.mark.parametrize(
    ("arguments", "asked_by", "last"),
    [
        *((arguments, {}, Tier.PLAIN) for arguments in (["tests"], MANY)),
        (["tests"], {"all": True}, Tier.ALL),
        (MANY, {"all": True}, Tier.ALL),
        (["tests"], {"nightly": True}, Tier.NIGHTLY),
        (["tests"], {"nightly": True, "all": True}, Tier.NIGHTLY),
        (["tests"], {"markexpr": "gpu"}, Tier.NIGHTLY),
        (["tests/test_overlap.py", "tests/test_compile.py"], {}, Tier.NIGHTLY),
        (["tests/test_compile.py::test_lightning"], {}, Tier.NIGHTLY),
        ([str(TESTS / "test_compile.py")], {}, Tier.NIGHTLY),
    ],
)
def test_who_asks_for_a_test_gets_it(arguments: list[str], asked_by: dict[str, object], last: Tier):
    """A plain run leaves out what takes long; here those of a file, which may be named."""
    options = {"all": False, "markexpr": "", "nightly": False, **asked_by}
    config = SimpleNamespace(getoption=options.get, args=arguments, invocation_params=SimpleNamespace(dir=TESTS.parent))
    items = [SimpleNamespace(path=TESTS / "test_compile.py", stash={CASE: Case("", 0, 0, tier)}) for tier in Tier]
    out = left_out(config, items)
    assert [item.stash[CASE].tier for item in items if item not in out] == [tier for tier in Tier if tier <= last]


def named_tests(name: str) -> list[tuple[Path, str]]:
    """What the map of promises names: a test, those of a file, or those of a folder."""
    file, _, test = name.removeprefix("tests/").partition("::")
    named = [path for path in TESTS.rglob("*") if path.with_suffix("").as_posix().endswith(f"/{file}")]
    files = [path for place in named for path in (place.rglob("test_*.py") if place.is_dir() else [place])]
    pattern = test.replace("*", ".*")
    found = [(path, function) for path in files for function in functions_in(path) if re.match(pattern, function)]
    assert found, f"{name} is not there"
    return found


def plain_tests(name: str) -> list[str]:
    on_host = [(path, function) for path, function in named_tests(name) if path.parent.name != "gpu"]
    return [function for path, function in on_host if min(seconds_of_cases(path, function)) < AT_MOST]


def needs_much(name: str) -> bool:
    """Whether it needs a device, or several processes."""
    signs = ("pytest.mark.gpu", "second_device.build import", "in_processes(")
    return any(sign in path.read_text(encoding="utf-8") for path, _ in named_tests(name) for sign in signs)


def promises() -> list[tuple[str, list[str]]]:
    """The rows of the map, and what they name."""
    rows = (TESTS / "README.md").read_text(encoding="utf-8").partition("| promise |")[2].splitlines()[2:]
    cells = [row.split(" | ") for row in rows if row.startswith("|")]
    return [
        (promise, re.findall(r"`([\w/]*test[\w/]*(?:::\w+\*?)?|pipeline/optimizer)`", shown_by))
        for promise, shown_by in cells
    ]


def test_each_promise_has_a_plain_test():
    """And so has each place that the map names, unless it needs a device or several processes."""
    assert len(promises()) > 15
    for promise, names in promises():
        without = [name for name in names if not plain_tests(name)]
        assert len(without) < len(names), promise
        assert all(map(needs_much, without)), without


def test_a_plain_run_is_most_of_the_suite(request: pytest.FixtureRequest):
    """Where the whole suite was collected."""
    items = request.session.items
    if not request.config.getoption("all") or {item.path for item in items} < {*TESTS.rglob("test_*.py")}:
        pytest.skip("not all tests were collected")
    assert sum(item.stash[CASE].tier is Tier.PLAIN and not item.get_closest_marker("gpu") for item in items) >= 1_800


def test_a_budget_fails_the_run_and_names_the_dearest():
    """The CPU seconds of tests that are not plain do not count."""
    options = {"budget": 3, "write_times": False}
    times = Times(SimpleNamespace(getoption=options.get))
    said: list[str] = []
    reporter = SimpleNamespace(section=said.append, line=said.append)
    for function, seconds, tier, says in [
        ("dear", 2, Tier.PLAIN, ""),
        ("long", 9, Tier.ALL, ""),
        ("cheap", 1.5, Tier.PLAIN, "   2.0 s  dear, case 1\n   1.5 s  cheap, case 1"),
    ]:
        times.pytest_runtest_logreport(
            SimpleNamespace(case=tuple(Case(function, 0, 0, tier)), seconds=seconds, shared=0, skipped=False)
        )
        session = SimpleNamespace(exitstatus=0)
        times.pytest_sessionfinish(session)
        said.clear()
        times.pytest_terminal_summary(reporter)
        assert bool(session.exitstatus) == bool(says)
        assert "\n".join(said).endswith(says)
        assert ("dear, case" in "\n".join(said)) == bool(says)
