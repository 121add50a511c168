"""From the twin's gradient on the device to the master's `.grad` on the host.

A unit's gradients are gathered as autograd finishes them, put together in one piece of device memory, and leave with
one copy, in the dtype they were computed in. A worker adds them to the host's gradients, so neither the device nor
the thread that runs backward waits. `.grad` is assigned when backward ends, so nobody sees a gradient whose copy
has not landed.

    device                        on its way                  host
    twin.grad -> staging (ring) ----------------------------> the gradient itself   (first gradient, same dtype)
                                ------------> staging (ring) -> added by the worker (accumulation, other dtype)
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sp_lightning.pipeline._private import (
    post_accumulate_hooks,
    tensor_hooks,
    users_of_storage,
    without_torch_function,
)
from sp_lightning.pipeline.host import HostBuffer, lay_out, tensor_in
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.transfer import Backend, Ticket
from sp_lightning.pipeline.units import Unit
from sp_lightning.pipeline.weights import Twin, Weight

_RING = 2  # one piece being filled while the other leaves
_CHUNK = 1 << 18  # elements cast and added at once: they stay in the cache in between


class GradientReturn:
    """Brings gradients home.

    Args:
        units: All units, the resident one included.
        backend: Copies.
        stats: Counters.
        pin: Whether to page-lock host memory.
        on_arrival: Called when autograd has finished a gradient.
    """

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
        self._hooked: dict[Weight, list[Tensor]] = {}
        self._shipped: set[Weight] = set()
        self._landed: dict[Weight, Tensor] = {}
        self._landing: list[Ticket] = []
        self._outgrown: list[HostBuffer] = []
        self._homes: dict[Unit, _Home] = {}
        self._ring: list[_Piece] = []
        self._turn = 0
        self._worker = _Worker(self)

    # ------------------------------------------------------------------------------------------- while backward runs

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
        offsets, nbytes = lay_out([gradient.nbytes for gradient in gradients])
        piece = self._next_piece(nbytes)
        if piece.ticket is not None:
            self._backend.wait(piece.ticket)
        torch._foreach_copy_(piece.tensors("device", weights, gradients, offsets), gradients)
        self._stats.bytes_to_host += nbytes
        home = self._home_for(unit, weights)
        if home.weights == weights and self._are_first(weights, gradients):
            home.vacate()
            piece.ticket = self._backend.download(home.memory, piece.device[:nbytes])
            self._landed.update(zip(weights, home.tensors, strict=True))
            self._landing.append(piece.ticket)
        else:
            piece.free.wait()
            piece.free.clear()
            piece.ticket = self._backend.download(piece.host.bytes[:nbytes], piece.device[:nbytes])
            arrived = piece.tensors("host", weights, gradients, offsets)
            self._worker.put(_Shipment(piece, weights, arrived))
        self._shipped.update(weights)

    def _are_first(self, weights: list[Weight], gradients: list[Tensor]) -> bool:
        """Whether the copy can land in the gradients themselves: nothing to add to, nothing to cast, nobody to ask."""
        return all(
            weight.master.grad is None
            and weight not in self._shipped
            and gradient.dtype == weight.master.dtype
            and not tensor_hooks(weight.master)
            for weight, gradient in zip(weights, gradients, strict=True)
        )

    # ------------------------------------------------------------------------------------------------ on the worker

    def land(self, shipment: _Shipment) -> None:
        """Wait for a copy and add what it brought to the host's gradients."""
        assert shipment.piece.ticket is not None
        shipment.piece.ticket.join()
        for weight, arrived in zip(shipment.weights, shipment.arrived, strict=True):
            if tensor_hooks(weight.master):  # a user's code: not in this thread
                self._hooked.setdefault(weight, []).append(arrived.clone())
            else:
                self._accumulate(weight, arrived)
        shipment.piece.free.set()

    def _accumulate(self, weight: Weight, arrived: Tensor) -> None:
        sum_so_far = self._landed.get(weight)
        if sum_so_far is None:
            sum_so_far = weight.master.grad
        if sum_so_far is None:
            self._landed[weight] = self._home_for(weight.unit, [weight]).room_for(weight).copy_(arrived)
        elif sum_so_far.layout is not torch.strided:
            self._landed[weight] = arrived + sum_so_far
        elif sum_so_far.dtype == arrived.dtype or sum_so_far.stride() != arrived.stride():
            sum_so_far.add_(arrived)
        else:
            _cast_and_add(sum_so_far, arrived)

    # ------------------------------------------------------------------------------------------------ when it ends

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, wait until everything has landed, and show it as `.grad`."""
        self.ship_all_but([])
        if self._shipped:
            self._stats.host_syncs += 1
            for ticket in self._landing:
                self._backend.synchronize(ticket)
            self._worker.join()
        for weight in self._arrived:  # in autograd's order, in which a user's hooks expect to be called
            for gradient in self._hooked.get(weight, ()):
                self._accumulate(weight, _through_hooks(weight, gradient))
            for gradient in self._sparse.get(weight, ()):
                self._add_sparse(weight, _through_hooks(weight, gradient))
            if weight in self._landed:
                weight.master.grad = self._landed[weight]
            for post_hook in post_accumulate_hooks(weight.master):
                post_hook(weight.master)
        self._forget()

    def abandon(self) -> None:
        """After an exception: forget what has not landed."""
        for join in [self._worker.join, *(ticket.join for ticket in self._landing)]:
            with contextlib.suppress(Exception):  # a copy that failed has been told of, or belongs to what failed
                join()
        for piece in self._ring:
            piece.ticket = None
        self._forget()

    def close(self) -> None:
        """Stop the worker and undo page-locks; gradients stay where they are."""
        self.abandon()
        self._worker.close()
        for buffer in [*(home.buffer for home in self._homes.values()), *(piece.host for piece in self._ring)]:
            buffer.release()

    def device_bytes(self) -> int:
        """Device memory held for gradients on their way."""
        return sum(piece.device.nbytes for piece in self._ring)

    def _forget(self) -> None:
        self._gathered.clear()
        self._arrived.clear()
        self._sparse.clear()
        self._hooked.clear()
        self._shipped.clear()
        self._landing.clear()
        while self._outgrown:
            self._outgrown.pop().release()
        self._landed.clear()

    def _add_sparse(self, weight: Weight, gradient: Tensor) -> None:
        arrived = gradient.to("cpu")
        self._stats.bytes_to_host += arrived._values().nbytes + arrived._indices().nbytes
        sum_so_far = self._landed.get(weight, weight.master.grad)
        if sum_so_far is None:
            self._landed[weight] = arrived
        else:
            sum_so_far.add_(arrived)

    def _next_piece(self, nbytes: int) -> _Piece:
        if len(self._ring) < _RING:
            self._ring.append(_Piece(max(self._largest(), nbytes), self._backend, self._pin))
            return self._ring[-1]
        self._turn = (self._turn + 1) % _RING
        piece = self._ring[self._turn]
        if piece.device.nbytes < nbytes:  # weights that were frozen, or lowered, when the ring was made
            self._worker.join()
            piece.host.release()
            self._ring[self._turn] = _Piece(nbytes, self._backend, self._pin)
        return self._ring[self._turn]

    def _largest(self) -> int:
        trainable = ([weight for weight in unit.weights if weight.master.requires_grad] for unit in self._units)
        return max(lay_out([weight.compute_bytes for weight in weights])[1] for weights in trainable)

    def _home_for(self, unit: Unit, weights: list[Weight]) -> _Home:
        home = self._homes.get(unit)
        if home is None or not set(weights) <= set(home.weights):
            if home is not None:
                self._outgrown.append(home.buffer)  # a copy into it may still be on its way
            members = [weight for weight in unit.weights if weight.master.requires_grad or weight in weights]
            home = self._homes[unit] = _Home(members, self._backend, self._pin)
        return home


class _Piece:
    """A piece of the ring: room for one unit's gradients on the device, and on the host where they must be added."""

    def __init__(self, nbytes: int, backend: Backend, pin: bool) -> None:
        self.device = backend.allocate(nbytes)
        self.host = HostBuffer(nbytes, backend, pin)
        self.ticket: Ticket | None = None
        self.free = threading.Event()
        self.free.set()
        self._tensors: dict[tuple[Any, ...], list[Tensor]] = {}

    def tensors(
        self, side: Literal["device", "host"], weights: list[Weight], gradients: list[Tensor], offsets: list[int]
    ) -> list[Tensor]:
        """Its memory as one tensor per gradient; made once for each set of weights."""
        key = (side, *weights, *(gradient.dtype for gradient in gradients))
        if key not in self._tensors:
            memory = self.device if side == "device" else self.host.bytes
            self._tensors[key] = [
                tensor_in(memory, offset, weight.host, gradient.dtype)
                for weight, gradient, offset in zip(weights, gradients, offsets, strict=True)
            ]
        return self._tensors[key]


