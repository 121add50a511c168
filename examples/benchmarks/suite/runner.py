"""The order of measurements: rooflines first, then every system on every workload, each in its own process.

Systems take turns, round after round, and every other round in the opposite order, because machines drift. The file is
written after every process, so whatever ends the benchmark, everything measured until then is kept.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suite import host_memory, machine, rooflines, worker
from suite.sets import WORKLOADS
from suite.systems import SYSTEMS, make_system
from suite.worker import Job, failure, record
from suite.workloads import Window, Workload

SCHEMA = 1
_PATIENCE = 4  # a process may take this many times its even share of the remaining time
_LEAST_SECONDS = 20.0  # the least time for a process, because it begins with imports
_HOST_RESERVE = 0.02  # of host memory; with less of it free, a process is ended before the machine is in trouble
_HOST_SHRUNK = 0.9  # of what was free; with less, the machine has lost memory, or something holds it
_POLL = 0.05  # seconds
_TIME_IS_UP = "the bench's time limit was reached"


@dataclass(frozen=True)
class Settings:
    """The choices made on the command line.

    Attributes:
        workloads: Workloads to run.
        systems: Names of the systems to run.
        rounds: How often everything is measured.
        warm_up: Steps of each process that do not count.
        steps: Steps of each process that count.
        time_limit: Seconds for the whole run.
        host_bytes: Host memory that the machine can have but may not report yet; None to rely on what it reports.
        revision: The commit, in case git is not available.
    """

    workloads: Sequence[Workload]
    systems: Sequence[str]
    rounds: int
    warm_up: int
    steps: int
    time_limit: float
    host_bytes: int | None = None
    revision: str | None = None


def jobs_of(settings: Settings) -> Iterator[Job]:
    """Yield all jobs to measure, in order."""
    for turn in range(settings.rounds):
        for workload in settings.workloads:
            ways = [way for name in settings.systems for way in _ways(name, workload)]
            for samples in workload.ladder or (workload.samples,):
                for name, window, budget in ways[:: -1 if turn % 2 else 1]:
                    yield Job(workload.name, name, window, samples, turn, settings.warm_up, settings.steps, budget)


def _ways(name: str, workload: Workload) -> Iterator[tuple[str, Window | None, int | None]]:
    """Yield the system with its own choices in each budget of device memory, then with each window."""
    system = SYSTEMS[name]
    for budget in (system.takes_budgets and workload.budgets) or (None,):
        yield name, None, budget
    for window in workload.windows if system.takes_windows else ():
        yield name, window, None


def run(settings: Settings, output: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure as much as time allows, and write each measurement to a file as it comes.

    Args:
        settings: The workloads and systems to run, and how.
        output: The file to write.
        say: Called with a line of text for each event.

    Returns:
        The result that was written.
    """
    end = time.monotonic() + settings.time_limit
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "complete": False,
        "settings": {name: getattr(settings, name) for name in ("rounds", "warm_up", "steps", "time_limit")},
        "machine": machine.describe(settings.revision),
        "host_grown": [],
        "systems": {name: SYSTEMS[name].title for name in settings.systems},
        "rooflines": None,
        "workloads": {},
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder), on_gpu=result["machine"]["gpu"] is not None)
        names = [workload.name for workload in settings.workloads]
        host_bytes = _grow_host(settings.host_bytes, processes, result, end)
        result["machine"] |= machine.host()
        prepared, why = processes.run(worker.prepare, names, end - time.monotonic())
        result["rooflines"], result["workloads"] = (
            (prepared or {}).get("rooflines"),
            (prepared or {}).get("workloads", {}),
        )
        say("rooflines: measured" if prepared else f"rooflines: {why['message']}")
        _save(result, output)
        jobs = list(jobs_of(settings))
        for index, job in enumerate(jobs):
            host_bytes = _grow_host(host_bytes, processes, result, end)
            done = _run_job(job, processes, result, end, len(jobs) - index)
            result["runs"].append(done)
            say(f"{job}: {outcome(done)}")
            _save(result, output)
    result["complete"] = all(run["error"] is None or run["error"]["type"] != "TimeIsUp" for run in result["runs"])
    _save(result, output)
    return result


def outcome(run: dict[str, Any]) -> str:
    """Describe the outcome of a job in one line."""
    if run["error"] is not None:
        return f"{run['status']}: {run['error']['type']}: {run['error']['message']}"
    return f"{sum(run['step_seconds']) / len(run['step_seconds']):.4g} s a step"


