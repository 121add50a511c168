"""Where a unit's bytes are: the one state that decides whether anybody may read them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sp_lightning
from sp_lightning.pipeline.units.presence import Presence, Residency

ALLOWED = ["ABSENT COMING", "COMING READABLE", "COMING ABSENT", "READABLE ABSENT"]


@pytest.mark.parametrize("before", Residency)
@pytest.mark.parametrize("after", Residency)
def test_a_unit_becomes_readable_only_by_a_copy(before: Residency, after: Residency) -> None:
    """Any other transition is an error of the engine, which names the presence."""
    presence = Presence("blocks.1")
    presence.residency = before
    if f"{before.name} {after.name}" in ALLOWED:
        presence.become(after)
        assert presence.residency is after
    else:
        with pytest.raises(AssertionError, match=r"blocks.1"):
            presence.become(after)
    presence.abandon()
    assert presence.residency is Residency.ABSENT


def test_only_one_class_changes_residency() -> None:
    """So that each transition is asserted."""
    files = Path(sp_lightning.__file__).parent.rglob("*.py")
    writers = [file.name for file in files if re.search(r"\.residency = ", file.read_text(encoding="utf-8"))]
    assert writers == ["presence.py"]
