"""Where large weights are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from sp_lightning.pipeline.optimizer.flat import VECTOR_MULTIPLE
from sp_lightning.pipeline.transfer.lanes import Ticket
from sp_lightning.pipeline.weights import sections
from sp_lightning.pipeline.weights.sections import Cut, Section, count_sections, divide

from ..parts import DoneTicket


class Master:
    """All that matters here of a weight."""

    def __init__(self, elements: int) -> None:
        self.master = nn.Parameter(torch.zeros(elements))


def test_weights_are_cut_where_torch_begins_a_new_vector() -> None:
    """Otherwise some elements would be rounded in another way."""
    assert sections.SECTION % VECTOR_MULTIPLE == 0


def test_sections_lie_side_by_side_and_end_in_large_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "SECTION", 64)
    small, large, exact, larger = (Master(elements) for elements in (10, 150, 64, 65))
    weights = [small, large, exact, larger]
    offsets, dtypes = [0, 256, 1024, 1280], [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    divided = divide(weights, offsets, dtypes, 1500)
    assert divided == [
        Section(Cut(large, 64), 0, 256 + 4 * 64),
        Section(Cut(large, 128), 256 + 4 * 64, 256 + 4 * 128),
        Section(Cut(larger, 64), 256 + 4 * 128, 1280 + 2 * 64),
        Section(None, 1280 + 2 * 64, 1500),
    ]
    assert all(before.end == after.begin for before, after in pairwise(divided))
    assert count_sections(weights) == len(divided)


def test_without_large_weights_there_is_one_section() -> None:
    assert divide([Master(10)], [0], [torch.float32], 40) == [Section(None, 0, 40)]


def test_divided_work_has_a_ticket_for_each_part() -> None:
    """One that was divided elsewhere, or not at all, is done as a whole."""
    first, last = DoneTicket(), DoneTicket()
    whole = Ticket.of_parts({"here": first, None: last})
    assert whole is last
    assert whole.until("here") is first
    assert whole.until(None) is whole.until("there") is whole
    assert first.until("here") is first
