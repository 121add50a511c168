"""The tables of hops in docs/architecture.md name what a weight and a gradient pass through in a step, in order."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning.pipeline.pipeline import Pipeline

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
MOST_HOPS = 6


def hops_of(what: str) -> list[str]:
    """The functions that the table under "A weight's life", say, names first in each row."""
    section = PAGE.read_text(encoding="utf-8").split(f"## A {what}'s life")[1].split("\n## ")[0]
    return re.findall(r"^\| \d+ \| `([\w.]+)`", section, re.MULTILINE)


def places_of(name: str) -> Iterator[tuple[Any, str]]:
    """Where a function of the engine can be replaced: its class, or each module that has it."""
    owner, _, function = name.rpartition(".")
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("sp_lightning.pipeline."):
            place = getattr(module, owner, None) if owner else module
            if place is not None and function in vars(place):
                yield place, function


@pytest.mark.parametrize("what", ["weight", "gradient"])
def test_hops_are_as_the_page_tells_them(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hops = hops_of(what)
    assert 3 < len(hops) <= MOST_HOPS
    seen: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def note_and_call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return function(*args, **kwargs)

        return note_and_call

    for name in hops:
        places = list(places_of(name))
        assert places, f"docs/architecture.md names {name}, which is not there"
        for place, function in dict.fromkeys(places):
            monkeypatch.setattr(place, function, noted(name, getattr(place, function)))
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipeline = Pipeline(model, "cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    with pipeline.step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    pipeline.detach()
    assert list(dict.fromkeys(seen)) == hops
