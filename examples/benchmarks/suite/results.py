"""The results of each system on each workload, with the runs of all rounds together. Read only from the JSON file."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sp_lightning.pipeline import readable_bytes

Run = Mapping[str, Any]


@dataclass
class Entry:
    """One system on one workload, with a window, a budget and a number of samples.

    Attributes:
        workload: Name of the workload.
        system: Name of the system.
        title: Name of the system in tables, with its window and budget.
        window: k and k_prime; None for the system's own choice.
        samples: Samples per step.
        budget: Bytes of device memory that it was to keep to; None for all there is.
        runs: The runs that succeeded.
        errors: Errors of the runs that failed, without repetition.
        description: The workload, as described in the file.
    """

    workload: str
    system: str
    title: str
    window: tuple[int, int] | None
    samples: int
    budget: int | None
    description: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether any run succeeded."""
        return bool(self.runs)

    @property
    def step_seconds(self) -> list[float]:
        """The seconds of every measured step of every round."""
        return [seconds for run in self.runs for seconds in run["step_seconds"]]

    @property
    def seconds(self) -> float:
        """The median time of a step."""
        return statistics.median(self.step_seconds)

    @property
    def items(self) -> float:
        """Tokens or images in a step."""
        return self.samples * self.description["items_per_sample"]

    @property
    def items_per_second(self) -> float:
        """Tokens or images per second."""
        return self.items / self.seconds

    @property
    def tflops(self) -> float | None:
        """10^12 operations per second by the usual convention (6N); None if items are not tokens."""
        demand = self.description.get("demand")
        each = demand and demand["model_flops_per_sample"]
        return each * self.samples / self.seconds / 1e12 if each else None

    @property
    def limit(self) -> Mapping[str, Any] | None:
        """The least time that a step can take; None if unknown."""
        return self.runs[0].get("limit")

    @property
    def times_limit(self) -> float | None:
        """The median time of a step over its limit; None if the limit is unknown."""
        return None if self.limit is None else self.seconds / self.limit["seconds"]

    @property
    def device_bytes(self) -> int | None:
        """The peak of device memory over all rounds; None if it was not counted."""
        return self._most("device_peak_bytes")

    @property
    def counted_device_bytes(self) -> int | None:
        """The peak that the system itself counted, for devices where torch does not; None if it did not count."""
        counted = [run["facts"].get("counted_device_peak_bytes") for run in self.runs]
        return max((count for count in counted if count is not None), default=None)

    @property
    def host_bytes(self) -> int | None:
        """The peak resident host memory of the process over all rounds."""
        return self._most("host_peak_bytes")

    @property
    def value(self) -> float | None:
        """The value that the last measured step computed."""
        run = self.runs[0]
        last = run["warm_up"] + run["steps"]
        return run["values"][last - 1] if len(run["values"]) >= last else None

    def _most(self, name: str) -> int | None:
        return max((run[name] for run in self.runs if run.get(name) is not None), default=None)


def entries(result: Mapping[str, Any]) -> dict[str, list[Entry]]:
    """Return all entries of a result, by workload, in the order of the first round."""
    found: dict[tuple[Any, ...], Entry] = {}
    for run in result["runs"]:
        window = tuple(run["window"]) if run["window"] else None
        budget = run.get("budget")  # files from before November 28 have none
        key = run["workload"], run["samples"], run["system"], window, budget
        if key not in found:
            title = result["systems"][run["system"]] + (f", k={window[0]}, k'={window[1]}" if window else "")
            title += f", in {readable_bytes(budget)}" if budget is not None else ""
            description = result["workloads"].get(run["workload"], {})
            found[key] = Entry(run["workload"], run["system"], title, window, run["samples"], budget, description)
        if run["status"] == "ok":
            found[key].runs.append(run)
        else:
            _add_error(found[key].errors, run)
    by_workload: dict[str, list[Entry]] = {}
    for entry in found.values():
        by_workload.setdefault(entry.workload, []).append(entry)
    return by_workload


def find(among: Iterable[Entry], *systems: str) -> list[Entry]:
    """Return the measured entries of some systems."""
    return [entry for entry in among if entry.system in systems and entry.ok]


def _add_error(errors: list[str], run: Run) -> None:
    error = run["error"]
    told = error["message"] if error["type"] in ("NotRun", "TimeIsUp") else f"{error['type']}: {error['message']}"
    repeats = errors and error["type"] == "NotRun" and run["round"]  # it was not tried again
    if not repeats and told not in errors:
        errors.append(told)
