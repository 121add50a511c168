"""Trainers of transformers and TRL over models that stream: numbers and files are those of their own runs."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from accelerate import DistributedType, ParallelismConfig
from torch import nn
from transformers import LlamaForCausalLM

import sp_lightning.transformers
from sp_lightning.pipeline.gradients.segment_gradients import Gradient
from sp_lightning.pipeline.optimizer.state_ring import StateRing
from sp_lightning.transformers import SuperpipelineTrainerMixin
from tests.helpers import assert_same_trace, ram_is_full
from tests.hf_trainers import CASES, build, everything, grpo_case, llama, pairs, rows, tokenizer

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="the Trainers need it: pip install -e '.[trl]'")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Versions 4 of transformers set environment variables for accelerate."""
    with patch.dict(os.environ):
        yield


@pytest.mark.parametrize("case", CASES)
def test_runs_have_the_numbers_of_plain_ones(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After training, the model is a plain one; evaluated again, it streams again."""
    read, show = [], Gradient.show
    monkeypatch.setattr(Gradient, "show", lambda self: (self.tensor is not None and read.append(self), show(self))[1])
    seen = []
    for streams in (False, True):
        folder = tmp_path / str(streams)
        trainer = build(case, folder, streams)
        if case == "metrics":
            trainer.evaluate()
        trainer.train()
        if "eval_strategy" in CASES[case][1]:
            trainer.evaluate()
            trainer.log(trainer.predict(trainer.eval_dataset).metrics)
        trainer.save_model(str(folder / "saved"))
        seen.append(everything(trainer, folder))
        if streams:
            assert not trainer.pipelines
            assert all(type(weight) is nn.Parameter for weight in trainer.model.parameters())
    assert_same_trace(*seen)
    # Amid an accumulation, the planner places weights once, and so shows gradients.
    assert len(read) <= (len(list(trainer.model.parameters())) if trainer.args.gradient_accumulation_steps > 1 else 0)


def test_a_run_is_resumed(tmp_path: Path) -> None:
    """From a checkpoint of a plain run, and from one of its own."""
    seen = []
    for streams in (False, True):
        folder = tmp_path / str(streams)
        build("SFT", folder, streams, save_strategy="steps", save_steps=2).train()
        for other in (False, True):
            trainer = build("SFT", tmp_path / f"{streams} {other}", other)
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
            seen.append(everything(trainer, tmp_path / f"{streams} {other}"))
    for other in seen[1:]:
        assert_same_trace(seen[0], other)


def test_state_on_a_drive(tmp_path: Path) -> None:
    """A run that was saved is resumed there, and in plain training."""

    def run(name: str, streams: bool, checkpoint: str | None = None) -> dict[str, Any]:
        folder = tmp_path / name
        trainer = build("SFT", folder, streams, optim="adamw_torch_fused", save_strategy="steps", save_steps=2)
        if streams:
            trainer.streaming = replace(trainer.streaming, nvme_path=str(tmp_path))
        trainer.train(resume_from_checkpoint=checkpoint)
        return everything(trainer, folder)

    with ram_is_full(), patch.object(StateRing, "step", autospec=True, side_effect=StateRing.step) as stepped:
        assert_same_trace(run("plain", False), run("streamed", True))
        checkpoint = str(tmp_path / "streamed" / "checkpoint-2")
        before = stepped.call_count
        assert_same_trace(run("resumed plainly", False, checkpoint), run("resumed", True, checkpoint))
    assert 0 < before < stepped.call_count


def test_an_exception_detaches(tmp_path: Path) -> None:
    class Fails(transformers.TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    trainer = build("Trainer", tmp_path, streams=True, gradient_accumulation_steps=2)
    trainer.add_callback(Fails())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert all(type(weight) is nn.Parameter for weight in trainer.model.parameters())
    trainer.pop_callback(Fails)
    trainer.args._n_gpu = 2
    trainer.create_accelerator_and_postprocess()
    trainer.train()
    assert trainer.args.n_gpu == 1


def test_grpo_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a reference streams beside the model."""
    llama().save_pretrained(tmp_path / "model")
    monkeypatch.setitem(CASES, "GRPO", grpo_case(tmp_path / "model"))
    seen = []
    for streams in (False, True):
        trainer = build("GRPO", tmp_path / str(streams), streams)
        trainer.train()
        seen.append(everything(trainer, tmp_path / str(streams)))
    assert_same_trace(*seen)


REFUSED: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("`fp16=True`", {"fp16": True}, {}),
    ("precision fp16", {}, {"ACCELERATE_MIXED_PRECISION": "fp16"}),
    ("`torch_compile=True`", {"torch_compile": True}, {}),
    ("dynamo's EAGER", {}, {"ACCELERATE_DYNAMO_BACKEND": "EAGER"}),
    ("full_eval", {"bf16_full_eval": True}, {}),
]


