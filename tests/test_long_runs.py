"""Recipes that are left alone for a night: what was killed goes on with the same numbers, and the log says what was."""

from __future__ import annotations

import csv
import json
import math
import re
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import long_runs
import pytest
import recipe
import torch
import yaml
from finetune_chat import ChatLM, make_chat_tokenizer, save
from long_runs import Loader, Schedule
from offline import WrittenNumbers
from torch.utils._pytree import tree_leaves

TINY = ["--accelerator=cpu", "--layers=1", "--hidden=16", "--heads=2"]


class Stopped(Exception):
    """In place of a signal."""


def run(script: str, *arguments: str, output: str, stop: int | None = None) -> dict[str, Any]:
    """Run a recipe, up to a batch, and return its last checkpoint."""

    class Stop(recipe.Losses):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if len(self.values) == stop:
                raise Stopped

    with pytest.MonkeyPatch.context() as patch, nullcontext() if stop is None else pytest.raises(Stopped):
        patch.setattr(recipe, "Losses", Stop)
        import_module(script).main([*arguments, f"--output={output}"])
    return torch.load(f"{output}/checkpoints/last.ckpt", weights_only=True)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("state_dict", "optimizer_states", "global_step"):
        for a, b in zip(tree_leaves(one[name]), tree_leaves(other[name]), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name


def test_with_a_model_the_same_command_continues(capsys):
    """One epoch by default, saved and said; options of another run are refused, and what was used is in the log."""
    save(ChatLM(layers=1, hidden=16, heads=2), make_chat_tokenizer(None), "mine")
    write_chats()
    command = ["--accelerator=cpu", "--model=mine", "--chats=chats.jsonl", "--output=out", "--log-every=99"]

    def lines(*arguments: str) -> list[str]:
        assert not import_module("finetune_chat").main([*command, *arguments])
        return capsys.readouterr().out.splitlines()

    first = lines()
    capsys.readouterr()
    assert any(line.startswith("Checkpoints in out/checkpoints (last.ckpt and best.ckpt); ") for line in first)
    assert "27 chats in 14 rows of 256 tokens; for validation, 3 chats in 2 rows" in first
    steps = torch.load("out/checkpoints/last.ckpt", weights_only=True)["global_step"]
    assert f"{steps} steps; --steps or --epochs takes another number" in first
    assert any(re.fullmatch(r"Step 5, \d+ s left", line) for line in first)
    assert len([line for line in first if "validation loss" in line]) == 1
    assert not [line for line in first if "saves no model" in line]
    options = yaml.safe_load(Path("out/logs/version_0/hparams.yaml").read_text(encoding="utf-8"))
    assert options["lr"] > 0
    again = lines("--save=result")
    assert "Continuing from out/checkpoints/last.ckpt" in again
    assert "Loss: no step was taken" in again
    with pytest.raises(SystemExit):
        lines("--length=128", "--lr=1")
    error = "out/checkpoints/last.ckpt is of a run with other options (--lr, --length): take another --output, or"
    assert error in capsys.readouterr().err
    assert f"{steps} steps; --steps or --epochs takes another number" in lines("--lr=1", "--no-resume")
    del command[command.index("--output=out")]
    folders = [lines(f"--lr={rate}")[-1].split()[-1] for rate in (1, 2, 1)]
    assert folders == [
        f"runs/finetune_chat{name}" for name in ("/logs/version_0", "_2/logs/version_0", "/logs/version_1")
    ]


def test_a_run_that_has_ended_takes_no_step_again(capsys):
    """Its last steps are saved, whatever --save-every is; more steps continue it."""
    Path("text.txt").write_text("one two three four five six " * 12, encoding="utf-8")
    arguments = [*TINY, "--text=text.txt", "--length=8", "--batch-size=2", "--save-every=3", "--resume"]
    first = run("finetune_lm", *arguments, "--steps=4", output="out")
    assert "has ended" not in capsys.readouterr().out
    assert_same(run("finetune_lm", *arguments, "--steps=4", output="out"), first)
    assert "\nThis run has ended at step 4, and no step was trained: --no-resume begins" in capsys.readouterr().out
    more = run("finetune_lm", *arguments, "--steps=5", output="out")
    assert "has ended" not in capsys.readouterr().out
    assert_same(more, run("finetune_lm", *arguments, "--steps=5", output="whole"))


def test_a_full_disk_is_seen_before_the_first_step(monkeypatch):
    """Two checkpoints must have room, of trained weights and the optimizer's state, and the weights of the best one."""
    parameters = sum(weight.numel() for weight in ChatLM(layers=1, hidden=16, heads=2).parameters())
    command = [*TINY, "--epochs=1", "--save-every=9", "--output=out"]
    usage = long_runs.shutil.disk_usage(".")
    monkeypatch.setattr(long_runs.shutil, "disk_usage", lambda _: usage._replace(free=27 * parameters))
    with pytest.raises(SystemExit, match=r"error: a checkpoint takes .*/checkpoints needs .* but has .*--output"):
        import_module("finetune_chat").main(command)
    monkeypatch.setattr(long_runs.shutil, "disk_usage", lambda _: usage._replace(free=29 * parameters))
    monkeypatch.setattr(ChatLM, "training_step", interrupt)
    with pytest.raises(Stopped):
        import_module("finetune_chat").main(command)


def interrupt(*_: Any) -> None:
    raise Stopped


def write_chats() -> None:
    chats = [[{"role": "user", "content": "2?" * 40}, {"role": "assistant", "content": f"{n}."}] for n in range(30)]
    Path("chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats), encoding="utf-8")


EXACT = ["--clip=0.5", "--accumulate=2", "--warmup=2", "--schedule=cosine"]


@pytest.mark.parametrize(
    ("script", "arguments", "stop"),
    [
        ("finetune_lm", [*TINY, *EXACT, "--text=text.txt", "--length=8", "--steps=9", "--eval-every=3"], 7),
        ("lora_lm", [*TINY, *EXACT, "--text=text.txt", "--length=8", "--steps=5", "--precision=bf16-mixed"], 4),
        ("finetune_chat", [*TINY, "--chats=chats.jsonl", "--epochs=2", "--batch-size=2", "--eval-every=99"], 3),
        ("finetune_preferences", [*TINY, "--epochs=2", "--batch-size=48"], 3),
        ("finetune_diffusion", [*TINY[:1], "--images=images", "--epochs=2", "--batch-size=2", "--denoising=1"], 4),
    ],
)
def test_a_recipe_goes_on_with_the_same_numbers(script, arguments, stop):
    """At the end of an epoch, in its middle, and between two steps; with random numbers that the model draws.

    test_distribution kills one.
    """
    write_chats()
    Path("text.txt").write_text("one two three four five six " * 12, encoding="utf-8")
    Path("images").mkdir()
    for number, (image, text) in enumerate(WrittenNumbers(5)):
        image.save(f"images/{number}.png")
        Path(f"images/{number}.txt").write_text(text, encoding="utf-8")
    arguments = [*arguments, "--save-every=1"]
    whole = run(script, *arguments, output="whole")
    run(script, *arguments, output="part", stop=stop)
    assert_same(run(script, *arguments, "--resume", output="part"), whole)


def test_a_loader_goes_on_after_each_batch():
    """With random numbers that it draws, and others that the model draws in between."""

    def loader() -> Loader:
        return Loader(range(7), batch_size=2, shuffle=True, collate_fn=lambda rows: [*rows, torch.rand(()).item()])

    whole, found = loader(), []
    for _ in range(2):
        found += [(batch, torch.rand(()).item(), whole.state_dict()) for batch in whole]
    for number, (*_, state) in enumerate(found[:-1], 1):
        torch.manual_seed(number)
        resumed = loader()
        resumed.load_state_dict(state)
        rest = [(batch, torch.rand(()).item()) for _ in range(2 - number // 4) for batch in resumed]
        assert rest == [(batch, drawn) for batch, drawn, _ in found[number:]], number


def test_the_learning_rate_rises_and_falls_and_is_in_the_log(monkeypatch):
    rates: list[float] = []

    def record(self, trainer, pl_module, outputs, *_):
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.values.append(0.0)

    monkeypatch.setattr(recipe.Losses, "on_train_batch_end", record)
    Path("text.txt").write_text("one two three four " * 40, encoding="utf-8")
    arguments = [*TINY, "--text=text.txt", "--length=8", "--batch-size=2", "--steps=10", "--lr=0.8", "--eval-every=5"]
    assert not import_module("finetune_lm").main([*arguments, "--warmup=3", "--schedule=cosine"])
    cosine = [0.4 * (1 + math.cos(math.pi * step / 7)) for step in range(7)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, *cosine])
    constant = Schedule("constant", warmup=1)
    assert [constant.part(step) for step in range(3)] == [0.5, 1, 1]
    with Path("runs/finetune_lm/logs/version_0/metrics.csv").open(encoding="utf-8") as file:
        found = {name for row in csv.DictReader(file) for name, value in row.items() if value}
    assert found >= {"train_loss", "val_loss", "lr-AdamW"}


def test_a_run_says_how_it_goes_and_where_its_results_are(capsys):
    """Without a terminal in lines; its options are in the log, and the best checkpoint lies beside the last."""
    chat = [*TINY, "--epochs=2", "--batch-size=4", "--log-every=6", "--lr=0.1", "--output=out"]
    assert not import_module("finetune_chat").main(chat)
    *lines, end = capsys.readouterr().out.splitlines()
    assert lines[0] == "This run saves no model: add --save or --save-adapters or --save-every to keep what it learns"
    steps = [line for line in lines if line.startswith("Step ")]
    pace = r"Step (6|12|18)/18: loss \d+\.\d{4}, [\d,]+ tokens/s, \d+\.\d GiB of (RAM|GPU), \d+ s left"
    assert len(steps) == 3
    assert all(re.fullmatch(pace, line) for line in steps)
    assert end == "Log and options in out/logs/version_0"
    options = yaml.safe_load(Path("out/logs/version_0/hparams.yaml").read_text(encoding="utf-8"))
    assert (options["batch_size"], options["precision"], options["chats"], options["seed"]) == (4, "32-true", None, 0)

    assert not import_module("finetune_chat").main([*chat, "--epochs=3", "--save-every=20", "--save=model"])
    output = capsys.readouterr().out
    assert "This run saves no model" not in output
    kept = "checkpoints in out/checkpoints (last.ckpt and best.ckpt)"
    assert output.endswith(f"Model in model; {kept}; log and options in out/logs/version_1\n")
    losses = list(map(float, re.findall(r"validation loss (\d+\.\d+)", output)))
    best = torch.load("out/checkpoints/best.ckpt", weights_only=True)
    assert best["global_step"] == 9 * (1 + losses.index(min(losses)))
    loaded = ChatLM.load_from_checkpoint("out/checkpoints/best.ckpt")
    assert all(torch.equal(weight, best["state_dict"][name]) for name, weight in loaded.state_dict().items())


def test_the_learning_rate_suits_the_size(capsys):
    for parameters, is_full, part, rate in [
        (124e6, True, 1, 4e-5), (8e9, True, 1, 1e-5), (8e9, False, 1, 1e-4), (70e9, False, 1, 5e-5),
        (8e9, True, 0.05, 5e-7),
    ]:  # fmt: skip
        assert recipe.learning_rate(int(parameters), is_full, part) == rate
    ChatLM(layers=1, hidden=16, heads=2, lr=None, train="lora").configure_optimizers()
    assert "as suits adapters of" in capsys.readouterr().out.splitlines()[-1]
    parse = import_module("finetune_lm").parse
    model = ["--model=gpt2"]
    assert [parse(arguments).lr for arguments in ([], model, [*model, "--lr=1"])] == [1e-3, None, 1]


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("finetune_lm", ["--steps=0"], "--steps"),
        ("finetune_lm", ["--heads=3"], "--hidden 128 must be an even multiple of --heads 3"),
        ("finetune_lm", ["--text=nowhere.txt"], "--text: nowhere.txt: no such file"),
        ("finetune_lm", ["--model=./nowhere"], "--model: ./nowhere: no such folder"),
        ("finetune_lm", ["--model=text.txt"], "--model: text.txt: no such folder"),
        ("finetune_lm", ["--k=0"], "--k: 0 is neither 'auto' nor an integer of at least 1"),
        ("finetune_lm", ["--k=2", "--k-prime=3"], "k_prime"),
        ("finetune_lm", ["--save=/proc/mine/lm.ckpt"], "--save: /proc/mine: nothing can be written there"),
        ("finetune_lm", ["--save=.."], "--save: ..: a folder, not a file"),
        ("finetune_lm", ["--optimizer=int8"], "--optimizer int8 is for bf16 weights: add --precision bf16-true"),
        ("pretrain", ["--hours=0"], "--hours: a budget of 0.0 hours leaves no time to train: it must be above 0"),
        ("pretrain", ["--text=/dev"], "--text: /dev: no .txt file in this folder"),
        ("finetune_lm", ["--save-every=0"], "--save-every: 0 is not an integer of at least 1"),
        ("finetune_lm", ["--warmup=-1"], "--warmup: -1 is not an integer of at least 0"),
        ("finetune_lm", ["--schedule=linear"], "--schedule: invalid choice: 'linear'"),
        ("finetune_lm", ["--output=text.txt"], "--output: text.txt: a file, not a folder"),
        ("finetune_chat", ["--save-adapters=mine"], "--save-adapters has none to write: add --train lora"),
        ("finetune_diffusion", ["--train=qlora", "--save=a", "--model=b"], "qlora rounds: take --save-adapters"),
        ("lora_lm", ["--peft", "--save-adapters=mine"], "for the adapters of this recipe: leave out --peft"),
    ],
)
def test_what_is_refused_in_one_line(script, arguments, message, capsys):
    Path("text.txt").touch()
    with pytest.raises(SystemExit) as stop:
        import_module(script).parse(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


DATA = {
    "finetune_lm": "text", "finetune_chat": "chats", "finetune_preferences": "pairs", "finetune_diffusion": "images",
    "finetune_vlm": "examples", "finetune_vision": "images", "fabric_loop": "text", "pretrain": "text",
}  # fmt: skip


@pytest.mark.parametrize("script", ["finetune_lm", "finetune_chat", "pretrain"])
def test_a_model_that_is_nowhere(script, monkeypatch):
    """No folder has its name, and neither the hub nor what is left of it on this machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_chats()
    data = "--chats=chats.jsonl" if script == "finetune_chat" else "--text=chats.jsonl"
    says = "error: --model no/where: there is no such folder, and the hub has no such model for this recipe, or is not"
    with pytest.raises(SystemExit, match=says):
        import_module(script).main(["--accelerator=cpu", "--model=no/where", data])


@pytest.mark.parametrize("script", DATA)
def test_a_pretrained_model_needs_data(script):
    """It would learn what a tiny model is shown; this is said before it is loaded."""
    says = f"error: --{DATA[script]} is missing: without it, --model mine would learn from a toy"
    with pytest.raises(SystemExit, match=says):
        import_module(script).main(["--model=mine"])
