"""Access to masters: it waits for steps and copies under way, and writes a forward's changes back to the masters.

[Note: while copies read the masters]
Computing waits for a copy to the device, but the host goes on: when a forward returns, copies that it has asked for may
not have begun. Until such a copy is done, no code may write to the memory that it reads. Steps come after it, any other
writer waits for it, and guards stay until then.

[Note: writes on the device]
A forward may write to its weights (`nn.Embedding(max_norm=...)`). So may a checkpoint within it that backward runs
again, a hook, and code outside of units through a view. The masters get these writes when the device's copy is to be
discarded, when the step ends, or when other code looks at the masters.

[Note: writes that torch does not count]
Some operations write without a new version: `F.batch_norm` its running statistics, numpy, fused optimizers. So the
first uses of a unit compare fingerprints of its bytes, before a call and after it, in training mode and in evaluation
mode. A weight that changes unseen is compared with its master whenever other weights are asked for their version.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.operations import untracked
from sp_lightning.pipeline.processes.box import written_by_follower
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.units.unit import Residency, Unit
from sp_lightning.pipeline.weights.buffers import as_bytes
from sp_lightning.pipeline.weights.weight import Weight


class MasterAccess:
    """Waits for work that uses masters, and writes changes of weights on the device back to them.

    Attributes:
        units: All units, the resident one, and weights that were made resident.
    """

    def __init__(self, units: Sequence[Unit], backend: Backend, stats: Stats) -> None:
        self.units = units
        self.backend = backend
        self.stats = stats

    def finish_optimizer(self, unit: Unit) -> None:
        """Wait until the optimizer is done with the unit's masters; an error of its step is raised here."""
        work = unit.update.ticket
        if work is None:
            return
        if not work.done:
            self.stats.optimizer_waits += 1
        try:
            if unit.update.pending_visit is not None:
                unit.update.pending_visit.begin(in_place=False)
            self.backend.trace.join(work, "optimizer")
        except Exception:
            warnings.warn(
                f"superpipeline: the update of {unit.name!r} has failed. Some weights may have taken this "
                "step, and others not. Continue from a checkpoint.",
                stacklevel=2,
            )
            raise
        finally:
            if work.done:  # an interrupt may have ended the wait
                unit.update.ticket = None

    def copies_of(self, units: Iterable[Unit]) -> list[Ticket]:
        """Return the tickets of copies to the device that may still read these units' masters."""
        # Weights that were made resident have copies of their own.
        return [
            ticket
            for unit in units
            for reader in (unit, *unit.split_off)
            for ticket in reader.presence.uploads
            if not ticket.done
        ]

    def finish_copies(self, units: Iterable[Unit]) -> None:
        """Wait until no copy reads these units' masters: code may be about to write to them."""
        copies = self.copies_of(units)
        if copies:
            self.stats.host_syncs += 1
        for ticket in copies:
            ticket.join()

    def is_being_stepped(self, unit: Unit) -> bool:
        """Tell whether an optimizer is still at work on the unit's masters; an error of its step is raised here."""
        if unit.update.ticket is not None and unit.update.ticket.done:
            self.finish_optimizer(unit)
        return unit.update.ticket is not None

    # ------------------------------------------------------------------------------------- what the device has written

    def write_back_all(self) -> None:
        """Write all weights back that were changed on the device."""
        for unit in self.units:
            if unit.presence.residency is Residency.READABLE:
                self.write_back(unit.weights)

    def write_back(self, weights: Iterable[Weight]) -> None:
        """Copy weights that were changed on the device to their masters."""
        for weight in weights:
            twin = weight.twin
            is_readable = twin.unit.presence.residency is Residency.READABLE
            if twin.unit.presence.fingerprint is not None:
                self.find_unseen_writes(twin.unit)
            if not (twin.is_touched() or (weight.changes_unseen and is_readable)):
                continue
            if not is_readable:
                raise RuntimeError(
                    f"Weight {weight.name!r} was changed in backward after the optimizer had "
                    "updated it there. In plain training, the change would come first. Train with "
                    "`overlap_optimizer=False`."
                )
            self._write_to_master(weight)

    def find_unseen_writes(self, unit: Unit) -> None:
        """Compare a watched unit with its fingerprint, and write changes back that torch has not counted."""
        is_readable = unit.presence.residency is Residency.READABLE
        if is_readable and self.backend.device.type != "cpu":
            self.stats.host_syncs += 1
        if not (unit.presence.has_changed(goes_on=unit.users > 0) and is_readable):
            return
        for segment in unit.segments:
            for weight in segment.weights:
                if weight.twin.unit is unit and not (weight.lowered or weight.twin.is_touched()):
                    weight.changes_unseen |= self._write_to_master(weight)

    def _write_to_master(self, weight: Weight) -> bool:
        """Copy a weight to its master, and tell whether that has changed."""
        twin = weight.twin
        with untracked():
            arrived = torch.empty_like(weight.current_memory, dtype=weight.compute_dtype)
            self.backend.download(as_bytes(arrived), as_bytes(twin.data)).join()
            self.finish_optimizer(weight.unit)
            self.stats.host_syncs += 1
            # A write may leave the values as they were: clamping often does.
            if torch.equal(as_bytes(arrived), as_bytes(weight.current_memory.to(arrived.dtype))):
                twin.note_unchanged()
                return False
            assert not weight.lowered, "what writes to a weight gets it as it is"
            if weight.unit.is_stepped_elsewhere:
                raise written_by_follower(weight.name)
            weight.write_to_master(arrived)
        twin.note_unchanged()
        twin.write_backs += 1
        self.stats.write_backs += 1
        # Otherwise a change of another weight, which is not found yet, would count as checked.
        if not twin.unit.presence.suspect:
            for segment in twin.unit.segments:
                if not segment.sends_copies:
                    segment.note_written_back()
        return True
