"""An arrangement: units, host memory, places on the device and twins, made from a module tree at one moment.

A pipeline makes one when it attaches, and another whenever it has learned something (a weight is used outside of its
unit, autocast lowers a weight) or the module tree has changed. Masters keep their identity and values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.options import PipelineOptions, parse_bytes
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.torch_private import is_compiled, without_torch_function
from sp_lightning.pipeline.units.finder import find_units
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.autocast import Casts
from sp_lightning.pipeline.weights.buffers import tensor_in
from sp_lightning.pipeline.weights.leaf import EagerLeaf, TwinParameter
from sp_lightning.pipeline.weights.segment import HostMemory, Segment
from sp_lightning.pipeline.weights.weight import Twin, Weight
from sp_lightning.pipeline.window.places import WindowPlan, check_host_memory, choose_device_layout


class Learned:
    """Findings that a pipeline makes while it runs, for the next arrangement; parameters are known by identity.

    The step in which something is found is right without it; the parts that find it see to that.
    """

    def __init__(self) -> None:
        self.used_outside: set[int] = set()  # weights that are used outside of their unit
        # names of units in the order in which the first step called them; None before that
        self.order: list[str] | None = None
        # modules that are not called themselves; only their children are
        self.divided: list[nn.Module] = []
        self.casts = Casts()  # how autocast uses weights
        self.plan: WindowPlan | None = None  # the planner's choice for the window
        # weights that were used outside of their unit since the arrangement was made
        self.touched_outside: list[Weight] = []
        self.outdated = False  # whether something was learned that calls for another arrangement
        self._trained: set[int] = set()  # parameters that have required a gradient in some step

    def note_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note, as a step with gradients begins, which parameters it trains.

        If there are new ones (a user unfreezes layers), units take more memory than the arrangement was made for.
        """
        trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
        self.outdated |= bool(self._trained) and not trained <= self._trained
        self._trained |= trained

    def forget_all_but(self, alive: set[int]) -> None:
        """Forget all but these parameters: new objects may reuse the others' ids."""
        for known in (self.used_outside, self.casts.lowered, self.casts.used_as_is, self._trained):
            known.intersection_update(alive)

    def conclude(self, units: Sequence[Unit], called: Sequence[str]) -> bool:
        """Draw conclusions between steps, and tell whether these call for another arrangement.

        `called` are the names of units that the first step called, in the order of their first calls.
        """
        if self.order is None and called:
            self.order = list(dict.fromkeys(called))
            # Consecutive units must not share a place, or the later one cannot be fetched ahead.
            self.outdated |= self.order != [unit.name for unit in units if unit.name in called]
        self._explain_outside(units)
        is_outdated = self.has_news
        self.outdated = False
        self.casts.has_news = False
        if is_outdated:
            self.plan = None  # which was made for other units
        return is_outdated

    def _explain_outside(self, units: Sequence[Unit]) -> None:
        """Find out why weights of these units were used outside of them."""
        members = [member for unit in units for member in unit.members]
        for weight in self.touched_outside:
            containers = [  # mere ones: their parents call their children
                member.module
                for member in members
                if member.uses(weight) and member.entered == 0 and any(member.module.children())
            ]
            self.divided += containers
            if not containers:
                self.used_outside.add(id(weight.master))
        self.touched_outside.clear()

    @property
    def has_news(self) -> bool:
        """Whether something was learned since that was last concluded."""
        return self.outdated or self.casts.has_news

    def agree(self, module: nn.Module, units: Sequence[Unit], called: Sequence[str], processes: Processes) -> None:
        """Learn what any process has: the memory of weights is arranged alike in all of them.

        All expect the first one's order of units, as each may have left out others in its first step.
        """
        self._explain_outside(units)
        parameters = dict(module.named_parameters())
        modules = dict(module.named_modules())
        sets = self.used_outside, self.casts.lowered, self.casts.used_as_is
        own = [[name for name, parameter in parameters.items() if id(parameter) in known] for known in sets]
        found = set(map(id, self.divided))
        divided = [name for name, module in modules.items() if id(module) in found]
        order = list(dict.fromkeys(called)) if self.order is None else self.order
        everyones = processes.gather((own, divided, self.has_news, order))
        self.order = everyones[0][-1]
        for others, others_divided, outdated, _ in everyones:
            for known, names in zip(sets, others, strict=True):
                known.update(id(parameters[name]) for name in names)
            self.divided += [module for name, module in modules.items() if name in others_divided]
            self.outdated |= outdated


