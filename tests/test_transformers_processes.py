"""Several processes under Trainers of transformers and TRL: numbers and files are those of Hugging Face's own DDP."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import transformers
from torch import nn

from sp_lightning.pipeline import Processes

from .helpers import Trace, assert_close_trace, assert_same_trace
from .hf_trainers import CASES, build, everything, grpo_case, llama
from .processes import in_processes, run_python

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="the Trainers need it: pip install -e '.[trl]'")

ROOT = Path(__file__).parents[1]

Compare = Callable[[Trace, Trace], None]


def in_one_folder(check: Callable[[Path], None]) -> None:
    """Run a check with a folder that all processes have, as a launcher of two on this machine starts them."""
    folders: list[Any] = [None]
    with TemporaryDirectory() as folder, patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        folders = [folder]
        dist.broadcast_object_list(folders)
        check(Path(folders[0]))
        dist.barrier()


def assert_as_ddp(case: str, compare: Compare = assert_same_trace, **options: Any) -> None:
    """Bit-equality with Hugging Face's own DDP, of all that each process sees, and of the files."""

    def check(folder: Path) -> None:
        seen = []
        for streams in (False, True):
            trainer = build(case, folder / str(streams), streams, **options)
            trainer.train()
            if "eval_strategy" in CASES[case][1]:
                trainer.evaluate()
            trainer.save_model()
            dist.barrier()
            seen.append(everything(trainer, folder / str(streams)))
        assert trainer.args.world_size == 2
        assert any("loss" in label for label in seen[0])
        compare(*seen)

    in_one_folder(check)


ONCE = {"gradient_accumulation_steps": 1}


def trainer() -> None:
    assert_as_ddp("Trainer")


def sft() -> None:
    assert_as_ddp("SFT", **ONCE)


def sft_accumulates() -> None:
    assert_as_ddp("SFT", assert_close_trace)


def sft_with_checkpoints() -> None:
    assert_as_ddp("SFT with checkpoints", **ONCE)


def lora() -> None:
    assert_as_ddp("SFT LoRA", **ONCE)


def dpo() -> None:
    assert_as_ddp("DPO", **ONCE)


def dpo_with_lora() -> None:
    assert_as_ddp("DPO LoRA", **ONCE)


def autocast() -> None:
    assert_as_ddp("autocast", **ONCE)


def the_best_model() -> None:
    assert_as_ddp("the best model", **ONCE)


def sequences() -> None:
    assert_as_ddp("sequences", **ONCE)


class States(transformers.TrainerCallback):
    """Counts the weights whose optimizer state a process has as its training begins."""

    def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self.count = len(optimizer.state)


def resumed() -> None:
    """From a checkpoint of DDP, and from one of its own, in both directions; the first process alone has the state."""

    def check(folder: Path) -> None:
        seen = []
        for streams in (False, True):
            saved = folder / str(streams)
            build("SFT", saved, streams, save_strategy="steps", save_steps=2, **ONCE).train()
            dist.barrier()
            for other in (False, True):
                here = folder / f"{streams} {other}"
                continued = build("SFT", here, other, **ONCE)
                loaded = States()
                continued.add_callback(loaded)
                continued.train(resume_from_checkpoint=str(saved / "checkpoint-2"))
                assert bool(loaded.count) == (not other or dist.get_rank() == 0)
                seen.append(everything(continued, here))
        for other in seen[1:]:
            assert_same_trace(seen[0], other)

    in_one_folder(check)


def shorter() -> nn.Module:
    """Return a model whose last layer the second process leaves out."""
    model = llama()
    model.config.num_hidden_layers -= dist.get_rank()
    return model


def a_layer_is_left_out() -> None:
    """No process waits in backward for what another one does not compute."""
    with patch.dict(CASES, shorter=("Trainer", {}, {"model": shorter})):
        assert_as_ddp("shorter", **ONCE)


def grpo() -> None:
    """Completions differ in length, and so does how often a process calls the model; a reference streams beside it."""

    def check(folder: Path) -> None:
        if dist.get_rank() == 0:
            llama().save_pretrained(folder / "model")
        dist.barrier()
        with patch.dict(CASES, GRPO=grpo_case(folder / "model")):
            seen = []
            for streams in (False, True):
                trainer = build("GRPO", folder / str(streams), streams, **ONCE)
                trainer.train()
                seen.append(everything(trainer, folder / str(streams)))
        assert_same_trace(*seen)

    in_one_folder(check)


CHECKS = [
    trainer,
    autocast,
    sft,
    sft_with_checkpoints,
    lora,
    dpo_with_lora,
    dpo,
    sequences,
    sft_accumulates,
    the_best_model,
    resumed,
    grpo,
    a_layer_is_left_out,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_processes_are_those_of_ddp(check: Callable[[], None]) -> None:
    in_processes([check])


def test_a_process_in_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process, which meets before steps and averages as several do, with numbers of a plain run."""
    made = []

    class Counted(Processes):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("sp_lightning.transformers.Processes", Counted)
    seen = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for streams in (False, True):
            if streams:
                monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
                monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
            trainer = build("the best model", tmp_path / str(streams), streams)
            trainer.train()
            seen.append(everything(trainer, tmp_path / str(streams)))
    finally:
        dist.destroy_process_group()
    assert_same_trace(*seen)
    assert [processes.passes for processes in made] == [6]


SCRIPT = """
import hashlib, sys
from pathlib import Path
from tests.hf_trainers import build

trainer = build("SFT", Path(sys.argv[1]), streams=True)
trainer.train()
weights = b"".join(weight.detach().numpy().tobytes() for weight in trainer.model.parameters())
print("trained", trainer.args.world_size, hashlib.sha256(weights).hexdigest())
"""

LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node=2"],
    "accelerate launch": ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--mixed_precision=no"],
}


def test_launchers(tmp_path: Path) -> None:
    """Both start processes that train the same model."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    lines: set[str] = set()
    for launcher in LAUNCHERS.values():
        folder = tmp_path / launcher[0]
        printed, _ = run_python("-m", *launcher, script, folder, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        found = re.findall("trained .*", printed)
        assert len(found) == 2
        lines |= {*found}
    (line,) = lines
    assert line.startswith("trained 2 ")
