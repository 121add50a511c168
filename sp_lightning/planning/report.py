"""`sp_lightning.plan(module)`: a model's predicted device memory, host memory and step time, as a table over k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from sp_lightning.pipeline.activations.ways import choose_ways
from sp_lightning.pipeline.sizes import readable_bytes, readable_seconds
from sp_lightning.pipeline.survey import SHARE_OF_FREE_MEMORY
from sp_lightning.planning.choose import choose
from sp_lightning.planning.cost import Choice, Prediction, predict
from sp_lightning.planning.dry_run import CannotFollow
from sp_lightning.planning.estimate import TERA, Assumptions, Estimate, estimate
from sp_lightning.planning.workload import Workload

_EVERY_K = 4  # up to here each k is in the table, then k doubles from row to row


@dataclass(frozen=True)
class Row:
    """The predicted cost of one choice.

    Attributes:
        choice: The choice.
        prediction: Its predicted time and memory.
        device_bytes: Device memory for weights, gradients on their way, activations and their gradients.
        fits: Whether `device_bytes` is within a step's share of device memory.
    """

    choice: Choice
    prediction: Prediction
    device_bytes: int
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        """Return numbers and names only, for JSON."""
        return {
            "k": self.choice.k,
            "k_prime": self.choice.k_prime,
            "kept": len(self.choice.kept),
            "on_device": len(self.choice.on_device),
            "activations": dict(Counter(way.policy for way in self.choice.ways)),
            "fits": self.fits,
            "device_bytes": self.device_bytes,
            "host_bytes": self.prediction.host_bytes,
            "bytes_to_device": self.prediction.bytes_to_device,
            "bytes_to_host": self.prediction.bytes_to_host,
            "seconds": self.prediction.seconds,
            "bottleneck": self.prediction.bottleneck.value,
            "lanes": {lane.value: seconds for lane, seconds in self.prediction.lanes.items()},
        }


@dataclass(frozen=True)
class Report:
    """The predicted cost of training a model, for several k. `str()` of it is a table.

    Attributes:
        title: The model's name in the table.
        given: The assumptions.
        estimate: The model as a workload.
        rows: One for each k, with `k_prime=1` and no unit kept on the device, up to the first that does not fit.
        best: The choice with the fastest step; `None` if nothing fits.
        not_followed: Why activations are not counted; `None` if they are.
    """

    title: str
    given: Assumptions
    estimate: Estimate
    rows: Sequence[Row]
    best: Row | None
    not_followed: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return numbers and names only, for JSON."""
        units = self.estimate.workload.units
        return {
            "model": self.title,
            "assumptions": {**asdict(self.given), "device_memory": self.given.device_bytes},
            "parameters": self.estimate.parameters,
            "tera_flops": self.estimate.flops / TERA,
            "units": {unit.name: unit.weight_bytes for unit in units},
            "activations_counted": self.not_followed is None,
            "rows": [row.as_dict() for row in self.rows],
            "best": None if self.best is None else self.best.as_dict(),
        }

    def __str__(self) -> str:
        return "\n".join([*self._what(), "", *self._assumed(), "", *self._table(), "", *self._advice()])

    def _what(self) -> Iterator[str]:
        units, resident = self.estimate.workload.units, self.estimate.workload.resident
        parameters, flops = _count(self.estimate.parameters), self.estimate.flops / TERA
        yield f"{self.title}: {parameters} parameters, {flops:.3g} TFLOP a step"
        if units:
            largest = max(units, key=lambda unit: unit.weight_bytes)
            yield (
                f"{len(units)} units, the largest {largest.name} with {readable_bytes(largest.weight_bytes)}; "
                f"{readable_bytes(resident.weight_bytes)} of weights always stay on the device"
            )

    def _assumed(self) -> Iterator[str]:
        given = self.given
        optimizer = given.optimizer
        if not isinstance(optimizer, str):
            optimizer = f"with {optimizer:g} bytes per parameter"
        yield (
            f"Assumed: {readable_bytes(given.device_bytes)} of device memory, {SHARE_OF_FREE_MEMORY:.0%} of it for a "
            f"step; {given.compute:g} TFLOP/s;"
        )
        yield (
            f"{given.to_device:g} GB/s to the device, {given.to_host:g} GB/s back; "
            f"{given.host_bandwidth:g} GB/s of host memory for the optimizer;"
        )
        yield f"precision {given.precision}; optimizer {optimizer}; activations {given.activations}."
        if self.not_followed is not None:
            yield f"{given.tokens} tokens a step are assumed, and activations are not counted: {self.not_followed}."

    def _table(self) -> Iterator[str]:
        yield f"{'k':>4}  {'device':>10} {'host':>10} {'to device':>10} {'to host':>10} {'step':>10}  bottleneck"
        for row in self.rows:
            took = row.prediction
            memory = f"{row.choice.k:>4}  {readable_bytes(row.device_bytes):>10} {readable_bytes(took.host_bytes):>10}"
            if row.fits:
                moved = f"{readable_bytes(took.bytes_to_device):>10} {readable_bytes(took.bytes_to_host):>10}"
                yield f"{memory} {moved} {readable_seconds(took.seconds):>10}  {took.bottleneck.value}"
            else:
                yield f"{memory} {'does not fit':>21}"

    def _advice(self) -> Iterator[str]:
        if self.best is None:
            room = readable_bytes(int(SHARE_OF_FREE_MEMORY * self.given.device_bytes))
            yield f"Nothing fits {room}. Fewer tokens a step help, a lower precision, or other `units`."
            return
        choice, took = self.best.choice, self.best.prediction
        chosen = [f"k={choice.k}", f"k_prime={choice.k_prime}"]
        if choice.kept:
            chosen.append(f"units kept on the device: {len(choice.kept)}")
        if choice.on_device:
            chosen.append(f"units with their optimizer on the device: {len(choice.on_device)}")
        if self.not_followed is None:
            ways = Counter(way.policy for way in choice.ways)
            chosen.append("activations: " + ", ".join(f"{policy} {count}" for policy, count in sorted(ways.items())))
        lanes = ", ".join(f"{lane.value} {readable_seconds(seconds)}" for lane, seconds in took.lanes.items())
        yield f"Fastest: {'; '.join(chosen)}"
        device, step = readable_bytes(self.best.device_bytes), readable_seconds(took.seconds)
        yield f"{device} on the device, {step} a step; busy: {lanes}"


