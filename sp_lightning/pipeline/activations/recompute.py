"""Recomputation: a unit's forward runs again in backward, so that what it saves need not be held.

[Note: decided when a call is over]
While a unit's forward runs, everything that autograd saves is held. Only when the call is over, and all of it has been
seen, is it decided whether to drop these tensors and keep the inputs alone. So nothing has to be known in advance
about what a forward must not do twice: one that changes its inputs in place, or appends to a list, keeps what it has
saved, from its first call on. The peak is the same as if tensors had been dropped at once, because backward needs a
whole unit as well. `torch.utils.checkpoint` around a unit would have to decide at the beginning.

[Note: run again]
Backward asks for the first tensor that was dropped. The unit is called again, through its gate, as a user's own
checkpoint would call it: with the same inputs, and what contract.py promises. The tensors that the second forward
saves take the place of the dropped ones, in the same order, and the forward ends as soon as none is missing. The graph
of the second forward is thrown away; gradients flow through the first.

[Note: inputs on the host]
What a call holds are its inputs, and with many units or long sequences these are most of what is left. They can be
offloaded like anything else that is saved (offload.py): packed once the call has been entered, for they belong to what
its unit sends when it is left, and fetched for the second forward one unit ahead.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from sp_lightning.pipeline.activations.contract import Buffers, Look, Surroundings
from sp_lightning.pipeline.activations.footprint import Footprint, bytes_worth_a_copy
from sp_lightning.pipeline.activations.inputs import Inputs
from sp_lightning.pipeline.activations.refill import Refill, are_close, sample
from sp_lightning.pipeline.activations.saved import Recording, SavedTensors
from sp_lightning.pipeline.lanes.backend import Backend, is_out_of_memory
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import scope_that_ends_before_backward, storage_key, without_torch_function
from sp_lightning.pipeline.weights.operands import tensors_in
from sp_lightning.pipeline.weights.units import Member
from sp_lightning.pipeline.weights.weight import outdated_graph_error


class CannotRunAgain(RuntimeError):
    """A unit's forward has to run again in backward, but cannot: mostly, something that it depends on has changed."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}. Use `activations='keep'` or `'offload'`, or change it after backward.")


@dataclass
class History:
    """What earlier calls of a member that were recorded, to run again, have shown.

    Attributes:
        calls: How many there were.
        held: Whether the last look found an obstacle, so that calls hold what they save.
        never: Whether a second forward has failed, or computed something else, so that there is no other.
        warned: Whether a warning has said why calls do not run again.
    """

    calls: int = 0
    held: bool = False
    never: bool = False
    warned: bool = False

    @property
    def is_time_to_look(self) -> bool:
        """Whether to look at what the next call changes: in the first, the second, the fourth, ..."""
        return (self.calls + 1).bit_count() == 1


