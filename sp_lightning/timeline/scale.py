"""Round numbers for axes, and numbers as people write them."""

from __future__ import annotations

import math

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def readable_seconds(seconds: float) -> str:
    """A time as people write it: three digits and a unit."""
    for size, unit in _UNITS:
        if abs(seconds) >= 0.9995 * size or unit == "µs":
            value = seconds / size
            digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
            return "0 s" if not value else f"{value:.{digits}f} {unit}"
    raise AssertionError("the last unit takes any time")


def round_steps(span: float, count: int = 10) -> list[float]:
    """From zero up to `span` in about `count` steps of one, two or five times a power of ten."""
    if span <= 0:
        return [0.0]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    return [index * step for index in range(int(span / step * (1 + 1e-9)) + 1)]


def ticks(seconds: float) -> list[tuple[float, str]]:
    """Moments to mark on an axis that is so long, and what to write there: all in one unit."""
    moments = round_steps(seconds)
    size, unit = next((pair for pair in _UNITS if moments[-1] >= pair[0]), _UNITS[-1])
    return [(moment, f"{moment / size:g} {unit}" if moment else "0") for moment in moments]
