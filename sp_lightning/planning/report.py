"""`sp_lightning.plan(module)`: a model's predicted device memory, host memory and step time, as a table over k.

Below it stands the ladder: how much host memory, and time, ways to keep masters and moments take.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from sp_lightning.pipeline.engine import SHARE_OF_FREE_MEMORY
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.planning.choose import choose
from sp_lightning.planning.cost import Choice, Prediction, Workload
from sp_lightning.planning.estimate import Assumptions, estimate, ladder
from sp_lightning.planning.step import predict

UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_KS = (1, 2, 3, 4, 8, 16, 32, 64, 128)  # the rows of the table, as far as there are so many units
_HOSTS = tuple(size * 2**30 for size in (32, 64, 128))
_SYSTEM_BYTES = 6 * 2**30  # of host memory, for the system, Python, torch and data


@dataclass(frozen=True)
class Rung:
    """What a step takes with a way to keep masters and moments."""

    given: Assumptions
    host_bytes: int
    seconds: float
    # of host memory if gradients are clipped by norm, and so wait there for each other
    clipped_bytes: int


@dataclass(frozen=True)
class Report:
    """The predicted cost of training a model, for several k. `str()` of it is a table."""

    title: str  # the model's name in the table
    given: Assumptions
    parameters: int  # elements of all weights
    workload: Workload
    # for each k that fits, with `k_prime=1` and no unit kept on the device
    rows: Sequence[Prediction]
    best: Prediction | None  # the choice with the fastest step; None if nothing fits
    last_row: str  # what the table says of the first k that does not fit
    # of host memory, with the best choice: from what is assumed to the most compact
    ladder: Sequence[Rung]

    def as_dict(self) -> dict[str, Any]:
        """Return numbers and names only, for JSON."""
        return {
            "model": self.title,
            "assumptions": {**asdict(self.given), "device_memory": self.given.device_bytes},
            "parameters": self.parameters,
            "units": {unit.name: unit.weight_bytes for unit in self.workload.units},
            "rows": [_as_dict(row) for row in self.rows],
            "best": self.best and _as_dict(self.best),
            "ladder": [
                {name: getattr(rung.given, name) for name in ("precision", "optimizer", "master", "moments")}
                | {"host_bytes": rung.host_bytes, "clipped_bytes": rung.clipped_bytes, "seconds": rung.seconds}
                for rung in self.ladder
            ],
        }

    def __str__(self) -> str:
        given = {**asdict(self.given), "device_memory": readable_bytes(self.given.device_bytes)}
        units, columns = self.workload.units, ("device", "host", "to device", "to host", "step")
        largest = readable_bytes(max(unit.weight_bytes for unit in units))
        lines = [
            f"{self.title}: {self.parameters:,} parameters in {len(units)} units of at most {largest}",
            *textwrap.wrap("Assumed: " + ", ".join(f"{name}={value}" for name, value in given.items()), 110),
            "",
            f"   k {_in_columns(columns)}  bottleneck",
            *(_as_row(str(row.choice.k), row) for row in self.rows),
            *([self.last_row] if self.last_row else []),
        ]
        if self.best is None:
            return "\n".join([*lines, "", "Nothing fits. Fewer tokens help, or a lower precision, or other `units`."])
        chosen = _as_dict(self.best)
        counts = {name: chosen[name] for name in ("k", "k_prime", "kept", "on_device")}
        counts |= chosen["activations"]
        words = ", ".join(f"{name} {count}" for name, count in counts.items())
        lanes = self.best.lanes.items()
        busy = ", ".join(f"{lane.value} {readable_seconds(seconds)}" for lane, seconds in lanes)
        lines += [_as_row("best", self.best), "", f"Best: {words}", f"Busy: {busy}"]
        return "\n".join([*lines, "", *self._ladder_lines()])

    def _ladder_lines(self) -> list[str]:
        hosts = _HOSTS if self.given.host_bytes is None else (self.given.host_bytes,)
        rows = [("on the host", ["memory", "clipped", "step", *map(readable_bytes, hosts)])]
        for rung in self.ladder:
            columns = [readable_bytes(rung.host_bytes), readable_bytes(rung.clipped_bytes)]
            columns.append(readable_seconds(rung.seconds))
            columns += ["fits" if rung.host_bytes + _SYSTEM_BYTES <= size else "-" for size in hosts]
            rows.append((f"{rung.given.optimizer_words}, {rung.given.precision}", columns))
        lines = [f"{label:<55} {_in_columns(columns)}" for label, columns in rows]
        return [*lines, "clipped: with gradient_clip_val, for which all gradients wait on the host"]


def _as_dict(row: Prediction) -> dict[str, Any]:
    choice = row.choice
    return {
        "k": choice.k,
        "k_prime": choice.k_prime,
        "kept": len(choice.kept),
        "on_device": len(choice.on_device),
        "activations": dict(Counter(way.policy for way in choice.ways)),
        "seconds": row.seconds,
        "bottleneck": row.bottleneck.value,
        "lanes": {lane.value: seconds for lane, seconds in row.lanes.items()},
        "device_bytes": row.device_bytes,
        "host_bytes": row.host_bytes,
        "bytes_to_device": row.bytes_to_device,
        "bytes_to_host": row.bytes_to_host,
    }


def _as_row(label: str, row: Prediction) -> str:
    sizes = (row.device_bytes, row.host_bytes, row.bytes_to_device, row.bytes_to_host)
    columns = [*map(readable_bytes, sizes), readable_seconds(row.seconds)]
    return f"{label:>4} {_in_columns(columns)}  {row.bottleneck.value}"


def _in_columns(texts: Sequence[str]) -> str:
    return "".join(f"{text:>11}" for text in texts)


def _rung(module: nn.Module, given: Assumptions, choice: Choice) -> Rung:
    """Return what a step takes with a way to keep masters and moments."""
    workload, machine = estimate(module, given)
    predicted = predict(workload, machine, choice)
    clipped = predicted
    if workload.stepping is not None:
        clipped = predict(replace(workload, stepping="after backward"), machine, choice)
    return Rung(given, predicted.host_bytes, predicted.seconds, clipped.host_bytes)


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

    Example::

        print(plan(model, Assumptions(device_memory="24GB", tokens=8 * 2048)))
    """
    given = assumptions or Assumptions()
    workload, machine = estimate(module, given)
    budget, length = int(SHARE_OF_FREE_MEMORY * given.device_bytes), len(workload.units)
    rows: list[Prediction] = []
    last_row = ""
    for k in [*(k for k in _KS if k < length), length]:
        try:
            rows.append(choose(workload, machine, budget, k=k, k_prime=1, fill=False))
        except ValueError as error:
            last_row = f"{k:>4}  {error}"
            break
    best = choose(workload, machine, budget) if rows else None
    parameters = sum(parameter.numel() for parameter in module.parameters())
    rungs = [] if best is None else [_rung(module, way, best.choice) for way in ladder(given)]
    return Report(title or type(module).__name__, given, parameters, workload, rows, best, last_row, rungs)


def readable_seconds(seconds: float) -> str:
    """Format a time with three digits and a unit."""
    if not seconds:
        return "0 s"
    size, unit = next((each for each in UNITS_OF_TIME if abs(seconds) >= 0.9995 * each[0]), UNITS_OF_TIME[-1])
    value = seconds / size
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"
