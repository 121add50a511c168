"""From the twin's gradient on the device to the master's `.grad` on the host.

A unit's gradients are gathered as autograd finishes them, put together in one piece of device memory, and leave with
one copy, in the dtype they were computed in.

    device                        on its way                  host
    twin.grad -> piece (ring) ------------------------------> home: the gradient itself    (first of a step)
                              -----------> slot (ring) -----> added to the gradient        (accumulation)
                              -----------> slot (ring) -----> the optimizer                (it steps in backward)

[Note: gradients that nobody has asked for yet]
When backward ends, its last gradients are still on their way, and the host does not wait for them: optimizer steps
wait by themselves, and masters are guarded until then, so that whoever touches one makes `settle` run first. A
gradient that arrived in a lower dtype than its master's stays as it came, at half the memory: the optimizer casts it
as it reads it. It becomes the master's `.grad` (`show`) only when somebody asks for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sp_lightning.pipeline._private import post_accumulate_hooks, tensor_hooks, without_torch_function
from sp_lightning.pipeline.device import Group
from sp_lightning.pipeline.landing import (
    PIECES,
    Home,
    Piece,
    Ring,
    Slot,
    cast_and_add,
    is_only_shown,
    lay_out_gradients,
)
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.stepping import NO_SCALING, Scaling
from sp_lightning.pipeline.trace import Kind
from sp_lightning.pipeline.transfer import Backend, Ticket
from sp_lightning.pipeline.units import Unit
from sp_lightning.pipeline.weights import Twin, Weight

_SLOTS_SHARE = 5  # at most one slot for so many units: what the optimizer may be behind


def slots_in_ring(units: int, together: int) -> int:
    """How many slots there are at most for the gradients of this many units, of which so many travel together."""
    return max(2, together + 1, -(-units // _SLOTS_SHARE))


@dataclass(eq=False)
class Shipment:
    """One copy on its way to the host.

    Attributes:
        unit: Whose gradients it brings.
        weights: Which of the unit's weights.
        arrived: Where they land, a tensor per weight.
        ticket: The copy.
        slot: What has to be released when they have been read; None if they have landed where they stay.
    """

    unit: Unit
    weights: list[Weight]
    arrived: list[Tensor]
    ticket: Ticket
    slot: Slot | None


class Stepper(Protocol):
    """Who steps units in backward, as far as gradients know it (see overlap.py).

    Attributes:
        keeps_gradients: Whether gradients that arrive in a lower dtype are kept when the optimizer has used them.
    """

    @property
    def keeps_gradients(self) -> bool:
        """See above."""

    def wants(self, unit: Unit) -> bool:
        """Whether the unit's complete gradients should go to the optimizer right away."""

    def has_stepped(self, weight: Weight) -> bool:
        """Whether a gradient of this weight would come too late."""

    def step_in_backward(self, shipment: Shipment) -> None:
        """Step a unit when its gradients have landed; releases the slot."""

    def end_of_backward(self) -> None:
        """Give back, by `keep`, what was not stepped after all."""

    def finish_step(self, group: Group) -> None:
        """Wait until no step reads the gradients of a group any more."""


