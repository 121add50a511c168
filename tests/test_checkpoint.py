"""Checkpoints are ordinary Lightning files, written and read without a second copy in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils._pytree import keystr, tree_flatten_with_path

from sp_lightning import SuperpipelineCheckpointIO, SuperpipelineStrategy

from .helpers import Trace, assert_same_trace, overwrite
from .lightning_modules import Base, fit, loader, note_end, plain, run, streamed, trainer
from .planning.parts import Wanders

STRATEGIES = {
    "plain": plain,
    "streamed": streamed,
    "planned": lambda: streamed(k="auto", memory_budget="1GiB"),  # steps are measured
    "placed": lambda: Placed(k=2, debug=True),
}


class Placed(SuperpipelineStrategy):
    """Units come to live on the device, or to visit it, and go again."""

    def model_to_device(self) -> None:
        with mock.patch("sp_lightning.strategy.AutoPlanner", return_value=Wanders(1)):
            super().model_to_device()


class Tied(Base):
    """A weight with two names, a frozen weight, a buffer that is not saved, and hyperparameters.

    Nobody looks at gradients, so units are stepped in backward.
    """

    on_before_optimizer_step = L.LightningModule.on_before_optimizer_step

    def __init__(self, blocks: int = 3) -> None:
        super().__init__(blocks)
        self.save_hyperparameters()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[1].norm.requires_grad_(False)
        for block in self.blocks:
            block.drop.p = 0.0  # checkpoints do not hold the random state
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def trained(strategy: Any, path: Path | None = None, resume: Path | None = None, **arguments: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    module = Tied()
    torch.manual_seed(2)
    ours = trainer(strategy, **arguments)
    ours.fit(module, loader(), loader(2), ckpt_path=resume)
    if path is not None:
        ours.save_checkpoint(path)
    return ours, module


def flat(value: Any) -> Trace:
    """Every leaf of a checkpoint by its path."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(value)[0]}


def assert_same_files(expected: Path, *others: Path) -> None:
    """The same content in the same order; each weight, a view of a buffer while attached, has its own storage."""
    files = [torch.load(path, weights_only=False) for path in (expected, *others)]
    for file in files[1:]:
        assert list(files[0]) == list(file)
        assert list(files[0]["state_dict"]) == list(file["state_dict"])
        assert files[0]["state_dict"]._metadata == file["state_dict"]._metadata
        assert_same_trace(flat(files[0]), flat(file))
        for name, tensor in file["state_dict"].items():
            assert type(tensor) is torch.Tensor
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    sizes = [path.stat().st_size for path in (expected, *others)]
    assert max(sizes) - min(sizes) < 2000, "a file holds more than the state"


def test_the_file_is_what_plain_training_writes(tmp_path):
    for name, strategy in STRATEGIES.items():
        ours, _ = trained(strategy(), tmp_path / name)
        ours.save_checkpoint(tmp_path / f"{name}, weights", weights_only=True)
    for suffix in ("", ", weights"):
        assert_same_files(*(tmp_path / f"{name}{suffix}" for name in STRATEGIES))
    state = torch.load(tmp_path / "streamed", weights_only=False)["state_dict"]
    assert state["blocks.0.up.weight"].data_ptr() == state["blocks.2.up.weight"].data_ptr(), "tied weights are one"


@cache
def uninterrupted() -> tuple[Any, Any]:
    return trained(plain(), max_epochs=3)


@pytest.mark.parametrize(
    ("first", "second"),
    [("plain", "streamed"), ("plain", "planned"), ("plain", "placed"), ("streamed", "plain"), ("planned", "placed"),
     ("placed", "plain")],
)  # fmt: skip
def test_resume_in_both_directions(tmp_path, first, second):
    plainly, reference = uninterrupted()
    trained(STRATEGIES[first](), tmp_path / "a.ckpt", max_epochs=2)
    ours, module = trained(STRATEGIES[second](), resume=tmp_path / "a.ckpt", max_epochs=3)
    reference.trace, module.trace = Trace(), Trace()
    assert_same_trace(note_end(reference, plainly), note_end(module, ours))