@pytest.mark.parametrize(("what", "options", "variables"), REFUSED)
def test_what_does_not_go_with_streaming(
    what: str, options: dict[str, Any], variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As arguments, or as `accelerate launch` sets it."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"Streamed streams its model, and does not .*{what}.*. Use"):
        build("Trainer", tmp_path, streams=True, **options)


def test_other_placements_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a launcher that does not say how many processes share a machine's memory."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match="how many processes this machine runs. Start them with `torchrun` or"):
        build("Trainer", tmp_path, streams=True)
    monkeypatch.undo()
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        monkeypatch.setattr("accelerate.Accelerator.distributed_type", kind)
        with pytest.raises(ValueError, match=f"does not work with {kind.value}. Leave it out"):
            build("Trainer", tmp_path, streams=True)
        monkeypatch.undo()
    with pytest.raises(ValueError, match="does not work with `parallelism_config`. Leave it out"):
        build("Trainer", tmp_path, streams=True, parallelism_config=ParallelismConfig())
    trainer = build("Trainer", tmp_path, streams=True)
    trainer.model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(ValueError, match="LlamaForCausalLM was loaded with a `device_map` of several devices"):
        trainer.evaluate(rows(labeled=True))


LOADED: dict[str, tuple[str, bool, bool]] = {  # the Trainer, whether by name, and whether arguments are positional
    "by name": ("SFT", True, False),
    "by name, positional": ("SFT", True, True),
    "the reference of an object": ("DPO", False, False),
    "a model and its reference": ("DPO", True, False),
}


@pytest.mark.parametrize("case", LOADED)
def test_trl_loads_models_into_cpu_memory(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where a GPU is, onto which TRL would load them otherwise."""
    import trl
    from accelerate import PartialState

    kind, by_name, is_positional = LOADED[case]
    folder = str(tmp_path / "model")
    llama().save_pretrained(folder)
    load = LlamaForCausalLM.from_pretrained
    model = folder if by_name else load(folder)
    args = getattr(trl, f"{kind}Config")(str(tmp_path / "runs"), use_cpu=True, bf16=False, report_to=[])
    places: list[Any] = []

    class OnGPU:
        device = torch.device("cuda")

        def __getattr__(self, name: str) -> Any:
            return getattr(PartialState(), name)

    def loaded(*given: Any, device_map: Any = "left out", **options: Any) -> Any:
        places.append(device_map)
        return load(*given, **options)

    data = {"train_dataset": rows() if kind == "SFT" else pairs(), "processing_class": tokenizer()}
    made = getattr(sp_lightning.transformers, f"Superpipeline{kind}Trainer")
    with (
        patch.object(LlamaForCausalLM, "from_pretrained", loaded),
        patch("trl.trainer.utils.PartialState", OnGPU, create=True),
    ):
        made(model, args, **data) if is_positional else made(model, args=args, **data)
    assert places == [None] * (by_name + (kind == "DPO"))
    assert "already instantiated" not in caplog.text


def test_a_trainer_that_comes_first_is_refused() -> None:
    """Its methods would be called, and the model would not stream; other classes may come first."""
    name = "SuperpipelineTrainerMixin"
    with pytest.raises(TypeError, match=rf"Wrong\(Trainer, {name}\) would not stream.*`class Wrong\({name}, "):
        type("Wrong", (transformers.Trainer, SuperpipelineTrainerMixin), {})
    part = type("Part", (SuperpipelineTrainerMixin,), {"create_accelerator_and_postprocess": lambda self: None})
    type("Right", (part, transformers.Trainer), {})
    type("Right", (type("Logs", (), {}), SuperpipelineTrainerMixin, transformers.Trainer), {})


@pytest.mark.parametrize("streaming", [{"k": 3}, 3])
def test_streaming_takes_options(streaming: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a `sp_lightning.PipelineOptions`, such as .*PipelineOptions\(k=3\)`"):
        sp_lightning.transformers.SuperpipelineTrainer(llama(), streaming=streaming)


def test_a_run_says_once_what_streams(tmp_path: Path) -> None:
    """And what came of it, by transformers' logger; a plan that was said is not said again."""
    trainer = build("SFT", tmp_path, streams=True, max_steps=8, gradient_accumulation_steps=1)
    said: list[str] = []
    logger = logging.getLogger("transformers.sp_lightning")
    with patch.object(logger, "handle", lambda record: said.append(record.getMessage())):
        trainer.train()
        trainer.evaluate(rows())
        trainer.predict(rows())
    plan, outcome = said
    assert "superpipeline runs LlamaForCausalLM as follows:\ndevice  " in plan
    assert re.search(r"\nunits +5: 2 at a time on the CPU", plan)
    assert re.search(r"superpipeline: 8 batches, \d+ unit loads .* A batch takes .* Layers compute \d+%", outcome)


def test_names_that_are_relied_on(tmp_path: Path) -> None:
    """See [Note: names of transformers and accelerate]; on a device, tests/gpu shows what comes of it."""
    called: list[str] = []

    class Seen(transformers.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.args._n_gpu = 0
            for name in ("prepare_model", "clip_grad_norm_", "no_sync", "backward"):
                note(self.accelerator, name)

        def _move_model_to_device(self, *_: Any) -> None:
            called.append("_move_model_to_device")

    def note(accelerator: Any, name: str) -> None:
        function = getattr(accelerator, name)
        setattr(accelerator, name, lambda *args, **options: (called.append(name), function(*args, **options))[1])

    trainer = build("Trainer", tmp_path, streams=False, trainer=Seen, max_steps=2, gradient_accumulation_steps=2)
    assert called == ["_move_model_to_device"]
    trainer.train()
    a_step = ["no_sync", "backward", "backward", "clip_grad_norm_"]
    assert called[1:] == ["prepare_model", *a_step, *a_step]
    assert trainer.args.n_gpu == 0
    assert trainer.__dict__.get("_mixed_mesh_grads", False) is False
    named = {name for name in dir(SuperpipelineTrainerMixin) if "stream" in name} | {"pipelines"}
    assert not any(hasattr(trainer, name) for name in named)


def test_classes_by_name() -> None:
    import trl

    from sp_lightning.transformers import SuperpipelineSFTTrainer, SuperpipelineTrainer

    assert issubclass(SuperpipelineSFTTrainer, (SuperpipelineTrainerMixin, trl.SFTTrainer))
    assert issubclass(SuperpipelineTrainer, transformers.Trainer)
    assert sp_lightning.transformers.SuperpipelineTrainer is SuperpipelineTrainer
    for name in ("SuperpipelineNoSuchTrainer", "Superpipeline", "SFTTrainer"):
        with pytest.raises(AttributeError, match="has no attribute"):
            getattr(sp_lightning.transformers, name)
