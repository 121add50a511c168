"""The path of gradients from the twin on the device to the master's `.grad` on the host.

A unit's gradients are gathered as autograd finishes them, put together in a staging buffer on the device, and leave
with one device-to-host (D2H) copy, in the dtype they were computed in. The methods below are in the order of this path,
as far as the staging buffer; shipping.py has the rest of it.

    device                        on its way                  host
    twin.grad -> staging buffer ----------------------------> home: the gradient itself    (first of a step)
                      -----------------> landing buffer ---> added to the gradient        (accumulation: sums.py)
                      -----------------> landing buffer ---> the optimizer                (it steps in backward)

host_gradients.py has the gradients that are on the host, and the scaling that is still to be applied to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sp_lightning.pipeline.gradients.averaging import Averaged, Averaging, ReplicatedWeights
from sp_lightning.pipeline.gradients.buffers import LandingBuffers, Parcel, StagingBuffers, few_landing_buffers, unit_of
from sp_lightning.pipeline.gradients.direct import DirectGradients
from sp_lightning.pipeline.gradients.gradient_layout import GradientLayout
from sp_lightning.pipeline.gradients.homes import Homes
from sp_lightning.pipeline.gradients.host_gradients import HostGradients
from sp_lightning.pipeline.gradients.shipping import Shipping
from sp_lightning.pipeline.gradients.sums import Sums
from sp_lightning.pipeline.gradients.unaveraged import Unaveraged
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import (
    brings_gradient,
    graph_task,
    post_accumulate_hooks,
    without_torch_function,
)
from sp_lightning.pipeline.weights.group import Group
from sp_lightning.pipeline.weights.leaf import take_gradient
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Twin, Weight


class GradientReturn:
    """Brings gradients to the host.

    Args:
        units: All units, the resident one included.
        backend: Runs the copies.
        stats: Counters.
        pin: Whether to pin host memory.
        on_arrival: Called when autograd has finished a gradient.
        on_departure: Called before gradients are sent off: backward leaves a unit, or has all gradients of it.
        finish_optimizer: Waits until no step reads the gradients of a group any more.
        replicated: The weights whose gradients are averaged with those of other processes, if there are any.

    Attributes:
        gradients: The gradients that are on the host, or on their way there.
        shipping: Sends them there.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        backend: Backend,
        stats: Stats,
        pin: bool,
        on_arrival: Callable[[], None],
        on_departure: Callable[[], None],
        finish_optimizer: Callable[[Group], None],
        replicated: ReplicatedWeights | None = None,
    ) -> None:
        self._units = units
        self._on_arrival = on_arrival
        self._on_departure = on_departure
        self._finish_optimizer = finish_optimizer
        self._gathered: dict[Unit, dict[Weight, Tensor]] = {}
        self._expected: dict[Unit, int] = {}
        self._arrived: dict[Weight, None] = {}
        self._sparse: dict[Weight, list[Tensor]] = {}
        self._of_one_leaf: dict[tuple[Weight, int], Tensor] = {}
        self._direct = DirectGradients(self._refuse_direct)
        self._staging_buffers = StagingBuffers(units, backend)
        self._homes = Homes(backend, pin)
        together = max((unit.group.unit_count for unit in units), default=1)
        self._landing_buffers = LandingBuffers(backend, pin, few_landing_buffers(len(units), together))
        self._bytes_given_up = 0, 0  # on the device, and on the host
        self.gradients = HostGradients(self._homes, backend, stats)
        replicas = None if replicated is None else replicated.replicas
        self._sums = Sums(self.gradients, self._homes, backend, stats, replicas)
        self.shipping = Shipping(
            self.gradients, self._homes, self._landing_buffers, self._sums, backend, stats, finish_optimizer
        )
        self._averaging: Averaging | None = None
        if replicated is not None:
            unaveraged = Unaveraged(replicated.replicas, self.gradients, backend, stats)
            self._averaging = Averaging(replicated, unaveraged, self._gathered, self._staging_buffers)

    @property
    def _averaging_now(self) -> Averaging | None:
        """What averages gradients; None also while this process runs backward alone."""
        averages = self._averaging is not None and self._averaging.replicas.averages
        return self._averaging if averages else None

    # ----------------------------------------------------------------------------------- gathering, while backward runs

    def follow_requires_grad(self, twin: Twin) -> None:
        """Let a twin require a gradient if its master does, and collect its gradients."""
        with torch.inference_mode(False):
            twin.parameter.requires_grad_(twin.weight.master.requires_grad)
            twin.required_gradient = twin.parameter.requires_grad
            if twin.parameter.requires_grad and twin.gradient_hook is None:
                self.watch(twin)

    def adopt_requires_grad(self, twin: Twin) -> None:
        """Let a master require a gradient, or no longer, if a forward has changed that of its twin."""
        if twin.parameter.requires_grad != twin.required_gradient:
            twin.weight.master.requires_grad_(twin.parameter.requires_grad)
            self.follow_requires_grad(twin)

    def watch(self, twin: Twin) -> None:
        """Collect the gradients of a twin from now on."""

        def collect(_: Tensor) -> None:
            with without_torch_function():
                self._collect(twin)

        self._direct.watch(twin.weight)
        register = twin.parameter.register_post_accumulate_grad_hook
        twin.gradient_hook = register(collect)  # type: ignore[no-untyped-call]

    def _collect(self, twin: Twin) -> None:
        self._on_arrival()
        gradient = take_gradient(twin.parameter)
        weight = twin.weight
        if gradient is None or not weight.master.requires_grad:  # frozen since the forward
            return
        self._note_arrival(weight, gradient)
        if gradient.layout is not torch.strided:
            self._sparse.setdefault(weight, []).append(gradient)
        elif weight.lowered_leaves:
            self._await_other_leaf(twin, gradient)
        else:
            self._gather(weight, gradient)

    def _refuse_direct(self, weight: Weight) -> None:
        """Raise if the master itself gets a gradient; if it was frozen since the forward, autograd adds none."""
        if weight.master.requires_grad:
            raise RuntimeError(
                f"Weight {weight.name!r} got a gradient from a graph that was built outside of a step, or by an "
                "`autograd.Function` outside of its module. Compute with weights in `with pipeline.step():`, as "
                "`training_step` does, and give such a function `weight[:]`."
            )

    def _note_arrival(self, weight: Weight, gradient: Tensor) -> None:
        if gradient.requires_grad:
            raise RuntimeError(
                f"backward(create_graph=True) would leave a gradient with a graph on weight {weight.name!r}, whose "
                "gradient lives on the host. Use torch.autograd.grad(..., create_graph=True) for the inner gradient."
            )
        self._arrived[weight] = None

    def _await_other_leaf(self, twin: Twin, gradient: Tensor) -> None:
        """Keep the gradient of one of a weight's leaves until the other's arrives, if this backward brings one.

        In plain training there is one leaf, and autograd adds up the gradients of all uses before it adds their sum to
        the gradient that is there: once in each backward, of which reentrant checkpoints nest one in another.
        """
        weight, backward = twin.weight, graph_task()
        earlier = self._of_one_leaf.pop((weight, backward), None)
        if earlier is not None:
            self._gather(weight, earlier.to(weight.master.dtype) + gradient)
        elif any(brings_gradient(leaf) for leaf in weight.leaves() if leaf is not twin.parameter):
            self._of_one_leaf[weight, backward] = gradient
        else:
            self._gather(weight, gradient)

    def _gather(self, weight: Weight, gradient: Tensor) -> None:
        """Put a gradient with the others of its unit, and ship them when it is the last."""
        self._check_not_stepped(weight)
        unit = weight.unit
        if weight in self._gathered.get(unit, ()):  # reentrant checkpoints accumulate several times in one backward
            self._ship(unit)
        gathered = self._gathered.get(unit)
        if gathered is None:
            gathered = self._gathered[unit] = {}
            self._expected[unit] = sum(other.master.requires_grad for other in unit.weights)
        gathered[weight] = gradient
        if len(gathered) == self._expected[unit]:
            self._ship(unit)

    def _check_not_stepped(self, weight: Weight) -> None:
        if self.shipping.stepper.has_stepped(weight):
            raise RuntimeError(
                f"Weight {weight.name!r} got another gradient after it was stepped in this backward pass. Train with "
                "`overlap_optimizer=False`."
            )

    def has_arrived(self, weight: Weight) -> bool:
        """Tell whether the backward that is running has brought a gradient that is not part of `.grad` yet."""
        return weight in self._arrived

    def ship_all_but(self, units: Sequence[Unit]) -> None:
        """Ship what all other units have gathered: backward has moved on to these."""
        self._on_departure()  # also if the unit that it left is frozen
        for unit in [unit for unit in self._gathered if unit not in units]:
            self._ship(unit)

    # ----------------------------------------------------------------------------- shipping: averaged, and put together

    @torch.no_grad()
    def _ship(self, unit: Unit) -> None:
        """Send what a unit has gathered to the host, averaged first if there are other processes."""
        self._on_departure()
        gathered = self._gathered.pop(unit)
        if not gathered:  # another process's turn has taken it already
            return
        if self._averaging is not None and self._averaging.is_due:
            self._ship_averaged(self._averaging.average(gathered))
            return
        if self._averaging is not None:
            self._averaging.unaveraged.note(gathered)
        self._send(self._put_together(unit, gathered))

    def _ship_averaged(self, turns: Iterable[Averaged]) -> None:
        for turn in turns:
            weights = turn.layout.weights
            for weight in weights:
                self._check_not_stepped(weight)
            unit = unit_of(weights)
            if unit is not None:
                self._send(Parcel(unit, turn.layout, turn.staging))
                continue
            averaged = dict(zip(weights, turn.staging.tensors(turn.layout), strict=True))
            for unit in dict.fromkeys(weight.unit for weight in weights):
                self._send(self._put_together(unit, averaged))

    def _send(self, parcel: Parcel) -> None:
        weights = parcel.layout.weights
        complete = len(weights) == self._expected.get(parcel.unit)
        is_final = self._averaging is None or self._averaging.is_final(weights)  # no other process can bring more
        is_last = complete and is_final
        self.shipping.send(parcel, complete, is_last)

    def _put_together(self, unit: Unit, gathered: Mapping[Weight, Tensor]) -> Parcel:
        """Copy the gradients of a unit's weights into one staging buffer."""
        weights = tuple(weight for weight in unit.weights if weight in gathered)
        gradients = [gathered[weight] for weight in weights]
        layout = GradientLayout(weights, tuple(gradient.dtype for gradient in gradients))
        staging = self._staging_buffers.take(layout.nbytes)
        torch._foreach_copy_(staging.tensors(layout), gradients)
        return Parcel(unit, layout, staging)

    def fetch_sums(self, unit: Unit) -> None:
        """Fetch the sums of a unit that backward has reached: it needs them on the device when it leaves the unit."""
        if self._averaging_now is not None:
            self._averaging_now.unaveraged.fetch(unit)

    def check_averaged(self, weights: Iterable[Weight]) -> None:
        """Raise if a weight that is about to be stepped has a gradient that was not averaged over processes."""
        if self._averaging_now is not None:
            self._averaging_now.unaveraged.check_averaged(weights)

    # ----------------------------------------------------------------------------------------------- when backward ends

    @torch.no_grad()
    def finish(self, takes_part: bool = False) -> None:
        """Send the gradients that are left, and enter all of them in `gradients`, though some may not have landed yet.

        Args:
            takes_part: Whether to take part in averaging even if no gradient has arrived in this process. Otherwise it
                takes part only if one has: `torch.autograd.grad` in some processes does not concern the others.
        """
        while self._of_one_leaf:
            (weight, _), gradient = self._of_one_leaf.popitem()
            self._gather(weight, gradient)
        self.ship_all_but([])
        averaging = self._averaging_now
        if averaging is not None and (takes_part or self._arrived or averaging.has_unmanaged()):
            self._ship_averaged(averaging.finish(self._sparse))
            self._sparse = averaging.average_sparse(self._sparse)
            averaging.average_unmanaged()
        self.shipping.stepper.end_of_backward()
        self._conclude()
        self._forget()

    def _conclude(self) -> None:
        """Make what backward has brought the masters' gradients, and call users' hooks."""
        # in autograd's order, in which users expect their hooks to be called; then weights that only others have used
        weights = dict.fromkeys([*self._arrived, *self.shipping.sent, *self._sparse])
        self._arrived.clear()  # hooks may read the gradients now
        has_hooks = any(post_accumulate_hooks(weight.master) for weight in weights)
        changed = [*self._sums.held_back, *self._sparse, *self._sums.held]
        if changed or has_hooks:
            self.gradients.settle()
        self.gradients.forget_norms(changed)  # which were taken before the change
        for weight in weights:
            self._sums.conclude(weight, self._sparse.get(weight, ()))
            for post_hook in post_accumulate_hooks(weight.master):
                self.gradients.show(weight)
                post_hook(weight.master)

    def abandon(self) -> None:
        """Forget gradients that have not landed, after an exception."""
        self.shipping.stepper.abandon()  # before the memory that it reads is given to anybody else
        self._let_go()

    def close(self) -> None:
        """Show all gradients, and release all other memory, on the device as well.

        No copy may be under way. `device_bytes` and `host_bytes` still count the memory.
        """
        self._let_go()
        self._direct.close()
        self._bytes_given_up = self.device_bytes(), self.host_bytes()
        self._homes.pins = False  # no copies will come
        for unit in self._units:
            for weight in unit.weights:
                self.gradients.show(weight)
            self._homes.release_lower(unit)
        self._staging_buffers.release()
        self._homes.release()
        self._landing_buffers.release()

    def _let_go(self) -> None:
        self.gradients.abandon()
        if self._averaging is not None:
            self._averaging.abandon()
        self._landing_buffers.abandon()
        self._staging_buffers.abandon()
        self._forget()

    def _forget(self) -> None:
        self._gathered.clear()
        self._arrived.clear()
        self._sparse.clear()
        self._of_one_leaf.clear()
        self.shipping.forget_sent()
        self._sums.forget()
        self._homes.release_outgrown()

    # ----------------------------------------------------------------------------------------------------------- memory

    def reserve(self) -> None:
        """Allocate the device memory through which gradients leave, before a step that may have a backward."""
        self._staging_buffers.reserve()

    def device_bytes(self) -> int:
        """Return the bytes of device memory held for gradients that leave."""
        return self._bytes_given_up[0] + self._staging_buffers.nbytes()

    def host_bytes(self) -> int:
        """Return the bytes of host memory held for gradients."""
        return self._bytes_given_up[1] + self._homes.nbytes() + self._landing_buffers.nbytes()