class _Shipment(NamedTuple):
    """One copy on its way, and what it brings for the worker to add."""

    piece: _Piece
    weights: list[Weight]
    arrived: list[Tensor]


class _Home:
    """Where the gradients of a unit's trainable weights live on the host: one buffer, a tensor per weight.

    It is used again every step, unless the user kept a gradient (PCGrad and the like do): then that one stays theirs.
    """

    def __init__(self, weights: Sequence[Weight], backend: Backend, pin: bool) -> None:
        self.weights = list(weights)
        self._backend = backend
        self._pin = pin
        self._build()

    def _build(self) -> None:
        offsets, nbytes = lay_out([weight.master.nbytes for weight in self.weights])
        self.buffer = HostBuffer(nbytes, self._backend, self._pin)
        self.memory = self.buffer.bytes
        self.tensors = [
            tensor_in(self.memory, offset, weight.host, weight.host.dtype)
            for weight, offset in zip(self.weights, offsets, strict=True)
        ]

    def vacate(self) -> None:
        """Make sure that nobody else holds any of it."""
        if not all(_is_free(tensor) for tensor in self.tensors):
            self.buffer.release()
            self._build()

    def room_for(self, weight: Weight) -> Tensor:
        """Memory for one weight's gradient that nobody else holds."""
        tensor = self.tensors[self.weights.index(weight)]
        return tensor if _is_free(tensor) else torch.empty_like(weight.host)


