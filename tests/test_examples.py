"""Each example runs as its reader would run it, and learns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GPT2Config

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SMALL = ["--layers=6", "--hidden=32", "--heads=2", "--length=32", "--batch-size=4", "--accelerator=cpu"]


def run(script: str, *arguments: str, code: int = 0) -> str:
    """Run a script of examples/ and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    return output


def losses(output: str) -> tuple[float, float]:
    match = re.search(r"first (\d+\.\d+), last (\d+\.\d+)", output)
    assert match, output
    return float(match[1]), float(match[2])


def test_finetune_lm_learns_and_says_what_it_streamed():
    output = run("finetune_lm.py", *SMALL, "--steps=30", "--k=2", "--k-prime=1")
    first, last = losses(output)
    assert last < 0.8 * first
    steps, loads = map(int, re.search(r"(\d+) steps, (\d+) unit loads", output).groups())
    assert steps >= 30
    assert loads > 6 * 30  # six blocks go up in each forward, and most of them again in the backward
    assert int(re.search(r"(\d+)% saved", output)[1]) > 0
    # The same run without streaming gives the same numbers.
    assert losses(run("finetune_lm.py", *SMALL, "--steps=30", "--strategy=auto")) == (first, last)


def test_finetune_lm_reads_a_file(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100, encoding="utf-8")
    first, last = losses(run("finetune_lm.py", *SMALL, "--steps=8", f"--text={text}"))
    assert last < first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps=0"], "--steps"),
        (["--heads=3"], "--hidden 128 must be an even multiple of --heads 3"),
        (["--text=nowhere.txt"], "--text nowhere.txt: no such file"),
        (["--k=0"], "--k: 0 is neither 'auto' nor an integer of at least 1"),
        (["--k=2", "--k-prime=3"], "k_prime"),
        (["--memory-budget=plenty"], "memory_budget"),
    ],
)
def test_finetune_lm_refuses(monkeypatch, capsys, arguments, message):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from finetune_lm import parse

    with pytest.raises(SystemExit) as stop:
        parse(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "softcap"),
    [
        (GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), None),
        (
            Gemma2Config(
                hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
                num_key_value_heads=1, vocab_size=64, final_logit_softcapping=2.0, pad_token_id=0,
            ),
            2.0,
        ),
    ],
    ids=["GPT-2", "Gemma 2"],
)  # fmt: skip
def test_finetune_lm_has_the_loss_of_transformers(tmp_path, monkeypatch, config, softcap):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from finetune_lm import CausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    module = CausalLM(str(tmp_path))
    assert getattr(module.model.config, "final_logit_softcapping", None) == softcap
    module.log = lambda *_, **__: None  # there is no trainer
    tokens = torch.randint(64, (2, 9))
    expected = module.model(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(module.training_step([tokens], 0), expected)


def test_finetune_lm_refuses_models_that_scale_their_logits(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from finetune_lm import CausalLM

    config = CohereConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="scales its logits"):
        CausalLM(str(tmp_path))


def test_finetune_lm_refuses_a_short_text(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from finetune_lm import TextData

    text = tmp_path / "text.txt"
    text.write_text("too short", encoding="utf-8")
    with pytest.raises(ValueError, match=r"has 9 tokens, but one batch takes batch_size \* length = 512"):
        TextData(str(text)).setup("fit")


def test_plain_loop_learns():
    values = [float(value) for value in re.findall(r"loss (\d+\.\d+)", run("plain_loop.py"))]
    assert len(values) == 4
    assert values[-1] < values[0]


@pytest.mark.parametrize(
    "strategy",
    [
        [],
        ["--trainer.strategy.k=3"],
        ["--trainer.strategy=superpipeline"],
    ],
    ids=["class path", "class path with an option", "name"],
)
def test_cli(strategy):
    config = str(EXAMPLES / "configs" / "finetune_lm.yaml")
    small = ["--trainer.max_steps=2", "--trainer.accelerator=cpu", "--model.layers=4", "--model.hidden=32"]
    assert "`max_steps=2` reached" in run("cli.py", "fit", f"--config={config}", *small, *strategy)


def test_the_overhead_benchmark_measures(tmp_path):
    output = run(
        "benchmarks/overhead.py", "--blocks=4", "--rounds=1", "--block-ms=1", f"--json={tmp_path / 'out.json'}"
    )
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["ratio"] > 0
    assert results["block_ms"] >= 1
    assert f"{results['ratio']:.3f}" in output


def test_the_benchmark_of_the_host_step_measures(tmp_path):
    small = ["--parameters=20000", "--tensors", "2", "20", "--threads", "1", "--rounds=1"]
    output = run("benchmarks/host_step.py", *small, f"--json={tmp_path / 'out.json'}")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["tensors"], row["work"]) for row in rows] == [
        (tensors, work) for tensors in (2, 20) for work in ("update", "clip", "mixed")
    ]
    assert all(value > 0 for row in rows for value in row["ms"].values())
    assert f"{rows[0]['fused / by unit, fused']:.2f}" in output


def test_memory_and_time_over_k_are_measured_and_drawn(tmp_path):
    """The more units are on the device, the more memory they take; and the picture has every point."""
    small = ["--device=cpu", "--blocks=4", "--width=8", "--rows=2", "--steps=1", "--warm-up=2", "--rounds=1"]
    printed = run("benchmarks/sweep_k.py", *small, f"--output={tmp_path / 'k.json'}")
    result = json.loads((tmp_path / "k.json").read_text(encoding="utf-8"))
    points = result["points"]
    assert [point["k"] for point in points] == [1, 2, 4]
    assert all(point["step_seconds"] > 0 for point in points)
    memory = [point["device_bytes"] for point in points]
    assert memory == sorted(set(memory))
    assert printed.count("ms a step") == 3
    for name in ("k.svg", "k.png"):
        run("benchmarks/plot_k.py", str(tmp_path / "k.json"), f"--output={tmp_path / name}")
    drawn = (tmp_path / "k.svg").read_text(encoding="utf-8")
    assert drawn.count("<circle") == 2 * 3 + 1
    assert result["title"] in drawn
    assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")
    output = run("benchmarks/plot_k.py", str(tmp_path / "k.json"), "--output=k.pdf", code=2)
    assert "--output k.pdf must end in .png or .svg" in output
