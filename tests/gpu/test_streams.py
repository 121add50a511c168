"""On a real device: copies run beside the computing, the host waits for nothing, memory is what was planned."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from sp_lightning import superpipeline
from sp_lightning.pipeline.lanes.accelerator import AcceleratorBackend
from sp_lightning.pipeline.lanes.lanes import Kind
from sp_lightning.planning import AutoPlanner

from ..helpers import slow_host
from ..second_device import IN_USE
from .parts import (
    BLOCK_BYTES,
    ROWS,
    WIDTH,
    big_chain,
    micro_step,
    on_device,
    quick_training,
    steps_that_wait_for_nothing,
    train,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("k", "pin", "activations"),
    [*product((1, 2, 3), [True], ["auto"]), (2, True, "recompute"), *product((1, 3), (True, False), ("offload",))],
)
def test_copies_wait_for_the_computing(k: int, pin: bool, activations: str, cuda: torch.device) -> None:
    """With a device that lags far behind the host, memory is used again only when units and copies are done with it."""
    quick_losses, quick_weights = quick_training(cuda)
    slow = big_chain(cycles=5_000_000)
    slow_losses, slow_weights = train(slow, cuda, k=k, pin_memory=pin, activations=activations)
    assert all(map(torch.equal, quick_losses, slow_losses))
    assert all(map(torch.equal, quick_weights, slow_weights))


@pytest.mark.parametrize(("activations", "first"), [("auto", 2), ("recompute", 2), ("offload", 4)])
def test_no_host_synchronization_in_a_step(activations: str, first: int, cuda: torch.device) -> None:
    """Though the device lags behind it. Of a unit, two calls are looked at and two second forwards are compared."""
    with on_device(big_chain(cycles=5_000_000), cuda, activations=activations) as pipe:
        steps_that_wait_for_nothing(pipe, cuda, 7, first)
        assert (pipe.stats.offloaded_bytes > 0) == ("offload" in activations)
        assert pipe.stats.activation_misses == 0


def test_steps_are_measured_and_recorded_while_the_host_lags(device: torch.device) -> None:
    """As a recording ends, copies that come after a step on the host are not even asked for; that was an error."""
    x = torch.randn(ROWS, WIDTH, device=device)
    options = {"k": "auto", "memory_budget": 8 * BLOCK_BYTES}
    with slow_host(), on_device(big_chain(), device, AutoPlanner(), **options) as pipe:
        optimizer = SGD(pipe.module.parameters(), lr=0.1)
        for _ in range(5):
            with pipe.record() as recording:
                loss = pipe.module(x).square().mean()
                with pipe.optimizers.stepping_in_backward(optimizer):
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert pipe.summary().plan is not None
    assert len(recording.steps) == 1
    assert {Kind.LOAD, Kind.STEP, Kind.GRADIENTS} <= {span.kind for span in recording.spans}


@pytest.mark.parametrize("pin", [True, False])
def test_host_memory_is_page_locked_where_asked_for(pin: bool, cuda: torch.device) -> None:
    """Only page-locked memory can be copied beside the computing."""
    model = big_chain()
    with on_device(model, cuda, pin_memory=pin):
        assert {p.is_pinned() for p in model.parameters()} == {pin}


def test_memory_that_cannot_be_page_locked_leaves_no_error_behind(cuda: torch.device) -> None:
    """CUDA would raise it at the next kernel, whoever starts that."""
    backend, memory = AcceleratorBackend(cuda), torch.empty(1 << 16, dtype=torch.uint8)
    assert backend.pin(memory)
    assert not backend.pin(memory), "it is page-locked already"
    assert torch.ones(2, device=cuda).sum() == 2
    backend.unpin(memory)
    backend.close()


def test_copies_run_on_other_streams_beside_the_computing(cuda: torch.device, tmp_path: Path) -> None:
    """In a profile, large copies are never on the computing stream, and most of their time kernels run as well."""
    if IN_USE:
        pytest.skip("the profiler asks CUDA's driver, and there is none")
    model = big_chain()
    x = torch.randn(64 * ROWS, WIDTH, device=cuda)  # so many that a block computes for longer than it is copied
    with on_device(model, cuda, k=3) as pipe:
        for _ in range(2):
            micro_step(pipe, x)
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
            micro_step(pipe, x)
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and e["args"].get("bytes", 0) > BLOCK_BYTES // 2]
    assert kernels
    assert copies
    computing = {event["args"]["stream"] for event in kernels}
    assert not computing & {event["args"]["stream"] for event in copies}

    def beside(copy: dict[str, Any]) -> bool:
        return any(k["ts"] < copy["ts"] + copy["dur"] and copy["ts"] < k["ts"] + k["dur"] for k in kernels)

    assert sum(map(beside, copies)) > len(copies) / 2


def test_a_place_is_not_poisoned_while_it_is_copied_to(device: torch.device) -> None:
    """The second device ends a process whose streams race."""
    model = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
    pipeline = superpipeline(model, device, k=2, debug=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        with pipeline.step():
            x = torch.randn(4, 16, device=device)
            for number, block in enumerate(model):
                if (number + step) % 3:
                    x = block(x)
            loss = x.square().mean()
            loss.backward()
        assert torch.isfinite(loss)
        optimizer.step()
        optimizer.zero_grad()
    pipeline.detach()
