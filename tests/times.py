"""How much CPU time each test takes: written to times.json, and held to a budget.

It is the time of the test's process, of its threads, and of all processes that come from it. Under load, or on a slower
machine, the same work takes more of it: a yardstick between the tests tells by how much, and times are divided by that.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from .selection import CASE, NOTICED, TIMES, Case, Tier, seconds_of

DEAREST = 10
STEADY = 1.5  # a time that has changed less than this stays in the file as it is
USUAL = 0.004  # CPU seconds of the yardstick on the machine of times.json, which had nothing else to do
ONE_IN = 20  # tests, after which the yardstick is laid on


def yardstick() -> float:
    """Return the CPU seconds of a little work."""
    begin = time.thread_time()
    sum(number * number % 7 for number in range(50_000))
    return time.thread_time() - begin


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all that come from it, ended or not."""
    ours = os.times()
    total = time.process_time() + ours.children_user + ours.children_system
    found = _children(os.getpid())
    while found:
        process = found.pop()
        found += _children(process)
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def _children(process: int) -> list[int]:
    try:  # only Linux tells
        return [
            int(child)
            for file in Path(f"/proc/{process}/task").glob("*/children")
            for child in file.read_text().split()
        ]
    except OSError:
        return []


class Times:
    """Measures in a process that runs tests, and adds up in the one that reports them; without xdist both are one."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._last = 0.0
        self._seconds: Counter[Case] = Counter()
        self._shared: dict[tuple[str, str], float] = {}  # what fixtures of several tests took, by place and name
        self._alone: Counter[Case] = Counter()  # with these in full
        self._skipped: set[Case] = set()
        self._tests = 0
        self._yardsticks: list[float] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Any:
        self._last = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        begin = cpu_seconds()
        value = yield
        if fixturedef.scope != "function":
            self._shared[fixturedef.baseid, fixturedef.argname] = took = cpu_seconds() - begin
            self._last += took
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        """Setup, call and teardown have a report each, which xdist sends with its attributes."""
        report = yield
        now = cpu_seconds()
        report.seconds, self._last = now - self._last, now
        *case, tier = item.stash[CASE]
        report.case = (*case, tier.value)  # xdist sends plain numbers
        report.shared = 0.0
        if report.when == "teardown":
            shared = self._shared.items()
            used = [took for (place, name), took in shared if name in item.fixturenames and place in item.nodeid]
            report.shared = sum(used)
            self._tests += 1
            if self._tests % ONE_IN == 1:
                report.yardstick = yardstick()
                self._last = cpu_seconds()
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not hasattr(report, "case"):  # of a worker that died
            return
        *case, tier = report.case
        case = Case(*case, Tier(tier))
        self._seconds[case] += report.seconds
        self._alone[case] += report.seconds + report.shared
        if report.skipped:
            self._skipped.add(case)
        if hasattr(report, "yardstick"):
            self._yardsticks.append(report.yardstick)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workerinput"):
            return
        if self._config.getoption("write_times"):
            self._write()
        budget = self._config.getoption("budget")
        if budget is not None and self._plain_seconds() > budget and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        budget = self._config.getoption("budget")
        if budget is None:
            return
        spent = self._plain_seconds()
        terminalreporter.section("CPU time")
        terminalreporter.line(f"The tests of a plain run took {spent:.0f} s of CPU, of {budget:.0f} s at most.")
        if (slowness := self._slowness()) > 1:
            terminalreporter.line(f"(Divided by {slowness:.2f}: this processor is slow, or has other work.)")
        if spent > budget:
            terminalreporter.line("Make some of them quicker, or measure again with --write-times. The dearest:")
            plain = Counter(
                {case: seconds for case, seconds in self._usual(self._seconds).items() if case.tier is Tier.PLAIN}
            )
            for case, seconds in plain.most_common(DEAREST):
                terminalreporter.line(f"{seconds:6.1f} s  {case.function}, case {case.number + 1}")

    def _plain_seconds(self) -> float:
        return sum(seconds for case, seconds in self._usual(self._seconds).items() if case.tier is Tier.PLAIN)

    def _slowness(self) -> float:
        return max(1.0, fmean(self._yardsticks or [USUAL]) / USUAL)

    def _usual(self, seconds: Counter[Case]) -> dict[Case, float]:
        """Return the seconds that the same work takes on the machine of times.json."""
        slowness = self._slowness()
        return {case: each / slowness for case, each in seconds.items()}

    def _write(self) -> None:
        alone = self._usual(self._alone)
        times = updated(seconds_of, {case: each for case, each in alone.items() if case not in self._skipped})
        lines = [f"{json.dumps(function)}: {json.dumps(times[function])}" for function in sorted(times)]
        TIMES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def updated(before: dict[str, list[float]], measured: dict[Case, float]) -> dict[str, list[float]]:
    """Return the times of functions that exist, with those of the cases that have run."""
    times = {function: known for function, known in before.items() if _exists(function)}
    for function in {case.function for case in measured}:
        cases = {case.number: seconds for case, seconds in measured.items() if case.function == function}
        known = times.pop(function, [])
        found = [_steady(cases.get(number), known[number:]) for number in range(max([*cases, len(known) - 1]) + 1)]
        if max(found) >= NOTICED:
            times[function] = found
    return times


def _exists(function: str) -> bool:
    file, _, name = function.partition("::")
    path = TIMES.parent / file
    return path.is_file() and f"def {name.rpartition('::')[2]}(" in path.read_text(encoding="utf-8")


def _steady(seconds: float | None, known: list[float]) -> float:
    """Return what was measured, or what the file has if that is nearly the same."""
    before = known[0] if known else 0.0
    if seconds is None:
        return before
    if before and before / STEADY < seconds < before * STEADY:
        return before
    return round(seconds, 1) if seconds >= NOTICED else 0
