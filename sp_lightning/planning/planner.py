"""The planner that a pipeline asks between steps: starts small, measures, and chooses; anew if the situation changes.

    step 1      the smallest window; memory, kernels and optimizer state are created
    steps 2, 3  recorded: what each unit computes and moves, how fast copies and the optimizer are
    step 4 on   the window that was chosen

With gradient accumulation it waits for a first step of the optimizer, and records until it has seen another one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from typing_extensions import override

from sp_lightning.pipeline import Planner, Recording, Survey, WindowPlan
from sp_lightning.pipeline.activations.ways import Policy
from sp_lightning.pipeline.layout.arrangement import Arrangement
from sp_lightning.planning.choose import choose
from sp_lightning.planning.cost import activation_bytes, ways_of
from sp_lightning.planning.measure import Observed, machine_of, workload_of

_WARM_UP = 1  # steps before the recording
_RECORDED = 2
_PATIENCE = 32  # steps to wait for one of the optimizer
_MUCH_LARGER = 1.25  # inputs that exceed the measured ones by this factor are measured again

_Units = tuple[tuple[str, int, int], ...]
"""For each unit: its name, its bytes, and its bytes that require gradients."""

_Situation = tuple[_Units, bool]
"""The situation that a plan is made for: units, and whether there is a backward."""


@dataclass(frozen=True)
class _Outcome:
    """The plan for a situation (None if only the smallest window fits), and the size of inputs or activations then."""

    plan: WindowPlan | None
    size: int


def _warn(result: WindowPlan | str) -> None:
    if isinstance(result, str):
        warnings.warn(result, stacklevel=2)


class AutoPlanner(Planner):
    """Measures the first steps, then chooses what the user has left open (see `choose`).

    Args:
        tell: Called with each result: a plan, or why the window stays as it is. The default warns of the latter.
    """

    def __init__(self, tell: Callable[[WindowPlan | str], None] = _warn) -> None:
        self._tell = tell
        self._outcomes: dict[_Situation, _Outcome] = {}
        self._arrangement: Arrangement | None = None
        self._units: _Units = ()
        self._has_limit = False
        self._trains = False
        self._measuring: _Measurement | None = None

    @override
    def before_step(self, survey: Survey, builds_graph: bool) -> WindowPlan | None:
        options = survey.options
        if options.k != "auto" and options.k_prime != "auto":
            return None
        if survey.arrangement is not self._arrangement:
            self._look_at(survey)
        if not self._has_limit:
            return None
        if builds_graph and not self._trains:
            self._trains = True
            self.abandon()
        outcome = self._outcomes.get((self._units, self._trains))
        if builds_graph != self._trains:  # a validation step during training: its times would falsify the measurement
            self.abandon()
        elif outcome is None or _size(survey) > _MUCH_LARGER * outcome.size:
            outcome = self._measure(survey) or outcome
        return None if outcome is None else outcome.plan

    @override
    def abandon(self) -> None:
        measuring, self._measuring = self._measuring, None
        if measuring is not None:
            measuring.stop()

    def _look_at(self, survey: Survey) -> None:
        """Take note of a new arrangement; a plan depends on units and their bytes, but not on where they lie."""
        self._arrangement = survey.arrangement
        self._has_limit = survey.budget is not None
        units = tuple(
            (
                unit.name,
                sum(weight.compute_bytes for weight in unit.every_weight),
                sum(weight.compute_bytes for weight in unit.every_weight if weight.master.requires_grad),
            )
            for unit in self._arrangement.all_units
        )
        if units != self._units:
            self._units = units
            self.abandon()

    def _measure(self, survey: Survey) -> _Outcome | None:
        if self._measuring is None:
            self._measuring = _Measurement(survey, self._trains)
        measuring = self._measuring
        if measuring.goes_on():
            return None
        self._measuring = None
        result = _plan(survey, measuring)
        self._tell(result)
        plan = None if isinstance(result, str) else result
        outcome = self._outcomes[self._units, self._trains] = _Outcome(plan, _size(survey))
        return outcome


class _Measurement:
    """The recording of some steps.

    Args:
        survey: The pipeline.
        trains: Whether the steps have a backward.
    """

    def __init__(self, survey: Survey, trains: bool) -> None:
        self._survey = survey
        self._trains = trains
        self._waits = trains and any(weight.master.requires_grad for weight in survey.arrangement.weights)
        self._steps = -1  # the first call comes before the first step
        self._complete = self._passes = 0
        self._before, self._optimizer_steps_before = replace(survey.stats), survey.optimizer_steps
        self._scope: ExitStack | None = None
        self._policies: list[dict[str, Policy]] = []
        self._peak = self._turn = self._outside = 0
        self._in_use: int | None = None
        self._most_in_use = 0
        self.recording = Recording()

    def goes_on(self) -> bool:
        """Count the step that ended before this call, and tell whether more steps are needed."""
        self._steps += 1
        if self._scope is None:  # warming up
            if self._steps >= _WARM_UP and self._saw_optimizer():
                self._start()
            return True
        self._note_recorded_step()
        if (self._complete >= _RECORDED or self._steps >= _PATIENCE) and self._saw_optimizer():
            self.stop()
            return False
        return True

    def _note_recorded_step(self) -> None:
        auto = self._survey.activations
        self._policies.append({} if auto is None else dict(auto.in_use))
        if auto is not None:  # depends on the policies in use, as memory that two units save is counted for both
            auto.update_peaks()
            self._turn, self._outside = max(self._turn, auto.turn_bytes), max(self._outside, auto.outside_bytes)
        self._peak = max(self._peak, self._survey.activation_peak)
        before, self._passes = self._passes, self._survey.backward_passes
        self._complete += self._passes > before or not self._waits  # a step that returns no loss has no backward

    def _saw_optimizer(self) -> bool:
        """Tell whether an optimizer has stepped meanwhile, or is not worth waiting for."""
        has_stepped = self._survey.optimizer_steps > self._optimizer_steps_before
        return not self._waits or has_stepped or self._steps >= _PATIENCE

    def _start(self) -> None:
        self._waits &= self._steps < _PATIENCE
        self._steps = 0
        self._passes = self._survey.backward_passes
        self._before, self._optimizer_steps_before = replace(self._survey.stats), self._survey.optimizer_steps
        self._in_use = self._survey.begin_watching_memory()
        self._scope = ExitStack()
        self.recording = self._scope.enter_context(self._survey.record())

    def stop(self) -> None:
        """End the recording."""
        if self._scope is not None:
            self._most_in_use = self._survey.end_watching_memory()
            with contextlib.suppress(Exception):  # a failed copy has raised elsewhere
                self._scope.close()

    def observed(self) -> Observed:
        """Return the observations that are not in the recording."""
        now, before = self._survey.stats, self._before
        auto = self._survey.activations
        reserve = 0 if auto is None else auto.reserve_bytes
        is_counted = auto is not None and auto.counts_operations
        if not is_counted and self._in_use is not None:
            reserve = max(0, self._most_in_use - self._in_use - self._peak)
        return Observed(
            trains=self._trains,
            policies=self._policies,
            activation_peak=self._peak,
            turn_bytes=self._turn,
            outside_bytes=self._outside,
            reserve_bytes=reserve,
            optimizer_steps=self._survey.optimizer_steps - self._optimizer_steps_before,
            overlapped=now.overlapped_steps - before.overlapped_steps,
            in_backward=now.steps_in_backward - before.steps_in_backward,
        )


def _size(survey: Survey) -> int:
    """Return the bytes of inputs, or of activations where inputs are not measured."""
    return survey.activation_peak if survey.activations is None else survey.activations.input_bytes


def _plan(survey: Survey, measured: _Measurement) -> WindowPlan | str:
    """Choose by the measurements; return a message instead if only the smallest window fits."""
    options, arrangement, budget = survey.options, survey.arrangement, survey.budget
    assert budget is not None
    workload = workload_of(survey, measured.recording, measured.observed())
    machine = machine_of(arrangement, measured.recording)
    try:
        choice, prediction = choose(
            workload, machine, budget, k=options.k, k_prime=options.k_prime, fill=options.k == "auto"
        )
    except ValueError as error:
        advice = "Use smaller batches, or a larger `memory_budget`."
        return f"Superpipeline: the window stays as small as it is. {error} {advice}"
    ways = ways_of(workload, choice)
    policies = {unit.name: way.policy for unit, way in zip(workload.units, ways, strict=True)}
    return WindowPlan(
        k=choice.k,
        k_prime=choice.k_prime,
        kept=tuple(arrangement.units[unit].name for unit in choice.kept),
        on_device=tuple(arrangement.units[unit].name for unit in choice.on_device),
        on_device_bytes=sum(workload.units[unit].bytes_on_device for unit in choice.on_device),
        step_seconds=prediction.seconds,
        bottleneck=prediction.bottleneck,
        device_bytes=prediction.device_bytes,
        activation_bytes=activation_bytes(workload, ways),
        policies={} if survey.activations is None else policies,
    )
