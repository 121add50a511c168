"""The planner that a pipeline asks between steps: starts small, measures, and chooses; anew if the situation changes.

    step 1      the smallest window; memory, kernels and optimizer state are created
    steps 2, 3  recorded: what each unit computes and moves, how fast copies and the optimizer are
    step 4 on   the window that was chosen

With gradient accumulation it waits for a first step of the optimizer, and records until it has seen another one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeAlias

from typing_extensions import override

from sp_lightning.pipeline import Engine, Planner, WindowPlan
from sp_lightning.planning.choose import choose
from sp_lightning.planning.cost import UnitWork, activation_bytes
from sp_lightning.planning.measure import FirstSteps, bytes_of, machine_of, workload_of

_MUCH_LARGER = 1.25  # inputs that exceed the measured ones by this factor are measured again

_Situation: TypeAlias = tuple[tuple[UnitWork, ...], bool]
"""What a plan is made for: the bytes of all units, and whether there is a backward."""


def _warn(result: WindowPlan | str) -> None:
    if isinstance(result, str):
        warnings.warn(result, stacklevel=2)


class AutoPlanner(Planner):
    """Measures the first steps, then chooses what the user has left open (see `choose`)."""

    def __init__(self, tell: Callable[[WindowPlan | str], None] = _warn) -> None:
        self._tell = tell
        self._plans: dict[_Situation, tuple[WindowPlan | None, int]] = {}  # and the size of inputs they are made for
        self._arrangement: object = None
        self._situation: _Situation = ((), False)
        self._has_limit = False
        self._measuring: FirstSteps | None = None

    @override
    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        arrangement, options = engine.arrangement, engine.options
        if "auto" not in (options.k, options.k_prime):
            return None
        if arrangement is not self._arrangement:
            self._arrangement, self._has_limit = arrangement, engine.budget is not None
            self._change((tuple(map(bytes_of, [*arrangement.units, arrangement.resident])), self._situation[1]))
        if not self._has_limit:
            return None
        if builds_graph:
            self._change((self._situation[0], True))
        plan, size = self._plans.get(self._situation, (None, -1))
        if builds_graph != self._situation[1]:  # a validation step: its times would falsify the measurement
            self.abandon()
        elif _input_bytes(engine) > _MUCH_LARGER * size:
            plan = self._measure(engine, plan)
        return plan

    @override
    def abandon(self) -> None:
        measuring, self._measuring = self._measuring, None
        if measuring is not None:
            measuring.stop()

    def _change(self, situation: _Situation) -> None:
        if situation != self._situation:
            self._situation = situation
            self.abandon()

    def _measure(self, engine: Engine, plan: WindowPlan | None) -> WindowPlan | None:
        """Return a new plan once enough steps are measured, and the given one until then."""
        units, trains = self._situation
        if self._measuring is None:
            self._measuring = FirstSteps(engine, trains, waits=trains and any(unit.step_bytes for unit in units))
        measured = self._measuring
        if measured.go_on():
            return plan
        self._measuring = None
        result = _plan(engine, measured)
        self._tell(result)
        plan = None if isinstance(result, str) else result
        self._plans[self._situation] = plan, _input_bytes(engine)
        return plan


def _input_bytes(engine: Engine) -> int:
    """Return the bytes of inputs, or of activations where inputs are not measured."""
    auto = engine.activations.auto
    return engine.meter.step_peak if auto is None else auto.input_bytes


def _plan(engine: Engine, measured: FirstSteps) -> WindowPlan | str:
    """Choose by the measurements; return a message instead if only the smallest window fits."""
    k, k_prime, budget = engine.options.k, engine.options.k_prime, engine.budget
    workload, machine = workload_of(engine, measured), machine_of(measured.recording)
    assert budget is not None
    try:
        plan = choose(workload, machine, budget, k=k, k_prime=k_prime, fill=k == "auto")
    except ValueError as error:
        advice = "Use smaller batches, or a larger `memory_budget`."
        return f"Superpipeline: the window stays as small as it is. {error} {advice}"
    choice, names = plan.choice, [unit.name for unit in workload.units]
    policies = {name: way.policy for name, way in zip(names, choice.ways, strict=True)}
    return WindowPlan(
        k=choice.k,
        k_prime=choice.k_prime,
        kept=tuple(names[number] for number in choice.kept),
        on_device=tuple(names[number] for number in choice.on_device),
        on_device_bytes=sum(workload.units[number].bytes_on_device for number in choice.on_device),
        step_seconds=plan.seconds,
        bottleneck=plan.bottleneck,
        device_bytes=plan.device_bytes,
        activation_bytes=activation_bytes(workload, choice.ways),
        policies={} if engine.activations.auto is None else policies,
    )
