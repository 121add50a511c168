"""Which tests a plain `pytest` runs: each promise once, in seven minutes on two cores. `--all` runs the others, too.

A test that takes long has one of the marks below, by its file or by a decorator. A plain run leaves marked tests out,
unless somebody asks for them: by `-m`, by `--all`, or by naming their file. Of a grid with `one_in(3)` it runs every
third case: those on the diagonals, so that each value is there with some others.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

MARKS = {
    "bench": "trains the rivals of the bench, and draws its report",
    "compile": "compiles blocks",
    "processes": "starts several processes that train together",
    "recipes": "trains a recipe of examples/",
    "second_device": "runs on the CUDA runtime that is made for tests",
    "slow": "takes long, or shows again what a shorter test shows",
}
"""What pyproject.toml says, too; the tests compare the two."""

FILES = {
    "bench": ("test_benchmarks.py", "test_benchmark_systems.py"),
    "compile": ("test_compile.py",),
    "processes": (
        "pipeline/gradients/test_processes.py", "pipeline/weights/test_buffers.py", "test_exact_random_processes.py",
        "test_fabric_processes.py", "test_one_copy.py", "test_processes.py",
    ),
    "recipes": (
        "test_examples.py", "test_finetune_chat.py", "test_finetune_diffusion.py", "test_finetune_preferences.py",
        "test_long_runs.py", "test_pretrain.py",
    ),
    "second_device": ("test_second_device.py",),
    "slow": ("test_distribution.py", "test_loading.py"),
}  # fmt: skip

ONE_OF_EACH = (
    "pipeline/gradients/test_processes.py::test_single_things",
    "test_compile.py::test_training_is_exact[compile=True",
    "test_examples.py::test_recipes_refuse",
    "test_examples.py::test_scripts_can_be_imported",
    "test_processes.py::test_other_numbers_of_processes_are_refused",
    "test_processes.py::test_slurm_tasks_that_the_trainer_does_not_ask_for",
)
"""Of the files above, what shows their promise in a few seconds."""


is_short = False
"""Whether this is a plain run of all files, which draws fewer programs; set before a test file is imported."""


def draws(count: int) -> int:
    """Return how many random programs to draw: a fifth in a plain run, all where their file or `--all` is asked for."""
    return count // 5 if is_short else count


def is_plain_run(config: pytest.Config) -> bool:
    """Whether nobody has asked for particular tests, or for all of them."""
    asked = config.getoption("all") or config.getoption("markexpr")
    return not asked and not any(argument.partition("::")[0].endswith(".py") for argument in config.args)


def mark(item: pytest.Item) -> None:
    """Give a test the marks of its file."""
    where = item.nodeid.removeprefix("tests/")
    if where.startswith(ONE_OF_EACH):
        return
    for name, files in FILES.items():
        if where.partition("::")[0] in files:
            item.add_marker(name)


def thin_out(items: list[pytest.Item]) -> None:
    """Mark as slow the cases of grids with `one_in` whose places in the lists of `parametrize` do not add up to it."""
    lists: defaultdict[tuple[str, str], dict[tuple[int, ...], int]] = defaultdict(dict)
    for item in items:
        grid = item.get_closest_marker("one_in")
        if grid is None:
            continue
        place = 0
        for parametrize in item.iter_markers("parametrize"):
            names = parametrize.args[0]
            values = [item.callspec.params[name] for name in (names.split(", ") if isinstance(names, str) else names)]
            seen = lists[item.nodeid.partition("[")[0], str(names)]
            place += seen.setdefault(tuple(map(id, values)), len(seen))
        if place % grid.args[0]:
            item.add_marker("slow")


def is_plain(item: pytest.Item) -> bool:
    """Whether a plain run has it."""
    return MARKS.keys().isdisjoint(mark.name for mark in item.iter_markers())


def left_out(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that nobody has asked for."""
    if config.getoption("all") or config.getoption("markexpr"):
        return []
    folder = config.invocation_params.dir
    named = {(folder / argument.partition("::")[0]).resolve() for argument in config.args}
    return [item for item in items if not is_plain(item) and item.path.resolve() not in named]
