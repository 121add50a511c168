"""Units are those that have been looked at: a change of the finder shows what it does to each kind of model."""

from __future__ import annotations

from difflib import unified_diff

import pytest
import transformers

from .golden import FAMILIES, FILE, described

HOW = "\nIf that is better, or as good, run `python -m tests.pipeline.units.golden`."


needs_its_names = pytest.mark.skipif(
    transformers.__version__ < "5", reason="version 4 has other names for parts of models"
)


def assert_as_before(family: str) -> None:
    """Their names, sizes and members, and what is resident."""
    before = dict(zip(FAMILIES, FILE.read_text(encoding="utf-8").split("\n\n\n"), strict=True))[family]
    lines = unified_diff(before.splitlines(), described(family).splitlines(), "golden_units.txt", "now", lineterm="")
    difference = "\n".join(lines)
    assert not difference, difference + HOW


@needs_its_names
def test_units_of_the_zoo() -> None:
    assert_as_before("of the zoo")


@needs_its_names
def test_units_of_models_in_full_size() -> None:
    assert_as_before("in full size")


def test_units_of_models_that_plan_knows() -> None:
    assert_as_before("that `plan` knows")
