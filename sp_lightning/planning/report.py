"""`sp_lightning.plan(module)`: a model's predicted device memory, host memory and step time, as a table."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from sp_lightning.pipeline.engine import SHARE_OF_FREE_MEMORY
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.planning.choose import TooLittleMemory, choose
from sp_lightning.planning.estimate import Assumptions, estimate, ladder
from sp_lightning.planning.work import Prediction, UnitWork

UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_COLUMNS = ("device", "host", "to device", "to host", "step")


@dataclass(frozen=True)
class Report:
    """The predicted cost of training a model. `str()` of it is a table."""

    title: str  # the model's name in the table
    given: Assumptions
    parameters: int  # elements of all weights
    units: Sequence[UnitWork]
    # the fastest steps that fit: as assumed, with more compact moments, with less memory; empty if nothing fits
    rows: Mapping[str, Prediction]
    missing: str  # why nothing fits

    @property
    def best(self) -> Prediction | None:
        """The fastest step as it is asked for; None if nothing fits."""
        return next(iter(self.rows.values()), None)

    def as_dict(self) -> dict[str, Any]:
        """Return numbers and names only, for JSON."""
        return {
            "model": self.title,
            "assumptions": {**asdict(self.given), "device_memory": self.given.device_bytes},
            "parameters": self.parameters,
            "units": {unit.name: unit.weight_bytes for unit in self.units},
            "best": self.best and self._as_dict(self.best),
            "rows": {label: self._as_dict(row) for label, row in self.rows.items()},
        }

    def _as_dict(self, prediction: Prediction) -> dict[str, Any]:
        choice = prediction.choice
        names = ("seconds", "device_bytes", "host_bytes", "bytes_to_device", "bytes_to_host")
        # frozen units are stepped nowhere
        trained = {number for number, unit in enumerate(self.units) if unit.step_bytes}
        live, visit = len(trained.intersection(choice.living)), len(choice.visiting)
        return {
            "k": choice.k,
            "steps": {"live": live, "visit": visit, "host": len(trained) - live - visit},
            "activations": dict(Counter(way.policy for way in choice.ways)),
            "bottleneck": prediction.bottleneck.value,
            "lanes": {lane.value: seconds for lane, seconds in prediction.lanes.items()},
            **{name: getattr(prediction, name) for name in names},
        }

    def __str__(self) -> str:
        given = {**asdict(self.given), "device_memory": readable_bytes(self.given.device_bytes)}
        largest = readable_bytes(max(unit.weight_bytes for unit in self.units))
        lines = [
            f"{self.title}: {self.parameters:,} parameters in {len(self.units)} units of at most {largest}",
            *textwrap.wrap("Assumed: " + ", ".join(f"{name}={value}" for name, value in given.items()), 110),
            "",
        ]
        if self.best is None:
            advice = "Nothing fits. Fewer tokens help, or a lower precision, or other `units`."
            return "\n".join([*lines, self.missing, advice])
        lines.append(_as_line("", _COLUMNS, "bottleneck"))
        for label, row in self.rows.items():
            sizes = (row.device_bytes, row.host_bytes, row.bytes_to_device, row.bytes_to_host)
            columns = [*map(readable_bytes, sizes), readable_seconds(row.seconds)]
            lines.append(_as_line(label, columns, row.bottleneck.value))
        best = self._as_dict(self.best)
        live, visit, host = best["steps"].values()
        ways = ", ".join(f"{policy} {count}" for policy, count in best["activations"].items())
        last = (
            f"First row: k {best['k']}, {ways}; {live} units live on the device with their state, "
            f"{visit} visit it to be stepped there, {host} are stepped on the host"
        )
        return "\n".join([*lines, "", last])


def _as_line(label: str, texts: Sequence[str], last: str) -> str:
    return f"{label:<36}" + "".join(f"{text:>11}" for text in texts) + f"  {last}"


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
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if not parameters:
        raise ValueError(f"{title or type(module).__name__} has no parameters, so there is nothing to plan.")
    budget = int(SHARE_OF_FREE_MEMORY * given.device_bytes)
    assumed = estimate(module, given)
    rows: dict[str, Prediction] = {}
    missing = ""
    try:
        for way in ladder(given):
            rows[f"{way.optimizer_words}, {way.precision}"] = choose(*estimate(module, way), budget)
        for part in (2, 4):
            rows[f"with 1/{part} of the memory"] = choose(*assumed, budget // part)
    except TooLittleMemory as error:
        missing = str(error)
    return Report(title or type(module).__name__, given, parameters, assumed[0].units, rows, missing)


def readable_seconds(seconds: float) -> str:
    """Format a time with three digits and a unit."""
    if not seconds:
        return "0 s"
    size, unit = next((each for each in UNITS_OF_TIME if abs(seconds) >= 0.9995 * each[0]), UNITS_OF_TIME[-1])
    value = seconds / size
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"
