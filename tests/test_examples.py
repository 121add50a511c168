"""Each example runs, and learns; each configuration too. In this process where possible: a new one takes seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config

from sp_lightning import SuperpipelineStrategy, cli

from .lightning_modules import trainer

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for folder in (EXAMPLES, EXAMPLES / "benchmarks", ROOT / "tools") for path in folder.glob("*.py"))
CONFIGS = sorted((EXAMPLES / "configs").glob("*.yaml"))
SMALL = ["--layers=6", "--hidden=32", "--heads=2", "--length=32", "--batch-size=4", "--accelerator=cpu"]


def run(script: str, *arguments: str, code: int = 0) -> str:
    """Run a script of examples/ and return what it printed."""
    command, environment = (
        [sys.executable, str(EXAMPLES / script), *arguments],
        {**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    return output


Call = Callable[..., str]


@pytest.fixture(autouse=True)
def examples_are_found(monkeypatch):
    """As in a script that lies beside them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def call(capsys) -> Call:
    """Run `main` of an example in this process and return what it printed."""

    def call(script: str, *arguments: str) -> str:
        capsys.readouterr()
        assert not import_module(script).main(["--accelerator=cpu", *arguments])
        return capsys.readouterr().out

    return call


def percent(output: str) -> tuple[int, int]:
    """Accuracy before and after."""
    match = re.search(r"before (\d+)%, after (\d+)%", output)
    assert match, output
    return int(match[1]), int(match[2])


def losses(output: str) -> tuple[float, float]:
    match = re.search(r"first (\d+\.\d+), last (\d+\.\d+)", output)
    assert match, output
    return float(match[1]), float(match[2])


# ---------------------------------------------------------------------------------------------- language models


def test_finetune_lm_learns_and_says_what_it_streamed(call):
    output = run("finetune_lm.py", *SMALL, "--steps=20", "--k=2", "--k-prime=1", "--optimizer-on=host")
    first, last = losses(output)
    assert last < 0.9 * first
    loads = int(re.search(r"(\d+) unit loads", output)[1])
    assert loads > 6 * 20  # six blocks go up in each forward, and most of them again in the backward
    # The same run without streaming gives the same numbers.
    assert losses(call("finetune_lm", *SMALL, "--steps=20", "--strategy=auto")) == (first, last)


def test_finetune_lm_learns_with_a_compact_optimizer(call):
    """With the same numbers whether units live on the device, as memory to spare has them, or nothing streams."""
    arguments = *SMALL, "--steps=20", "--precision=bf16-true", "--optimizer=int8"
    first, last = losses(call("finetune_lm", *arguments))
    assert last < 0.9 * first
    assert losses(call("finetune_lm", *arguments, "--memory-budget=1GB")) == (first, last)
    assert losses(call("finetune_lm", *arguments, "--strategy=auto")) == (first, last)


SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA = Gemma2Config(**SIZES, head_dim=8, num_key_value_heads=1, vocab_size=64, final_logit_softcapping=2.0)
GPT2 = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)


@pytest.mark.parametrize(("config", "softcap"), [(GPT2, None), (GEMMA, 2.0)], ids=["GPT-2", "Gemma 2"])
def test_finetune_lm_has_the_loss_of_transformers(tmp_path, config, softcap):
    from finetune_lm import CausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    module = CausalLM(str(tmp_path))
    assert getattr(module.model.config, "final_logit_softcapping", None) == softcap
    module.log = lambda *_, **__: None  # there is no trainer
    tokens = torch.randint(64, (2, 9))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(module.training_step([tokens], 0), expected)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.parametrize("kind", ["own", "peft"])
def test_lora_learns_and_leaves_the_base_alone(tmp_path, call, kind):
    if kind == "peft":
        pytest.importorskip("peft")
    base, adapters = tmp_path / "base.ckpt", tmp_path / "adapters.ckpt"
    call("finetune_lm", *SMALL, "--steps=3", f"--save={base}")
    arguments = [*SMALL, f"--weights={base}", "--steps=15", *(["--peft"] if kind == "peft" else [])]
    first, last = losses(call("lora_lm", *arguments, f"--save={adapters}"))
    assert last < first - 0.2
    assert losses(call("lora_lm", *arguments, "--strategy=auto")) == (first, last)
    # The checkpoint has the adapters alone, and with the base they are the model again.
    frozen, learned = weights(base), weights(adapters)
    assert not frozen.keys() & learned.keys()
    from lora_lm import LoRALM

    model = LoRALM.load_from_checkpoint(adapters, generation={"max_new_tokens": 2})
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in learned.items())
    rest = [value for name, value in state.items() if name not in learned]
    assert len(rest) == len(frozen)
    assert all(torch.equal(*pair) for pair in zip(rest, frozen.values(), strict=True))
    tokens = torch.arange(8).view(2, 4)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    assert model.predict_step(batch, 0).shape == (2, 2)


