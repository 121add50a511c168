"""The sums of a unit's gradients over the processes of a machine, which have them in one copy.

What each process has got is added in the order of their ranks, so the sums are the same in every run. A counter in the
memory tells whose turn it is. It has passed a process when that has added what a backward pass has brought, or when
its pass has ended: it may have got nothing. What lies there from earlier passes counts for the processes that have not
dropped it; the first one sees to that, whose turn comes first. When all have, as after a step, it is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sp_lightning.optim.passes import pieces
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.weights.buffers import HostBuffer, lay_out, tensor_in
from sp_lightning.pipeline.weights.weight import Weight


class SharedSums:
    """The sums of the gradients of weights whose masters lie together in shared memory."""

    def __init__(self, weights: Sequence[Weight], masters: HostBuffer, everyone: int) -> None:
        assert masters.shared is not None
        count = masters.shared.box.count
        with torch.device("meta"):
            present = torch.empty(len(weights), dtype=torch.bool)
            norms = torch.empty(len(weights), dtype=torch.float32)
            dropped = torch.empty(count, len(weights), dtype=torch.bool)
        like = [*(weight.host for weight in weights), present, norms, dropped]
        offsets, nbytes = lay_out([tensor.nbytes for tensor in like])
        memory = masters.get_beside("sums", nbytes, pin=False, together=True)
        assert memory.shared is not None
        self._memory = memory.shared
        self._everyone = everyone  # how many processes there are on all machines
        self.box = memory.shared.box
        tensors = []
        for offset, tensor in zip(offsets, like, strict=True):
            tensors.append(tensor_in(memory.bytes, offset, tensor, tensor.dtype))
        # the sums; which there are; their norms; which were dropped by each process since the last pass
        *self.places, self._present, self._norms, self._dropped = tensors
        self._places = set(map(id, self.places))
        self._begun = -1  # the last pass that has begun
        # the numbers of weights whose sums this process has dropped since then
        self._forgotten: list[int] = []
        self.names = [weight.name for weight in weights]
        self.index = {weight: number for number, weight in enumerate(weights)}
        # whether this process's turn in the present pass is over, or will be after its last job
        self.is_over = False

    def present(self) -> dict[Weight, tuple[Tensor, Tensor | None]]:
        """Return the sums that there are, each with its norm if that was measured."""
        sums: dict[Weight, tuple[Tensor, Tensor | None]] = {}
        are_present, are_unknown = self._present.tolist(), self._norms.isnan().tolist()
        for weight, number in self.index.items():
            if are_present[number]:
                norm = None if are_unknown[number] else self._norms[number]
                sums[weight] = self.places[number], norm
        return sums

    def has(self, gradient: Tensor) -> bool:
        """Tell whether a gradient is one of the sums, and not one that this process alone has."""
        return id(gradient) in self._places

    def turn(self) -> Ticket:
        """Return a ticket that is done when it is this process's turn in the present pass."""
        return self._memory.reached(self._memory.generation * self.box.count + self.box.rank)

    def complete(self) -> Ticket:
        """Return a ticket that is done when all processes have had their turn in the present pass."""
        return self._memory.reached((self._memory.generation + 1) * self.box.count)

    @property
    def is_partial(self) -> bool:
        """Whether the next pass is added to the sums; from one arrangement to the next."""
        return self._memory.is_partial

    def end_pass(self, is_partial: bool) -> None:
        """Note that the present pass has ended in this process, and its turn in it is over."""
        self._memory.generation += 1
        self._memory.is_partial = is_partial
        self.is_over = False

    def pass_on(self, number: int) -> None:
        """Let the next process have its turn in a pass."""
        self._memory.reach(number * self.box.count + self.box.rank + 1)

    @property
    def number(self) -> int:
        """The number of the present pass."""
        return self._memory.generation

    def forget(self, weight: Weight) -> None:
        """Note that this process has the sum of a weight no longer; others are told before the next pass."""
        if weight in self.index:
            self._forgotten.append(self.index[weight])

    def take_forgotten(self) -> list[int]:
        """Return the numbers of weights whose sums this process has dropped since this was last asked."""
        forgotten = self._forgotten
        self._forgotten = []
        return forgotten

    def drop(self, numbers: Iterable[int]) -> None:
        """Tell the others that this process has the sums of the weights with these numbers no longer."""
        for number in numbers:
            self._dropped[self.box.rank, number] = True

    def begin(self, number: int, is_partial: bool) -> None:
        """Begin a pass, in its first turn: what is there from earlier ones counts for the processes that still have it.

        The others have dropped it, or as `.grad` they have what it was, which is a part of theirs then.

        Raises:
            RuntimeError: Some have dropped a sum that is not complete, in which their parts cannot be told apart.
        """
        if number == self._begun:
            return
        self._begun = number
        dropped = self._dropped.sum(0).tolist()
        self._dropped.zero_()
        for index, is_present in enumerate(self._present.tolist()):
            having = self.box.count - dropped[index]
            if not having:
                self._present[index] = False
            elif is_present and is_partial and dropped[index]:
                raise RuntimeError(
                    f"The gradient of weight {self.names[index]!r} was dropped or hooked between "
                    "micro-batches in some of the processes of this machine. Do so in all of them."
                )
            elif is_present and not is_partial and having != self._everyone:
                self.places[index].mul_(having / self._everyone)

    def add(self, parts: Mapping[int, Tensor]) -> None:
        """Add this process's parts, by the numbers of their weights, in its turn."""
        share = 1 / self._everyone
        for number, gradient in parts.items():
            is_first = not self._present[number]
            for total, part in pieces(self.places[number], gradient):
                if is_first:
                    total.copy_(part).mul_(share)
                else:
                    total.add_(part, alpha=share)
            self._present[number] = True

    def measure_norms(self, is_wanted: bool) -> None:
        """Measure the norms of the sums, which have all their parts now, or forget those of earlier ones."""
        self._norms.fill_(torch.nan)
        for number, is_present in enumerate(self._present.tolist()):
            if is_wanted and is_present:
                self._norms[number] = torch.linalg.vector_norm(self.places[number])

    def note_present(self, names: Iterable[str]) -> None:
        """Note that there are sums for these weights now, from other machines."""
        for name in names:
            self._present[self.names.index(name)] = True


def check_part(weight: Weight, sums: SharedSums | None) -> None:
    """Check that a gradient of a weight that has come may be a part of sums.

    Raises:
        RuntimeError: It may not.
    """
    if sums is None or weight not in sums.index:
        raise RuntimeError(
            f"Weight {weight.name!r} got a gradient, and was frozen when the processes of "
            "this machine last met. Thaw weights between two steps of the optimizer, and before "
            "the next begins, as in `on_train_batch_start`; in a loop of your own, before "
            "`meet_processes()`."
        )
    if sums.is_over:
        raise RuntimeError(
            f"Weight {weight.name!r} got a second gradient in this backward pass, when "
            "the processes of this machine had added up the first. Let checkpoints around its "
            "module have `use_reentrant=False`."
        )
