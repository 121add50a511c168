"""The gradients of one unit: the state that they are in, and the host memory that they stay in until somebody asks.

[Note: what you look at is yours]
The gradients that backward has brought belong to the engine: they may still be on their way, in a lower dtype than
their masters', and unscaled. `.grad` is None meanwhile. Whoever reads it gets a copy in the master's dtype, which is
*the* gradient from then on, and belongs to the user like any that the user sets.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.buffers import GradientMemory, HostGradients
from sp_lightning.pipeline.gradients.shared_sums import SharedSums
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.gradient_layout import GradientLayout
from sp_lightning.pipeline.weights.segment import Segment
from sp_lightning.pipeline.weights.weight import Weight


@dataclass(frozen=True)
class Scaling:
    """Operations on a gradient between backward and the update."""

    # factors to multiply by, one after the other: the inverse of a loss scale, a clipping factor
    factors: tuple[float | Tensor, ...] = ()
    clamp: float | None = None  # the largest absolute value to leave after that; None not to clip by value

    @cached_property
    def without_ones(self) -> Scaling:
        """The same scaling without factors of one, when they are known; looked at once, as many gradients share it."""
        return Scaling(tuple(factor for factor in self.factors if factor != 1), self.clamp)

    def times(self, factor: float | Tensor) -> Scaling:
        """Return this scaling with one more factor."""
        return Scaling((*self.factors, factor), self.clamp)

    def apply_(self, gradient: Tensor) -> None:
        """Scale in place, bit for bit as `GradScaler.unscale_`, `clip_grad_norm_` and `clip_grad_value_` do."""
        for factor in self.factors:
            gradient.mul_(factor)
        if self.clamp is not None:
            gradient.clamp_(-self.clamp, self.clamp)


NO_SCALING = Scaling()


class State(enum.Enum):
    """Where the gradients of a unit are."""

    EMPTY = enum.auto()
    """The engine has none."""

    HELD = enum.auto()
    """The engine has some, on the device, on their way to the host, or there."""

    CONSUMED = enum.auto()
    """An optimizer has stepped the unit with them in backward; its `step()` has yet to be called."""


class Gradient:
    """The gradient of one weight."""

    __slots__ = ("host", "look", "norm", "scaling", "unit", "weight")

    def __init__(self, weight: Weight, unit: UnitGradients) -> None:
        self.weight = weight
        self.unit = unit
        # what the engine has on the host: as it came, or a sum in the master's dtype. It may not have landed yet.
        self.host: Tensor | None = None
        self.norm: Tensor | None = None  # the norm of that; None if it is not known
        self.scaling: Scaling = NO_SCALING  # unscaling and clipping still to be applied to it
        self.look: Tensor | None = None  # what a user has been shown of a sum that is not complete

    @property
    def is_seen(self) -> bool:
        """Whether somebody would see how it is added up: it has a `.grad` of the user's, or hooks to call."""
        master = self.weight.master
        return bool(master._backward_hooks or master._post_accumulate_grad_hooks) or master.grad is not None

    def take_look_back(self) -> None:
        """Take back what was shown of a sum that is not complete.

        Raises:
            RuntimeError: It was changed.
        """
        look, self.look = self.look, None
        master = self.weight.master
        if look is None or master.grad is None:
            return
        if master.grad is not look or look._version:
            raise RuntimeError(
                f"The gradient of weight {self.weight.name!r} was changed before the last micro-batch of a step, while "
                "the processes of this machine add it up. Change it after that."
            )
        master.grad = None


IS_TRAINED = attrgetter("weight.master.requires_grad")