def test_prediction_generates_the_tokens_of_the_plain_model():
    """`generate` of transformers within `trainer.predict`, with prompts that are padded on the left."""
    from finetune_lm import CausalLM, make_tokenizer

    tokenizer = make_tokenizer(None)
    prompts = DataLoader(
        ["a", "longer", "the longest of them"],
        batch_size=2,
        collate_fn=lambda texts: dict(tokenizer(texts, padding=True, return_tensors="pt")),
    )
    generated = []
    for strategy in ("auto", SuperpipelineStrategy(k_prime=2)):
        torch.manual_seed(0)
        model = CausalLM(layers=6, hidden=32, heads=2, generation={"max_new_tokens": 6, "do_sample": False})
        generated.append(trainer(strategy).predict(model, prompts))
    assert [batch.shape for batch in generated[0]] == [(2, 6), (1, 6)]
    assert all(map(torch.equal, *generated))


# ---------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize(("model", "steps", "least"), [("vit", 45, 25), ("resnet", 20, 25)])
def test_finetune_vision_learns_to_read(call, model, steps, least):
    output = call("finetune_vision", f"--model={model}", f"--steps={steps}")
    before, after = percent(output)
    assert before < 20
    assert after > least
    first, last = losses(output)
    assert last < 0.8 * first


def test_finetune_vlm_learns_to_read(call):
    output = call("finetune_vlm", "--steps=100")
    first, last = losses(output)
    assert last < 0.4 * first
    before, after = percent(output)
    assert before < 10
    assert after > 20


def test_images_are_looked_for_before_any_work(capsys):
    from finetune_vlm import parse

    Image.new("RGB", (8, 8)).save("a.png")
    good = {"image": "a.png", "text": "a"}
    for lines, message in [
        ([good, {"image": "b.png", "text": "b"}], "1 examples, where one is for validation and others to learn from"),
        ([good, {"image": "b.png", "text": "b"}], "(1 skipped: my.jsonl, line 2: no image b.png)"),
        ([good, {"image": "a.png"}], 'my.jsonl, line 2: not {"image": FILE, "text": ANSWER}'),
    ]:
        Path("my.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        with pytest.raises(SystemExit):
            parse(["--examples=my.jsonl"])
        assert message in capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_can_be_imported(path):
    """Also those that no other test runs."""
    if path.stem == "finetune_trl":
        pytest.importorskip("trl", reason="the recipe needs it: pip install -e '.[trl]'")
    assert import_module(path.stem).__doc__


def test_plain_loop_learns(capsys):
    import_module("plain_loop").main()
    values = [float(value) for value in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    assert len(values) == 4
    assert values[-1] < values[0]


@pytest.mark.parametrize("arguments", [[], ["--int8"]], ids=str)
def test_finetune_trl_learns(arguments, tmp_path):
    """And saves what transformers loads."""
    pytest.importorskip("trl", reason="the recipe needs it: pip install -e '.[trl]'")
    with patch.dict(os.environ):  # transformers 4.57 sets variables for accelerate
        steps = ["--max_steps=4", "--logging_steps=1"]
        import_module("finetune_trl").main([f"--output_dir={tmp_path}", *steps, *arguments])
    lines = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert lines[-1]["loss"] < 0.97 * lines[0]["loss"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert saved.dtype == (torch.bfloat16 if arguments else torch.float32)


def test_fabric_loop_learns(call, tmp_path):
    """With the same losses as without streaming."""
    arguments = *SMALL, "--steps=12", f"--save={tmp_path / 'a.ckpt'}"
    first, last = losses(call("fabric_loop", *arguments, "--k=2"))
    assert last < 0.9 * first
    assert losses(call("fabric_loop", *arguments, "--strategy=auto")) == (first, last)
    assert torch.load(tmp_path / "a.ckpt")["steps"] == 12


TINY = {
    "finetune_lm": ["--model.layers=4", "--model.hidden=32", "--trainer.strategy.k=3"],
    "finetune_lm_compact": ["--model.layers=4", "--model.hidden=32"],
    "lora_lm": ["--model.layers=4", "--model.hidden=32"],
    "finetune_chat": ["--model.layers=2"],
    "finetune_preferences": ["--model.layers=2", "--trainer.limit_val_batches=1"],
    "finetune_vlm": ["--data.batch_size=4", "--data.count=8", "--trainer.limit_val_batches=1"],
    "finetune_diffusion": ["--data.batch_size=4", "--data.count=8", "--model.denoising=2"],
    "pretrain": ["--model.layers=2", "--model.hidden=32"],
    "finetune_vision": ["--data.batch_size=4", "--data.count=8", "--trainer.limit_val_batches=1"],
}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configuration(config, capsys, monkeypatch):
    steps = ["--trainer.max_steps=2", *(["--trainer.val_check_interval=2"] if "vision" in config.stem else [])]
    arguments = ["fit", f"--config={config}", "--trainer.accelerator=cpu", *steps, *TINY[config.stem]]
    monkeypatch.setattr(sys, "argv", ["sp-lightning", *arguments])
    assert cli.main() == 0
    assert "train_loss" in capsys.readouterr().out
