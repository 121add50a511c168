"""What the members of a unit can do, as ways of the unit."""

from __future__ import annotations

from torch import nn

from sp_lightning.pipeline.activations.ways import Way
from sp_lightning.pipeline.weights.units import Member, Unit
from sp_lightning.planning.measure import _ways_of

KEEP = Way("keep", 50, 60, 0.0)
RECOMPUTE = Way("recompute", 20, 60, 2.0, repeating=2.0)
OFFLOAD = Way("offload", 10, 60, 1.0, leaving=40, under_way=40)
BOTH = Way("recompute_offload", 5, 60, 2.5, leaving=15, under_way=15, repeating=2.0)


def test_each_member_follows_its_unit_as_far_as_it_can() -> None:
    """The second has inputs too small to leave, the third cannot run again, and the last saves too little to leave."""
    unit = Unit("stage")
    for name in ("first", "second", "third", "last"):
        unit.members.append(Member(name, nn.Identity(), unit))
    ways = {
        "first": [KEEP, RECOMPUTE, OFFLOAD, BOTH],
        "second": [KEEP, RECOMPUTE],
        "third": [KEEP, OFFLOAD],
        "last": [KEEP],
    }
    together = {way.policy: way for way in _ways_of(unit, ways)}
    assert list(together) == ["keep", "recompute", "offload", "recompute_offload"]
    both = together["recompute_offload"]
    assert (both.held, both.leaving, both.under_way) == (5 + 20 + 10 + 50, 15 + 40, 0)
    assert (both.seconds, both.repeating) == (2.5 + 2.0 + 1.0, 2.0 + 2.0)
    assert both.working == 5 + 20 + 10 + 40 + 60, "of the last, while the third's leaves"
    assert (together["offload"].repeating, together["recompute"].repeating) == (0.0, 4.0)