class UnitGradients:
    """The gradients of what of a unit is sent together: of its trained weights, or of others that may be trained yet.

    Attributes:
        layout: How these lie in memory, in the dtypes in which they arrive.
        kept_as: How they are kept on the host: just so, or in the masters' dtypes, as sums are.
    """

    def __init__(self, unit: Unit, segment: Segment, is_summed: bool) -> None:
        self.unit = unit
        self.gradients = [Gradient(weight, self) for weight in segment.weights]  # that of each of its weights
        self.trained: list[Gradient] = []  # those of weights that require one, in this backward pass
        self.layout = self._sum_layout = self.kept_as = GradientLayout((), ())
        self.state = State.EMPTY
        self.gathered: dict[Gradient, Tensor] = {}  # what backward has brought, as long as it has not left the device
        # comes after everything that is on its way to them; None if nothing is known to be
        self.ticket: Ticket | None = None
        self.memory: GradientMemory | None = None  # the host memory that they stay in; None if there is none yet
        self._masters = segment.memory  # that of the masters, which it lies beside
        # their sums over the processes of this machine, if these share memory
        is_summed &= segment.weights[0].master.requires_grad
        self.sums = SharedSums(segment.weights, segment.memory) if is_summed else None
        self.anew: list[Gradient] = []  # those whose sums begin anew with the next pass
        if self.sums is not None:
            self._take_up(self.sums)
        self.begin()

    def _take_up(self, sums: SharedSums) -> None:
        """Take up sums where an earlier arrangement has left them."""
        if not sums.is_partial:
            self.anew += self.gradients
            return
        present = sums.present()
        for gradient in self.gradients:
            if gradient.weight in present:
                gradient.host, self.state = present[gradient.weight][0], State.HELD

    def begin(self) -> None:
        """Find out which gradients to expect of the backward pass that has reached the unit."""
        trained = list(filter(IS_TRAINED, self.gradients))
        dtypes = [gradient.weight.gradient_dtype for gradient in trained]
        if trained != self.trained or dtypes != self.layout.dtypes:
            if self.trained:
                self.close()
            self.trained = trained
            weights = [gradient.weight for gradient in trained]
            self.layout = self._sum_layout = GradientLayout(weights, dtypes)
            sums = [weight.dtype for weight in weights]
            if dtypes != sums:
                self._sum_layout = GradientLayout(weights, sums)
            self.kept_as = self.layout

    def own(self) -> GradientMemory:
        """Return the memory in which gradients stay, as `kept_as` tells."""
        if self.memory is None:
            is_sent = self.kept_as is self.layout
            self.memory = GradientMemory(self._masters.get_beside("gradients", self.kept_as.nbytes, is_sent).bytes)
        return self.memory

    def room_for(self, gradient: Gradient, dtype: torch.dtype) -> Tensor:
        """Return memory for the sum of one weight's gradients, or for the first of them, which came in this dtype.

        From the first sum on, gradients that arrive in lower dtypes than the masters' are kept in the masters'.
        """
        if gradient.is_seen:  # it becomes the user's
            return torch.empty_like(gradient.weight.host)
        index = self.trained.index(gradient)
        is_sum = gradient.host is not None or dtype != self.kept_as.dtypes[index]
        if is_sum and self.kept_as is not self._sum_layout:
            self.close()  # what lies in it keeps it
            self.kept_as = self._sum_layout
        return self.own().views(self.kept_as)[0][index]

    def lacks_a_sum(self) -> bool:
        """Tell whether a weight requires a gradient that has no sum over processes."""
        summed = {} if self.sums is None else self.sums.index
        return any(IS_TRAINED(gradient) and gradient.weight not in summed for gradient in self.gradients)

    def check_sum(self, gradient: Gradient, is_own_pass: bool) -> None:
        """Check that a gradient that has come may be a part of the sum over processes, or of none in a pass of its own.

        Raises:
            RuntimeError: If it may not.
        """
        gradient.take_look_back()
        sums = self.sums
        if is_own_pass and sums is not None and gradient.host is not None and sums.has(gradient.host):
            raise RuntimeError(
                f"Weight {gradient.weight.name!r} got a gradient in an evaluation step, while those of a training step "
                "are added up. Take it by `torch.autograd.grad`."
            )
        if is_own_pass:
            return
        if sums is None or gradient.weight not in sums.index:
            raise RuntimeError(
                f"Weight {gradient.weight.name!r} got a gradient, and was frozen when the processes of this machine "
                "last met. Thaw weights between two steps of the optimizer, and before the next begins, as in "
                "`on_train_batch_start`; in a loop of your own, before `meet_processes()`."
            )
        if sums.is_over:
            raise RuntimeError(
                f"Weight {gradient.weight.name!r} got a second gradient in this backward pass, when the processes of "
                "this machine had added up the first. Let checkpoints around its module have `use_reentrant=False`."
            )

    def show(self, gradient: Gradient) -> None:
        """Make what has landed of a gradient the master's `.grad`, which is the user's."""
        if self.sums is not None and self.sums.is_partial and gradient.host is not None and not gradient.is_seen:
            self.wait()
            with torch.inference_mode(False), torch.no_grad():
                gradient.look = gradient.host.clone(memory_format=torch.preserve_format)
            gradient.weight.master.grad = gradient.look
        elif (taken := self.take(gradient)) is not None:
            gradient.weight.master.grad = taken

    def take(self, gradient: Gradient) -> Tensor | None:
        """Return what has landed of a gradient, which the engine then has no longer; None if there is nothing."""
        if gradient.host is None:
            return None
        self.wait()
        with torch.inference_mode(False), torch.no_grad():
            taken = torch.empty_like(gradient.weight.host).copy_(gradient.host)
            gradient.scaling.apply_(taken)
        self.forget([gradient])
        return taken

    def forget(self, gradients: Iterable[Gradient]) -> None:
        """Forget what the engine has of these on the host, which may be all that it has of the unit."""
        for gradient in gradients:
            if self.sums is not None and (gradient.host is None or self.sums.has(gradient.host)):
                self.anew.append(gradient)  # not for what somebody sees, and this process alone has
            gradient.host = gradient.norm = None
            gradient.scaling = NO_SCALING
        if self.state is State.CONSUMED:
            return
        for gradient in self.gradients:
            if gradient.host is not None:
                return
        self.state = State.EMPTY

    def wait(self) -> None:
        """Block until nothing is on its way to the gradients, not even to those that were dropped before.

        Raises:
            Exception: Whatever a copy or an addition raised.
        """
        ticket = self.ticket
        if ticket is None:
            return
        try:
            ticket.join()
        finally:
            if ticket.done:  # not if an interrupt has ended the wait
                self.ticket = None

    def close(self) -> None:
        """Let go of the memory; what lies in it keeps it."""
        self.wait()
        self._masters.release_beside("gradients")
        self.memory, self.kept_as = None, self.layout


@dataclass(eq=False)
class Shipment:
    """Gradients of a unit on their way to the host."""

    unit: UnitGradients
    gradients: Sequence[Gradient]  # those that are on their way
    arrived: Sequence[Tensor]  # the tensors that they land in
    ticket: Ticket  # the copy, or the addition, that brings them
    # the landing buffer to release when they have been read; None if they land where they stay
    buffer: HostGradients | None


def refusal(weight: Weight, tensor: Tensor) -> RuntimeError:
    """Make the error for a gradient that cannot be sent."""
    if tensor.requires_grad:
        return RuntimeError(
            f"backward(create_graph=True) would leave a gradient with a graph on weight {weight.name!r}, whose "
            "gradient lives on the host. Use torch.autograd.grad(..., create_graph=True) for the inner gradient."
        )
    if tensor.layout is not torch.strided:
        return RuntimeError(
            f"Weight {weight.name!r} got a sparse gradient. Let it be dense (`sparse=False`), or compute it in an "
            "`nn.Embedding(sparse=True)`, which lives on the device."
        )
    return RuntimeError(
        f"Weight {weight.name!r} got another gradient after it was stepped in this backward pass. Train with "
        "`overlap_optimizer=False`."
    )
