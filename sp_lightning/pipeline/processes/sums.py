"""The sums of a unit's gradients over the processes of a machine, which have them in one copy.

What each process has got is added in the order of their ranks, so the sums are the same in every run. A counter in the
memory tells whose turn it is. It has passed a process when that has added what a backward pass has brought, or when
its pass has ended: it may have got nothing. What lies there from earlier passes counts for the processes that have not
dropped it; the first one sees to that, whose turn comes first. When all have, as after a step, it is overwritten.

To add is to move memory: the sum is read and written. So a process leaves its gradients where they have landed, for
one whose turn comes later to add those of several in one pass. The last one leaves nothing, nor does one that
has few landing buffers left, or whose gradients lie in another way than those of all units do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sp_lightning.optim.passes import pieces
from sp_lightning.pipeline.gradients.buffers import LandingBuffer
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.weights.buffers import HostBuffer, lay_out, tensor_in
from sp_lightning.pipeline.weights.segment import GradientLayout
from sp_lightning.pipeline.weights.weight import Weight


class SharedSums:
    """The sums of the gradients of weights whose masters lie together in shared memory."""

    def __init__(self, weights: Sequence[Weight], masters: HostBuffer) -> None:
        assert masters.shared is not None
        flags = torch.empty(len(weights), dtype=torch.bool, device="meta")
        norms = torch.empty(len(weights), dtype=torch.float32, device="meta")
        left = torch.empty(masters.shared.box.count, dtype=torch.int64, device="meta")
        dropped = torch.empty(len(left), len(weights), dtype=torch.bool, device="meta")
        sizes = [*(weight.nbytes for weight in weights), flags.nbytes, norms.nbytes, dropped.nbytes, left.nbytes]
        (*offsets, at_flags, at_norms, at_dropped, at_left), nbytes = lay_out(sizes)
        memory = masters.get_beside("sums", nbytes, pin=False, together=True)
        assert memory.shared is not None
        self._memory = memory.shared
        self.box = memory.shared.box
        # the numbers, from one on, of files in which each process has left gradients; 0 if there are none to add
        self._left = tensor_in(memory.bytes, at_left, left, torch.int64)
        self._left_as = GradientLayout(weights, [weight.gradient_dtype for weight in weights])
        lying = zip(offsets, weights, strict=True)
        self.places = [tensor_in(memory.bytes, at, weight.layout, weight.dtype) for at, weight in lying]
        self._present = tensor_in(memory.bytes, at_flags, flags, torch.bool)
        self._norms = tensor_in(memory.bytes, at_norms, norms, torch.float32)
        # by each process, since the last pass
        self._dropped = tensor_in(memory.bytes, at_dropped, dropped, torch.bool)
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
        found: dict[Weight, tuple[Tensor, Tensor | None]] = {}
        known = zip(self.index, self.places, self._norms.unbind(), self._present.tolist(), strict=True)
        for (weight, place, norm, is_present), is_unknown in zip(known, self._norms.isnan().tolist(), strict=True):
            if is_present:
                found[weight] = place, None if is_unknown else norm
        return found

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

    def begin(self, number: int, is_partial: bool, everyone: int) -> None:
        """Begin a pass, in its first turn: what is there from earlier ones counts for the processes that still have it.

        `everyone` is how many there are on all machines. The others have dropped it, or as `.grad` they have what it
        was, which is a part of theirs then.

        Raises:
            RuntimeError: Some have dropped a sum that is not complete, in which their parts cannot be told apart.
        """
        if number == self._begun:
            return
        self._begun = number
        dropped = self._dropped.sum(0).tolist()
        self._dropped.zero_()
        for each, is_present in enumerate(self._present.tolist()):
            having = self.box.count - dropped[each]
            if not having:
                self._present[each] = False
            elif is_present and is_partial and dropped[each]:
                raise RuntimeError(
                    f"The gradient of weight {self.names[each]!r} was dropped or hooked between "
                    "micro-batches in some of the processes of this machine. Do so in all of them."
                )
            elif is_present and not is_partial and having != everyone:
                self.places[each].mul_(having / everyone)

    def can_leave(self, gradients: Mapping[int, Tensor]) -> bool:
        """Tell whether gradients, by the numbers of their weights, lie as others expect of those that are left."""
        dtypes = [gradient.dtype for gradient in gradients.values()]
        return (
            not self.box.is_last and list(gradients) == list(range(len(self.places))) and dtypes == self._left_as.dtypes
        )

    def leave(self, buffer: LandingBuffer, until: Ticket) -> bool:
        """Leave this process's part to others, in its turn, until the pass is complete; tell whether it was left."""
        if self._left[self.box.rank]:  # it was left, and has been followed by more
            return False
        self._left[self.box.rank] = buffer.file + 1
        buffer.leave(until)
        return True

    def add(self, gradients: Mapping[int, Tensor], share: float) -> None:
        """Add this process's part, by the numbers of weights, after those that others have left; in its turn."""
        files = {rank: file - 1 for rank, file in enumerate(self._left.tolist()) if file}
        left = [self._left_as.views(self.box.look_into(rank, file))[0] for rank, file in files.items()]
        for number, place in enumerate(self.places):
            added = [of_rank[number] for of_rank in left]
            if number in gradients:
                added.append(gradients[number])
            if added:
                self._add_up(number, place, added, share)
        for rank in files:
            self._left[rank] = 0

    def _add_up(self, number: int, place: Tensor, gradients: Sequence[Tensor], share: float) -> None:
        is_first = not self._present[number]
        for total, *parts in pieces(place, *gradients):
            if is_first:
                total.copy_(parts.pop(0)).mul_(share)
            for part in parts:
                total.add_(part, alpha=share)
        self._present[number] = True

    def measure_norms(self, is_wanted: bool) -> None:
        """Measure the norms of the sums, which have all their parts now, or forget those of earlier ones."""
        for norm, place, is_present in zip(self._norms, self.places, self._present.tolist(), strict=True):
            norm.fill_(torch.linalg.vector_norm(place, dtype=place.dtype) if is_wanted and is_present else torch.nan)

    def note_present(self, names: Iterable[str]) -> None:
        """Note that there are sums for these weights now, from other machines."""
        for name in names:
            self._present[self.names.index(name)] = True
