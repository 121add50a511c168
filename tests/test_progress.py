"""Long work shows itself (pipeline/stats.py, trainer/narrator.py), and an interrupt in its middle breaks nothing."""

from __future__ import annotations

import copy
import io
import logging
import os
import shutil
import sys
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import sp_lightning
from sp_lightning import SuperpipelineCheckpointIO, SuperpipelineStrategy
from sp_lightning.pipeline import Pipeline, PipelineOptions, Progress, Work
from sp_lightning.pipeline import stats as progress

from .helpers import assert_same_trace, facts_of
from .lightning_modules import Base, fit, loader, streamed, trainer
from .pipeline.parts import RecordingBackend
from .zoo.blocks import chain


def test_each_tenth_is_a_line(monkeypatch, caplog):
    """Among Lightning's messages; in a plain loop in the package's log, which is seen if somebody asks for it."""
    said: list[str] = []
    monkeypatch.setattr(SuperpipelineStrategy.lightning, "info", said.append)
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    fit(trainer(streamed(), max_steps=1), Base(12))
    with caplog.at_level(logging.INFO, progress.__name__):
        Pipeline(Base(12), "cpu").detach()
    logged = [record.message for record in caplog.records if record.name == progress.__name__]
    for lines in (said, logged):
        assert sum(line.startswith("Moving weights") for line in lines) == 10


def test_work_is_shown_once_it_has_taken_five_seconds(monkeypatch, caplog):
    clock = iter(torch.arange(0.0, 9.0, 0.2).tolist())
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with caplog.at_level(logging.INFO):
        work = Progress().begin("Waiting", 2000)
        for _ in range(40):
            work.advance(50)
    assert caplog.messages == [f"Waiting (2.0 KiB): {percent} %" for percent in (70, 80, 90, 100)]


@pytest.mark.parametrize("told", [Progress(), SuperpipelineStrategy().progress], ids=["a loop", "a Trainer"])
def test_a_terminal_shows_a_bar(told, monkeypatch):
    """Which is drawn again for each percent, and ends its line."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    work = told.begin("Waiting", 2000)
    for _ in range(100):
        work.advance(20)
    drawn = terminal.getvalue().split("\r")[1:]
    assert len(drawn) == 100
    assert drawn[49] == f"Waiting (2.0 KiB): [{'#' * 15}{' ' * 15}]  50 %"
    assert drawn[-1] == f"Waiting (2.0 KiB): [{'#' * 30}] 100 %\n"


class Interrupts(Progress):
    """Raises an error as work advances for the n-th time, whatever it is."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.left, self.error = at, error
        self.shown: set[str] = set()

    def begin(self, words: str, nbytes: int) -> Work:
        work = Work(words, nbytes, self)
        work.advance = partial(self.advance, words)
        return work

    def advance(self, words: str, nbytes: int) -> None:
        self.shown.add(words)
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_save(tmp_path, error):
    """It leaves the file that was there, and torch's writer, which is interrupted, does not make it another error."""
    path, old, new = tmp_path / "a.ckpt", {"weight": torch.zeros(400)}, {"weight": torch.ones(400)}
    SuperpipelineCheckpointIO().save_checkpoint(old, path)
    for at in range(1, 100):
        try:
            SuperpipelineCheckpointIO(Interrupts(at, error)).save_checkpoint(new, path)
            break
        except error:
            assert os.listdir(tmp_path) == ["a.ckpt"]
            assert torch.equal(torch.load(path)["weight"], old["weight"])
    assert 5 < at < 99
    assert torch.equal(torch.load(path)["weight"], new["weight"])


class PinsAndIsInterrupted(RecordingBackend):
    """The interrupt comes while the system page-locks memory, so it is raised afterwards."""

    def pin(self, memory: Tensor) -> bool:
        if super().pin(memory) and len(self.pinned) == 2:
            raise KeyboardInterrupt
        return True


def test_an_interrupted_attach():
    """The module is a plain one with its values, nothing is page-locked any more, and it can be attached."""
    model = chain(3)
    model.rest = nn.Embedding(3, 2, sparse=True)
    plain, values = facts_of(model), copy.deepcopy(list(model.parameters()))
    interrupted: set[CodeType] = set()

    def at_each_function(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Python before 3.12 makes another error of what is raised in `__set_name__`
        is_new = code not in interrupted and code.co_name != "__set_name__"
        if is_new and code.co_filename.startswith(sp_lightning.__path__[0]):
            sys.settrace(None)
            interrupted.add(code)
            raise KeyboardInterrupt

    backend, pipeline = PinsAndIsInterrupted(pins=True), None
    while pipeline is None:
        with suppress(KeyboardInterrupt):
            sys.settrace(None if isinstance(backend, PinsAndIsInterrupted) else at_each_function)
            pipeline = Pipeline(model, "cpu", options=PipelineOptions(k=2), backend=backend)
        sys.settrace(None)
        if pipeline is not None:
            pipeline.detach()
        assert not backend.pinned
        assert_same_trace(plain, facts_of(model))
        assert all(map(torch.equal, model.parameters(), values))
        backend = RecordingBackend(pins=True)
    assert len(interrupted) > 100


def test_an_interrupted_run(tmp_path):
    """Loading, attaching, saving: each weight has its old value or its new one, and the last checkpoint is whole."""
    old, last = tmp_path / "old.ckpt", tmp_path / "last.ckpt"
    ours = trainer(streamed(), max_epochs=1)
    fit(ours, Base())
    ours.save_checkpoint(old)
    saved, steps = torch.load(old, weights_only=False)["state_dict"], set()
    for at in range(1, 1000, 13):
        shutil.copy(old, last)
        module = Base()
        values = copy.deepcopy(dict(module.named_parameters()))
        strategy = streamed()
        strategy.progress = interrupts = Interrupts(at)
        keeps = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0, enable_version_counter=False)
        with suppress(KeyboardInterrupt, SystemExit):
            trainer(strategy, callbacks=keeps, enable_checkpointing=True).fit(module, loader(), ckpt_path=last)
        assert {type(weight) for weight in module.parameters()} == {nn.Parameter}
        for name, weight in module.named_parameters() if not module.trace else ():
            assert torch.equal(weight, values[name]) or torch.equal(weight, saved[name])
        steps.add(torch.load(last, weights_only=False)["global_step"])
        fit(trainer(streamed(), max_steps=1), module)
        if interrupts.left > 0:
            break
    assert at > 30
    loading = {"Loading weights", "Loading optimizer state"}
    assert interrupts.shown == {*loading, "Moving weights to their CPU memory", "Saving last.ckpt"}
    assert steps == {4, 8}
