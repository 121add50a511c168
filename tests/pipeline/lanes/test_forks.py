"""Forks of a process in which a module is attached: the right value, or an error in words, and never a hang."""

from __future__ import annotations

import copy
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from sp_lightning import superpipeline
from sp_lightning.pipeline import HostBackend, Pipeline
from sp_lightning.pipeline.lanes.lanes import Job

from ...helpers import PATIENCE
from ...zoo.blocks import WIDTH, Block, chain
from ..parts import RecordingBackend

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork, or not safely")

FORKED = "RuntimeError: This process was forked"


def in_fork(look: Callable[[], Any]) -> Any:
    """What it returns in a fork, or its error; a hang fails within seconds."""

    def run() -> None:
        torch.set_num_threads(1)  # as in a loader's worker: it has none of OpenMP's either
        try:
            here.send(look())
        except BaseException as error:
            here.send(f"{type(error).__name__}: {error}")

    there, here = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    try:
        assert there.poll(PATIENCE), "it hangs"
        found = there.recv()
        process.join(PATIENCE)
        assert process.exitcode == 0, "it hangs at its end"
        return found
    finally:
        process.kill()


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """While it is not set, no job on the host ends."""
    event, work = threading.Event(), HostBackend.work
    event.set()

    def waiting(self: HostBackend, job: Job) -> Any:
        action = job.action
        job.action = lambda: (event.wait(PATIENCE), action())[1]
        return work(self, job)

    with patch.object(HostBackend, "work", waiting):
        yield event


@pytest.fixture
def pipeline(go_on: threading.Event) -> Iterator[Pipeline]:
    """After a step, which nobody has waited for."""
    made = superpipeline(chain(4), "cpu", units=Block, k=2)
    made.optimizer = AdamW(made.module.parameters())
    train(made)
    made.backend.drain()
    yield made
    go_on.set()
    made.detach()


def train(pipeline: Pipeline) -> None:
    call(pipeline.module).sum().backward()
    pipeline.optimizer.step()
    pipeline.optimizer.zero_grad()


def call(module: nn.Module) -> Any:
    return module(torch.ones(2, WIDTH))


def read(module: nn.Module) -> Any:
    return [float(parameter.detach().sum()) for parameter in module.parameters()]


def call_a_copy(module: nn.Module) -> Any:
    return call(copy.deepcopy(module)).tolist()


@pytest.mark.parametrize("look", [read, call_a_copy])
@pytest.mark.parametrize("is_locked", [False, True])
def test_what_is_there_is_read(look: Callable[[nn.Module], Any], is_locked: bool, pipeline: Pipeline) -> None:
    """A thread that the fork has not may hold the engine's lock."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with pipeline._engine.at_work:
            held.set()
            done.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    if is_locked:
        thread.start()
        held.wait(PATIENCE)
    found = in_fork(lambda: look(pipeline.module))
    done.set()
    assert found == look(pipeline.module)


@pytest.mark.parametrize("look", [read, call_a_copy, call])
def test_what_is_under_way_is_an_error(
    look: Callable[[nn.Module], Any], pipeline: Pipeline, go_on: threading.Event
) -> None:
    """Weights that are being stepped; what the fork leaves is the other process's, which goes on."""
    go_on.clear()
    train(pipeline)
    assert FORKED in in_fork(lambda: look(pipeline.module))
    assert in_fork(pipeline.detach) is None
    go_on.set()
    train(pipeline)


@pytest.mark.parametrize("look", [call, lambda module: module.blocks[1].up.weight.grad])
def test_calls_and_gradients_are_an_error(look: Callable[[nn.Module], Any], pipeline: Pipeline) -> None:
    call(pipeline.module).sum().backward()
    pipeline.backend.drain()
    assert FORKED in in_fork(lambda: look(pipeline.module))


def test_weights_of_an_accelerator_are_an_error() -> None:
    """Their memory is hidden from forks, which find zeros in it."""
    made = Pipeline(chain(2), "meta:0", backend=RecordingBackend())
    assert "RuntimeError: Weight 'blocks.0.norm.weight' cannot be read here. This" in in_fork(lambda: read(made.module))
    made.detach()
