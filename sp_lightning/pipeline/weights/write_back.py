"""Weights that are written to on the device: their values go to the masters, which hold the authoritative ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import without_torch_function
from sp_lightning.pipeline.weights.buffers import as_bytes
from sp_lightning.pipeline.weights.weight import Weight


class WriteBack:
    """Copies what is written to weights on the device back to the host.

    A forward may write to its weights (`nn.Embedding(max_norm=...)`), so may a checkpoint within it that backward runs
    again, a hook, and code outside of units through a view. Nobody waits for that until the device's copy is to be
    discarded, the step ends, or somebody looks at the master.
    """

    def __init__(self, backend: Backend, stats: Stats) -> None:
        self._backend = backend
        self._stats = stats

    def write(self, weights: Iterable[Weight]) -> None:
        """Copy those of the weights that were written to on the device to their masters.

        Raises:
            RuntimeError: One was written to after the optimizer had stepped it in this backward.
        """
        with without_torch_function():
            touched = [weight for weight in weights if weight.twin.is_touched]
        for weight in touched:
            if not weight.twin.group.readable:
                raise RuntimeError(
                    f"Weight {weight.name!r} was changed in backward after the optimizer had stepped it there, "
                    "which this change should have preceded. Train with `overlap_optimizer=False`."
                )
            self._copy(weight)

    def _copy(self, weight: Weight) -> None:
        with torch.inference_mode(False), torch.no_grad(), without_torch_function():
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
