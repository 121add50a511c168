"""The targets of the benchmark, and whether a result meets them. "Not measured" is a valid answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from suite.results import Entry, find

CEILING, OURS, LEAST = "device", "superpipeline", "superpipeline-least"
_ALL_OF_OURS = (OURS, "superpipeline-recompute", LEAST)
_RIVALS = ("deepspeed-zero3", "fsdp2")
_NOT_MEASURED = "not measured", "-"

Found = Mapping[str, Sequence[Entry]]


def targets(found: Found) -> list[tuple[str, str, str]]:
    """Return a row for each target: the target, what was measured, and whether it is met.

    Args:
        found: All entries, by workload.
    """
    return [
        ("at least 60 % less device memory than plain Lightning, in at most 1.1x its time, at 8K tokens or more",)
        + _best_saving(found, 0.6),
        ("at least 85 % less with k = 1",) + _smallest(found, 0.85),
        *(
            (f"at least 2x the tokens per second of {rival}, with less memory (1.5B and 3B, clipped)",)
            + _against(found, rival)
            for rival in _RIVALS
        ),
        ("at most 1.15x the limit (7B and 8B, 8K tokens)",) + _near_limit(found),
        ("more samples per second than plain Lightning's largest batch, in the same device memory",)
        + _largest_batches(found),
    ]


def _trains_tokens(entry: Entry) -> bool:
    return entry.description.get("kind") == "train" and entry.description["items"] == "tokens"


def _pairs(found: Found) -> Iterator[tuple[Entry, Entry]]:
    """Yield ours with plain Lightning, where both trained the same large steps and torch counted their memory."""
    for of_workload in found.values():
        for plain in find(of_workload, CEILING):
            for ours in find(of_workload, *_ALL_OF_OURS):
                counted = ours.device_bytes is not None and plain.device_bytes is not None
                if counted and ours.samples == plain.samples and _trains_tokens(ours) and ours.items >= 8192:
                    yield ours, plain


def _saving(ours: Entry, plain: Entry) -> float:
    assert ours.device_bytes is not None
    assert plain.device_bytes is not None
    return 1 - ours.device_bytes / plain.device_bytes


def _best_saving(found: Found, least: float) -> tuple[str, str]:
    """Report the fastest of those that save enough, or otherwise the one that saves most."""
    pairs = list(_pairs(found))
    if not pairs:
        return _NOT_MEASURED
    saving = [pair for pair in pairs if _saving(*pair) >= least]
    ours, plain = (
        min(saving, key=lambda pair: pair[0].seconds / pair[1].seconds)
        if saving
        else max(pairs, key=lambda pair: _saving(*pair))
    )
    ratio = ours.seconds / plain.seconds
    told = f"{_saving(ours, plain):.0%} less in {ratio:.2f}x ({ours.workload}: {ours.title})"
    return told, _yes(bool(saving) and ratio <= 1.1)


def _smallest(found: Found, least: float) -> tuple[str, str]:
    pairs = [pair for pair in _pairs(found) if pair[0].window == (1, 1) or pair[0].system == LEAST]
    if not pairs:
        return _NOT_MEASURED
    ours, plain = max(pairs, key=lambda pair: _saving(*pair))
    return f"{_saving(ours, plain):.0%} less ({ours.workload})", _yes(_saving(ours, plain) >= least)


def _against(found: Found, rival: str) -> tuple[str, str]:
    told, met = [], []
    for name, of_workload in found.items():
        if not name.startswith(("qwen2.5-1.5b", "qwen2.5-3b")) or name.endswith("noclip"):
            continue
        for theirs in find(of_workload, rival):
            for ours in find(of_workload, *_ALL_OF_OURS):
                if ours.samples == theirs.samples:
                    ratio, less = ours.items_per_second / theirs.items_per_second, _takes_less(ours, theirs)
                    told.append(f"{ratio:.2f}x, {'less' if less else 'not less'} memory ({name}: {ours.title})")
                    met.append(ratio >= 2 and less)
    return ("; ".join(told), _yes(any(met))) if told else _NOT_MEASURED


def _takes_less(ours: Entry, theirs: Entry) -> bool:
    pairs = ((ours.device_bytes, theirs.device_bytes), (ours.host_bytes, theirs.host_bytes))
    return all(mine is not None and other is not None and mine < other for mine, other in pairs)


def _near_limit(found: Found) -> tuple[str, str]:
    measured = [
        entry
        for name, of_workload in found.items()
        if name.startswith(("llama-3.1-8b-24g", "llama-3.1-8b-80g", "qwen2.5-7b-"))
        for entry in find(of_workload, OURS)
        if entry.times_limit is not None and entry.items == 8192
    ]
    if not measured:
        return _NOT_MEASURED
    told = "; ".join(f"{entry.times_limit:.2f}x ({entry.workload})" for entry in measured)
    return told, _yes(all(entry.times_limit is not None and entry.times_limit <= 1.15 for entry in measured))


def _largest_batches(found: Found) -> tuple[str, str]:
    """Compare, for workloads that climb a ladder of batch sizes on a limited device, our best to their largest."""
    told, met = [], []
    for name, of_workload in found.items():
        description = of_workload[0].description
        plain, ours = find(of_workload, CEILING), find(of_workload, *_ALL_OF_OURS)
        if not description.get("ladder") or description["device_limit"] is None or not plain or not ours:
            continue
        largest = max(plain, key=lambda entry: entry.samples)
        best = max(ours, key=lambda entry: entry.items_per_second)
        ratio = best.items_per_second / largest.items_per_second
        told.append(f"{ratio:.2f}x with {best.samples} samples to its {largest.samples} ({name})")
        met.append(ratio > 1)
    return ("; ".join(told), _yes(all(met))) if told else _NOT_MEASURED


def _yes(met: bool) -> str:
    return "yes" if met else "no"
