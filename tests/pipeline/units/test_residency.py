"""Where a unit's bytes are: the one state that decides whether anybody may read them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sp_lightning
from sp_lightning.pipeline.units.unit import Residency, Unit

ALLOWED = ["ABSENT COMING", "COMING READABLE", "COMING ABSENT", "READABLE ABSENT"]


@pytest.mark.parametrize("before", Residency)
@pytest.mark.parametrize("after", Residency)
def test_a_unit_becomes_readable_only_by_a_copy(before: Residency, after: Residency) -> None:
    """Any other transition is an error of the engine, which names the unit."""
    unit = Unit("blocks.1")
    unit.residency = before
    if f"{before.name} {after.name}" in ALLOWED:
        unit.become(after)
        assert unit.residency is after
    else:
        with pytest.raises(AssertionError, match=r"blocks.1"):
            unit.become(after)
    unit.abandon()
    assert unit.residency is Residency.ABSENT


def test_only_a_unit_changes_its_residency() -> None:
    """So that each transition is asserted."""
    files = Path(sp_lightning.__file__).parent.rglob("*.py")
    writers = [file.name for file in files if re.search(r"\.residency = ", file.read_text(encoding="utf-8"))]
    assert writers == ["unit.py"]
