"""The bench's systems: rivals that run here give plain training's numbers."""

from __future__ import annotations

import pytest
import torch
from suite.runner import Processes
from suite.sets import WORKLOADS
from suite.worker import Job, measure, run
from suite.workloads import Window

STEPS = 2


def job(workload: str, system: str, window: Window | None = None, budget: int | None = None) -> Job:
    return Job(workload, system, window, WORKLOADS[workload].samples, round=0, warm_up=1, steps=STEPS, budget=budget)


@pytest.mark.parametrize("window", [(1, 1), (2, 1), (3, 2), (4, 3)], ids=str)
def test_the_paper_has_the_losses_of_plain_training(window: Window):
    """And its steps load what the window lacks."""
    paper = measure(job("toy-lm", "paper", window))
    assert paper["values"] == measure(job("toy-lm", "device"))["values"]
    facts = paper["facts"]
    assert (facts["k"], facts["k_prime"]) == window
    if window[1] == 1:
        assert facts["loads"] == (1 + STEPS + 1) * (2 * facts["units"] - window[0])


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch needs a GPU")
def test_fsdp2_reaches_the_losses_of_plain_training(tmp_path):
    """In a process of its own, as the bench does: what it leaves there is gone with it."""
    written, why = Processes(tmp_path, on_gpu=False).run(run, job("toy-lm", "fsdp2", budget=500_000), 240)
    assert written is not None, why
    assert written["error"] is None
    assert written["values"] == pytest.approx(measure(job("toy-lm", "device"))["values"], abs=1e-5)
