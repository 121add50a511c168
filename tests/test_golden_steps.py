"""What the engine asks of its lanes, and in which order, is what golden_steps.txt says."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from .golden_steps import MODELS, OF_PROCESSES, of_two_processes, written
from .processes import in_processes


@pytest.mark.parametrize("name", MODELS)
def test_steps(name: str) -> None:
    """`python -m tests.golden_steps` rewrites the file; look at each difference."""
    assert "\n".join(MODELS[name]()) == written()[name]


def as_written() -> None:
    told = "\n".join(of_two_processes())
    assert dist.get_rank() or told == written()[OF_PROCESSES]


@pytest.mark.usefixtures("server")
def test_steps_of_two_processes() -> None:
    in_processes([as_written])