class SecondForwards:
    """Records calls of units, and runs their forwards again in backward.

    Attributes:
        checks: Whether to compare what all calls save, and not only those with a look.
        histories: Of members, by their names.
        timed: Whether second forwards are timed.
        times: The members whose forwards have run again while they were timed, and the marks before and after.
        under_way: Whether one runs now.
        has_failed: Whether one has failed, or computed something else, since somebody has asked.
    """

    def __init__(self, saved: SavedTensors, backend: Backend, stats: Stats, checks: bool) -> None:
        self.saved = saved
        self.backend = backend
        self.checks = checks
        self.histories: defaultdict[str, History] = defaultdict(History)
        self.timed = False
        self.times: list[tuple[str, Any, Any]] = []
        self.under_way = self.has_failed = False
        self._stats = stats
        self._dropped: WeakSet[UnitCall] = WeakSet()

    def passes_over(self, member: Member) -> bool:
        """Tell whether the next call of a member is not recorded, as it could not run again; if so, count it."""
        history = self.histories[member.name]
        if not (history.never or (history.held and not history.is_time_to_look)):
            return False
        history.calls += 1
        return True

    def record(self, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnitCall:
        """Begin to record a call of a member; its inputs are packed later."""
        history = self.histories[member.name]
        looks = history.is_time_to_look
        history.calls += 1
        return UnitCall(self, member, args, kwargs, looks)

    def conclude(self, call: UnitCall, output: Any, warns: bool) -> None:
        """End a call: drop what its forward has saved if that can be recomputed, and is worth it."""
        history = self.histories[call.member.name]
        obstacle = call.conclude(output, may_repeat=not history.never and (call.looks or not history.held))
        if call.looks:
            history.held = not call.is_dropped
        if call.is_dropped:
            self._dropped.add(call)
        if obstacle is not None and warns:
            self._warn(call.member, f"{obstacle}, so its forward cannot run a second time")

    def run(self, call: UnitCall) -> None:
        """Run a forward again."""
        self._stats.recomputed += 1
        history = self.histories[call.member.name]
        before, self.under_way = self.under_way, True
        begin = self.backend.mark() if self.timed else None
        try:
            is_same = call.run_again()
        except CannotRunAgain:
            history.never = self.has_failed = True
            raise
        finally:
            self.under_way = before
        if self.timed:
            self.times.append((call.member.name, begin, self.backend.mark()))
        if not is_same:
            history.never = self.has_failed = True
            self._warn(
                call.member,
                "has computed something else when its forward ran again in backward, so that the gradients of this "
                "step are not exact. It will not run again",
            )

    def _warn(self, member: Member, what: str) -> None:
        history = self.histories[member.name]
        if not history.warned:
            history.warned = True
            warnings.warn(
                f"`activations`: {member.name!r} {what}. What it saves for backward stays on the device.", stacklevel=2
            )

    def let_go(self) -> None:
        """Refer to the module no longer: its graphs, which may live on, cannot recompute anything now."""
        for call in list(self._dropped):
            call.let_go()


class UnitCall(Recording):
    """One call of a member: what its forward saved, and how to run it again.

    Attributes:
        looks: Whether to look at what the forward changes.
        is_packed: Whether its inputs were packed.
        is_dropped: Whether what it saved was dropped when it was over.
        footprint: The device memory that the call takes; None if nobody has counted it.
    """

    def __init__(
        self, runner: SecondForwards, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any], looks: bool
    ) -> None:
        super().__init__()
        self.member = member
        self.looks = looks
        self.is_packed = self.is_dropped = False
        self.footprint: Footprint | None = None
        self._runner = runner
        self._saved = runner.saved
        self._meter = runner.saved.meter
        self._bytes_before = self._meter.bytes
        self._refused: RuntimeError | None = None
        self._samples: dict[int, Tensor] = {}
        self._inputs = Inputs(self._saved, args, kwargs)
        modules = list(member.module.modules())
        self._has_hooks = any(module._forward_pre_hooks or module._forward_hooks for module in modules)
        self._look = Look(modules if looks else [], self._inputs.objects)
        self._buffers = Buffers(modules)
        self._training = member.module.training
        self._surroundings = Surroundings(runner.backend.device)
        with without_torch_function():
            twins = {entry.weight.twin for entry in member.entries}
            self._weights = [(twin, twin.version(), twin.weight.master.requires_grad) for twin in twins]
        self._on_device = [(parameter, parameter._version) for parameter in member.parameters_on_device]

    # ------------------------------------------------------------------------------------------------ first forward

    def pack_inputs(self) -> None:
        """Have the inputs held for the second forward, on the device or on the host."""
        self._inputs.pack()
        self.is_packed = True
        self._held = self._meter.bytes - self._bytes_before

    def conclude(self, output: Any, may_repeat: bool) -> str | None:
        """Drop what the forward, which is over, has saved, if that can be recomputed and is worth it.

        Returns:
            The obstacle to warn of, in words; None if there is none, or if nothing would have been dropped anyway.
        """
        obstacle = self._obstacle()
        tensors = [kept.tensor for kept in self.alive() if kept is not None and kept.tensor is not None]
        known = {storage_key(tensor) for tensor in [*self._inputs.tensors, *tensors_in(output)]}
        is_worth_it = any(storage_key(tensor) not in known for tensor in tensors)
        # what was changed after it was saved must raise in backward, as it does in plain training
        is_wrong = any(kept is not None and kept.is_changed for kept in self.alive())
        is_possible = may_repeat and is_worth_it and not is_wrong
        self.is_dropped = obstacle is None and is_possible
        if self._meter.counts:
            self.footprint = self._measure_footprint(tensors)
        del self._look
        if self.is_dropped:
            if self.looks or self._runner.checks:
                self._samples = sample(self, self._saved.twins)
            for kept in self.alive():
                if kept is not None:
                    kept.drop()
            self._inputs.tensors.clear()
            return None
        del self._inputs, self._surroundings, self._buffers
        return obstacle if is_possible else None

    def _obstacle(self) -> str | None:
        """Return what the forward has done that keeps it from running again, in words; None if it has not."""
        if self._has_hooks:
            return "has forward hooks"
        if self._inputs.have_attributes:
            return "is given a tensor with attributes of its own"
        if self.saves_nested:  # its shape cannot be compared: it has none, or a length that is new each time
            return "saves a nested tensor"
        if self._inputs.are_changed:
            return "changes its input in place"
        if self._weights_are_changed():
            return "changes its weights in place, or how they are sent"
        if self._buffers.obstacle is not None or self._buffers.are_changed:
            return self._buffers.obstacle or "changes a large buffer in place"
        scope = scope_that_ends_before_backward()
        if scope is not None:
            return f"is called under {scope}"
        return self._look.obstacle()

    def _measure_footprint(self, tensors: list[Tensor]) -> Footprint:
        held, saved = self._held, max(0, self._meter.bytes - self._bytes_before - self._held)
        large, large_inputs = (
            min(bytes_worth_a_copy(tensors), held + saved),
            min(bytes_worth_a_copy(self._inputs.tensors), held),
        )
        return Footprint(held, saved, large, held + saved, self.is_dropped, large_inputs)

    def _weights_are_changed(self) -> bool:
        with without_torch_function():
            # another leaf: the weight is no longer lowered, say
            return any(
                twin.weight.twin.parameter is not twin.parameter
                or twin.version() != version
                or twin.weight.master.requires_grad != trained
                for twin, version, trained in self._weights
            ) or any(parameter._version != version for parameter, version in self._on_device)

    # --------------------------------------------------------------------------------------------------- in backward

    def let_go(self) -> None:
        """Refer to the module no longer: autograd may hold what was dropped, and so this call (see Announcement)."""
        refused = outdated_graph_error(f"the inputs of {self.member.name!r}")
        vars(self).clear()
        self._refused = refused

    @override
    def repeat(self) -> None:
        if self._refused is not None:
            raise self._refused
        self._runner.run(self)

    def run_again(self) -> bool:
        """Run the forward again until every dropped tensor that is still needed has been recomputed.

        Returns:
            Whether it has computed the same as before, as far as that is known.
        """
        name = repr(self.member.name)
        if self._inputs.are_changed or self._buffers.are_changed or self._weights_are_changed():
            raise CannotRunAgain(
                f"an input, a buffer or a weight of {name} has been modified by an inplace operation, frozen, or sent "
                "in another dtype, between forward and backward, so its forward cannot run again"
            )
        if self.member.module.training != self._training:
            raise CannotRunAgain(f"{name} is in another mode in backward (`train()`, `eval()`) than in its forward")
        refill = Refill(self)
        args, kwargs = self._inputs.rebuild()
        with (
            self._surroundings.restored(),
            self._buffers.put_back(),
            torch.enable_grad(),
            saved_tensors_hooks(refill.pack, lambda tensor: tensor),
        ):
            try:
                self.member.module(*args, **kwargs)
            except Exception as error:  # code in between may have made another exception of `NothingMissing`
                if is_out_of_memory(error):
                    raise
                if refill.missing:
                    raise CannotRunAgain(
                        f"the forward of {name} failed when it ran again in backward ({type(error).__name__}: {error}),"
                        " where it is cut off from the graph that its inputs came from"
                    ) from error
        if refill.missing:
            raise CannotRunAgain(
                f"{name} has computed something else when its forward ran again in backward, because something outside "
                "of it has changed in between"
            )
        return not self._samples or are_close(self._samples, sample(self, self._saved.twins))
