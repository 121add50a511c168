"""Trainers of transformers and TRL: models stay in CPU memory, and train closely as plain ones do on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from sp_lightning import Assumptions
from sp_lightning.planning.memory import device_bytes
from sp_lightning.planning.work import Choice
from tests.helpers import assert_close_trace, assert_same_trace
from tests.hf_trainers import CASES, build, everything, llama, text, tokens
from tests.planning.parts import estimate
from tests.second_device import IN_USE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("trl") is None, reason="the Trainers need it: pip install -e '.[trl]'"),
]


@pytest.mark.parametrize("case", ["the best model", "sequences", "autocast", "SFT", "DPO"])
def test_a_trainer(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a generation, evaluations, and with a reference that streams as well."""
    if IN_USE and find_spec("trl.kernels") is not None:  # there is no driver that could load a kernel
        monkeypatch.setattr("trl.kernels.chunked_logprob._TRITON_AVAILABLE", False)
    seen = []
    for streams in (False, True):
        trainer = build(case, tmp_path / str(streams), streams, use_cpu=False)
        assert {weight.device.type == "cpu" for weight in trainer.model.parameters()} == {streams}
        trainer.train()
        if "eval_strategy" in CASES[case][1]:
            trainer.evaluate()
        assert {weight.device.type == "cpu" for weight in trainer.model.parameters()} == {streams}
        seen.append({name: value for name, value in everything(trainer, tmp_path).items() if "file" not in name})
        del trainer
        gc.collect()
    logs = [{name: value for name, value in each.items() if not isinstance(value, Tensor)} for each in seen]
    assert logs[1] == pytest.approx(logs[0], rel=1e-3, abs=1e-4, nan_ok=True)
    assert_close_trace(*seen)


VOCABULARY, LENGTH, ROWS = 16384, 120, 2

SLICED: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, Any]]]] = {
    "SFT": ({}, lambda row: {"input_ids": tokens(row, LENGTH)}),
    "KTO": ({}, lambda row: {"prompt": text(row, 9), "completion": text(row, LENGTH), "label": row % 2 == 0}),
    "GRPO": (
        {"num_generations": 2, "max_completion_length": 4, "beta": 0.1},
        lambda row: {"prompt": text(row, LENGTH)},
    ),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", SLICED)
def test_trls_loss_in_slices(case: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the head's weight without a call of the head. Logits of all tokens never exist."""
    from datasets import Dataset

    kernels = pytest.importorskip("trl.kernels.chunked_logprob", reason="this TRL makes all logits")
    if IN_USE:
        monkeypatch.setattr(kernels, "_TRITON_AVAILABLE", False)
    monkeypatch.setattr(kernels, "TOKEN_CHUNK_SIZE", 32)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 1024)
    options, row = SLICED[case]
    model = llama(vocab_size=VOCABULARY, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    given: dict[str, Any] = {
        "model": partial(LlamaForCausalLM.from_pretrained, tmp_path / "model"),
        "train_dataset": lambda: Dataset.from_list([row(number) for number in range(12)]),
    }
    if case == "GRPO":
        given["reward_funcs"] = lambda: lambda completions, **_: [float(len(words)) for words in completions]
    settings = {"optim": "sgd", "max_steps": 2, "gradient_accumulation_steps": 1, **options}
    monkeypatch.setitem(CASES, case, (f"{case}Trainer", settings, given))
    seen = []
    for streams in (False, True):
        trainer = build(case, tmp_path / str(streams), streams, use_cpu=False)
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        taken = torch.cuda.max_memory_allocated() - before
        seen.append({name: value for name, value in everything(trainer, tmp_path).items() if "file" not in name})
        del trainer
        gc.collect()
    assert taken < ROWS * LENGTH * VOCABULARY * 4
    if IN_USE:
        assert_same_trace(*seen)
    else:
        assert_close_trace(*seen)
    if IN_USE and case == "SFT":
        assumed = {"loss": "chunked", "tokens": ROWS * LENGTH, "length": LENGTH, "gradient_clip_val": 0.5}
        workload, _ = estimate(model, Assumptions(precision="32-true", **assumed))
        one_head = model.get_output_embeddings().weight.nbytes
        assert taken == pytest.approx(device_bytes(workload, Choice(2)), abs=one_head / 2), "one head more, or less"
