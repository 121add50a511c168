"""Weights that are written to on the device: their values go to the masters, which hold the authoritative ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.buffers import as_bytes
from sp_lightning.pipeline.weights.group import Group
from sp_lightning.pipeline.weights.guard import EngineAtWork
from sp_lightning.pipeline.weights.weight import Twin, Weight


class WriteBack:
    """Copies what is written to weights on the device back to the host.

    Attributes:
        served: Weights that code outside of units has used in this step, and may have written to.
    """

    def __init__(self, backend: Backend, stats: Stats, at_work: EngineAtWork) -> None:
        self._backend = backend
        self._stats = stats
        self._at_work = at_work
        self.served: set[Weight] = set()
        self._written: set[Weight] = set()

    def write_served(self) -> None:
        """Write back what code outside of units has written to weights through views of them (`w[0].zero_()`)."""
        with self._at_work:
            self.write(self.served)

    def end_step(self) -> None:
        """Write back the same at the end of a step: the next one may not use these weights."""
        try:
            self.write_served()
        finally:
            self.served.clear()

    def write_again(self) -> None:
        """Write back what a checkpoint within a unit writes to weights when backward runs it again."""
        if self._written:
            with self._at_work:
                self.write(self._written)

    def write_in_backward(self, weights: Sequence[Weight]) -> None:
        """Write back what hooks on modules' backward have written to these weights.

        Raises:
            RuntimeError: One was written to after the optimizer had stepped it in this backward.
        """
        touched = _touched(weights)
        for twin in touched:
            if not twin.group.readable:
                raise RuntimeError(
                    f"Weight {twin.weight.name!r} was changed in backward after the optimizer had stepped it there, "
                    "which this change should have preceded. Train with `overlap_optimizer=False`."
                )
        self._write_back(touched)

    def before_discard(self, group: Group) -> None:
        """Write back what was written to a group on the device, where its weights are about to be discarded."""
        self.write([weight for weight in group.weights if weight.twin.group is group])

    def write(self, weights: Iterable[Weight]) -> None:
        """Copy weights that were written to on the device to the masters, which hold the authoritative values."""
        self._write_back(_touched(weights))

    def _write_back(self, touched: Iterable[Twin]) -> None:
        for twin in touched:
            if not twin.group.readable:  # after an exception: its place holds something else
                twin.note_unchanged()
                continue
            self._written.add(twin.weight)
            self._copy(twin.weight)

    def _copy(self, weight: Weight) -> None:
        with torch.inference_mode(False), torch.no_grad():
            arrived = torch.empty_like(weight.host, dtype=weight.compute_dtype)
            self._backend.synchronize(self._backend.download(as_bytes(arrived), as_bytes(weight.twin.data)))
            weight.unit.group.finish_step(self._stats)
            self._stats.host_syncs += 1
            if torch.equal(as_bytes(arrived), as_bytes(weight.host.to(arrived.dtype))):  # clamped to where it was
                weight.twin.note_unchanged()
                return
            if weight.lowered:
                raise RuntimeError(
                    f"Weight {weight.name!r} is both cast by autocast and changed in place by a forward. Keep its "
                    "module out of autocast, or change the weight outside of the forward."
                )
            weight.overwrite(arrived)
        weight.twin.note_written_back()
        self._stats.write_backs += 1
        group = weight.twin.group
        if not group.suspect:  # else a change of another weight, which is still to be found, would look checked
            for segment in group.segments:
                if not segment.sends_copies:
                    segment.look_anew()


def _touched(weights: Iterable[Weight]) -> list[Twin]:
    """Return the twins of those weights that have been written to on the device since the last time."""
    with without_torch_function():
        twins = [weight.twin for weight in weights]
        return [twin for twin in twins if twin.is_touched]
