"""What a file of results says of each system on each workload: the runs of all rounds together. Knows JSON alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Run = Mapping[str, Any]


@dataclass
class Entry:
    """One system on one workload, with a window and a number of samples.

    Attributes:
        workload: Its name.
        system: Its name.
        title: What it is called in tables, with its window.
        window: k and k_prime; None for the system's own choice.
        samples: In a step.
        runs: Those that worked.
        errors: Of those that did not, without repetition.
        description: The workload, as in the file.
    """

    workload: str
    system: str
    title: str
    window: tuple[int, int] | None
    samples: int
    description: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether anything was measured."""
        return bool(self.runs)

    @property
    def step_seconds(self) -> list[float]:
        """Every step of every round."""
        return [seconds for run in self.runs for seconds in run["step_seconds"]]

    @property
    def seconds(self) -> float:
        """Their median."""
        return statistics.median(self.step_seconds)

    @property
    def items(self) -> float:
        """Tokens or images in a step."""
        return self.samples * self.description["items_per_sample"]

    @property
    def items_per_second(self) -> float:
        """Tokens or images."""
        return self.items / self.seconds

    @property
    def tflops(self) -> float | None:
        """10^12 operations per second as they are usually given (6N); None where items are not tokens."""
        demand = self.description.get("demand")
        each = demand and demand["model_flops_per_sample"]
        return each * self.samples / self.seconds / 1e12 if each else None

    @property
    def limit(self) -> Mapping[str, Any] | None:
        """The least time that a step can take; None if that is not known."""
        return self.runs[0].get("limit")

    @property
    def times_limit(self) -> float | None:
        """How many times that a step takes."""
        return None if self.limit is None else self.seconds / self.limit["seconds"]

    @property
    def device_bytes(self) -> int | None:
        """The most device memory of all rounds; None if nobody counted."""
        return self._most("device_peak_bytes")

    @property
    def counted_device_bytes(self) -> int | None:
        """The most that the system itself counted, where torch does not; None if it does not count."""
        counted = [run["facts"].get("counted_device_peak_bytes") for run in self.runs]
        return max((count for count in counted if count is not None), default=None)

    @property
    def host_bytes(self) -> int | None:
        """The most host memory of all rounds that the process had resident."""
        return self._most("host_peak_bytes")

    @property
    def host_taken_bytes(self) -> int | None:
        """The most host memory that was missing on the machine while it ran."""
        return self._most("host_taken_bytes")

    @property
    def value(self) -> float | None:
        """What the last measured step gave."""
        run = self.runs[0]
        last = run["warm_up"] + run["steps"]
        return run["values"][last - 1] if len(run["values"]) >= last else None

    def _most(self, name: str) -> int | None:
        return max((run[name] for run in self.runs if run.get(name) is not None), default=None)


def entries(result: Mapping[str, Any]) -> dict[str, list[Entry]]:
    """All that a file says, by workload, in the order of the file's first round."""
    found: dict[tuple[Any, ...], Entry] = {}
    for run in result["runs"]:
        window = tuple(run["window"]) if run["window"] else None
        key = run["workload"], run["samples"], run["system"], window
        if key not in found:
            title = result["systems"][run["system"]] + (f", k={window[0]}, k'={window[1]}" if window else "")
            description = result["workloads"].get(run["workload"], {})
            found[key] = Entry(run["workload"], run["system"], title, window, run["samples"], description)
        if run["status"] == "ok":
            found[key].runs.append(run)
        else:
            _add_error(found[key].errors, run)
    by_workload: dict[str, list[Entry]] = {}
    for entry in found.values():
        by_workload.setdefault(entry.workload, []).append(entry)
    return by_workload


def find(among: Iterable[Entry], *systems: str) -> list[Entry]:
    """Those of some systems that were measured."""
    return [entry for entry in among if entry.system in systems and entry.ok]


def _add_error(errors: list[str], run: Run) -> None:
    error = run["error"]
    told = error["message"] if error["type"] in ("NotRun", "TimeIsUp") else f"{error['type']}: {error['message']}"
    repeats = errors and error["type"] == "NotRun" and run["round"]  # it was not tried again
    if not repeats and told not in errors:
        errors.append(told)