def plan(module: nn.Module, inputs: Any = None, assumptions: Assumptions | None = None, title: str = "") -> Report:
    """Estimate the device memory, host memory and step time of training a model, before it is trained.

    Nothing is computed and no weights are needed, so the module may be on the meta device. The numbers are estimates,
    from shapes and from the assumptions; during training the planner measures instead.

    Args:
        module: The model. It is neither changed nor called.
        inputs: The inputs to the model's forward in one step. A tuple is unpacked into positional arguments, a
            dictionary into keyword arguments; tensors may be on the meta device. `None` uses the module's
            `example_input_array`. Without inputs, activations are not counted.
        assumptions: About the device, the host, the precision and the optimizer.
        title: Name of the model in the table; by default, the name of its class.

    Returns:
        The report. `str()` of it is the table, `as_dict()` of it is for JSON.

    Raises:
        ValueError: If the model has no parameters, or `units` or `resident` do not fit it.

    Example::

        print(plan(model, {"input_ids": tokens}, Assumptions(device_memory="24GB")))
    """
    given = assumptions or Assumptions()
    if inputs is None:
        inputs = getattr(module, "example_input_array", None)
    not_followed = None if inputs is not None else "it is not known what the model is called with"
    try:
        found = estimate(module, inputs, given)
    except CannotFollow as error:
        not_followed = str(error)
        found = estimate(module, None, given)
    rows, best = _rows(found, int(SHARE_OF_FREE_MEMORY * given.device_bytes))
    return Report(title or type(module).__name__, given, found, rows, best, not_followed)


def _rows(found: Estimate, budget: int) -> tuple[list[Row], Row | None]:
    workload, machine = found.workload, found.machine
    least = tuple(choose_ways([unit.ways for unit in workload.units], 0, workload.turn_bytes))
    rows: list[Row] = []
    for k in _windows(len(workload.units)):
        smallest = Choice(k, 1, (), least)
        row = _row(workload, smallest, predict(workload, machine, smallest), budget)
        if row.fits:
            row = _row(workload, *choose(workload, machine, budget, k=k, k_prime=1, fill=False), budget)
        rows.append(row)
        if not row.fits:
            break
    return rows, _row(workload, *choose(workload, machine, budget), budget) if rows[0].fits else None


def _row(workload: Workload, choice: Choice, prediction: Prediction, budget: int) -> Row:
    nbytes = prediction.device_bytes + workload.reserve_bytes
    return Row(choice, prediction, nbytes, nbytes <= budget)


def _windows(units: int) -> Iterator[int]:
    k = 1
    while k < units:
        yield k
        k = k + 1 if k < _EVERY_K else 2 * k
    yield units


def _count(number: int) -> str:
    """Format a large number with a word for its magnitude."""
    for name, size in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {name}"
    return str(number)
