"""Conversion of memory sizes and times from and to text."""

from __future__ import annotations

import re
from typing import Any

_UNITS_OF_BYTES = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS_OF_BYTES |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}
UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def parse_bytes(budget: int | float | str, device_bytes: int | None) -> int | None:
    """Convert a user's budget to bytes; `None` if it is a fraction of a device whose memory size is unknown.

    Raises:
        ValueError: If the budget is not positive, not a size, or a fraction above 1.
    """
    size: Any = budget
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", budget)
        size = None if match is None else int(float(match[1]) * _UNITS_OF_BYTES.get(match[2].lower(), 0))
    is_number = isinstance(size, int | float) and not isinstance(size, bool)
    if not is_number or not size > 0 or (isinstance(size, float) and size > 1):
        raise ValueError(
            f"`memory_budget={budget!r}` is not an amount of memory. Give bytes (an int above zero), a fraction of the "
            "device's memory (a float up to 1.0) or text such as '12GB'."
        )
    if isinstance(size, float):
        return None if device_bytes is None else int(size * device_bytes)
    return int(size)


def readable_bytes(count: int) -> str:
    """Format a number of bytes, with a unit."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def readable_seconds(seconds: float) -> str:
    """Format a time with three digits and a unit."""
    if not seconds:
        return "0 s"
    size, unit = next((each for each in UNITS_OF_TIME if abs(seconds) >= 0.9995 * each[0]), UNITS_OF_TIME[-1])
    value = seconds / size
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"