class _Worker:
    """The thread that waits for gradients and adds them."""

    def __init__(self, returns: GradientReturn) -> None:
        self._returns = returns
        self._jobs: queue.Queue[_Shipment | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, shipment: _Shipment) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="superpipeline-gradients", daemon=True)
            self._thread.start()
        self._jobs.put(shipment)

    def join(self) -> None:
        """Wait until everything has been added."""
        self._jobs.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    @torch.no_grad()
    def _run(self) -> None:
        while (shipment := self._jobs.get()) is not None:
            try:
                with without_torch_function():
                    self._returns.land(shipment)
            except BaseException as error:
                self._error = error
                shipment.piece.free.set()
            finally:
                self._jobs.task_done()
        self._jobs.task_done()


def _through_hooks(weight: Weight, gradient: Tensor) -> Tensor:
    """What the user's hooks on the master make of a gradient."""
    for hook in tensor_hooks(weight.master):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _references(tensor: Tensor) -> int:
    return sys.getrefcount(tensor)


# what a tensor in a list, in a local variable and in an argument of a function counts
_OWN_REFERENCES = max(_references(tensor) for tensor in [torch.empty(0)])


def _is_free(tensor: Tensor) -> bool:
    """Whether only its home holds a gradient: not the user, not a view of it, not `.grad`."""
    return sys.getrefcount(tensor) <= _OWN_REFERENCES and users_of_storage(tensor) <= 1


def _cast_and_add(sum_so_far: Tensor, arrived: Tensor) -> None:
    count = arrived.numel()
    flat_sum = sum_so_far.as_strided((count,), (1,))
    flat_arrived = arrived.as_strided((count,), (1,))
    for start in range(0, count, _CHUNK):
        end = min(start + _CHUNK, count)
        flat_sum[start:end].add_(flat_arrived[start:end].to(sum_so_far.dtype))