class Arrangement:
    """The layout of a module's weights on host and device. Nothing is changed before `lay_out`.

    By then everything has been checked, and the weights that live on the device are there, all others on the host.
    """

    def __init__(
        self,
        module: nn.Module,
        options: PipelineOptions,
        learned: Learned,
        memory: HostMemory,
        backend: Backend,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.autocast = autocast
        # whether torch compiles the module or parts of it
        self.compiled = options.compile or any(map(is_compiled, module.modules()))
        self.unused_in_step = True  # whether nothing of it has been used yet in this step
        self._backend = backend
        device = backend.memory()
        total = None if device is None else device.total
        # the user's `memory_budget` in bytes; None if there is none, or if it is a fraction of an unknown size
        self.budget = None if options.memory_budget is None else parse_bytes(options.memory_budget, total)
        division = find_units(
            module,
            options.units,
            options.resident,
            self.budget or total,
            split=learned.divided,
            used_outside=learned.used_outside,
            k_prime=options.k_prime,
            order=learned.order or (),
        )
        self.units = division.units
        self.resident = division.resident
        self.unmanaged = division.unmanaged
        self.all_units = division.all_units()
        # members of streamed units, in expected order
        self.streamed_members = [member for unit in division.units for member in unit.members]
        # every module that gets a gate
        self.members = [*self.streamed_members, *division.resident.members, *division.callers]
        self._choose_dtypes(module, learned.casts)
        self.layout = choose_device_layout(division, options, learned.plan, self.budget)
        self.k = self.layout.window.k
        # the planner's choice, if it is in force
        self.plan = learned.plan if self.layout.window is learned.plan else None
        living_there = self.layout.units_on_device
        division.leave_on_device(living_there)
        self.parameters_on_device = [weight.master for unit in living_there for weight in unit.weights_on_device]
        self.weights = [weight for unit in self.all_units for weight in unit.weights]
        # all of its parameters, on the host and on the device
        self.parameters = [*(weight.master for weight in self.weights), *self.parameters_on_device]
        check_host_memory(self.all_units, memory.nbytes_for("copies") + memory.nbytes_for("gradients"))
        # all that streams or stays: units, what is resident, single weights
        self.in_window = list(self.all_units)
        self.segments: list[Segment] = []  # the host memory of all units
        self.twins: dict[int, Twin] = {}  # all twins, by the identity of their memory

    # --------------------------------------------------------------------------------------------------- how it is made

    def lay_out(self, memory: HostMemory) -> None:
        """Give each unit of the window its host memory, its place on the device, and its weights' twins there."""
        arena = self._backend.allocate(self.layout.arena_bytes)
        offsets = iter(self.layout.offsets)
        spans: dict[Unit, tuple[int, int]] = {}  # of the arena
        # in the order of names, as processes that share the memory may expect units in other orders
        by_name = sorted(self.in_window, key=attrgetter("name"))
        nbytes = sum(weight.nbytes for weight in self.weights)
        with memory.progress.begin("Arranging weights in host memory", nbytes) as work:
            for unit in by_name:
                unit.send(memory.segment(weights) for weights in _sent_together(unit))
                work.advance(sum(weight.nbytes for weight in unit.weights))
        for index, unit in enumerate(self.in_window):
            unit.index = index
            unit.visits = self._may_visit(unit)
            if unit in self.layout.staying:
                unit.lie_in(self._backend.allocate(unit.nbytes))
            else:
                begin = next(offsets)
                end = begin + unit.nbytes
                spans[unit] = begin, end
                unit.lie_in(arena[begin:end])
            self.segments += unit.segments
        for unit, (begin, end) in spans.items():
            overlapping = {other for other, span in spans.items() if span[0] < end and begin < span[1]}
            unit.conflicts = frozenset(overlapping - {unit})
        memory.keep(self.segments)
        memory.wait_for_values()
        # whether all host memory that is sent is pinned; units that live on the device have none
        self.is_pinned = all(segment.source.pinned for segment in self.segments if segment.nbytes)
        if self._backend.pins and not self.is_pinned:
            warnings.warn(
                "Some host memory could not be page-locked: WSL, and some containers, allow little "
                "of it. Copies of the rest are slow, and do not run while the device computes. Linux "
                "by itself has no such limit; `pin_memory=False` page-locks nothing, without this warning.",
                stacklevel=2,
            )
        for unit in self.in_window:
            for segment in unit.segments:
                for weight, offset in zip(segment.weights, segment.offsets, strict=True):
                    data = tensor_in(segment.place, offset, weight.host, weight.compute_dtype)
                    weight.twin = weight.twin_class(weight, unit, data)
                    self.twins[weight.twin.key] = weight.twin
        for member in self.members:
            member.find_needed()

    def _may_visit(self, unit: Unit) -> bool:
        """Tell whether a unit is to visit the device for optimizer steps; if processes share memory, one steps all."""
        is_shared = any(segment.memory.shared is not None for segment in unit.segments)
        if self.plan is None or unit.resident or is_shared:
            return False
        return unit.name in self.plan.visiting

    def _choose_dtypes(self, module: nn.Module, casts: Casts) -> None:
        """Decide in which dtype each weight is sent, and which leaves stand for it."""
        if self.compiled:  # such code does not show how it uses weights
            for weight in [weight for unit in self.all_units for weight in unit.weights]:
                weight.leaf_class = TwinParameter
        elif self.autocast is not None:  # resident weights do not travel
            sent_together = [weights for unit in self.units for weights in _sent_together(unit)]
            casts.choose_dtypes(module, sent_together, self.autocast)

    @property
    def named_on_device(self) -> dict[str, nn.Parameter]:
        """The parameters on the device that the engine does not manage: they live there, or cannot be moved."""
        living = [weight for unit in self.all_units for weight in unit.weights_on_device]
        return {**self.unmanaged, **{weight.name: weight.master for weight in living}}

    def all_twins(self) -> list[Twin]:
        """Return the twins, and those that graphs have besides."""
        return [*self.twins.values(), *(twin for weight in self.weights for twin in weight.other_twins)]

    def is_lent_out(self) -> bool:
        """Tell whether modules hold other tensors for the time of a call, as `functional_call` puts them there."""
        for member in self.members:
            if Tensor in [type(entry.parameters.get(entry.key)) for entry in member.entries]:
                return True
        return False

    def make_resident(self, weight: Weight) -> None:
        """Give a weight memory of its own on the device, in its own dtype, for the rest of this arrangement."""
        was_lowered = weight.lowered
        weight.compute_dtype = weight.dtype
        segment = next(segment for segment in weight.unit.segments if weight in segment.weights)
        unit = Unit(weight.name, resident=True)
        unit.send([Segment([weight], pin=False, memory=segment.piece_of(weight, self._backend))])
        unit.lie_in(self._backend.allocate(unit.nbytes))
        weight.unit.apart.append(unit)
        self.in_window.append(unit)
        self.layout.device_bytes += unit.nbytes
        self.layout.streaming_bytes += unit.nbytes
        data = tensor_in(unit.place, 0, weight.host, weight.compute_dtype)
        if was_lowered:
            weight.other_twins.append(weight.twin)
            weight.leaf_class = EagerLeaf
            weight.twin = weight.twin_class(weight, unit, data)
        else:
            weight.twin = weight.twin.moved_to(unit, data)
        self.twins[weight.twin.key] = weight.twin
        for member in self.members:
            member.find_needed()

    # ---------------------------------------------------------------------------------------------------- how it ends

    def close(self) -> None:
        """Make way for another arrangement, or for none. Idempotent."""
        for unit in (*self.all_units, *self.in_window):
            # saved weights lead to units, and must not lead to the module (see backward.py)
            unit.members.clear()
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        # the garbage collector would only free memory with this object, a part of cycles
        for weight in self.weights:
            weight.host = weight.home = nothing
        for segment in self.segments:
            segment.copies.clear()
        if any(unit.handles for unit in self.in_window):  # a graph holds weights
            return
        for unit in self.in_window:
            unit.lie_in(nothing)
        with torch.inference_mode(False), without_torch_function():
            for twin in self.all_twins():
                twin.data = torch.empty(0, dtype=twin.data.dtype, device=twin.data.device)
                twin.lay_leaf()
        self.twins.clear()  # twins are known by their memory, which others may get now


def _sent_together(unit: Unit) -> list[list[Weight]]:
    """Return what of a unit is sent together: its frozen weights, and its trained ones."""
    frozen = [weight for weight in unit.weights if not weight.master.requires_grad]
    trained = [weight for weight in unit.weights if weight.master.requires_grad]
    return [part for part in (frozen, trained) if part]
