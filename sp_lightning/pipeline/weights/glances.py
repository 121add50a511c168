"""A look at masters after a forward, and another before its backward: has anybody changed them past their versions?

`p.data.clamp_()` between the two is no error in plain training. Backward goes on with activations of the old weights,
and under autocast with the old weights themselves, which were cast. A unit that recomputes or whose weights are cast
before they are sent no longer has these, so it has to notice.
"""

from __future__ import annotations

from collections.abc import Iterable

from sp_lightning.pipeline._private import without_torch_function
from sp_lightning.pipeline.weights.device import Group
from sp_lightning.pipeline.weights.units import Member
from sp_lightning.pipeline.weights.weight import Weight


class Glances:
    """What the masters that a member computes with look like after a forward.

    Args:
        member: The member.
        groups: The groups to look at. One that an optimizer steps at either time is left out.
    """

    def __init__(self, member: Member, groups: Iterable[Group]) -> None:
        self._member = member
        with without_torch_function():
            self._seen = [(group, group.host.glance()) for group in groups if _is_final(group)]

    def differ(self) -> bool:
        """Tell whether masters look different now, although no change of them was counted."""
        with without_torch_function():
            final = [(group, before) for group, before in self._seen if _is_final(group)]
            changed = set[Weight]().union(*(group.host.changed_past_versions(before) for group, before in final))
        # others that travel with them may change: an average of weights does, between forward and backward
        return any(entry.weight in changed for entry in self._member.entries)


def _is_final(group: Group) -> bool:
    return group.being_stepped is None or group.being_stepped.done
