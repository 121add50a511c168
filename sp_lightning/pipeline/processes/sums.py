"""The sums of a segment's gradients over the processes of a machine, which have them in one copy.

Gradients that come in one dtype, to masters of one dtype, are a *run*. Its elements lie in one order on the device and
in the sums, and the same part of both is the *share* of each process, which adds it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.processes.box import Reached
from sp_lightning.pipeline.weights.buffers import HostBuffer, lay_out, tensor_in
from sp_lightning.pipeline.weights.weight import Weight

_ALIGNMENT = 64  # elements: so weights and shares are aligned in any dtype


class Run:
    """Gradients that lie one behind the other.

    Attributes:
        weights: Whose they are.
        dtype: The dtype in which they come.
        sum_dtype: The dtype of their sums, which is the masters'.
        numel: Elements in all, which all processes have equal shares of.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        dtype: torch.dtype,
        sum_dtype: torch.dtype,
        processes: int,
    ) -> None:
        self.weights = weights
        self.dtype = dtype
        self.sum_dtype = sum_dtype
        self._offsets: list[int] = []
        end = 0
        for weight in weights:
            self._offsets.append(end)
            end += -(-weight.layout.numel() // _ALIGNMENT) * _ALIGNMENT
        self.numel = -(-end // (processes * _ALIGNMENT)) * processes * _ALIGNMENT

    def views(self, memory: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Return bytes of `memory` as one tensor for each weight."""
        lying = zip(self.weights, self._offsets, strict=True)
        size = dtype.itemsize
        return [tensor_in(memory, begin * size, weight.layout, dtype) for weight, begin in lying]


class SharedSums:
    """The sums of the gradients of weights whose masters lie together in shared memory.

    Attributes:
        runs: The runs that their gradients come in.
        places: The sum of each weight.
        index: The number of each weight.
        norms: The norm of each, where it was measured.
        present: The numbers of the weights that any process has brought a gradient of.
        is_held: Whether the next gradients are added to what is there.
    """

    def __init__(self, weights: Sequence[Weight], masters: HostBuffer) -> None:
        assert masters.shared is not None
        self.box = masters.shared.box
        alike: dict[tuple[torch.dtype, torch.dtype], list[Weight]] = {}
        for weight in weights:
            alike.setdefault((weight.compute_dtype, weight.dtype), []).append(weight)
        self.runs = [Run(each, *dtypes, self.box.count) for dtypes, each in alike.items()]
        sizes = [run.numel * run.sum_dtype.itemsize for run in self.runs]
        norms = torch.empty(len(weights), device="meta")
        landed = torch.empty(self.box.count, device="meta")
        offsets, nbytes = lay_out([*sizes, norms.nbytes, self.box.count * torch.int64.itemsize])
        memory = masters.get_beside("sums", nbytes, pin=True, together=True)
        assert memory.shared is not None
        self._memory = memory.shared
        *begins, norms_at, landed_at = offsets
        self.norms = tensor_in(memory.bytes, norms_at, norms, torch.float32)
        # the last pass whose share each process has there
        self._landed = tensor_in(memory.bytes, landed_at, landed, torch.int64)
        lying = zip(begins, sizes, strict=True)
        self._of_runs = [memory.bytes[begin:][:size] for begin, size in lying]
        places: dict[Weight, Tensor] = {}
        for run, own in zip(self.runs, self._of_runs, strict=True):
            places.update(zip(run.weights, run.views(own, run.sum_dtype), strict=True))
        self.places = [places[weight] for weight in weights]
        self.index = {weight: number for number, weight in enumerate(weights)}
        self.present: set[int] = set()
        self.is_held = False

    def share(self, run: Run) -> Tensor:
        """Return this process's share of the sums of a run."""
        sums = self._of_runs[self.runs.index(run)].view(run.sum_dtype)
        return sums.view(self.box.count, -1)[self.box.rank]

    # Each segment's gradients are exchanged equally often in all processes, which count that.

    def begin(self) -> None:
        """Begin to exchange gradients once more."""
        self._memory.generation += 1

    @property
    def number(self) -> int:
        """How many times gradients were exchanged."""
        return self._memory.generation

    def land(self, number: int) -> None:
        """Tell the others that this process's share has landed, and that it reads none of the masters any more."""
        self._landed[self.box.rank] = number

    def fail_unless_landed(self, number: int) -> None:
        """Have nobody here wait for the shares of all if this process's could not land."""
        if self._landed[self.box.rank] < number:
            self.box.failure = RuntimeError(
                "The gradients of a unit could not be added up in this process. Whoever waits for "
                "them here is told why: see that error."
            )

    def complete(self) -> Ticket:
        """Return a ticket that is done when the shares of all have landed."""
        return Reached(self.box, self._landed, self.number)

    def measure_norms(self, number: int, present: Iterable[int]) -> None:
        """Measure norms, once for all processes."""
        for index in present:
            self.norms[index] = torch.linalg.vector_norm(self.places[index])
        self._memory.reach(number)

    def measured(self) -> Ticket:
        """Return a ticket that is done when norms were measured."""
        return self._memory.reached(self.number)