class GradientReturn:
    """Brings gradients home.

    Args:
        units: All units, the resident one included.
        backend: Copies.
        stats: Counters.
        pin: Whether to page-lock host memory.
        on_arrival: Called when autograd has finished a gradient.

    Attributes:
        stepper: Steps units in backward, if an optimizer lets it.
        measures_norms: Whether the norm of each gradient is wanted with it (see `norms_of`).
    """

    stepper: Stepper
    measures_norms = False

    def __init__(
        self, units: Sequence[Unit], backend: Backend, stats: Stats, pin: bool, on_arrival: Callable[[], None]
    ) -> None:
        self._backend = backend
        self._stats = stats
        self._pin = pin
        self._on_arrival = on_arrival
        self._units = list(units)
        self._gathered: dict[Unit, dict[Weight, Tensor]] = {}
        self._expected: dict[Unit, int] = {}
        self._arrived: dict[Weight, None] = {}
        self._sparse: dict[Weight, list[Tensor]] = {}
        self._held_back: dict[Weight, list[Tensor]] = {}
        self._shipped: set[Weight] = set()
        self._landed: dict[Weight, Tensor] = {}
        self._must_settle = False
        self._low: dict[Weight, Tensor] = {}
        self._norms: dict[Weight, Tensor] = {}
        self._scaling: dict[Weight, Scaling] = {}
        self._under_way: dict[Weight, Ticket] = {}
        self._outgrown: list[Home] = []
        self._homes: dict[tuple[Unit, bool], Home] = {}
        self._pieces: list[Piece] = []
        self._given_up = 0
        self._turn = 0
        together = max((unit.group.units for unit in self._units), default=1)
        self._ring = Ring(backend, pin, slots_in_ring(len(self._units), together))

    # ------------------------------------------------------------------------------------------- while backward runs

    def follow_requires_grad(self, twin: Twin) -> None:
        """Let a twin require a gradient if its master does, and collect what it gets."""
        with torch.inference_mode(False):
            twin.parameter.requires_grad_(twin.weight.master.requires_grad)
            if twin.parameter.requires_grad and twin.gradient_hook is None:
                self.watch(twin)

    def watch(self, twin: Twin) -> None:
        """Collect the gradients of a twin from now on."""

        def collect(_: Tensor) -> None:
            with without_torch_function():
                self._collect(twin)

        register = twin.parameter.register_post_accumulate_grad_hook
        twin.gradient_hook = register(collect)  # type: ignore[no-untyped-call]

    def _collect(self, twin: Twin) -> None:
        self._on_arrival()
        gradient, twin.parameter.grad = twin.parameter.grad, None
        assert gradient is not None
        weight = twin.weight
        if gradient.requires_grad:
            raise RuntimeError(
                f"backward(create_graph=True) would leave a gradient with a graph on weight {weight.name!r}, whose "
                "gradient lives on the host. Use torch.autograd.grad(..., create_graph=True) for the inner gradient."
            )
        self._arrived[weight] = None
        if gradient.layout is not torch.strided:
            self._sparse.setdefault(weight, []).append(gradient)
            return
        if self.stepper.has_stepped(weight):
            raise RuntimeError(
                f"Weight {weight.name!r} got another gradient after it was stepped in this backward pass. Train with "
                "`overlap_optimizer=False`."
            )
        unit = weight.unit
        if weight in self._gathered.get(unit, ()):  # reentrant checkpoints accumulate several times in one backward
            self._ship(unit)
        if unit not in self._gathered:
            self._gathered[unit] = {}
            self._expected[unit] = sum(other.master.requires_grad for other in unit.weights)
        self._gathered[unit][weight] = gradient
        if len(self._gathered[unit]) == self._expected[unit]:
            self._ship(unit)

    def ship_all_but(self, units: Sequence[Unit]) -> None:
        """Backward has moved on to these units: what others gathered can leave."""
        for unit in [unit for unit in self._gathered if unit not in units]:
            self._ship(unit)

    @torch.no_grad()
    def _ship(self, unit: Unit) -> None:
        """Start the copy of a unit's gathered gradients to the host."""
        gathered = self._gathered.pop(unit)
        weights = [weight for weight in unit.weights if weight in gathered]
        gradients = [gathered[weight] for weight in weights]
        dtypes = [gradient.dtype for gradient in gradients]
        _, nbytes, norms_at = lay_out_gradients(weights, dtypes)
        piece = self._next_piece(nbytes)
        if piece.ticket is not None:
            self._backend.trace.wait(piece.ticket, "gradients")
        gathered_there, norms = piece.tensors(weights, dtypes)
        torch._foreach_copy_(gathered_there, gradients)
        measures = self.measures_norms and all(weight.master.dtype == torch.float32 for weight in weights)
        if measures:
            torch.stack(torch._foreach_norm(gathered_there, 2, torch.float32), out=norms)
        sent = nbytes if measures else norms_at
        self._stats.bytes_to_host += sent
        self.stepper.finish_step(unit.group)
        for weight in weights:
            self._norms.pop(weight, None)
            if weight in self._scaling:  # of what is there, not of what comes
                self.settle()
                self.show(weight)

        complete, first = len(weights) == self._expected[unit], self._are_first(weights)
        steps_now = complete and self.stepper.wants(unit)
        lower = any(dtype != weight.master.dtype for weight, dtype in zip(weights, dtypes, strict=True))
        home = None
        passes_through = first and lower and steps_now and not self.stepper.keeps_gradients
        if passes_through and (unit, True) in self._homes:  # of the time before the optimizer stepped in backward
            self._let_land(weights)
            self._homes.pop((unit, True)).buffer.release()
        if first and not passes_through and (complete or not lower):
            home = self._home_for(unit, weights, dtypes if lower else None)
        if home is not None and home.weights == weights:
            self._let_land(weights)
            home.vacate()
            piece.ticket = self._backend.download(home.memory[:sent], piece.memory[:sent])
            shipment = Shipment(unit, weights, home.tensors, piece.ticket, None)
            self._landed.update(zip(weights, home.tensors, strict=True))
            if measures:
                self._norms.update(zip(weights, home.norms, strict=True))
        else:
            slot = self._ring.take(nbytes)
            piece.ticket = self._backend.download(slot.memory[:sent], piece.memory[:sent])
            shipment = Shipment(unit, weights, slot.tensors(weights, dtypes)[0], piece.ticket, slot)
        self._backend.trace.moved(Kind.GRADIENTS, unit.name, sent, piece.ticket)
        self._shipped.update(weights)
        if not first or (shipment.slot is not None and not passes_through):
            shipment = self._add(shipment)
        self._under_way.update(dict.fromkeys(weights, shipment.ticket))
        if steps_now and not any(weight in self._held_back for weight in weights):
            self.stepper.step_in_backward(shipment)

    def _are_first(self, weights: list[Weight]) -> bool:
        """Whether there is nothing to add to, and no user's hook to ask."""
        return all(
            self.gradient_of(weight) is None and weight not in self._shipped and not tensor_hooks(weight.master)
            for weight in weights
        )

    def _let_land(self, weights: Sequence[Weight]) -> None:
        """Wait until nothing is on its way to these gradients; for what nobody waited for, that was dropped."""
        for weight in weights:
            if weight in self._under_way:
                self._under_way.pop(weight).join()

    # ------------------------------------------------------------------------------------------------- accumulation

    def _add(self, shipment: Shipment) -> Shipment:
        """Have gradients in a slot added to the sums, on the thread for work on the host; returns the sums."""
        additions, after = [], [shipment.ticket]
        for weight, arrived in zip(shipment.weights, shipment.arrived, strict=True):
            after += [self._under_way[weight]] if weight in self._under_way else []
            if tensor_hooks(weight.master) or _is_sparse(weight.master.grad):  # a user's code: not in that thread
                self._held_back.setdefault(weight, []).append(torch.empty_like(weight.host))
                additions.append(_Addition(self._held_back[weight][-1], None, arrived, onto=False))
            else:
                additions.append(self._addition(weight, arrived))

        measured = [w for w in shipment.weights if self.measures_norms and w.master.dtype == torch.float32]
        norms = {weight: torch.empty(()) for weight in measured}
        self._norms.update(norms)

        def job() -> None:
            with without_torch_function(), torch.no_grad():
                for addition in additions:
                    addition.run()
                for weight, addition in zip(shipment.weights, additions, strict=True):
                    if weight in norms:
                        norms[weight].copy_(torch.linalg.vector_norm(addition.target, dtype=torch.float32))

        moved = sum(addition.target.nbytes for addition in additions)
        assert shipment.slot is not None
        ticket = self._backend.work(job, after, 2 * moved, shipment.slot.release)
        self._backend.trace.moved(Kind.ADD, shipment.unit.name, 2 * moved, ticket)
        return Shipment(shipment.unit, shipment.weights, [addition.target for addition in additions], ticket, None)

    def keep(self, shipment: Shipment) -> None:
        """Gradients that went to the optimizer were not needed there: they stay."""
        if shipment.slot is not None:
            self._under_way.update(dict.fromkeys(shipment.weights, self._add(shipment).ticket))

    def _addition(self, weight: Weight, arrived: Tensor) -> _Addition:
        total = self._landed.get(weight)
        if total is None:
            total = self.gradient_of(weight)
        if total is not None and total.dtype == weight.master.dtype:
            if not is_only_shown(self._home_for(weight.unit, [weight]).tensors, id(total)):
                self._must_settle = True
            self._landed[weight] = total
            return _Addition(total, None, arrived, onto=True)
        self._low.pop(weight, None)
        room = self._home_for(weight.unit, [weight]).room_for(weight)
        self._landed[weight] = room
        return _Addition(room, total, arrived, onto=total is not None)

    # ------------------------------------------------------------------------------------------------ when it ends

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left. Gradients are known from now on, though some may still have to land."""
        self.ship_all_but([])
        self.stepper.end_of_backward()
        hooks = any(post_accumulate_hooks(weight.master) for weight in self._arrived)
        if self._held_back or self._sparse or self._must_settle or hooks:
            self.settle()
        for weight in [*self._held_back, *self._sparse]:  # what a hook makes of them is not what was measured
            self._norms.pop(weight, None)
        for weight in self._arrived:  # in autograd's order, in which a user's hooks expect to be called
            for gradient in self._held_back.get(weight, ()):
                self._add_now(weight, _through_hooks(weight, gradient))
            for gradient in self._sparse.get(weight, ()):
                self._add_sparse(weight, _through_hooks(weight, gradient))
            if weight in self._landed:
                self._keep(weight, self._landed[weight])
            for post_hook in post_accumulate_hooks(weight.master):
                self.show(weight)
                post_hook(weight.master)
        self._forget()

    def _keep(self, weight: Weight, gradient: Tensor) -> None:
        if gradient.dtype == weight.master.dtype:
            weight.master.grad = gradient
        else:
            self._low[weight] = gradient

    def _add_now(self, weight: Weight, gradient: Tensor) -> None:
        total = self._landed.get(weight, weight.master.grad)
        if total is not None and _is_sparse(total):
            self._landed[weight] = gradient + total
        else:
            self._addition(weight, gradient).run()

    def _add_sparse(self, weight: Weight, gradient: Tensor) -> None:
        arrived = gradient.to("cpu")
        self._stats.bytes_to_host += arrived._values().nbytes + arrived._indices().nbytes
        if weight in self._landed:
            self._keep(weight, self._landed.pop(weight))
        self.show(weight)
        if weight.master.grad is None:
            self._landed[weight] = arrived
        else:
            self._landed[weight] = weight.master.grad.add_(arrived)

    def settle(self) -> None:
        """Wait until every gradient has landed and been added."""
        if self._under_way:
            self._stats.host_syncs += 1
            for ticket in dict.fromkeys(self._under_way.values()):
                self._backend.synchronize(ticket)
            self._under_way.clear()

    @property
    def settled(self) -> bool:
        """Whether `.grad` of all masters is plain training's, and it makes no difference who reads or changes it."""
        return not (self._under_way or self._low or self._scaling or self._norms)

    def abandon(self) -> None:
        """After an exception: forget what has not landed."""
        for ticket in self._under_way.values():
            with contextlib.suppress(Exception):  # a copy that failed has been told of, or belongs to what failed
                ticket.join()
        self._under_way.clear()
        self._ring.release_all()
        for piece in self._pieces:
            piece.ticket = None
        self._forget()

    def close(self) -> None:
        """Show all gradients and undo page-locks; the gradients themselves stay where they are."""
        self.abandon()
        self.show_all()
        for home in self._homes.values():
            home.buffer.release()
        self._ring.close()

    def device_bytes(self) -> int:
        """Device memory held for gradients on their way."""
        return self._given_up + sum(piece.memory.nbytes for piece in self._pieces)

    def give_up_memory(self) -> None:
        """Let go of the device's memory, when no copy is under way; how much it was is still known."""
        self._given_up = self.device_bytes()
        self._pieces.clear()

    def host_bytes(self) -> int:
        """Host memory held for gradients."""
        return sum(home.memory.nbytes for home in self._homes.values()) + self._ring.nbytes()

    def _forget(self) -> None:
        self._gathered.clear()
        self._arrived.clear()
        self._sparse.clear()
        self._held_back.clear()
        self._shipped.clear()
        self._landed.clear()
        self._must_settle = False
        while self._outgrown:
            self._outgrown.pop().buffer.release()

    # ------------------------------------------------------------------------------------------- for who reads them

    def gradient_of(self, weight: Weight) -> Tensor | None:
        """The gradient in the dtype in which it came, or the sum in the master's; it may still have to land."""
        return self._low.get(weight, weight.master.grad)

    def on_its_way(self, weights: Sequence[Weight]) -> list[Ticket]:
        """What has to be waited for before the gradients of these weights may be read."""
        return list(dict.fromkeys(self._under_way[weight] for weight in weights if weight in self._under_way))

    def show(self, weight: Weight) -> None:
        """Make the gradient the master's `.grad`, in the master's dtype, with all that was to be done to it."""
        self._norms.pop(weight, None)
        low = self._low.pop(weight, None)
        scaling = self._scaling.pop(weight, None)  # before `.grad` is set: the guard may take that for somebody else's
        with torch.inference_mode(False), torch.no_grad():
            if low is not None:
                weight.master.grad = self._home_for(weight.unit, [weight]).room_for(weight).copy_(low)
            if scaling is not None and weight.master.grad is not None:
                scaling.apply_(weight.master.grad)

    def show_all(self) -> None:
        """Wait for all gradients and show them."""
        self.settle()
        for weight in {**self._low, **self._scaling}:
            self.show(weight)

    def drop(self, weight: Weight) -> None:
        """Forget a gradient: somebody sets `.grad`."""
        self._low.pop(weight, None)
        self._norms.pop(weight, None)
        self._scaling.pop(weight, None)

    # ----------------------------------------------------------------------------- what is to be done to gradients

    def norms_of(self, weights: Sequence[Weight]) -> list[Tensor] | None:
        """The norms of gradients as they came, to be read when these have landed; None if one is not known."""
        norms = [self._norms.get(weight) for weight in weights]
        known = [norm for norm in norms if norm is not None]
        return known if len(known) == len(norms) else None

    def multiply(self, weights: Sequence[Weight], factor: Tensor) -> None:
        """Have gradients multiplied by a number, when the optimizer reads them or somebody else does."""
        self._rescale(weights, lambda scaling: scaling.times(factor))

    def clamp(self, weights: Sequence[Weight], limit: float) -> None:
        """Have gradients clipped to plus and minus a limit, when they are read."""
        self._rescale(weights, lambda scaling: scaling.clamped(limit))

    def _rescale(self, weights: Sequence[Weight], change: Callable[[Scaling], Scaling]) -> None:
        changed: dict[int, Scaling] = {}  # weights that are treated alike share an object
        for weight in weights:
            if self.scaling_of(weight).clamp is not None:  # a scaling clips last
                self.settle()
                self.show(weight)
            before = self.scaling_of(weight)
            self._scaling[weight] = changed.setdefault(id(before), change(before))

    def scaling_of(self, weight: Weight) -> Scaling:
        """What is still to be done to a gradient."""
        return self._scaling.get(weight, NO_SCALING)

    def wait_also(self, weights: Sequence[Weight], ticket: Ticket) -> None:
        """Whoever reads these gradients has to wait for this work, too, which comes after all that is on its way."""
        self._under_way.update(dict.fromkeys(weights, ticket))

    def take(self, weight: Weight) -> tuple[Tensor, Scaling]:
        """A gradient for the optimizer, which writes what is to be done to it back if it is in the master's dtype."""
        gradient = self.gradient_of(weight)
        assert gradient is not None
        self._norms.pop(weight, None)
        scaling = self.scaling_of(weight)
        if weight not in self._low:
            self._scaling.pop(weight, None)
        return gradient, scaling

    # ----------------------------------------------------------------------------------------------------- memory

    def _next_piece(self, nbytes: int) -> Piece:
        if len(self._pieces) < PIECES:
            self._pieces.append(Piece(max(self._largest(), nbytes), self._backend))
            return self._pieces[-1]
        self._turn = (self._turn + 1) % PIECES
        if self._pieces[self._turn].memory.nbytes < nbytes:  # weights that were frozen, or lowered, when it was made
            ticket = self._pieces[self._turn].ticket
            if ticket is not None:
                ticket.join()
            self._pieces[self._turn] = Piece(nbytes, self._backend)
        return self._pieces[self._turn]

    def _largest(self) -> int:
        trainable = ([weight for weight in unit.weights if weight.master.requires_grad] for unit in self._units)
        return max(lay_out_gradients(weights, [weight.compute_dtype for weight in weights])[1] for weights in trainable)

    def _home_for(self, unit: Unit, weights: list[Weight], lower: Sequence[torch.dtype] | None = None) -> Home:
        """The home of a unit's gradients: in the masters' dtypes, or in lower ones for exactly these weights."""
        key = (unit, lower is not None)
        home = self._homes.get(key)
        if lower is not None:
            fits = home is not None and home.weights == weights and home.dtypes == list(lower)
        else:
            fits = home is not None and set(weights) <= set(home.weights)
        if home is not None and fits:
            return home
        if home is not None:
            self._outgrown.append(home)  # a copy into it may still be on its way
        members = weights
        if lower is None:
            members = [weight for weight in unit.weights if weight.master.requires_grad or weight in weights]
            lower = [weight.master.dtype for weight in members]
        self._homes[key] = Home(members, lower, self._backend, self._pin)
        return self._homes[key]


class _Addition(NamedTuple):
    """What a gradient that arrived does to a sum.

    Attributes:
        target: The sum.
        low: A part of the sum that has only landed in a lower dtype, and not been written to the target.
        arrived: The gradient.
        onto: Whether there is a sum to add to.
    """

    target: Tensor
    low: Tensor | None
    arrived: Tensor
    onto: bool

    def run(self) -> None:
        """Do it."""
        if self.low is not None:
            self.target.copy_(self.low)
        if self.onto:
            cast_and_add(self.target, self.arrived)
        else:
            self.target.copy_(self.arrived)


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided


def _through_hooks(weight: Weight, gradient: Tensor) -> Tensor:
    """What the user's hooks on the master make of a gradient."""
    for hook in tensor_hooks(weight.master):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient
