"""The rates that the bench measures on a GPU, in small."""

from __future__ import annotations

import pytest
import torch
from suite import rooflines

pytestmark = pytest.mark.gpu


def test_copies_are_ordered_after_the_memory_they_fill(cuda: torch.device) -> None:
    """The second device ends a process whose streams race."""
    rates = rooflines._copies_of_gpu(1 << 20)
    assert min(rates.values()) > 0
