"""Describes in text which units the finder makes of the tests' models; golden_units.txt has what they were so far.

`python -m tests.pipeline.units.golden` rewrites that file. Look at each difference before you commit it: names of units
are in recordings, plans and error messages, and their number and sizes decide how well a model streams.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

from torch import nn

from sp_lightning.pipeline.units.finder import find_units
from sp_lightning.pipeline.units.unit import Division, Unit
from sp_lightning.planning.known import named_model

from ...zoo import CASES, Case
from .parts import FULL_SIZE, in_full_size

FILE = Path(__file__).with_name("golden_units.txt")
MOST_NAMES = 6  # in a line, before some are left out
# models that `plan` knows, one of each kind, and the GiB of a GPU that they are divided for
PLANNED = [
    ("Llama-3.1-8B", 24), ("Llama-3.2-1B", 24), ("Qwen3-30B-A3B", 24), ("gpt-oss-20b", 12), ("Gemma-3-4B-it", 24),
    ("Gemma-3-12B-it", 8), ("Qwen2.5-VL-7B-Instruct", 24), ("DINOv2-giant", 24), ("FLUX.1-dev", 24),
    ("stable-diffusion-3.5-large", 24), ("Wan2.1-T2V-14B", 24),
]  # fmt: skip


def _of_case(case: Case) -> Division:
    return find_units(case.model(), case.units)


def _in_full_size(name: str) -> Division:
    return find_units(in_full_size(name))


def _for_a_plan(name: str, gibibytes: int) -> Division:
    model: nn.Module = named_model(name)
    return find_units(model, device_bytes=gibibytes << 30)


FAMILIES: dict[str, dict[str, Callable[[], Division]]] = {
    "of the zoo": {name: partial(_of_case, case) for name, case in CASES.items()},
    "in full size": {name: partial(_in_full_size, name) for name in FULL_SIZE},
    "that `plan` knows": {f"{name} on {size} GiB": partial(_for_a_plan, name, size) for name, size in PLANNED},
}
"""How each model is divided, by its family and its name."""


def _size(nbytes: int) -> str:
    if nbytes < 10_000:
        return f"{nbytes} B"
    return f"{nbytes / 1e3:.0f} kB" if nbytes < 1e7 else f"{nbytes / 1e6:.0f} MB"


def _bytes_of(unit: Unit) -> int:
    return sum(weight.nbytes for weight in unit.weights)


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _patterns(names: Iterable[str]) -> str:
    """Names in which numbers are left out, and how many of each there are."""
    counts = Counter(map(_without_numbers, names))
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def _members(unit: Unit) -> list[str]:
    """The names of a unit's members, unless there is one, which has the unit's name."""
    names = [member.name for member in unit.members if member.name != unit.name]
    if len(names) > MOST_NAMES:
        left_out = len(names) - MOST_NAMES + 1
        names[MOST_NAMES - 2 : -1] = [f"... {left_out} more ..."]
    return names


def _lines(division: Division) -> Iterator[str]:
    def looks(unit: Unit) -> tuple[str, int, list[str]]:
        return _without_numbers(unit.name), _bytes_of(unit), [_without_numbers(name) for name in _members(unit)]

    for _, equal in groupby(division.units, looks):
        units = list(equal)
        name = units[0].name if len(units) == 1 else f"{len(units)} x {units[0].name} to {units[-1].name}"
        members = ", ".join(_members(units[0]))
        size = _size(_bytes_of(units[0]))
        yield f"{name}: {size} ({members})" if members else f"{name}: {size}"
    resident = division.resident.weights
    if resident:
        yield f"resident: {_size(_bytes_of(division.resident))} ({_patterns(weight.name for weight in resident)})"
    if division.unmanaged:
        yield f"unmanaged: {_patterns(division.unmanaged)}"


def described(family: str) -> str:
    """The units of each model of a family."""
    paragraphs = [f"# Models {family}\n"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, divide in FAMILIES[family].items():
            division = divide()
            lines = [f"    {line}\n" for line in _lines(division)]
            paragraphs.append(f"{name}, {len(division.units)} units\n{''.join(lines)}")
    return "\n".join(paragraphs)


if __name__ == "__main__":
    FILE.write_text("\n\n".join(described(family) for family in FAMILIES), encoding="utf-8")
