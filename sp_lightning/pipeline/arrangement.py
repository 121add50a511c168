"""An arrangement: units, host memory, places on the device and twins, made from a module tree at one moment.

A pipeline makes one when it attaches, and another one when it has learned something (a weight used outside of its
unit, a weight that autocast lowers) or when the module tree has changed. Masters keep their identity and values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from sp_lightning.pipeline._private import storage_key
from sp_lightning.pipeline.gradients.landing import PIECES, lay_out_gradients
from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.learned import Learned
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.planned import WindowPlan
from sp_lightning.pipeline.sizes import parse_bytes, readable_bytes
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.weights.device import Group, place_in_arena, travel_together
from sp_lightning.pipeline.weights.finder import find_units
from sp_lightning.pipeline.weights.host import (
    GroupHost,
    HostBuffer,
    available_host_memory,
    lay_out,
    tensor_in,
    total_host_memory,
)
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Twin, Weight

_PINNED_SHARE = 0.8  # of the host's memory; the rest of the system must not starve
_DEFAULT_SLOTS = 2  # one computes, one arrives
_LARGEST_UNIT = 4 << 30  # see `largest_unit_bytes`
_SHARE_OF_DEVICE = 6


class Arrangement:
    """Lays a module's weights out on host and device. Nothing is changed before everything has been checked.

    Args:
        module: The module.
        options: The user's choices.
        learned: What earlier steps have shown.
        backend: Allocates and pins.
        autocast: The dtype that autocast lowers to in the steps to come, if it is on.
        progress: Told how many bytes of weights have been laid out, and of how many: it may take minutes.
        replicas: Other processes that train the same model, if there are any.

    Attributes:
        units: Streamed units in expected order.
        resident: The unit of resident weights.
        streamed_members: Members of streamed units, in expected order.
        members: Every module that gets a gate.
        weights: All weights.
        weights_by_master: All weights, by the identity of their masters.
        weights_by_memory: The same, by the identity of the masters' memory.
        groups: All groups, resident ones included.
        on_device: Parameters of units that live on the device.
        twins: All twins, by the identity of their memory.
        budget: The user's `memory_budget` in bytes; None if there is none, or if it is a share of what nobody knows.
        plan: What a planner has chosen, if it is in force.
        k: Units on the device at once, kept ones not counted.
        k_prime: Units that travel together.
        untouched: Whether nothing of it has been used in this step.

    Raises:
        ValueError: If an option does not fit the module or the memory.
    """

    def __init__(
        self,
        module: nn.Module,
        options: PipelineOptions,
        learned: Learned,
        backend: Backend,
        autocast: torch.dtype | None = None,
        progress: Callable[[int, int], None] | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.autocast = autocast
        self.untouched = True
        self._options = options
        self._short_of_memory = learned.short_of_memory
        self._backend = backend
        self._replicas = replicas
        self._sharing = 1 if replicas is None else replicas.on_this_machine
        device_bytes = backend.total_memory()
        self.budget = None if options.memory_budget is None else parse_bytes(options.memory_budget, device_bytes)
        largest = largest_unit_bytes(self.budget or device_bytes)
        division = find_units(module, options.units, [*options.resident, *learned.resident], largest, learned.split)
        if learned.order:
            division.put_in_order(learned.order)
        self.units = division.units
        self.resident = division.resident
        self.callers = division.callers
        self.unmanaged = division.unmanaged
        self.all_units = division.all_units()
        self.streamed_members = [member for unit in division.units for member in unit.members]
        self.members = [*self.streamed_members, *division.resident.members, *division.callers]
        for weight in [weight for unit in division.units for weight in unit.weights]:  # resident ones do not travel
            if autocast is not None and id(weight.master) in learned.lowered - learned.used_as_is:
                weight.compute_dtype = autocast
        for weight in [weight for unit in self.all_units for weight in unit.weights]:
            weight.averaged = replicas is not None
        self._choose_window(learned.plan)
        division.leave_on_device(self._on_device)
        self.on_device = [weight.master for unit in self._on_device for weight in unit.on_device]
        self.weights = [weight for unit in self.all_units for weight in unit.weights]
        self.weights_by_master = {id(weight.master): weight for weight in self.weights}
        self._check_budget()
        self._check_host_memory(others=0 if learned.buffers else self._sharing - 1)
        self.pin, self.pin_gradients = self._may_pin()
        self.groups: list[Group] = []
        self.twins: dict[int, Twin] = {}
        before = learned.buffers
        try:
            self._lay_out(learned, progress or (lambda done, total: None))
        except BaseException:
            learned.buffers = {**before, **learned.buffers}  # somebody has to release them
            raise
        self.weights_by_memory = {storage_key(weight.host): weight for weight in self.weights}

    def make_resident(self, weight: Weight) -> Twin:
        """Give a weight memory of its own on the device, in its own dtype, for the rest of this arrangement."""
        lowered, weight.compute_dtype = weight.lowered, weight.master.dtype
        memory = weight.unit.group.host.memory_of(weight)
        masters = HostBuffer(memory.nbytes, self._backend, False, memory)
        group = Group(-1, 0, GroupHost([weight], self._backend, False, masters), True, weight.name)
        group.place = self._backend.allocate(group.nbytes)
        self.groups.append(group)
        data = tensor_in(group.place, 0, weight.host, weight.compute_dtype)
        weight.twin = Twin(weight, group, data) if lowered else weight.twin.moved_to(group, data)
        self.twins[weight.twin.key] = weight.twin
        for member in self.members:
            if any(place.weight is weight for place in member.places):
                member.find_groups()
        return weight.twin

    def give_up_memory(self) -> None:
        """Let go of the device's memory, so that who comes next has room; not while a graph holds weights.

        Else it would be there until Python's collector comes to the reference cycles that this is part of.
        """
        if any(group.handles for group in self.groups):
            return
        self.arena = self._backend.allocate(0)
        for group in self.groups:
            group.place = self.arena
        with torch.inference_mode(False):
            for twin in self.twins.values():
                twin.data = twin.parameter.data = torch.empty(0, dtype=twin.data.dtype, device=twin.data.device)
        self.twins.clear()  # twins are known by their memory, which is anybody's now

    def device_bytes(self) -> int:
        """Device memory for weights, and for all that units which live there have."""
        return self._arena_bytes + sum(group.nbytes for group in self.groups if group.kept) + self._on_device_bytes()

    def pinnable_bytes(self) -> int | None:
        """How much host memory may be page-locked besides weights and gradients; None for any amount."""
        total = total_host_memory()
        if not self._backend.can_pin or self._options.pin_memory is False:
            return 0
        if self._options.pin_memory is True or total is None:
            return None
        weights = sum(weight.compute_bytes for weight in self.weights) if self.pin else 0
        gradients = self._gradient_bytes() if self.pin_gradients else 0
        return max(0, int(_PINNED_SHARE * total) // self._sharing - weights - gradients)

    def streaming_bytes(self) -> int:
        """Device memory for weights, and for gradients on their way to the host."""
        return self.device_bytes() + self._bytes_of_gradients_on_their_way()

    def _bytes_of_gradients_on_their_way(self) -> int:
        averaged = 0 if self._replicas is None else 1  # while the next ones are put together
        largest = max((gradient_bytes([u]) for u in self.all_units if u not in self._on_device), default=0)
        return (PIECES + averaged) * largest

    def _on_device_bytes(self) -> int:
        return 0 if self.plan is None else self.plan.on_device_bytes

    # ------------------------------------------------------------------------------------------------------ checks

    def _choose_window(self, plan: WindowPlan | None) -> None:
        k, k_prime = self._options.k, self._options.k_prime
        together = k_prime if isinstance(k_prime, int) else 1
        self.plan = None if self._short_of_memory else plan
        if self.plan is not None:
            on_device = [unit for unit in self.units if unit.name in self.plan.on_device]
            kept = [unit for unit in self.units if unit.name in self.plan.resident]
            self._set_window(self.plan.k, self.plan.k_prime, kept, on_device)
            if self.budget is None or self._needed_bytes() <= self.budget:
                return
            self.plan = None  # weights are sent in another dtype than when the plan was made
        slots = 1 if self._short_of_memory else _DEFAULT_SLOTS
        self._set_window(k if isinstance(k, int) else slots * together, together)
        if k == "auto" and self.budget is not None and self._needed_bytes() > self.budget:
            self._set_window(together, together)

    def _set_window(self, k: int, k_prime: int, kept: Sequence[Unit] = (), on_device: Sequence[Unit] = ()) -> None:
        self.k, self.k_prime = k, k_prime
        self._window = max(1, k // k_prime)
        self._on_device = list(on_device)
        self._kept = {*kept, *on_device}
        parts = travel_together(len(self.units), k_prime, [self.units.index(unit) for unit in self._kept])
        self._parts = [[self.units[number] for number in part] for part in parts]

    def _slot_bytes(self) -> int:
        sizes = [sent_bytes(part) for part in self._parts if part[0] not in self._kept]
        kept = sum(sent_bytes([unit]) for unit in self._kept if unit not in self._on_device)
        return place_in_arena(sizes, self._window)[1] + kept + self._on_device_bytes()

    def _needed_bytes(self) -> int:
        """What `streaming_bytes` will be."""
        return self._slot_bytes() + sent_bytes([self.resident]) + self._bytes_of_gradients_on_their_way()

    def _check_budget(self) -> None:
        budget = self.budget
        if budget is None or self._needed_bytes() <= budget:
            return
        resident = sent_bytes([self.resident])
        gradients = self._bytes_of_gradients_on_their_way()
        least = max((sent_bytes([unit]) for unit in self.units), default=0) + resident + gradients
        raise ValueError(
            f"`memory_budget={self._options.memory_budget!r}` is too small with `k={self.k}`: slots take "
            f"{readable_bytes(self._slot_bytes())}, resident weights {readable_bytes(resident)}, gradients on their "
            f"way {readable_bytes(gradients)}. The least budget that works, with k=1, is {least} bytes "
            f"({readable_bytes(least)})."
        )

    def _check_host_memory(self, others: int) -> None:
        """Refuse what does not fit, here and in other processes that arrange the same at this moment."""
        free = available_host_memory()
        gradients = self._gradient_bytes()
        copies = sum(weight.compute_bytes for weight in self.weights if weight.lowered)
        moving = max(sent_bytes(part) for part in [*self._parts, [self.resident]])
        needed = gradients + copies + moving
        if free is not None and needed * (1 + others) > free:
            each = f" in each of {1 + others} processes" if others else ""
            raise ValueError(
                f"Host memory is too small: {readable_bytes(needed)} are needed on top of the model{each} "
                f"({readable_bytes(gradients)} for gradients, the rest for copies of weights; optimizer state is not "
                f"counted), and {readable_bytes(free)} are free. Use a machine with more memory, or freeze weights"
                f"{', or train on fewer devices (`Trainer(devices=1)`)' if self._sharing > 1 else ''}."
            )

    def _gradient_bytes(self) -> int:
        """Host memory in which gradients stay, with their norms."""
        trainable = ([weight for weight in unit.weights if weight.master.requires_grad] for unit in self.all_units)
        return sum(lay_out_gradients(weights, [w.master.dtype for w in weights])[1] for weights in trainable)

    def _may_pin(self) -> tuple[bool, bool]:
        """Whether to page-lock weights, and gradients: not more than their share, unless the user insists."""
        if not self._backend.can_pin or self._options.pin_memory is False:
            return False, False
        total = total_host_memory()
        if self._options.pin_memory is True or total is None:
            return True, True
        weights = sum(weight.compute_bytes for weight in self.weights)
        gradients = self._gradient_bytes()
        share = _PINNED_SHARE * total / self._sharing
        if weights + gradients > share:
            warnings.warn(
                f"{readable_bytes(weights)} of weights and {readable_bytes(gradients)} of gradients would page-lock "
                f"more than {_PINNED_SHARE:.0%} of the host's {readable_bytes(total)}. "
                f"{'Gradients' if weights <= share else 'Both'} go through a small page-locked ring instead, which is "
                "slower. `pin_memory=True` page-locks everything.",
                stacklevel=2,
            )
        return weights <= share, weights + gradients <= share

    # ------------------------------------------------------------------------------------------------------ memory

    def _lay_out(self, learned: Learned, progress: Callable[[int, int], None]) -> None:
        before, learned.buffers = learned.buffers, {}
        total = sum(map(sent_bytes, self._parts))
        progress(0, total)
        for index, part in enumerate(self._parts):
            self.groups.append(self._make_group(index, part, before, learned.buffers))
            self.groups[-1].kept = part[0] in self._kept
            progress(sum(group.nbytes for group in self.groups), total)
        streamed = [group for group in self.groups if not group.kept]
        offsets, self._arena_bytes = place_in_arena([group.nbytes for group in streamed], self._window)
        self.arena = self._backend.allocate(self._arena_bytes)
        for group, offset in zip(streamed, offsets, strict=True):
            group.place = self.arena[offset : offset + group.nbytes]
            group.conflicts = [
                other
                for other, start in zip(streamed, offsets, strict=True)
                if other is not group and start < offset + group.nbytes and offset < start + other.nbytes
            ]
        for group in [group for group in self.groups if group.kept]:
            group.place = self._backend.allocate(group.nbytes)
        if self.resident.weights:
            group = self._make_group(len(self.groups), [self.resident], before, learned.buffers)
            group.place = self._backend.allocate(group.nbytes)
            self.groups.append(group)
        for group in self.groups:
            for weight, offset in zip(group.host.weights, group.host.source_offsets, strict=True):
                data = tensor_in(group.place, offset, weight.host, weight.compute_dtype)
                weight.twin = Twin(weight, group, data)
                self.twins[weight.twin.key] = weight.twin
        for member in self.members:
            member.twins = self.twins
            member.find_groups()
            masters = sorted({id(place.weight.master) for place in member.places})
            member.observed = learned.observed.setdefault((id(member.module), *masters), set())
        for key, buffer in before.items():
            if key not in learned.buffers:
                buffer.release()
        if self.pin and not all(group.host.source.pinned for group in self.groups):
            warnings.warn(
                "Some host memory could not be page-locked (a limit of the system or the container, see `ulimit -l`). "
                "It is copied through a small page-locked ring, which is slower.",
                stacklevel=2,
            )

    def _make_group(
        self,
        index: int,
        units: Sequence[Unit],
        before: dict[tuple[int, ...], HostBuffer],
        now: dict[tuple[int, ...], HostBuffer],
    ) -> Group:
        weights = [weight for unit in units for weight in unit.weights]
        key = tuple(id(weight.master) for weight in weights)
        host = GroupHost(weights, self._backend, self.pin, before.get(key))
        now[key] = host.masters
        name = ", ".join(unit.name for unit in units)
        group = Group(index, len(units), host, units[0].resident, name)
        for unit in units:
            unit.group = group
        return group


def largest_unit_bytes(device_bytes: int | None) -> int:
    """Blocks above this many bytes are divided where their structure allows it.

    Args:
        device_bytes: What there is for a step on the device, if that is known.
    """
    return _LARGEST_UNIT if device_bytes is None else min(_LARGEST_UNIT, device_bytes // _SHARE_OF_DEVICE)


def move_buffers(root: nn.Module, device: torch.device) -> None:
    """Move buffers: they live on the device, because BatchNorm saves and changes the very objects."""
    moved: dict[int, Tensor] = {}
    for module in root.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[key] = moved[id(buffer)]


def move_unmanaged(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move parameters that cannot stream (tensor subclasses, scripted modules): they live on the device."""
    for parameter in parameters:
        if parameter.device != device:
            parameter.data = parameter.data.to(device)


def sent_bytes(units: Sequence[Unit]) -> int:
    """Bytes of the weights of units, as they are sent to the device and lie there."""
    return lay_out([weight.compute_bytes for unit in units for weight in unit.weights])[1]


def gradient_bytes(units: Sequence[Unit]) -> int:
    """Bytes of the gradients of units, as they are sent to the host, with their norms."""
    weights = [weight for unit in units for weight in unit.weights if weight.master.requires_grad]
    return lay_out_gradients(weights, [weight.gradient_dtype for weight in weights])[1]
