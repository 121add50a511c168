"""Where large weights are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.optimizer.update import VECTOR_MULTIPLE
from sp_lightning.pipeline.weights import sections
from sp_lightning.pipeline.weights.sections import Section, count_sections, divide

from ..parts import DoneTicket


def master(elements: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(elements))


def test_weights_are_cut_where_torch_begins_a_new_vector() -> None:
    """Otherwise some elements would be rounded in another way."""
    assert sections.SECTION % VECTOR_MULTIPLE == 0


def test_sections_lie_side_by_side_and_end_in_large_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "SECTION", 64)
    small, large, exact, larger = map(master, (10, 150, 64, 65))
    masters = [small, large, exact, larger]
    offsets, dtypes = [0, 256, 1024, 1280], [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    divided = divide(masters, offsets, dtypes, 1500)
    assert divided == [
        Section((id(large), 64), 0, 256 + 4 * 64),
        Section((id(large), 128), 256 + 4 * 64, 256 + 4 * 128),
        Section((id(larger), 64), 256 + 4 * 128, 1280 + 2 * 64),
        Section(None, 1280 + 2 * 64, 1500),
    ]
    assert all(before.end == after.begin for before, after in pairwise(divided))
    assert count_sections(masters) == len(divided)


def test_without_large_weights_there_is_one_section() -> None:
    assert divide([master(10)], [0], [torch.float32], 40) == [Section(None, 0, 40)]


def test_divided_work_has_a_ticket_for_each_part() -> None:
    """One that was divided elsewhere, or not at all, is done as a whole."""
    first, last = DoneTicket(), DoneTicket()
    whole = Ticket.of_parts({"here": first, None: last})
    assert whole is last
    assert whole.until("here") is first
    assert whole.until(None) is whole.until("there") is whole
    assert first.until("here") is first