def _run_job(job: Job, processes: Processes, result: dict[str, Any], end: float, left: int) -> dict[str, Any]:
    reason = make_system(job.system).why_not(WORKLOADS[job.workload]) or _not_again(job, result["runs"])
    if reason is not None:
        return record(job, "skipped", error=failure("NotRun", reason))
    seconds = end - time.monotonic()
    if seconds <= 0:
        return record(job, "skipped", error=failure("TimeIsUp", _TIME_IS_UP))
    done, why = processes.run(worker.run, job, min(seconds, max(_LEAST_SECONDS, _PATIENCE * seconds / left)))
    if done is None:
        if time.monotonic() >= end:
            return record(job, "skipped", error=failure("TimeIsUp", f"{_TIME_IS_UP} while it ran", why["details"]))
        done = record(job, "failed", error=why)
    done["host_taken_bytes"] = processes.host_taken
    description = result["workloads"].get(job.workload)
    if description is not None and description["demand"] is not None:
        device_bytes, offloads = result["machine"]["device_bytes"], SYSTEMS[job.system].offloads
        done["limit"] = rooflines.limit(description, job.samples, result["rooflines"], device_bytes, offloads)
    return done


def _grow_host(target: int | None, processes: Processes, result: dict[str, Any], end: float) -> int | None:
    """Make sure that `target` bytes of host memory are free, if possible; return how many there can be."""
    seconds = end - time.monotonic()
    if target is None or host_memory.free_bytes() >= _HOST_SHRUNK * target or seconds <= 0:
        return target
    grown, why = processes.run(worker.grow_host, target, seconds)
    result["host_grown"].append(grown or why)
    return None if grown is None else min(target, int(grown["free_after"]))


def _not_again(job: Job, runs: Sequence[dict[str, Any]]) -> str | None:
    """Return why a job is skipped: the same, with as many samples or fewer, has failed before."""
    sought = job.workload, job.system, job.window, job.budget
    for run in runs:
        window = tuple(run["window"]) if run["window"] else None
        same = (run["workload"], run["system"], window, run["budget"]) == sought
        if same and _did_not_work(run) and run["samples"] <= job.samples:
            return f"it did not work with {run['samples']} samples in round {run['round'] + 1}"
    return None


def _did_not_work(run: dict[str, Any]) -> bool:
    return run["status"] != "ok" and run["error"]["type"] != "TimeIsUp"


def _save(result: dict[str, Any], output: Path) -> None:
    """Write the file atomically, so that ending the benchmark cannot leave half a file."""
    draft = output.with_suffix(".part")
    draft.write_text(json.dumps(result, indent=1), encoding="utf-8")
    draft.replace(output)


@dataclass
class Processes:
    """Runs functions in new processes, ends those that take too long or too much memory, and reads their results.

    With a GPU, each process is a new interpreter, as CUDA requires. Without one, they are forked from a process that
    has done the slow imports and nothing else.

    Attributes:
        folder: Folder for their files.
        on_gpu: Whether there is a GPU.
        host_taken: The largest increase in used host memory while the last process ran. It includes pinned memory and
            child processes, and whatever else ran on the machine.
    """

    folder: Path
    on_gpu: bool
    host_taken: int = 0
    _context: Any = field(init=False)

    def __post_init__(self) -> None:
        self._context = multiprocessing.get_context("spawn" if self.on_gpu else "forkserver")
        if not self.on_gpu:
            self._context.set_forkserver_preload([worker.__name__])

    def run(
        self, function: Callable[[Any, Path, Path], None], argument: Any, seconds: float
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Call a function in a process.

        Args:
            function: Called with the argument, a file to write JSON to, and a file for what it prints.
            argument: Anything that can be pickled.
            seconds: How long it may run.

        Returns:
            What it wrote, or None and the reason.
        """
        written, log = self.folder / "result.json", self.folder / "log.txt"
        for file in (written, log):
            file.unlink(missing_ok=True)
        process = self._context.Process(target=_call, args=(function, argument, written, log))
        process.start()
        why = self._watch(process, seconds)
        _end(process)
        printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if why is not None:
            return None, failure(*why, printed)
        if not written.exists():
            last = printed.strip().rpartition("\n")[2]
            return None, failure("ProcessDied", f"the process ended with {_exit(process.exitcode)}: {last}", printed)
        return json.loads(written.read_text(encoding="utf-8")), {}

    def _watch(self, process: Any, seconds: float) -> tuple[str, str] | None:
        """Wait for a process to end; return why it has to be ended early, if it does."""
        end = time.monotonic() + seconds
        reserve = _HOST_RESERVE * host_memory.total_bytes()
        before = least = host_memory.free_bytes()
        used_before = used = host_memory.total_bytes() - before
        why = None
        while process.is_alive() and why is None:
            free = host_memory.free_bytes()
            least, used = min(least, free), max(used, host_memory.total_bytes() - free)
            if least < min(reserve, before / 2):
                why = "HostMemoryFull", f"host memory is full: {least} bytes are left of {before} that were free"
            elif time.monotonic() > end:
                why = "TimedOut", f"it took more than {seconds:.0f} s"
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)  # makes it write to the log where it hangs
                time.sleep(1.0)
            process.join(_POLL)
        self.host_taken = used - used_before
        return why


def _call(function: Callable[[Any, Path, Path], None], argument: Any, written: Path, log: Path) -> None:
    """Run a function as a process, and exit when it returns, even if a system has left threads behind."""
    function(argument, written, log)
    os._exit(0)


def _end(process: Any) -> None:
    """Kill a process and its children, which are the process group that it leads."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()


def _exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
