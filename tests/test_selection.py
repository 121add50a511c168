"""A plain `pytest` leaves out what takes long, keeps a test of each promise, and runs whatever somebody asks for."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from .selection import FILES, MARKS, ONE_OF_EACH, TESTS, is_plain, left_out

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_marks_are_declared():
    pytest_options = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    declared = dict(line.split(": ", 1) for line in pytest_options["markers"])
    assert {name: text for name, text in declared.items() if name in MARKS} == MARKS
    assert declared.keys() - MARKS == {"gpu", "one_in(count)"}


def test_files_and_tests_exist():
    assert not [file for files in FILES.values() for file in files if not (TESTS / file).is_file()]
    for test in ONE_OF_EACH:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (TESTS / file).read_text(encoding="utf-8")
        assert any(file in files for files in FILES.values())


def runs(arguments: list[str], marks: str | None, markexpr: str = "", everything: bool = False) -> bool:
    """Whether a test of tests/test_compile.py that has a mark, or none, runs."""
    options = {"all": everything, "markexpr": markexpr}
    config = SimpleNamespace(getoption=options.get, args=arguments, invocation_params=SimpleNamespace(dir=TESTS.parent))
    its_marks = [pytest.mark.parametrize.mark, SimpleNamespace(name=marks)]
    item = SimpleNamespace(path=TESTS / "test_compile.py", iter_markers=lambda: its_marks)
    return not left_out(config, [item])


@pytest.mark.parametrize("arguments", [["tests"], ["tests/pipeline", "tests/test_overlap.py"]])
def test_a_plain_run_leaves_marked_tests_out(arguments: list[str]):
    assert runs(arguments, None)
    assert not any(runs(arguments, name) for name in MARKS)


@pytest.mark.parametrize(
    ("arguments", "asked_by"),
    [
        (["tests"], {"everything": True}),
        (["tests"], {"markexpr": "compile"}),
        (["tests/test_overlap.py", "tests/test_compile.py"], {}),
        (["tests/test_compile.py::test_lightning"], {}),
        ([str(TESTS / "test_compile.py")], {}),
    ],
)
def test_who_asks_for_a_test_gets_it(arguments: list[str], asked_by: dict[str, object]):
    assert runs(arguments, "compile", **asked_by)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("letter", "abcd")
@pytest.mark.parametrize(("number", "name"), [(1, "one"), (2, "two"), (3, "three")])
def test_a_plain_run_has_a_third_of_a_grid(letter: str, number: int, name: str, request: pytest.FixtureRequest):
    """This is one: each letter is there, and each number."""
    is_on_diagonal = ("abcd".index(letter) + number - 1) % 3 == 0
    assert is_plain(request.node) is is_on_diagonal


def test_each_value_of_a_grid_is_in_a_plain_run(request: pytest.FixtureRequest):
    """Where all cases of a grid were collected."""
    shown: dict[bool, set[tuple[str, str, int]]] = {True: set(), False: set()}
    for item in request.session.items:
        if item.get_closest_marker("one_in") and len([*item.iter_markers("parametrize")]) > 1:
            test = item.nodeid.partition("[")[0]
            shown[is_plain(item)] |= {(test, name, id(value)) for name, value in item.callspec.params.items()}
    assert shown[True]
    assert not shown[False] - shown[True]


def is_plain_by_name(name: str) -> bool:
    """Whether a plain run has something of what the map of promises names."""
    file, _, test = name.partition("::")
    found = [path for path in TESTS.rglob("*") if path.with_suffix("").as_posix().endswith(f"/{file}")]
    assert found, f"{name} is not there"
    marked = {TESTS / path for paths in FILES.values() for path in paths}
    kept = {TESTS / path.partition("::")[0] for path in ONE_OF_EACH if test.strip("*") in path}
    return any(path not in marked or path in kept for path in found)


def test_each_promise_has_a_plain_test():
    """Those that need several processes or another device say that `--all` shows them."""
    table = (TESTS / "README.md").read_text(encoding="utf-8").partition("| promise |")[2]
    rows = [row for row in table.splitlines()[2:] if row.startswith("|")]
    assert len(rows) > 15
    for row in rows:
        names = re.findall(r"`([\w/]*test[\w/]*(?:::\w+\*?)?|pipeline/optimizer)`", row.partition("|")[2])
        assert names, row
        assert any(is_plain_by_name(name.removeprefix("tests/")) for name in names) or "`--all`" in row, row


def test_a_plain_run_is_most_of_the_suite(request: pytest.FixtureRequest):
    """Where the whole suite was collected."""
    items = request.session.items
    if not request.config.getoption("all") or {item.path for item in items} < {*TESTS.rglob("test_*.py")}:
        pytest.skip("not all tests were collected")
    assert sum(is_plain(item) and not item.get_closest_marker("gpu") for item in items) >= 2_300


def test_each_file_has_one_kind_of_mark():
    everything = [Path(file) for files in FILES.values() for file in files]
    assert len(everything) == len(set(everything))
