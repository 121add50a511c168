"""The sums of a segment's gradients over the processes of a machine, which have them in one copy.

Gradients that come in one dtype, to masters of one dtype, are a *run*. Its elements have the same order on the device
and in the sums. Each process adds up one part of them, its *share*, which is the same part of both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.segment_gradients import Gradient, SegmentGradients
from sp_lightning.pipeline.weights.buffers import lay_out, tensor_in

_ALIGNMENT = 64  # elements; this aligns weights and shares in any dtype


class GradientRun:
    """Gradients of one dtype, to masters of one dtype, in one block of memory.

    Attributes:
        dtype: The dtype in which they are expected to come.
        sum_dtype: The dtype of their sums, which is the masters'.
        numel: The number of all elements; each process has an equal share of them.
        share: This process's share of the sums.
    """

    share: Tensor

    def __init__(self, gradients: Sequence[Gradient], processes: int) -> None:
        weight = gradients[0].weight
        self.dtype = gradients[0].expected_dtype
        self.sum_dtype = weight.dtype
        self._begins: dict[Gradient, int] = {}
        end = 0
        for gradient in gradients:
            self._begins[gradient] = end
            end += -(-gradient.weight.layout.numel() // _ALIGNMENT) * _ALIGNMENT
        self.numel = -(-end // (processes * _ALIGNMENT)) * processes * _ALIGNMENT

    def views(self, memory: Tensor, dtype: torch.dtype) -> dict[Gradient, Tensor]:
        """Return bytes of `memory` as one tensor for each gradient."""
        return {
            gradient: tensor_in(memory, begin * dtype.itemsize, gradient.weight.layout, dtype)
            for gradient, begin in self._begins.items()
        }


class SharedSums:
    """The sums of the gradients of a segment whose masters lie in shared memory.

    Attributes:
        memory: The memory of the sums.
        runs: The runs of the gradients.
        sum_of: The sum of each gradient.
        norms: The norm of each sum, where it was measured.
        brought_here: The gradients that this process has brought in this backward pass.
        brought_anywhere: The gradients that any process has brought.
        adds_to_earlier: Whether the next gradients are added to earlier sums.
        come_as_expected: Whether gradients of this pass come in the expected dtypes, in all processes.
    """

    # set as a pass of all processes begins
    adds_to_earlier: bool
    come_as_expected: bool

    def __init__(self, of_segment: SegmentGradients) -> None:
        gradients = of_segment.gradients
        masters = of_segment.segment.memory
        assert masters.shared is not None
        box = masters.shared.box
        alike: dict[tuple[torch.dtype, torch.dtype], list[Gradient]] = {}
        for gradient in gradients:
            dtypes = gradient.expected_dtype, gradient.weight.dtype
            alike.setdefault(dtypes, []).append(gradient)
        self.runs = [GradientRun(of_dtypes, box.count) for of_dtypes in alike.values()]
        sizes = [run.numel * run.sum_dtype.itemsize for run in self.runs]
        sizes.append(len(gradients) * torch.float32.itemsize)
        begins, nbytes = lay_out(sizes)
        # Its counters have, for each process, the last pass whose share has landed.
        memory = masters.get_companion("sums", nbytes, pin=True, together=True).shared
        assert memory is not None
        self.memory = memory
        spans = zip(begins, sizes, strict=True)
        *run_memories, norms = [memory.bytes[begin : begin + size] for begin, size in spans]
        self.sum_of: dict[Gradient, Tensor] = {}
        for run, run_memory in zip(self.runs, run_memories, strict=True):
            self.sum_of.update(run.views(run_memory, run.sum_dtype))
            run.share = run_memory.view(run.sum_dtype).view(box.count, -1)[box.rank]
        self.norms = dict(zip(gradients, norms.view(torch.float32).unbind(), strict=True))
        self.brought_here: list[Gradient] = []
        self.brought_anywhere: list[Gradient] = []

    # A pass of all processes has a number, which is the same in all.

    def land(self, number: int, measured: Collection[Gradient]) -> None:
        """Tell the others that this process's share has landed, and that the process no longer reads the masters.

        If it measures norms for all processes, it does so first.
        """
        for gradient in measured:
            self.norms[gradient].copy_(torch.linalg.vector_norm(self.sum_of[gradient]))
        self.memory.publish(number)

    def fail_unless_landed(self, number: int) -> None:
        """Note a failure if this process's share could not land: this process must not wait for the others' then."""
        box = self.memory.box
        if self.memory.counters[box.rank] < number:
            box.failure = RuntimeError(
                "The gradients of a unit could not be added up in this process. Another error of this "
                "process explains why."
            )
