"""Round numbers for axes."""

from __future__ import annotations

import math

from sp_lightning.pipeline.sizes import UNITS_OF_TIME


def round_steps(span: float, count: int = 10) -> list[float]:
    """Return marks from zero to `span`, about `count` of them, at steps of one, two or five times a power of ten."""
    if span <= 0:
        return [0.0]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    return [index * step for index in range(int(span / step * (1 + 1e-9)) + 1)]


def ticks(seconds: float) -> list[tuple[float, str]]:
    """Return the marks for a time axis of this length with their labels, all in one unit."""
    moments = round_steps(seconds)
    size, unit = next((pair for pair in UNITS_OF_TIME if moments[-1] >= pair[0]), UNITS_OF_TIME[-1])
    return [(moment, f"{moment / size:g} {unit}" if moment else "0") for moment in moments]
