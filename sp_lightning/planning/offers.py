"""`sp-lightning plan` without a model: the best way to train models of several kinds and sizes on one machine.

The ways of a model are tried from the one that trains most to the one that needs least: all weights with torch's AdamW,
then with compact ones, then adapters (LoRA), then adapters on a base of 4 bits (QLoRA). Only what a recipe of examples/
trains is offered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.planning.assumptions import Assumptions, ladder
from sp_lightning.planning.known import batch_of, known, named_model, recipe
from sp_lightning.planning.report import RANK, Row, plan_row

_FEWER = 4  # where a batch does not fit, a step has as many smaller ones


@dataclass(frozen=True)
class Offer:
    """The best way to train a model, or the last one that was tried, if none fits."""

    kind: str
    model: str
    row: Row
    command: str  # of a recipe

    def __str__(self) -> str:
        row, step, given = self.row, self.row.step, self.row.given
        trained = f"all weights, {given.moments} moments" if given.moments else "all weights"
        if given.lora is not None:
            trained = "LoRA" if given.bits == 16 else "QLoRA"
        label = f"{self.kind:<16}{self.model:<27}"
        if step is None:
            return f"{label}does not fit: {row.missing()}"
        memory = f"{readable_bytes(step.device_bytes):>10}{readable_bytes(step.host_bytes):>11}"
        return f"{label}{trained:<26}{memory}  {row.speed}"


HEAD = f"{'':<43}{'trained':<26}{'GPU':>10}{'RAM':>11}  tokens/s"


def offers(given: Assumptions) -> Iterator[Offer]:
    """Yield the best way to train each model that is offered on a machine."""
    for name, entry in known("models").items():
        if "offered_as" in entry:
            module = named_model(name)
            for way in _ways(replace(given, **batch_of(name))):
                if command := recipe(name, way):
                    offer = Offer(entry["offered_as"], name, plan_row(module, way), command)
                    if offer.row.step is not None:
                        break
            yield offer


def _ways(given: Assumptions) -> Iterator[Assumptions]:
    """Yield the ways to train, each in one batch a step, and in several smaller ones."""
    lora = replace(given, lora=RANK)
    for way in (*ladder(given), lora, replace(lora, bits=4)):
        yield way
        if way.tokens >= _FEWER * way.length:
            yield replace(way, tokens=way.tokens // _FEWER, accumulate=_FEWER * way.accumulate)
