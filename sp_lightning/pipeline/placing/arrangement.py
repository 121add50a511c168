"""An arrangement: units, host memory, places on the device and twins of a module tree.

A pipeline makes one when it attaches, and another only if the module tree has changed. Between steps it may choose
again: by a plan, and by findings (a weight is used outside of its unit, autocast lowers a weight). Then units and twins
get other places. Weights that are sent together as before stay where they are on the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from copy import copy
from operator import attrgetter

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.options import PipelineOptions, parse_bytes
from sp_lightning.pipeline.placing.places import WindowPlan, choose_device_layout, room_for_gradients
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.torch_private import is_compiled
from sp_lightning.pipeline.units.finder import find_units
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.autocast import Autocasts, Casts
from sp_lightning.pipeline.weights.leaf import EagerLeaf, TwinParameter
from sp_lightning.pipeline.weights.segment import HostMemory, Segment, sent_together
from sp_lightning.pipeline.weights.weight import Life, Twin, Weight, become


class Learned:
    """Findings of past steps, which are used when weights are placed next.

    A step is right without its own findings: the parts that find something see to that.
    """

    def __init__(self, divided: Iterable[str], autocasts: Autocasts) -> None:
        # The names of weights that are used outside of their unit.
        self.used_outside: set[str] = set()
        # The names of units in the order in which the first step called them; None before that.
        self.order: list[str] | None = None
        # The names of modules that are not called, though their children are: these modules are divided into units.
        self.divided = set(divided)
        self.casts = Casts()  # how autocast uses weights
        self.autocasts = autocasts  # the dtypes of autocast under which modules are called
        # The weights that were used outside of their unit since weights were placed.
        self.touched_outside: list[Weight] = []
        self.outdated = False  # whether the places of weights do not fit the findings
        # The weights that required a gradient in any step so far.
        self._trained: set[Weight] = set()

    def note_trained(self, weights: Iterable[Weight]) -> None:
        """Note which weights a step trains, as it begins.

        If a user unfreezes layers, their units take more memory than they were placed for.
        """
        trained = {weight for weight in weights if weight.master.requires_grad}
        if self._trained and not trained <= self._trained:
            self.outdated = True
        self._trained |= trained

    def draw_conclusions(self, units: Sequence[Unit], called: list[str]) -> bool:
        """Draw conclusions between steps, and tell whether weights need other places.

        `called` are the names of units that the first step called, in the order of their first calls.
        """
        if self.order is None and called:
            self.order = called
            # Consecutive units must not share a place, or the later one cannot be fetched ahead.
            self.outdated |= self.order != [unit.name for unit in units if unit.name in called]
        self._explain_outside(units)
        is_outdated = self.has_news
        self.outdated = False
        self.casts.has_news = False
        return is_outdated

    def _explain_outside(self, units: Sequence[Unit]) -> None:
        """Find out why weights of these units were used outside of them."""
        members = [member for unit in units for member in unit.members]
        for weight in self.touched_outside:
            containers = [  # modules that are never called: their parents call their children
                member.name
                for member in members
                if member.entered == 0
                and any(member.module.children())
                and weight in [entry.weight for entry in member.entries]
            ]
            self.divided.update(containers)
            if not containers:
                self.used_outside.add(weight.name)
        self.touched_outside.clear()

    @property
    def has_news(self) -> bool:
        """Whether there are findings from which no conclusions were drawn yet."""
        return self.outdated or self.casts.has_news

    def agree(self, module: nn.Module, units: Sequence[Unit], called: list[str], processes: Processes) -> None:
        """Share the findings of all processes: the memory of weights is arranged alike in all of them.

        All expect the first process's order of units: each may have called other units in its first step.
        """
        self._explain_outside(units)
        masters = {name: id(parameter) for name, parameter in module.named_parameters()}
        casts = self.casts.lowered, self.casts.used_as_is
        own_casts = [[name for name, master in masters.items() if master in known] for known in casts]
        order = called if self.order is None else self.order
        own_findings = own_casts, self.used_outside, self.divided, self.has_news, self.autocasts, order
        everyones = processes.gather(own_findings)
        self.order = everyones[0][-1]
        self.outdated |= self.order != [unit.name for unit in units if unit.name in self.order]
        for others, used_outside, divided, outdated, autocasts, _ in everyones:
            self.autocasts.agree(autocasts)
            for known, names in zip(casts, others, strict=True):
                known.update(masters[name] for name in names)
            self.used_outside |= used_outside
            self.divided |= divided
            self.outdated |= outdated


class Arrangement:
    """The units of a module, and the places of their weights on host and device.

    Units, members, weights and twins are made once. The choices, and the places that follow from them, may change
    between steps.
    """

    def __init__(
        self,
        module: nn.Module,
        options: PipelineOptions,
        learned: Learned,
        memory: HostMemory,
        backend: Backend,
    ) -> None:
        # Whether torch compiles the module or parts of it.
        self.compiled = bool(options.compile) or any(map(is_compiled, module.modules()))
        self.unused_in_step = True  # whether nothing of it has been used yet in this step
        self.module = module
        self._options = options
        self.learned = learned
        self._memory = memory
        self._backend = backend
        device = backend.memory()
        total = None if device is None else device.total
        # The user's `memory_budget` in bytes; None if there is none, or if it is a fraction of an unknown size.
        self.budget = None if options.memory_budget is None else parse_bytes(options.memory_budget, total)
        if options.memory_budget is not None and self.budget is None:
            warnings.warn(
                f"`memory_budget={options.memory_budget}` is a share of the GPU's memory, but "
                f"{backend.device} does not tell how much it has. There is no budget. Give bytes, or text "
                "such as '2GiB'.",
                stacklevel=2,
            )
        self.divided = set(learned.divided)
        division = find_units(
            module,
            options.units,
            options.resident,
            self.budget or total,
            split=self.divided,
            k_prime=options.k_prime,
        )
        self._division = division
        self.units = division.units
        self.resident = division.resident
        self.unmanaged = division.unmanaged
        self.streamed_members = division.streamed_members
        # All modules that get a gate.
        self.members = [*division.streamed_members, *division.resident.members, *division.callers]
        # All units that the window knows: streamed ones, the resident one, and single weights made resident.
        self.in_window: list[Unit] = []
        self.twins: dict[int, Twin] = {}  # all twins, by the identity of their memory
        # All weights that the engine manages, on the host or on the device.
        self.every_weight = [weight for unit in self.all_units for weight in unit.weights]
        self._choose_dtypes()
        for weight in self.every_weight:
            weight.twin = weight.twin_class(weight, weight.unit, backend.allocate(0).view(weight.dtype))

    @property
    def all_units(self) -> list[Unit]:
        """All streamed units, and the resident one."""
        return self._division.all_units()

    @property
    def segments(self) -> list[Segment]:
        """The host memory of all units."""
        return [segment for unit in self.all_units for segment in unit.segments]

    # ------------------------------------------------------------------------------------------------ what is chosen

    def choose(self, plan: WindowPlan | None, first_plan: WindowPlan | None) -> None:
        """Choose the dtypes in which weights are sent, which ones stay on the device, and how units share it.

        Without a `plan`, the units that stay on the device in the `first_plan` do so.

        Raises:
            ValueError: The weights do not fit the device or the host.
        """
        division, learned = self._division, self.learned
        for unit in self.all_units:
            unit.weights = unit.every_weight
            unit.weights_on_device = []
        division.make_resident(learned.used_outside)
        division.put_in_order(learned.order or ())
        self._choose_dtypes()
        buffers = self._memory.staging_buffers
        self.layout = choose_device_layout(division, self._options, plan, first_plan, self.budget, buffers)
        for unit in self.layout.units_on_device:
            unit.weights_on_device = unit.weights
            unit.weights = []
        units = self.all_units
        staying = {weight.name: weight.master for unit in units for weight in unit.weights_on_device}
        self.parameters_on_device = list(staying.values())
        # The parameters on the device that do not stream: they stay there, or cannot be managed.
        self.named_on_device = {**self.unmanaged, **staying}
        self.weights = [weight for unit in units for weight in unit.weights]
        present = sum(map(self._memory.nbytes_for, ("copies", "gradients", "sums")))
        has_limit = self.budget is not None or self._backend.memory() is not None
        may_wait = has_limit and not self._memory.is_shared
        self.room_for_gradients = room_for_gradients(units, present, may_wait)

    def _choose_dtypes(self) -> None:
        """Decide in which dtype each weight is sent, and which leaves stand for it."""
        for weight in self.every_weight:
            weight.compute_dtype = weight.dtype
            # compiled code does not show how it uses weights
            weight.leaf_class = TwinParameter if self.compiled else EagerLeaf
        autocasts = self._autocasts()
        if autocasts and not self.compiled:  # resident weights do not travel
            weight_groups = [part for unit in self.units for part in sent_together(unit.weights)]
            self.learned.casts.choose_dtypes(self.module, weight_groups, autocasts)

    def _autocasts(self) -> dict[Weight, torch.dtype]:
        """Return the dtype that autocast casts to wherever a weight is used; weights without one are left out."""
        known = self.learned.autocasts
        users: dict[Weight, list[str]] = {}
        for member in self.members:
            member.autocast = known.common([member.name])
            for entry in member.every_entry if member.unit is not None else ():
                users.setdefault(entry.weight, []).append(member.name)
        dtypes = {weight: known.common(names) for weight, names in users.items()}
        return {weight: dtype for weight, dtype in dtypes.items() if dtype is not None}

    # ----------------------------------------------------------------------------------------------- how it is done

    def lay_out(self) -> None:
        """Give each unit its host memory, its place on the device, and its weights' twins there."""
        nbytes = sum(weight.nbytes for weight in self.weights)
        work = self._memory.progress.begin("Moving weights to their CPU memory", nbytes)
        # Units come in the order of names: processes that share the memory may expect them in other orders.
        for unit in sorted(self.all_units, key=attrgetter("name")):
            for weight in unit.weights_on_device:
                weight.leave_host()
            unit.segments = self._memory.gather(unit.weights, unit.segments)
            work.advance(sum(weight.nbytes for weight in unit.weights))
        self._memory.keep(self.segments)
        self._memory.wait_for_values()
        # Whether all host memory that is sent is pinned; units that stay on the device have none.
        self.is_pinned = all(segment.source.pinned for segment in self.segments if segment.nbytes)
        if self._backend.pins and not self.is_pinned:
            warnings.warn(
                "superpipeline: some CPU memory could not be pinned. WSL and some containers pin only a "
                "little. Copies of the rest are slow, and do not run while the GPU computes. Native Linux "
                "has no such limit. `pin_memory=False` pins nothing, without this warning.",
                stacklevel=2,
            )
        self._place()

    def _place(self) -> None:
        arena = self._backend.allocate(self.layout.arena_bytes)
        offsets = iter(self.layout.offsets)
        spans: dict[Unit, tuple[int, int]] = {}  # begin and end of each unit's place in the arena
        self.in_window[:] = self.all_units
        for index, unit in enumerate(self.in_window):
            unit.index = index
            unit.update.is_on_device = unit.name in self.layout.window.visiting and not unit.resident
            unit.split_off.clear()
            if unit in self.layout.staying_units:
                unit.set_place(self._backend.allocate(unit.nbytes))
            else:
                begin = next(offsets)
                spans[unit] = begin, begin + unit.nbytes
                unit.set_place(arena[begin : begin + unit.nbytes])
            self.twins.update({weight.twin.key: weight.twin for weight in unit.weights})
        for unit in self.in_window:
            begin, end = spans.get(unit, (0, 0))
            overlapping = {other for other, span in spans.items() if span[0] < end and begin < span[1]}
            unit.conflicts = frozenset(overlapping - {unit})
        for member in self.members:
            member.find_needed()

    def is_lent_out(self) -> bool:
        """Tell whether modules hold other tensors for the time of a call, as `functional_call` puts them there."""
        for member in self.members:
            entries = member.entries
            if Tensor in [type(entry.parameters[entry.key]) for entry in entries if entry.key in entry.parameters]:
                return True
        return False

    def make_resident(self, weight: Weight) -> None:
        """Give a weight memory of its own on the device, in its own dtype, until weights are placed next."""
        was_lowered = weight.lowered
        weight.compute_dtype = weight.dtype
        segment = next(segment for segment in weight.unit.segments if weight in segment.weights)
        unit = Unit(weight.name, resident=True)
        unit.weights = [weight]
        unit.segments = [segment.of_one(weight, self._backend)]
        place = self._backend.allocate(unit.nbytes)
        if was_lowered:
            # Second forwards still compute with the lowered twin, though no module has it now.
            become(Life.IN_GRAPHS, [weight.twin])
            weight.twins_in_graphs.append(weight.twin)
            # The new twin is not made over its place: a leaf counts writes to the tensor that it is made of.
            weight.twin = weight.twin_class(weight, unit, self._backend.allocate(0).view(weight.dtype))
        else:  # handles keep the twin that lies in its unit
            weight.twin = copy(weight.twin)
        unit.set_place(place)
        weight.unit.split_off.append(unit)
        self.in_window.append(unit)
        self.layout.device_bytes += unit.nbytes
        self.layout.streaming_bytes += unit.nbytes
        self.twins[weight.twin.key] = weight.twin
        for member in self.members:
            member.find_needed()

    # ---------------------------------------------------------------------------------------------------- how it ends

    @torch.inference_mode(False)  # the step may be one of an evaluation
    def leave_places(self) -> None:
        """Release all places on the device."""
        for unit in self.in_window:
            unit.leave_place()
        self.twins.clear()  # twins are known by their memory, which others may get now

    def detach_weights(self) -> None:
        """Release twins and host memory, because no leaf stands for a weight any more. Idempotent."""
        for unit in self.all_units:
            # Saved weights refer to units, which must not refer to the module (see calls/backward.py).
            unit.members.clear()
        # This object is part of reference cycles. Memory must not stay until the garbage collector runs.
        for segment in self.segments:
            segment.hide_edits()
            segment.copies.clear()
        for weight in self.every_weight:
            weight.leave_host()
            for twin in (weight.twin, *weight.twins_in_graphs):
                twin.refuse_gradients()
        self.learned.casts.leave_device()
        # otherwise a graph holds weights
        if not any(unit.readers.handles for unit in self.in_window):
            self.leave_places()
