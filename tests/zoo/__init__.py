"""Small models of every family, and every way of training them, that must come out bit-equal."""

from __future__ import annotations

from . import language, oddities, quantized, training, vision
from .case import Batch, Case

CASES: dict[str, Case] = {
    case.name: case for module in (language, vision, training, oddities, quantized) for case in module.CASES
}

__all__ = ["CASES", "Batch", "Case"]
