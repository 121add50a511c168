"""The planner that a pipeline asks between steps: it starts small, measures and chooses, again if things change.

    step 1      the smallest window; memory, kernels and optimizer state are created
    steps 2, 3  recorded: the work and the copies of each unit, the speed of copies and of the optimizer
    step 4 on   the window that was chosen

With gradient accumulation it waits for a first step of the optimizer, and records until it has seen another one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from typing_extensions import override

from sp_lightning.optim import AdamW
from sp_lightning.pipeline import Engine, Planner, WindowPlan, available_host_memory
from sp_lightning.planning.choose import TooLittleMemory, choose
from sp_lightning.planning.measure import FirstSteps, machine_of, work_of, workload_of
from sp_lightning.planning.memory import bytes_that_stay, host_bytes
from sp_lightning.planning.rates import probe
from sp_lightning.planning.work import Choice, Machine, UnitWork

_HOST_ROOM = 2  # activations may wait in one of this number of equal parts of free host memory
_MUCH_LARGER = 1.25  # inputs that exceed the measured ones by this factor are measured again


@dataclass
class _Planned:
    """A plan, and the steps that it was made from."""

    plan: WindowPlan
    size: int  # bytes of the inputs that it was made for
    measured: FirstSteps
    measured_size: int  # bytes of their inputs


class AutoPlanner(Planner):
    """Measures the first steps, and then makes the choices that the user has left open (see `choose`)."""

    def __init__(self, tell: Callable[[WindowPlan], object] = lambda _: None) -> None:
        self._tell = tell  # a function that gets each new plan
        # plans by the situation that they are for: the bytes of all units, and whether there is a backward
        self._plans: dict[tuple[tuple[UnitWork, ...], bool], _Planned] = {}
        self._layout: object = None
        self._units: tuple[UnitWork, ...] = ()
        self._trains = False
        self._measuring: FirstSteps | None = None
        self._machine = Machine(math.inf, math.inf, math.inf)  # infinite rates are not known yet

    @override
    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        arrangement, options = engine.arrangement, engine.options
        if "auto" not in (options.k, options.activations, options.optimizer_on):
            return None
        if engine.device_budget is None or not arrangement.units:
            return None
        before = self._units, self._trains
        if arrangement.layout is not self._layout:
            self._layout = arrangement.layout
            self._units = tuple(map(work_of, arrangement.all_units))
        self._trains |= builds_graph
        situation = self._units, self._trains
        planned = self._plans.get(situation)
        # a validation step: its times would falsify the measurement
        validates = builds_graph != self._trains
        if validates or situation != before:
            self.abandon()
        if not validates:
            auto = engine.activations.auto
            # the size of inputs, or of activations where inputs are not measured
            size = engine.meter.step_peak if auto is None else auto.input_bytes
            if planned is None or size > _MUCH_LARGER * planned.measured_size:
                if self._measuring is None:
                    waits = self._trains and any(unit.step_bytes for unit in self._units)
                    self._measuring = FirstSteps(engine, self._trains, waits)
                if not self._measuring.go_on():
                    measured, self._measuring = self._measuring, None
                    planned = _Planned(self._plan(engine, measured), size, measured, size)
                    self._plans[situation] = planned
            if planned is not None and auto is not None and size > planned.size:
                # this uses the times that were measured
                planned.plan, planned.size = self._plan(engine, planned.measured), size
        return None if planned is None else planned.plan

    @override
    def abandon(self) -> None:
        measuring, self._measuring = self._measuring, None
        if measuring is not None:
            # the recording is dropped, and work that has failed raises where it is awaited
            with suppress(Exception):
                measuring.stop()

    def _plan(self, engine: Engine, measured: FirstSteps) -> WindowPlan:
        """Choose by the measurements; if nothing fits, choose the plan that takes least."""
        options, budget = engine.options, engine.device_budget
        if options.optimizer_on == "auto":
            compile_updates(engine)
        machine = machine_of(engine, measured.recording, self._machine)
        workload = workload_of(engine, measured, machine)
        if any(unit.visit_up for unit in workload.units) and machine.both == math.inf:
            machine = probe(engine.backend, machine, engine.arrangement.is_pinned)
        self._machine = machine
        assert budget is not None
        free = available_host_memory()
        # the choice of the first steps, in all that matters to host memory
        units, waited = enumerate(workload.everything), engine.waiting.waited
        waiting = tuple(number for number, unit in units if unit.name in waited)
        taken = host_bytes(workload, Choice(1, living=workload.staying or (), waiting=waiting))
        search = partial(
            choose,
            workload,
            machine,
            host_budget=math.inf if free is None else taken + free / _HOST_ROOM,
            k=options.slots,
            by_size=torch.are_deterministic_algorithms_enabled(),  # no two runs measure the same
        )
        try:
            prediction = search(budget)
        except TooLittleMemory as error:
            warnings.warn(f"superpipeline: {error}", stacklevel=2)
            prediction = search(error.needed)
        choice = prediction.choice
        plan = WindowPlan(
            k=choice.k,
            on_device=workload.names(choice.living),
            visiting=workload.names(choice.visiting),
            waiting=workload.names(choice.waiting),
            defers_visits=choice.defers_visits,
            on_device_bytes=bytes_that_stay(workload.numbered(choice.living)),
            step_seconds=prediction.seconds,
            bottleneck=prediction.bottleneck,
            device_bytes=prediction.device_bytes,
            policies={unit.name: way.policy for unit, way in zip(workload.units, choice.ways, strict=True)},
        )
        self._tell(plan)
        return plan


def compile_updates(engine: Engine) -> None:
    """Compile the kernels that update units on the device, between steps, and learn whether that is possible."""
    segments = engine.arrangement.segments
    lowered = {copy.dtype for segment in segments for copy in segment.copies if copy is not None}
    with torch.inference_mode(False), torch.no_grad():
        for optimizer in engine.optimizers.states.optimizers:
            if isinstance(optimizer, AdamW):
                optimizer.compile_updates(engine.device, lowered)