@pytest.mark.parametrize("first", ["streamed", "placed"])
def test_resume_in_the_middle_of_an_epoch(tmp_path, first):
    """With accumulation, ModelCheckpoint in the loop, and the last checkpoint."""

    def arguments(folder: Path) -> dict[str, Any]:
        checkpoint = callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, save_last=True)
        return {"accumulate_grad_batches": 2, "enable_checkpointing": True, "callbacks": checkpoint}

    trained(STRATEGIES[first](), **arguments(tmp_path / first), max_epochs=2)
    middle = tmp_path / first / "epoch=1-step=4.ckpt"
    assert middle.is_file()
    assert (tmp_path / first / "last.ckpt").exists()
    # Lightning begins the epoch's data anew, so an uninterrupted run is no reference.
    resumed, reference = trained(plain(), resume=middle, max_epochs=3, **arguments(tmp_path / "reference"))
    ours, module = trained(streamed(), resume=middle, max_epochs=3, **arguments(tmp_path / "resumed"))
    assert reference.trace
    assert_same_trace(note_end(reference, resumed), note_end(module, ours))


def test_evaluating_a_checkpoint(tmp_path):
    trained(streamed(), tmp_path / "a.ckpt")
    for entry in ("validate", "test", "predict"):

        def drive(trainer: L.Trainer, module: Base, entry: str = entry) -> Any:
            return getattr(trainer, entry)(module, loader(2), ckpt_path=tmp_path / "a.ckpt")

        expected = run(plain(), Tied, drive, dict)
        assert_same_trace(expected, run(streamed(), Tied, drive, dict))


def test_saving_in_the_middle_of_a_step(tmp_path):
    class Saving(Tied):
        folder: Path

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.trainer.save_checkpoint(self.folder / f"training step {self.global_step}")
            return loss

        def on_after_backward(self) -> None:
            self.trainer.save_checkpoint(self.folder / f"backward {self.global_step}")

    for name, strategy in STRATEGIES.items():
        torch.manual_seed(1)
        module = Saving()
        module.folder = tmp_path / name
        torch.manual_seed(2)
        fit(trainer(strategy(), max_epochs=1), module)
    names = sorted(os.listdir(tmp_path / "plain"))
    assert len(names) == 8
    for name in names:
        assert_same_files(*(tmp_path / folder / name for folder in STRATEGIES))


def test_hazard_22_no_second_copy_on_save(tmp_path, monkeypatch):
    def serialize(*_: Any) -> None:
        raise AssertionError("serialized into memory")

    monkeypatch.setattr("lightning.fabric.plugins.io.torch_io._atomic_save", serialize)
    trained(streamed(), tmp_path / "new folder" / "a.ckpt")
    assert (tmp_path / "new folder" / "a.ckpt").is_file()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="looks into Linux's list of mappings")
def test_hazard_22_no_second_copy_on_load(tmp_path):
    path = tmp_path / "a.ckpt"
    io = SuperpipelineCheckpointIO()
    io.save_checkpoint({"state_dict": torch.ones(1 << 20)}, path)
    loaded = io.load_checkpoint(path)["state_dict"]
    assert str(path) in Path("/proc/self/smaps").read_text()
    io.save_checkpoint({"state_dict": torch.zeros(1 << 20)}, path)
    assert loaded.sum() == 1 << 20, "a mapped file was overwritten in place"
    del loaded


