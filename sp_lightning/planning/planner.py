"""The planner that a pipeline asks between steps: starts small, measures, and chooses; anew if the situation changes.

    step 1      the smallest window; memory, kernels and optimizer state are created
    steps 2, 3  recorded: what each unit computes and moves, how fast copies and the optimizer are
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

from sp_lightning.pipeline import Engine, Planner, WindowPlan, available_host_memory
from sp_lightning.pipeline.options import Policy
from sp_lightning.planning.choose import TooLittleMemory, choose
from sp_lightning.planning.measure import FirstSteps, machine_of, work_of, workload_of
from sp_lightning.planning.memory import activation_bytes, first_host_bytes
from sp_lightning.planning.rates import probe
from sp_lightning.planning.work import Machine, UnitWork

_HOST_ROOM = 2  # of the host memory that is free, activations may wait in one part of so many
_MUCH_LARGER = 1.25  # inputs that exceed the measured ones by this factor are measured again


def _warn(result: WindowPlan | str) -> None:
    if isinstance(result, str):
        warnings.warn(result, stacklevel=2)


@dataclass
class _Planned:
    """A plan for a situation, and the bytes of the inputs that its window and its policies are for."""

    plan: WindowPlan | None = None
    window_size: int = -1
    size: int = -1
    measured: FirstSteps | None = None


class AutoPlanner(Planner):
    """Measures the first steps, then chooses what the user has left open (see `choose`)."""

    def __init__(self, tell: Callable[[WindowPlan | str], None] = _warn) -> None:
        self._tell = tell
        # by what they are made for: the bytes of all units, and whether there is a backward
        self._plans: dict[tuple[tuple[UnitWork, ...], bool], _Planned] = {}
        self._planned = _Planned()  # for what there is now
        self._layout: object = None
        self._units: tuple[UnitWork, ...] = ()
        self._trains = False
        self._measuring: FirstSteps | None = None
        self._machine = Machine(math.inf, math.inf, math.inf)  # as far as it is known

    @override
    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        arrangement, options = engine.arrangement, engine.options
        if "auto" not in (options.k, options.activations, options.optimizer_on):
            return None
        if arrangement.layout is not self._layout:
            self._layout = arrangement.layout
            may_stream = engine.budget is not None and arrangement.units
            self._units = tuple(map(work_of, arrangement.all_units)) if may_stream else ()
        if not self._units:
            return None
        self._trains |= builds_graph
        planned = self._plans.setdefault((self._units, self._trains), _Planned())
        if planned is not self._planned:
            self._planned = planned
            self.abandon()
        # a validation step: its times would falsify the measurement
        if builds_graph != self._trains:
            self.abandon()
            return planned.plan
        size = _input_bytes(engine)
        if size > _MUCH_LARGER * planned.window_size:
            self._measure(engine, planned)
        if planned.measured is not None and planned.plan is not None and planned.plan.policies and size > planned.size:
            # in the times that were measured
            planned.plan, planned.size = self._plan(engine, planned.measured), size
        return planned.plan

    @override
    def abandon(self) -> None:
        measuring, self._measuring = self._measuring, None
        if measuring is not None:
            with suppress(Exception):  # nobody looks at it, and what has failed raises where it is waited for
                measuring.stop()

    def _measure(self, engine: Engine, planned: _Planned) -> None:
        """Plan anew once enough steps are measured."""
        if self._measuring is None:
            waits = self._trains and any(unit.step_bytes for unit in self._units)
            self._measuring = FirstSteps(engine, self._trains, waits)
        if self._measuring.go_on():
            return
        measured, self._measuring = self._measuring, None
        planned.plan, planned.measured = self._plan(engine, measured), measured
        planned.size = planned.window_size = _input_bytes(engine)

    def _plan(self, engine: Engine, measured: FirstSteps) -> WindowPlan:
        """Choose by the measurements; if nothing fits, what takes least."""
        options, budget = engine.options, engine.budget
        machine = machine_of(engine, measured.recording, self._machine)
        workload = workload_of(engine, measured, machine)
        if any(unit.visit_up for unit in workload.units) and machine.both == math.inf:
            machine = probe(engine.backend, machine, engine.arrangement.is_pinned)
        self._machine = machine
        assert budget is not None
        free = available_host_memory()
        search = partial(
            choose,
            workload,
            machine,
            host_budget=math.inf if free is None else first_host_bytes(workload) + free / _HOST_ROOM,
            k=options.slots,
            by_size=torch.are_deterministic_algorithms_enabled(),  # no two runs measure the same
        )
        try:
            prediction = search(budget)
        except TooLittleMemory as error:
            self._tell(f"Superpipeline: {error}")
            prediction = search(budget + error.missing)
        choice = prediction.choice
        living = [workload.everything[number] for number in choice.living]
        policies: dict[str, Policy] = {}
        if engine.activations.auto is not None:
            policies = {unit.name: way.policy for unit, way in zip(workload.units, choice.ways, strict=True)}
        plan = WindowPlan(
            k=choice.k,
            on_device=tuple(unit.name for unit in living),
            visiting=tuple(workload.units[number].name for number in choice.visiting),
            on_device_bytes=sum(unit.bytes_on_device for unit in living),
            step_seconds=prediction.seconds,
            bottleneck=prediction.bottleneck,
            device_bytes=prediction.device_bytes,
            activation_bytes=activation_bytes(workload, choice),
            policies=policies,
        )
        self._tell(plan)
        return plan


def _input_bytes(engine: Engine) -> int:
    """Return the bytes of inputs, or of activations where inputs are not measured."""
    auto = engine.activations.auto
    return engine.meter.step_peak if auto is None else auto.input_bytes
