"""Units are those that have been looked at: a change of the finder shows what it does to each kind of model."""

from __future__ import annotations

from difflib import unified_diff

import pytest
import transformers

from .golden import FAMILIES, FILE, described

HOW = "\nIf that is better, or as good, run `python -m tests.pipeline.units.golden`."


@pytest.mark.parametrize("family", FAMILIES)
def test_units_are_those_of_the_golden_file(family: str) -> None:
    """Their names, sizes and members, and what is resident."""
    if family != "that `plan` knows" and transformers.__version__ < "5":
        pytest.skip("version 4 has other names for parts of models")
    before = dict(zip(FAMILIES, FILE.read_text(encoding="utf-8").split("\n\n\n"), strict=True))[family]
    lines = unified_diff(before.splitlines(), described(family).splitlines(), "golden_units.txt", "now", lineterm="")
    difference = "\n".join(lines)
    assert not difference, difference + HOW
