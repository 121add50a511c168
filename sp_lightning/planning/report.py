"""`sp_lightning.plan(module)`: whether a model can be trained on a machine, how fast, and what to type for that."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from sp_lightning.pipeline.room import SHARE_OF_FREE_MEMORY
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.planning.choose import TooLittleMemory, choose
from sp_lightning.planning.estimate import OF_SYSTEM, Assumptions, estimate, ladder
from sp_lightning.planning.memory import first_host_bytes
from sp_lightning.planning.work import Prediction

UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_HEAD = f"{'':<34}{'device':>11}{'host':>11}{'step':>11}  bottleneck"
_USUAL = ("auto", None, (), "auto")  # what a plan assumes of the strategy


@dataclass(frozen=True)
class Row:
    """One way to keep moments, and the fastest step with it."""

    given: Assumptions
    # with the host memory of the step that takes most; None if nothing fits
    step: Prediction | None
    missing: str = ""  # why nothing fits

    def __str__(self) -> str:
        given, step = self.given, self.step
        label = f"{given.optimizer_words}, {given.precision}"
        if step is None:
            return f"{label:<34} does not fit: {self.missing.partition('. ')[0]}"
        return (
            f"{label:<34}{readable_bytes(step.device_bytes):>11}{readable_bytes(step.host_bytes):>11}"
            f"{readable_seconds(step.seconds):>11}  {step.bottleneck.value}"
        )

    def answer(self) -> str:
        """Return what it takes, how fast it is, and what to type for it."""
        given, step = self.given, self.step
        if step is None:
            return f"Does not fit: {self.missing}"
        choice = step.choice
        counts = Counter(way.policy for way in choice.ways)
        ways = ", ".join(f"{policy} {count}" for policy, count in counts.items())
        speed = given.tokens * given.accumulate * given.devices / step.seconds
        strategy = "'superpipeline'"
        if (given.activations, given.units, given.resident, given.optimizer_on) != _USUAL:
            strategy = (
                f"SuperpipelineStrategy(activations={given.activations!r}, units={given.units!r}, "
                f"resident={given.resident!r}, optimizer_on={given.optimizer_on!r})"
            )
        optimizer = f"torch.optim.{given.optimizer}(model.parameters())"
        if given.moments is not None:
            optimizer = f"sp_lightning.optim.{given.optimizer}(model.parameters(), moments={given.moments!r})"
        return (
            f"k {choice.k}, {ways}; {len(choice.living)} live on the device, with their state, and "
            f"{len(choice.visiting)} visit it to be stepped there; the host steps the others.\n"
            f"Fits in every step: {readable_bytes(step.device_bytes)} of "
            f"{readable_bytes(given.device_bytes)} on the device; {readable_bytes(step.host_bytes)} on "
            f"the host, which has {readable_bytes(given.host_bytes)}, {readable_bytes(OF_SYSTEM)} of "
            "them for the system.\n"
            f"A step takes {readable_seconds(step.seconds)}: {speed:,.0f} tokens/s, "
            f"{1e6 / speed / 3600:.2g} hours for a million tokens, with\n"
            f"{optimizer}\n"
            f"Trainer(strategy={strategy}, precision={given.precision!r}, "
            f"gradient_clip_val={given.gradient_clip_val}, "
            f"accumulate_grad_batches={given.accumulate}, devices={given.devices})"
        )


@dataclass(frozen=True)
class Report:
    """Whether a model can be trained, and the predicted cost of that. The last lines of `str()` are the answer."""

    title: str  # the model's name, and its sizes
    rows: Sequence[Row]  # as it is asked for, then with more compact moments

    @property
    def best(self) -> Row:
        """The first row that fits, or else the last one."""
        return next((row for row in self.rows if row.step is not None), self.rows[-1])

    def __str__(self) -> str:
        assumed = textwrap.wrap(str(self.rows[0].given), 110)
        return "\n".join([self.title, *assumed, "", _HEAD, *map(str, self.rows), "", self.best.answer()])


def plan(module: nn.Module, assumptions: Assumptions | None = None, title: str = "") -> Report:
    """Estimate whether a model can be trained, in how much memory and how fast, before it is trained.

    Nothing is computed and no weights are needed, so the module may be on the meta device. The numbers are estimates,
    from shapes and from the assumptions; during training the planner measures instead.

    Args:
        module: The model. It is neither changed nor called.
        assumptions: About the device, the host, the precision, the optimizer, and the size of a step.
        title: Name of the model in the table; by default, the name of its class.

    Raises:
        ValueError: If the model has no parameters, or `units` or `resident` do not fit it.

    Examples:
        >>> print(plan(model, Assumptions(device_memory="24GB", tokens=8 * 2048)))
    """
    given = assumptions or Assumptions()
    title = title or type(module).__name__
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if not parameters:
        raise ValueError(f"{title} has no parameters, so there is nothing to plan.")
    rows = []
    for way in ladder(given):
        workload, machine = estimate(module, way)
        budget = int(SHARE_OF_FREE_MEMORY * way.device_bytes)
        try:
            step = choose(workload, machine, budget, host_budget=way.host_bytes - OF_SYSTEM)
        except TooLittleMemory as error:
            rows.append(Row(way, None, str(error)))
        else:
            # before there is a plan, nothing lives on the device
            most = max(step.host_bytes, first_host_bytes(workload))
            rows.append(Row(way, replace(step, host_bytes=most)))
    return Report(f"{title}: {parameters:,} parameters in {len(workload.units)} units", rows)


def readable_seconds(seconds: float) -> str:
    """Format a time with three digits and a unit."""
    if not seconds:
        return "0 s"
    size, unit = next((each for each in UNITS_OF_TIME if abs(seconds) >= 0.9995 * each[0]), UNITS_OF_TIME[-1])
    value = seconds / size
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"