class Keeps(Tied):
    """Keeps what a checkpoint has beside weights, and then writes into the file; its metric keeps its state, too."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.accuracy.update(torch.ones(4), batch[1])
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = {"average": torch.ones(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["kept"]

    def on_train_start(self) -> None:
        overwrite(Path(self.trainer.ckpt_path))

    def on_train_end(self) -> None:
        self.note("kept loss", [self.kept, self.accuracy.tp, self.accuracy.fp])


def test_who_writes_the_file_again_changes_nothing_that_was_loaded(tmp_path):
    def drive(trainer: L.Trainer, module: Keeps) -> None:
        trainer.fit(module, loader(), ckpt_path=tmp_path / "copy.ckpt")

    torch.manual_seed(1)
    first, traces = trainer(plain(), max_epochs=1), []
    with mock.patch.multiple(Keeps, on_train_start=lambda _: None, on_train_end=lambda _: None):
        first.fit(Keeps(), loader())
    for strategy in (plain(), streamed()):
        first.save_checkpoint(tmp_path / "copy.ckpt")
        traces.append(run(strategy, Keeps, drive, dict))
    assert_same_trace(*traces)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which processes there are")
def test_what_a_killed_process_has_left_goes_with_the_next_save(tmp_path):
    """Not what a process is still writing, and nothing of other names."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = {f".a[1].ckpt.{os.getppid()}.tmp", f".b.ckpt.{ended.pid}.tmp", ".a[1].ckpt.notes.tmp"}
    for name in (*kept, f".a[1].ckpt.{ended.pid}.tmp"):
        (tmp_path / name).touch()
    SuperpipelineCheckpointIO().save_checkpoint({}, tmp_path / "a[1].ckpt")
    assert set(os.listdir(tmp_path)) == {*kept, "a[1].ckpt"}


def test_load_with_and_without_weights_only(tmp_path):
    trained(streamed(), tmp_path / "a.ckpt")
    for weights_only in (None, True, False):
        assert SuperpipelineCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only)["state_dict"]
    assert SuperpipelineStrategy().load_checkpoint(tmp_path / "a.ckpt")["state_dict"]


def test_what_is_left_to_lightning(tmp_path):
    """Files that cannot be mapped, or are not there, and remote ones."""
    torch.save({"a": torch.ones(2)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    io = SuperpipelineCheckpointIO()
    assert torch.equal(io.load_checkpoint(tmp_path / "old")["a"], torch.ones(2))
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        io.load_checkpoint(tmp_path / "none")
    io.remove_checkpoint(tmp_path / "old")
    assert not (tmp_path / "old").exists()
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "a", storage_options={})
    io.save_checkpoint({"a": torch.ones(2)}, "memory://folder/a.ckpt")
    assert torch.equal(io.load_checkpoint("memory://folder/a.ckpt")["a"], torch.ones(2))


class Own(TorchCheckpointIO):
    saved: list[Any]

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.saved = [*getattr(self, "saved", []), path]
        super().save_checkpoint(checkpoint, path, storage_options)


def test_the_users_checkpoint_io_is_kept(tmp_path):
    io = Own()
    trained(streamed(checkpoint_io=io), tmp_path / "a.ckpt")
    assert len(io.saved) == 1
    io = Own()
    trained(streamed(), tmp_path / "b.ckpt", plugins=io)
    assert len(io.saved) == 1
    assert_same_files(tmp_path / "a.ckpt", tmp_path / "b.ckpt")


def test_wrappers_get_the_streaming_one(tmp_path):
    wrapper, threads = AsyncCheckpointIO(), set(threading.enumerate())
    for folder, strategy, plugins in (("streamed", streamed(), wrapper), ("plain", plain(), None)):
        checkpoint = callbacks.ModelCheckpoint(tmp_path / folder, every_n_train_steps=2, save_top_k=-1)
        trained(strategy, plugins=plugins, callbacks=checkpoint, enable_checkpointing=True)
    assert isinstance(wrapper.checkpoint_io, SuperpipelineCheckpointIO)
    assert set(threading.enumerate()) <= threads
    names = sorted(os.listdir(tmp_path / "plain"))
    assert names == sorted(os.listdir(tmp_path / "streamed"))
    for name in names:
        expected, actual = (
            torch.load(tmp_path / folder / name, weights_only=False) for folder in ("plain", "streamed")
        )
        for part in ("state_dict", "optimizer_states"):
            assert_same_trace(flat(expected[part]), flat(actual[part]))
    own = AsyncCheckpointIO(Own())
    assert SuperpipelineStrategy(checkpoint_io=own).checkpoint_io.checkpoint_io is own.checkpoint_io
    assert isinstance(own.checkpoint_io, Own)
