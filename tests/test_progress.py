"""Long work shows itself (pipeline/stats.py, trainer/progress.py), and an interrupt in its middle breaks nothing."""

from __future__ import annotations

import copy
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, TQDMProgressBar
from torch import Tensor, nn

import sp_lightning
from sp_lightning import SuperpipelineCheckpointIO, SuperpipelineStrategy
from sp_lightning.pipeline import Pipeline, PipelineOptions, Progress, Work
from sp_lightning.pipeline import stats as progress
from sp_lightning.trainer import checkpoint_io

from .helpers import Fingerprint, assert_same_facts
from .lightning_modules import Base, fit, loader, streamed, trainer
from .pipeline.parts import RecordingBackend
from .zoo.blocks import chain

IN_A_TERMINAL = """
import sys, lightning as L, torch
from lightning.pytorch import callbacks
from torch import nn
from sp_lightning.pipeline import stats as progress

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        frozen = [nn.Linear(512, 512, bias=False).requires_grad_(False) for _ in range(8)]
        self.layers = nn.Sequential(*frozen, nn.Linear(512, 1))

    def training_step(self, batch):
        return self.layers(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

progress.SHOWN_AFTER = 0.0
net, data = Net(), torch.utils.data.DataLoader(torch.randn(1, 512))
for bar in callbacks.RichProgressBar(), callbacks.TQDMProgressBar(), None:
    choices = {"callbacks": bar, "enable_progress_bar": bar is not None, "logger": False, "enable_checkpointing": False}
    for path in (None, sys.argv[1]):
        ours = L.Trainer(strategy="superpipeline", accelerator="cpu", max_steps=0, **choices)
        ours.fit(net, data, ckpt_path=path)
        if path is None:
            ours.save_checkpoint(sys.argv[1])
    print("END OF A BAR", flush=True)
"""


def in_a_terminal(script: str, *arguments: str) -> str:
    """What a terminal of 120 columns shows of a script."""
    fcntl, pty, termios = map(pytest.importorskip, ("fcntl", "pty", "termios"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    command, environment = [sys.executable, "-W", "ignore", "-c", script, *arguments], {**os.environ, "TERM": "xterm"}
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = bytearray()
    with suppress(OSError):  # which ends it on Linux
        while piece := os.read(ours, 2**16):
            shown += piece
    os.close(ours)
    assert child.wait() == 0, shown.decode(errors="replace")
    return shown.decode(errors="replace")


def test_a_model_in_a_terminal(tmp_path):
    lines, tqdm, silent, _ = in_a_terminal(IN_A_TERMINAL, f"{tmp_path}/a.ckpt").split("END OF A BAR")
    for words in ("Arranging weights in host memory", "Saving a.ckpt", "Loading weights"):
        assert f"{words} (8.0 MiB)" in lines, "beside rich's bars"
        assert re.search(f"{words} .8.0 MiB.: +[0-9]+%.", tqdm)
        assert words not in silent


@pytest.mark.parametrize("bar", [TQDMProgressBar, ProgressBar, None])
def test_without_a_terminal_each_tenth_is_a_line(monkeypatch, caplog, bar):
    """Without a bar, it is in the package's log alone, which is seen if somebody asks for it."""
    said: list[str] = []
    monkeypatch.setattr(SuperpipelineStrategy.lightning, "info", said.append)
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    with caplog.at_level(logging.INFO, progress.__name__):
        fit(trainer(streamed(), max_steps=1, callbacks=bar and bar(), enable_progress_bar=bar is not None), Base(12))
    logged = [record.message for record in caplog.records if record.name == progress.__name__]
    counts = [sum(line.startswith("Arranging weights") for line in lines) for lines in (said, logged)]
    assert counts == ([0, 10] if bar is None else [10, 0])


def test_work_is_shown_once_it_has_taken_five_seconds(monkeypatch, caplog):
    clock = iter(torch.arange(0.0, 9.0, 0.2).tolist())
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with caplog.at_level(logging.INFO), Progress().begin("Waiting", 2000) as work:
        for _ in range(40):
            work.advance(50)
    assert caplog.messages == [f"Waiting (2.0 KiB): {percent} %" for percent in (62, 70, 80, 90, 100)]


class Interrupts(Progress):
    """Raises an error as work advances for the n-th time, whatever it is."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.left, self.error = at, error
        self.shown: set[str] = set()

    def begin(self, words: str, nbytes: int) -> Work:
        work = Work(words, nbytes)
        work.advance = partial(self.advance, words)
        return work

    def advance(self, words: str, nbytes: int) -> None:
        self.shown.add(words)
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_save(tmp_path, monkeypatch, error):
    """It leaves the file that was there, and torch's writer, which is interrupted, does not make it another error."""
    monkeypatch.setattr(checkpoint_io, "_PIECE", 300)
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
    plain, values = Fingerprint.of(model), copy.deepcopy(list(model.parameters()))
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
        assert_same_facts(plain, Fingerprint.of(model))
        assert all(map(torch.equal, model.parameters(), values))
        backend = RecordingBackend(pins=True)
    assert len(interrupted) > 100


def test_an_interrupted_run(tmp_path, monkeypatch):
    """Loading, attaching, saving: each weight has its old value or its new one, and the last checkpoint is whole."""
    monkeypatch.setattr(checkpoint_io, "_PIECE", 2**12)
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
    assert interrupts.shown == {*loading, "Arranging weights in host memory", "Saving last.ckpt"}
    assert steps == {6, 12}
