"""An arrangement: units, host memory, places on the device and twins, made from a module tree at one moment.

A pipeline makes one when it attaches, and another whenever it has learned something (a weight is used outside of its
unit, autocast lowers a weight) or the module tree has changed. Masters keep their identity and values.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from sp_lightning.pipeline.gradients.replicas import Replicas
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.layout.device_layout import choose_device_layout, largest_unit_bytes, sent_bytes
from sp_lightning.pipeline.layout.host_share import HostShare
from sp_lightning.pipeline.layout.learned import Learned
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.sizes import parse_bytes
from sp_lightning.pipeline.torch_private import is_compiled, storage_key, without_torch_function
from sp_lightning.pipeline.units.finder import find_units
from sp_lightning.pipeline.weights.buffers import tensor_in
from sp_lightning.pipeline.weights.lowering import weights_under_autocast
from sp_lightning.pipeline.weights.places import overlaps, place_in_arena
from sp_lightning.pipeline.weights.segment import HostMemory, Segment
from sp_lightning.pipeline.weights.units import Group, Unit
from sp_lightning.pipeline.weights.weight import Twin, Weight


class Arrangement:
    """The layout of a module's weights on host and device. Nothing is changed before everything has been checked.

    Attributes:
        units: Streamed units in expected order.
        resident: The unit of resident weights.
        streamed_members: Members of streamed units, in expected order.
        members: Every module that gets a gate.
        weights: All weights.
        weights_by_master: All weights, by the identity of their masters.
        weights_by_memory: All weights, by the identity of their masters' memory.
        groups: All groups, resident ones included.
        parameters_on_device: Parameters of units that live on the device.
        twins: All twins, by the identity of their memory.
        host_share: Its share of the host's memory.
        budget: The user's `memory_budget` in bytes; None if there is none, or if it is a fraction of an unknown size.
        plan: The planner's choice, if it is in force.
        compiled: Whether torch compiles the module or parts of it.
        k: Units on the device at once, not counting kept ones.
        k_prime: Units that travel together.
        staging_buffers: How many gradients of a unit are on their way to the host at once.
        watched: Weights that autocast may lower, which shows when they are used.
        unused_in_step: Whether nothing of it has been used yet in this step.

    Raises:
        ValueError: If an option does not fit the module or the memory.
    """

    def __init__(
        self,
        module: nn.Module,
        options: PipelineOptions,
        learned: Learned,
        memory: HostMemory,
        backend: Backend,
        autocast: torch.dtype | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.autocast = autocast
        self.compiled = options.compile or any(map(is_compiled, module.modules()))
        self.unused_in_step = True
        self.watched: list[Weight] = []
        self._memory = memory
        self._backend = backend
        device_bytes = backend.total_memory()
        self.budget = None if options.memory_budget is None else parse_bytes(options.memory_budget, device_bytes)
        largest = largest_unit_bytes(self.budget or device_bytes)
        division = find_units(
            module,
            options.units,
            options.resident,
            largest,
            split=learned.divided,
            used_outside=learned.used_outside,
        )
        if learned.order:
            division.put_in_order(learned.order)
        self.units = division.units
        self.resident = division.resident
        self.unmanaged = division.unmanaged
        self.all_units = division.all_units()
        self.streamed_members = [member for unit in division.units for member in unit.members]
        self.members = [*self.streamed_members, *division.resident.members, *division.callers]
        self._choose_dtypes(module, learned, averaged=replicas is not None)
        self._layout = choose_device_layout(
            division,
            options,
            learned.plan,
            budget=self.budget,
        )
        self.plan = self._layout.plan
        self.k, self.k_prime = self._layout.k, self._layout.k_prime
        self.staging_buffers = self._layout.staging_buffers
        division.leave_on_device(self._layout.units_on_device)
        self.parameters_on_device = [
            weight.master for unit in self._layout.units_on_device for weight in unit.weights_on_device
        ]
        self.weights = [weight for unit in self.all_units for weight in unit.weights]
        self.weights_by_master = {id(weight.master): weight for weight in self.weights}
        self.watched = [weight for weight in self.watched if id(weight.master) in self.weights_by_master]
        processes = 1 if replicas is None else replicas.on_this_machine
        self.host_share = HostShare(self.all_units, backend, options.pin_memory, processes)
        parts = [*self._layout.parts, [self.resident]]
        self.host_share.check(max(map(sent_bytes, parts)), at_once=1 if memory else processes)
        self.groups: list[Group] = []
        self.twins: dict[int, Twin] = {}
        self._lay_out(learned)
        self.weights_by_memory: dict[int, Weight] = {}
        self._note_memory()

    def _choose_dtypes(self, module: nn.Module, learned: Learned, averaged: bool) -> None:
        """Decide in which dtype each weight is sent, and its gradient comes back."""
        if self.autocast is not None:
            by_table, unknown = weights_under_autocast(module, self._backend.device.type)
            if not self.compiled:  # a first step shows whether layers are called twice, or read from outside
                by_table, unknown = set(), by_table | unknown
            lowered = (by_table | learned.lowered) - learned.used_as_is
            unknown -= lowered | learned.used_as_is
            for segment in chain.from_iterable(map(_parts_of, self.units)):  # resident weights do not travel
                known = [weight for weight in segment if weight.dtype is torch.float32]
                casts = [weight for weight in known if id(weight.master) in lowered]
                if 2 * _bytes_of(casts) >= _bytes_of(segment):  # else most would be copied for the sake of a few
                    for weight in casts:
                        weight.compute_dtype = self.autocast
                if not self.compiled:
                    self.watched += [weight for weight in known if id(weight.master) in unknown]
        for weight in [weight for unit in self.all_units for weight in unit.weights]:
            weight.averaged = averaged

    def make_resident(self, weight: Weight) -> Twin:
        """Give a weight memory of its own on the device, in its own dtype, for the rest of this arrangement."""
        lowered, weight.compute_dtype = weight.lowered, weight.dtype
        beside = weight.unit.group
        segment = next(segment for segment in beside.segments if weight in segment.weights)
        own = Segment([weight], self._backend, pin=False, memory=segment.piece_of(weight, self._backend))
        group = Group(-1, units=[], segments=[own], resident=True, name=weight.name)
        beside.apart.append(group)
        group.place = self._backend.allocate(group.nbytes)
        self.groups.append(group)
        data = tensor_in(group.place, 0, weight.host, weight.compute_dtype)
        if lowered:
            weight.lowered_leaves.append(weight.twin.parameter)
        weight.twin = weight.make_twin(group, data, self.compiled) if lowered else weight.twin.moved_to(group, data)
        self.twins[weight.twin.key] = weight.twin
        for member in self.members:
            if any(entry.weight is weight for entry in member.entries):
                member.find_groups()
        return weight.twin

    def give_up(self) -> None:
        """Make way for another arrangement, or for none."""
        for unit in self.all_units:
            unit.members.clear()  # saved weights lead to units, and must not lead to the module (see Announcement)
        for weight in self.weights:  # the garbage collector would only free memory with this object, a part of cycles
            del weight.host, weight.home
        self.weights_by_memory.clear()  # others may get that memory
        if not any(group.handles for group in self.groups):  # else a graph holds weights
            self._give_up_device_memory()

    def _give_up_device_memory(self) -> None:
        """Release the device memory."""
        self.arena = self._backend.allocate(0)
        for group in self.groups:
            group.place = self.arena
        with torch.inference_mode(False), without_torch_function():
            for twin in self.twins.values():
                twin.data = torch.empty(0, dtype=twin.data.dtype, device=twin.data.device)
                twin.lay_leaf()
        self.twins.clear()  # twins are known by their memory, which others may get now

    def find_masters(self) -> None:
        """Find out where masters lie now: the next arrangement has failed, and may have moved some of them."""
        for weight in self.weights:
            weight.host = weight.home = weight.values()
        self._note_memory()

    def _note_memory(self) -> None:
        self.weights_by_memory.update((storage_key(weight.host), weight) for weight in self.weights)

    def release_host_memory(self) -> None:
        """Let go of host memory, except for that in which masters lie."""
        for group in self.groups:
            group.release_copies()

    @property
    def is_pinned(self) -> bool:
        """Whether all host memory that is sent is pinned; units that live on the device have none."""
        return all(segment.source.pinned for group in self.groups if group.nbytes for segment in group.segments)

    def device_bytes(self) -> int:
        """Return the device memory for weights, and for all state of units that live on the device."""
        kept = sum(group.nbytes for group in self.groups if group.has_own_place)
        return self._arena_bytes + kept + self._layout.on_device_bytes

    def streaming_bytes(self) -> int:
        """Return the device memory for weights, and for gradients on their way to the host."""
        return self.device_bytes() + self._layout.bytes_of_gradients_on_their_way()

    # ------------------------------------------------------------------------------------------------------ memory

    def _lay_out(self, learned: Learned) -> None:
        try:
            self._make_groups()
            self._assign_places()
        except BaseException:
            self.release_host_memory()
            raise
        self._memory.keep([segment for group in self.groups for segment in group.segments])
        self._make_twins()
        for member in self.members:
            member.twins = self.twins
            member.find_groups()
        if self.host_share.pin and not self.is_pinned:
            warnings.warn(
                "Some host memory could not be page-locked (a limit of the system or the container, see `ulimit -l`). "
                "Copies of it are slow.",
                stacklevel=2,
            )

    def _make_groups(self) -> None:
        for index, part in enumerate(self._layout.parts):
            self.groups.append(self._make_group(index, part))
        if self.resident.weights:
            self.groups.append(self._make_group(len(self.groups), [self.resident]))

    def _make_group(self, index: int, units: Sequence[Unit]) -> Group:
        parts = chain.from_iterable(map(_parts_of, units))
        segments = [Segment(part, self._backend, self.host_share.pin, self._memory.find(part)) for part in parts]
        name = ", ".join(unit.name for unit in units)
        is_kept = units[0] in self._layout.kept
        group = Group(index, units, segments, resident=units[0].resident, has_own_place=is_kept, name=name)
        for unit in units:
            unit.group = group
        return group

    def _assign_places(self) -> None:
        streamed = [group for group in self.groups if not group.has_own_place]
        sizes = [group.nbytes for group in streamed]
        offsets, self._arena_bytes = place_in_arena(sizes, self._layout.slots)
        self._backend.gather_free_memory()
        self.arena = self._backend.allocate(self._arena_bytes)
        for group, offset, others in zip(streamed, offsets, overlaps(offsets, sizes), strict=True):
            group.place = self.arena[offset : offset + group.nbytes]
            group.conflicts = frozenset(streamed[other] for other in others)
        for group in [group for group in self.groups if group.has_own_place]:
            group.place = self._backend.allocate(group.nbytes)

    def _make_twins(self) -> None:
        for group in self.groups:
            for weight, offset in zip(group.weights, group.offsets, strict=True):
                data = tensor_in(group.place, offset, weight.host, weight.compute_dtype)
                weight.twin = weight.make_twin(group, data, self.compiled)
                self.twins[weight.twin.key] = weight.twin


def _parts_of(unit: Unit) -> list[list[Weight]]:
    """Return what of a unit is sent together: its frozen weights, and its trained ones."""
    parts = [[weight for weight in unit.weights if weight.master.requires_grad is trained] for trained in (False, True)]
    return [part for part in parts if part]


def _bytes_of(weights: Sequence[Weight]) -> int:
    return sum(weight.nbytes for weight in weights)
