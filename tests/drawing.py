"""Tests with random programs, in parts: a plain run has one that is quick, `--all` a quarter, and `--nightly` all."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis.strategies import SearchStrategy

from .selection import parts

Test = Callable[..., None]


def random_programs(count: int, of: int, **programs: SearchStrategy[Any]) -> Callable[[Test], Test]:
    """Have a test run for random programs, in parts of so many. In CI, each part has the same ones in each run.

    Hypothesis begins each part with the simplest program, which is left to the first part.
    """

    def in_parts(test: Test) -> Test:
        def of_part(part: int) -> None:
            seen = 0

            @wraps(test)
            def but_the_simplest(**program: Any) -> None:
                nonlocal seen
                seen += 1
                if seen > 1 or part == 0:
                    test(**program)

            run = settings(max_examples=of + (part > 0), database=None)(given(**programs)(but_the_simplest))
            (seed(part)(run) if "CI" in os.environ else run)()

        of_part.__name__, of_part.__doc__ = test.__name__, test.__doc__
        return pytest.mark.parametrize("part", parts(count))(of_part)

    return in_parts
