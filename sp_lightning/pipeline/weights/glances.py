"""A look at masters after a forward, and another before its backward: has anybody changed them past their versions?

`p.data.clamp_()` between the two is no error in plain training. Backward goes on with activations of the old weights,
and under autocast with the old weights themselves, which were cast. A unit that recomputes or whose weights are cast
before they are sent no longer has these, so it has to notice.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sp_lightning.pipeline._private import without_torch_function
from sp_lightning.pipeline.weights.device import Group


class Glances:
    """What the masters of some groups look like after a forward.

    Args:
        groups: The groups. One that an optimizer steps at either time is left out.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        with without_torch_function():
            self._seen = [(group, group.host.glance()) for group in groups if _is_final(group)]

    def differ(self) -> bool:
        """Tell whether masters look different now, although no change of them was counted."""
        with without_torch_function():
            seen = [(before, group.host.glance()) for group, before in self._seen if _is_final(group)]
        return any(
            now.versions == before.versions and not torch.equal(now.sample, before.sample) for before, now in seen
        )


def _is_final(group: Group) -> bool:
    return group.being_stepped is None or group.being_stepped.done
