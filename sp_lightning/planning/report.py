"""`sp_lightning.plan(module)`: a model's predicted device memory, host memory and step time, as a table over k.

Below it stands the ladder: how much host memory, and time, ways to keep masters and moments take.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from sp_lightning.pipeline.engine import SHARE_OF_FREE_MEMORY
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.planning.choose import TooLittleMemory, choose
from sp_lightning.planning.cost import Choice, Machine, Prediction, Workload
from sp_lightning.planning.estimate import Assumptions, Precision, estimate, ladder
from sp_lightning.planning.rehearsal import StepMemory

UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_KS = (1, 2, 3, 4, 8, 16, 32, 64, 128)  # the rows of the table, as far as there are so many units
_HOSTS = tuple(size * 2**30 for size in (32, 64, 128))
_SYSTEM_BYTES = 6 * 2**30  # of host memory, for the system, Python, torch and data


class Row(NamedTuple):
    """The fastest steps that fit: without clipping by norm, and with it, each with a choice of its own."""

    plain: Prediction
    clipped: Prediction


@dataclass(frozen=True)
class Rung:
    """What a step takes with a way to keep masters and moments."""

    given: Assumptions
    row: Row


@dataclass(frozen=True)
class Report:
    """The predicted cost of training a model, for several k. `str()` of it is a table."""

    title: str  # the model's name in the table
    given: Assumptions
    parameters: int  # elements of all weights
    workload: Workload
    # for each k that fits, with `k_prime=1`, no unit kept on the device, and all stepped on the host
    rows: Sequence[Row]
    best: Row | None  # the choices with the fastest steps; None if nothing fits
    last_row: str  # what the table says of the first k that does not fit
    # whether what autograd saves was counted on the meta device; else it is estimated from shapes
    is_counted: bool
    # from what is assumed to the most compact, each with the choices that are best for it
    ladder: Sequence[Rung]

    def asked(self, row: Row) -> Prediction:
        """Return the step as it is asked for: clipped, or not."""
        return row.plain if self.given.gradient_clip_val is None else row.clipped

    def as_dict(self) -> dict[str, Any]:
        """Return numbers and names only, for JSON."""
        return {
            "model": self.title,
            "assumptions": {**asdict(self.given), "device_memory": self.given.device_bytes},
            "parameters": self.parameters,
            "units": {unit.name: unit.weight_bytes for unit in self.workload.units},
            "rows": [self._as_dict(row) for row in self.rows],
            "best": self.best and self._as_dict(self.best),
            "ladder": [
                {name: getattr(rung.given, name) for name in ("precision", "optimizer", "master", "moments")}
                | self._as_dict(rung.row)
                for rung in self.ladder
            ],
        }

    def _as_dict(self, row: Row) -> dict[str, Any]:
        asked = self.asked(row)
        choice = asked.choice
        return {
            "k": choice.k,
            "k_prime": choice.k_prime,
            "kept": len(choice.kept),
            "steps": self._places(choice),
            "activations": dict(Counter(way.policy for way in choice.ways)),
            "seconds": asked.seconds,
            "plain_seconds": row.plain.seconds,
            "clipped_seconds": row.clipped.seconds,
            "bottleneck": asked.bottleneck.value,
            "lanes": {lane.value: seconds for lane, seconds in asked.lanes.items()},
            "device_bytes": asked.device_bytes,
            "host_bytes": asked.host_bytes,
            "clipped_bytes": row.clipped.host_bytes,
            "bytes_to_device": asked.bytes_to_device,
            "bytes_to_host": asked.bytes_to_host,
        }

    def _places(self, choice: Choice) -> dict[str, int]:
        """Return how many units are stepped in which way; those that are frozen are in none."""
        trained = [number for number, unit in enumerate(self.workload.units) if unit.step_bytes]
        live = len(set(trained).intersection(choice.on_device))
        visit = len(choice.visiting)
        return {"live": live, "visit": visit, "host": len(trained) - live - visit}

    def __str__(self) -> str:
        given = {**asdict(self.given), "device_memory": readable_bytes(self.given.device_bytes)}
        units, columns = self.workload.units, ("device", "host", "to device", "to host", "step", "clipped")
        largest = readable_bytes(max(unit.weight_bytes for unit in units))
        lines = [
            f"{self.title}: {self.parameters:,} parameters in {len(units)} units of at most {largest}",
            *textwrap.wrap("Assumed: " + ", ".join(f"{name}={value}" for name, value in given.items()), 110),
            "Activations: " + ("counted on the meta device" if self.is_counted else "estimated from shapes"),
            "",
            f"   k {_in_columns(columns)}  bottleneck",
            *(self._as_line(str(row.plain.choice.k), row) for row in self.rows),
            *([self.last_row] if self.last_row else []),
        ]
        if self.best is None:
            return "\n".join([*lines, "", "Nothing fits. Fewer tokens help, or a lower precision, or other `units`."])
        asked = self.asked(self.best)
        choice = asked.choice
        counts = {"k": choice.k, "k_prime": choice.k_prime, "kept": len(choice.kept)}
        counts |= Counter(way.policy for way in choice.ways)
        words = ", ".join(f"{name} {count}" for name, count in counts.items())
        busy = ", ".join(f"{lane.value} {readable_seconds(seconds)}" for lane, seconds in asked.lanes.items())
        lines += [self._as_line("best", self.best), "", f"Best: {words}", self._in_words(choice), f"Busy: {busy}"]
        return "\n".join([*lines, "", *self._ladder_lines()])

    def _as_line(self, label: str, row: Row) -> str:
        asked = self.asked(row)
        sizes = (asked.device_bytes, asked.host_bytes, asked.bytes_to_device, asked.bytes_to_host)
        seconds = (row.plain.seconds, row.clipped.seconds)
        columns = [*map(readable_bytes, sizes), *map(readable_seconds, seconds)]
        return f"{label:>4} {_in_columns(columns)}  {asked.bottleneck.value}"

    def _in_words(self, choice: Choice) -> str:
        """Say what lives on the device, what visits it, and what is stepped on the host."""
        live, visit, host = self._places(choice).values()
        words = f"Steps: {live} units live on the device with their state, "
        words += f"{visit} visit it to be stepped there, {host} are stepped on the host"
        if self.given.devices > 1:
            words += "; with several devices none visits"
        return words

    def _ladder_lines(self) -> list[str]:
        hosts = _HOSTS if self.given.host_bytes is None else (self.given.host_bytes,)
        rows = [("on the host", ["memory", "step", "clipped", "its step", *map(readable_bytes, hosts)])]
        for rung in self.ladder:
            columns = []
            for prediction in rung.row:
                columns += [readable_bytes(prediction.host_bytes), readable_seconds(prediction.seconds)]
            taken = self.asked(rung.row).host_bytes + _SYSTEM_BYTES
            columns += ["fits" if taken <= size else "-" for size in hosts]
            rows.append((f"{rung.given.optimizer_words}, {rung.given.precision}", columns))
        lines = [f"{label:<50}{_in_columns(columns)}" for label, columns in rows]
        return [*lines, "clipped: with gradient_clip_val, for which nothing is stepped before all gradients are there"]


def _in_columns(texts: Sequence[str]) -> str:
    return "".join(f"{text:>11}" for text in texts)


def _fastest(workload: Workload, machine: Machine, budget: int, **fixed: Any) -> Row:
    """Choose for steps that are not clipped, and for those that are."""
    plain = choose(workload, machine, budget, **fixed)
    if workload.stepping in (None, "after backward"):
        return Row(plain, plain)
    clipped = replace(workload, stepping="after backward")
    return Row(plain, choose(clipped, machine, budget, **fixed))


def plan(module: nn.Module, assumptions: Assumptions | None = None, title: str = "") -> Report:
    """Estimate the device memory, host memory and step time of training a model, before it is trained.

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
    rehearsed: dict[Precision, StepMemory | None] = {}
    workload, machine = estimate(module, replace(given, gradient_clip_val=None), rehearsed)
    budget, length = int(SHARE_OF_FREE_MEMORY * given.device_bytes), len(workload.units)
    rows: list[Row] = []
    last_row = ""
    for k in [*(k for k in _KS if k < length), length]:
        try:
            rows.append(_fastest(workload, machine, budget, k=k, k_prime=1, fill=False))
        except TooLittleMemory as error:
            last_row = f"{k:>4}  {error}"
            break
    rungs = []
    for way in ladder(given) if rows else ():
        work = estimate(module, replace(way, gradient_clip_val=None), rehearsed)
        rungs.append(Rung(way, _fastest(*work, budget)))
    best = rungs[0].row if rungs else None
    is_counted = rehearsed[given.precision] is not None
    return Report(title, given, parameters, workload, rows, best, last_row, is_counted, rungs)


def readable_seconds(seconds: float) -> str:
    """Format a time with three digits and a unit."""
    if not seconds:
        return "0 s"
    size, unit = next((each for each in UNITS_OF_TIME if abs(seconds) >= 0.9995 * each[0]), UNITS_OF_TIME[-1])
    value = seconds / size
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"
