"""The report in Markdown: the machine, its rooflines, a table for each workload. Made only from the JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sp_lightning.pipeline import readable_bytes
from sp_lightning.planning.report import readable_seconds
from suite.results import Entry, entries
from suite.targets import targets

_MUCH = 0.02  # relative tolerance between the values that systems computed
_NOTHING = "-"
_HEAD = (
    "system",
    "step (median)",
    "fastest, slowest",
    "per second",
    "6N TFLOP/s",
    "of the limit",
    "device memory",
    "host memory",
    "value",
    "waits for copies",
)


def report(result: Mapping[str, Any]) -> str:
    """Return the whole report.

    Args:
        result: A result of `bench.py run`.
    """
    found = entries(result)
    parts = [
        "# Benchmark",
        _machine(result),
        "## Rooflines",
        _rooflines(result),
        "## Against the targets",
        table(("target", "measured", "met"), targets(found)),
    ]
    for name, of_workload in found.items():
        parts += [f"## {name}", _description(of_workload[0]), _table_of(of_workload)]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _machine(result: Mapping[str, Any]) -> str:
    m, s = result["machine"], result["settings"]
    gpu = "no GPU: the device is emulated, and times say nothing about one"
    if m["gpu"] is not None:
        gpu = f"{m['gpu']} ({readable_bytes(m['device_bytes'])}, driver {m['driver']})"
    packages = ", ".join(f"{name} {version}" for name, version in m["packages"].items())
    changed = " with changes" if m["modified"] else ""
    ended = "" if result["complete"] else " **Not everything was measured: the run ended, or was ended, early.**"
    return (
        f"{result['began']}, {gpu}; {m['cpu']}, {m['cores']} cores, {readable_bytes(m['host_bytes'])} of host memory; "
        f"Python {m['python']}, {packages}; revision {m['revision']}{changed}. Rounds: {s['rounds']}, of "
        f"{s['warm_up']} steps to warm up and {s['steps']} that count, each in a process of its own.{ended}"
    )


def _rooflines(result: Mapping[str, Any]) -> str:
    roof = result["rooflines"]
    if roof is None:
        return f"Not measured: {result.get('rooflines_error', {}).get('message', 'the run ended early')}"
    rows = [
        ("host to device", f"{roof['to_device_bytes_per_second'] / 1e9:.1f} GB/s"),
        ("device to host", f"{roof['to_host_bytes_per_second'] / 1e9:.1f} GB/s"),
        ("both at once, together", f"{roof['both_ways_bytes_per_second'] / 1e9:.1f} GB/s"),
    ]
    for dtype, rate in roof["adamw_parameters_per_second"].items():
        moved = rate * (28 if dtype == "float32" else 14)  # per parameter, four numbers are read and three written
        rows.append((f"AdamW on the host, {dtype}", f"{rate / 1e9:.2f} * 10^9 parameters/s ({moved / 1e9:.0f} GB/s)"))
    for dtype, rate in roof["matmul_flops"].items():
        rows.append((f"matrix product, {dtype}", f"{rate / 1e12:.1f} TFLOP/s"))
    return table(("", "rate"), rows)


def _description(entry: Entry) -> str:
    d = entry.description
    if not d:
        return "Nothing is known about it: the process that describes workloads failed."
    what = "training" if d["kind"] == "train" else "inference"
    demand = d["demand"]
    parameters = ""
    if demand is not None:
        frozen = "" if demand["trained"] == demand["parameters"] else f" ({demand['trained'] / 1e6:.1f}M trained)"
        billions = demand["parameters"] / 1e9
        parameters = (f"{billions:.2f}B" if billions >= 1 else f"{1e3 * billions:.1f}M") + f" parameters{frozen}, "
    parts = [f"{parameters}{what}, {d['precision']}"]
    if d["kind"] == "train":
        parts.append(f"clipping at {d['clipping']}" if d["clipping"] is not None else "no clipping")
    if d["device_limit"] is not None:
        parts.append(f"device limited to {d['device_limit'] / 1e9:g} GB")
    if d["checkpointing"]:
        parts.append("activation checkpointing for systems that make no choice of their own")
    note = f" Note: {d['note']}." if d["note"] else ""
    uncounted = f" Its work could not be counted: {d['error']}." if d["error"] else ""
    return f"{'; '.join(parts)}.{note}{uncounted}"


def _table_of(of_workload: Sequence[Entry]) -> str:
    rows = []
    for samples in dict.fromkeys(entry.samples for entry in of_workload):
        group = [entry for entry in of_workload if entry.samples == samples]
        reference = next((entry.value for entry in group if entry.ok), None)
        rows += [_row(entry, reference) for entry in group]
    return table(_HEAD, rows)


def _row(entry: Entry, reference: float | None) -> list[str]:
    title = f"{entry.title} (x {entry.samples})"
    if not entry.ok:
        return [title, "; ".join(entry.errors), *[_NOTHING] * (len(_HEAD) - 2)]
    failed = f" (but: {'; '.join(entry.errors)})" if entry.errors else ""
    items = entry.description.get("items", "items")
    limit = entry.limit
    return [
        title,
        readable_seconds(entry.seconds) + failed,
        f"{readable_seconds(min(entry.step_seconds))}, {readable_seconds(max(entry.step_seconds))}",
        f"{_digits(entry.items_per_second)} {items}" if entry.description else _NOTHING,
        _NOTHING if entry.tflops is None else f"{entry.tflops:.3g}",
        _NOTHING if limit is None else f"{entry.times_limit:.2f}x ({limit['lane']})",
        _device_memory(entry),
        _NOTHING if entry.host_bytes is None else readable_bytes(entry.host_bytes),
        _value(entry, reference),
        _waits(entry),
    ]


def _device_memory(entry: Entry) -> str:
    if entry.device_bytes is not None:
        return readable_bytes(entry.device_bytes)
    counted = entry.counted_device_bytes
    return _NOTHING if counted is None else f"({readable_bytes(counted)})"


def _value(entry: Entry, reference: float | None) -> str:
    """Return the computed value, marked if it differs from that of the first system."""
    if entry.value is None or reference is None:
        return _NOTHING
    differs = not abs(entry.value - reference) <= _MUCH * abs(reference)  # NaN differs, too
    return f"{entry.value:.4g}" + (" **differs**" if differs else "")


def _waits(entry: Entry) -> str:
    waits = entry.runs[0]["waits"]
    return _NOTHING if waits is None else readable_seconds(waits["stall_seconds"])


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
