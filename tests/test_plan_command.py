"""`sp-lightning plan`: what it takes, what it answers, and that the documentation prints the same.

Run as a script, it writes what the commands print now into docs/cli.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import re
import shlex
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import known_models
import pytest
import torch
import transformers
from lightning.pytorch import LightningModule, Trainer
from torch import nn

import sp_lightning
from sp_lightning import Assumptions, SuperpipelineStrategy, plan
from sp_lightning.cli import main
from sp_lightning.pipeline import Lane, readable_bytes
from sp_lightning.planning import rates
from sp_lightning.planning.known import batch_of, find, gpu_named, known, named_model, recipe
from sp_lightning.planning.memory import device_bytes, first_choice, first_host_bytes
from sp_lightning.planning.report import Report, readable_hours

from .planning.parts import estimate

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
SHOWN = re.compile(r"```bash\n(sp-lightning plan [^\n]+)\n```\n\n```text\n(.*?)```", re.DOTALL)


class Stack(LightningModule):
    def __init__(self, width: int, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))


def status(command: str) -> int:
    """The exit status of a command."""
    with mock.patch.object(sys, "argv", shlex.split(command)):
        return main()


def run(command: str) -> str:
    """What a command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert status(command) == 0
    return printed.getvalue()


@cache
def planned(arguments: str) -> Report:
    """What a command plans for; a plan of a large model takes seconds."""
    reports = []

    def noted(*args, **options):
        reports.append(plan(*args, **options))
        return reports[-1]

    with mock.patch("sp_lightning.cli.plan", noted):
        run(f"sp-lightning plan --device_memory 24GiB --host_memory 1024GiB --model {arguments}")
    return reports[0]


def answer(arguments: str) -> list[str]:
    """The first lines of what a command prints."""
    return run(f"sp-lightning plan {arguments}").partition("\n\n")[0].splitlines()


def typed(arguments: str) -> list[str]:
    """What a command says to type."""
    return [line.strip() for line in run(f"sp-lightning plan {arguments}").partition("\nType:\n")[2].splitlines()]


def test_the_document_shows_what_is_printed():
    shown = SHOWN.findall(DOCUMENT.read_text(encoding="utf-8"))
    assert shown
    for command, output in shown:
        assert run(command) == output, f"`python {Path(__file__).name}` writes it anew"


def test_published_sizes():
    """Golden shapes cover the other models."""
    for name, parameters in [
        ("Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/llama-3.1-70b", 70_553_706_496),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656),
    ]:
        assert sum(weight.numel() for weight in named_model(name).parameters()) == parameters, name
    report = planned("google/gemma-3-1b-it --precision bf16-true --activations recompute")
    assert report.title == "google/gemma-3-1b-it"
    assert report.sizes.startswith("999,885,952 parameters in ")
    assert report.best.step.device_bytes < 24 * 2**30
    assert len(known("models")) >= 20
    assert known("models").keys() == known("shapes").keys()


@pytest.mark.skipif(transformers.__version__ < "5", reason="version 4 has other names for parts of models")
@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Phi-4", "Gemma-3-4B-it", "Qwen3-30B-A3B", "DINOv2-giant"])
def test_shapes_are_those_of_the_library(name):
    """Written by a script, which compares all; the plan is the same, with adapters, too."""
    model = known_models.from_library(known("models")[name])
    assert known_models.shapes_of(model) == find("shapes", name)
    for given in (Assumptions(), Assumptions(lora=16, activations="recompute")):
        assert estimate(named_model(name), given) == estimate(model, given)


def test_gpus_and_hosts_by_name():
    """What is known of a card is assumed, and options win; each has a source."""
    for kind in ("gpus", "hosts", "reaches"):
        assert all(entry["source"] for entry in known(kind).values())
    stack = f"{__name__}.Stack --model.width 64"
    assumed = planned(f"{stack} --gpu 'rtx 4090' --host 'Desktop DDR5' --compute 50").rows[0].given
    card, host = find("gpus", "RTX 4090"), find("hosts", "desktop DDR5")
    assert assumed.link == card["link"]
    assert assumed.host_bandwidth == host["host_bandwidth"]
    assert (assumed.compute, assumed.compute_at_best) == (50, None), "one speed, where the user gives it"


@pytest.mark.parametrize(
    ("host", "device_room", "host_room"),
    [
        ("'server DDR5'", 23.1, 56.5),
        ("'desktop DDR5'", 22.1, 53.5),
        ("'desktop DDR5' --no-desktop", 23.1, 56.5),
        ("'server DDR5' --desktop", 22.1, 53.5),
    ],
)
def test_memory_is_what_a_run_finds(host, device_room, host_room):
    """Of 24 GB and 64 GiB, without what CUDA, the system and a desktop take."""
    memory = f"--device-memory 23.6GiB --host-memory 64GiB --host {host}"
    given = planned(f"{__name__}.Stack --model.width 64 {memory}").rows[0].given
    assert given.device_room / 2**30 == pytest.approx(0.9 * device_room)
    assert given.host_room / 2**30 == pytest.approx(host_room)
    found = replace(given, host_memory=None)
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("sp_lightning.planning.assumptions.total_host_memory", return_value=2**36),
    ):
        assert found.host_room == 2**36 - given.bytes_of_system


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("4090", "RTX 4090"), ("rtx4090", "RTX 4090"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4060ti", "RTX 4060 Ti"), ("a6000", "RTX A6000"), ("h100", "H100"), ("4060", "RTX 4060"),
        ("GTX1080", None),
    ],
)  # fmt: skip
def test_gpus_as_people_call_them(name, gpu):
    assert gpu_named(name) == gpu


def test_speed_is_a_range():
    """From the lowest to the highest share of the peak; the search is for the lowest, and searches for the highest."""
    report = planned("Llama-3.2-1B --gpu 4090 --tokens 8192 --host_memory 64GiB")
    row = report.best
    reach = find("reaches", "GeForce")
    assert (row.given.compute, row.given.compute_at_best) == (165.2 * reach["low"], 165.2 * reach["high"])
    low, high = row.tokens_per_second
    assert low < high < low * reach["high"] / reach["low"] * 1.01
    assert f"Estimated speed: {low:,.0f} to {high:,.0f} tokens/s (" in report.answer()
    slow = plan(named_model("Llama-3.2-1B"), replace(row.given, compute_at_best=None))
    assert slow.best.step == row.step


def test_names_as_people_write_them():
    """Dashes and underscores, any case, Lightning's short precisions."""
    stack = f"{__name__}.Stack --model.width 64"
    given = planned(f"{stack} --optimizer adamw --precision bf16 --gradient-clip-val=1.0").rows[0].given
    assert (given.optimizer, given.precision, given.gradient_clip_val) == ("AdamW", "bf16-mixed", 1.0)
    assert planned(f"{stack} --optimizer RMSPROP --precision 16").rows[0].given.precision == "16-mixed"
    assert planned(f"{stack} --host-bandwidth 9").rows[0].given.host_bandwidth == 9


def test_the_class_of_a_module():
    report = planned(f"{__name__}.Stack --model.width 64 --model.layers=6")
    assert report.sizes == f"{6 * (64 * 64 + 64):,} parameters in 6 units."
    assert report.best is report.rows[0]
    clipped = planned(f"{__name__}.Stack --model.width 64 --model.layers=6 --gradient_clip_val 1")
    assert clipped.best.step.seconds >= report.best.step.seconds
    scaled = f"{__name__}.Stack --model.width 64 --precision 16-mixed"
    waits = planned(scaled).best.step, planned(f"{scaled} --gradient_clip_val 1").best.step
    assert waits[0] == waits[1], "a loss scaler waits for all gradients anyway"


def test_a_configuration_of_transformers(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = planned(f"{tmp_path} --tokens 8")
    assert report.rows == planned(f"{tmp_path / 'config.json'} --tokens 8").rows
    vision = {"model_type": "vit", "image_size": 32, "patch_size": 16, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(vision))
    assert "parameters in 7 units" in planned(str(tmp_path)).sizes


def test_assumptions_change_the_plan():
    stack = f"{__name__}.Stack --model.width 512 --optimizer_on host"
    slow, fast = (planned(f"{stack} --link {rate}").best.step for rate in (0.01, 1000))
    assert slow.bottleneck in (Lane.TO_DEVICE, Lane.TO_HOST)
    assert slow.seconds > 10 * fast.seconds


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            f"{__name__}.Stack --model.width 512 --device_memory 1MiB",
            "of GPU memory, mostly for what one unit computes",
        ),
        (
            "Llama-3.1-8B --loss whole --tokens 65536 --activations recompute",
            "mostly for logits and the loss, and there",
        ),
        ("Llama-3.1-8B --device-memory 2GiB", "mostly for one unit, 'model.embed_tokens"),
        ("Qwen2.5-32B", " of RAM, mostly for weights and the optimizer's state, and there are 59.6 GiB."),
        ("Qwen3-0.6B --accumulate 4 --host-memory 7GiB --optimizer SGD --precision 32-true", "mostly for sums of grad"),
    ],
)
def test_nothing_fits(arguments, says):
    """One sentence says what is needed, and what takes most; what helps has itself been planned."""
    first, *helps = answer(f"--host_memory 64GB --model {arguments}")
    assert " does not fit: " in first
    assert says in first
    assert helps
    assert all(line.startswith("It fits ") and "tokens/s" in line for line in helps)


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (
            "Qwen3-8B --device_memory 16GiB --host_memory 57GiB --gradient_clip_val 1",
            ['with optimizer state on a drive (`--nvme "PCIe 4"`)', "without clipping", "on a machine with"],
        ),
        ("Qwen3-8B --host_memory 10GiB", ["on a machine with"]),  # neither do adapters fit
        ("Qwen3-8B --host_memory 16GiB", ["with QLoRA, on a base of 4 bits (`--lora 16 --bits 4`)", "on a machine"]),
        (
            "Qwen3-8B --host_memory 32GiB",
            ["with optimizer state on a drive", "with LoRA on a frozen base (`--lora 16`)", "on a machine with"],
        ),
        ("Qwen3-0.6B --host_memory 7GiB --lora 512", ["on a machine with 24.0 GiB of GPU memory and 10.0 GiB of RAM"]),
        ("Llama-3.1-8B --tokens 65536 --lora 8", ["in batches of 32,768 tokens, 2 of them in a step", "on a machine"]),
        ("Qwen3-0.6B --loss whole --tokens 16384", ["with `loss_in_slices(model)`", "on a machine with"]),
    ],
)
def test_a_remedy_has_been_planned(arguments, changes):
    """Adapters are no remedy for adapters, or where these do not fit either."""
    report = planned(arguments)
    assert report.best.step is None
    assert len(report.remedies) == len(changes)
    for (change, row), begin in zip(report.remedies, changes, strict=True):
        assert change.startswith(begin)
        assert row.step is not None
    again = plan(named_model(arguments.split()[0]), report.remedies[0][1].given)
    assert again.rows[0].step == report.remedies[0][1].step


def test_a_plan_for_scripts():
    """One JSON object with what the table has, of plans that fit and of those that do not."""
    arguments = "sp-lightning plan --model Llama-3.1-8B --device-memory 24GiB --host-memory 64GiB --json"
    report = json.loads(run(arguments))
    shown = planned("Llama-3.1-8B --host_memory 64GiB")
    assert report["title"] == shown.title
    assert [row["fits"] for row in report["rows"]] == [row.step is not None for row in shown.rows]
    assert {row["fits"] for row in report["rows"]} == {True, False}
    best = report["rows"][report["best"]]
    step = shown.best.step
    assert (best["seconds"], best["host_bytes"], best["k"]) == (step.seconds, step.host_bytes, step.choice.k)
    assert best["given"]["moments"] == shown.best.given.moments
    assert best["tokens_per_second"] == [2048 / step.seconds] * 2
    assert "of RAM, and there are 64.0 GiB" in report["rows"][0]["missing"]
    assert best["checkpoint_bytes"] == shown.best.checkpoint_bytes
    short = json.loads(run("sp-lightning plan Qwen3-8B --host-memory 10GiB --json"))
    assert [remedy["fits"] for remedy in short["remedies"]] == [True]


def test_host_memory_is_a_limit():
    """Where activations would wait on a host that has no room for them, they are recomputed."""
    sizes = "--moments int8 --precision bf16-true --gpu 'RTX 4090' --compute 82.6 --host_memory"
    for tokens in (8192, 16384):
        for room in (64, 1024):
            report = run(f"sp-lightning plan --model Llama-3.1-8B --tokens {tokens} {sizes} {room}GiB")
            report = " ".join(report.split())  # wherever its lines end
            assert (" recompute." in report, " offload" in report) == (room == 64, room > 64)
            assert " fits with AdamW(moments='int8') in bf16-true, including the first steps: " in report


def test_the_answer_is_what_to_type(monkeypatch, tmp_path):
    """It can be typed: the Trainer and the optimizer in Python, the recipe's command in a shell; nothing is lost."""
    given = "--tokens 8192 --length 1024 --accumulate 4 --gradient-clip-val 1 --activations recompute"
    arguments = f"--model qwen/qwen3-8b --gpu 'rtx 4090' --moments int8 --precision bf16-true {given}"
    arguments += " --host_memory 128GiB"
    first, speed = answer(arguments)
    fits = "fits with AdamW(moments='int8') in bf16-true, including the first steps: "
    assert first.startswith(f"qwen/qwen3-8b on RTX 4090 {fits}")
    said = r"Estimated speed: [\d,]+ to [\d,]+ tokens/s \([\d.]+ to [\d.]+ minutes per million\); "
    said += r"a step of 32,768 tokens takes [\d.]+ s at most, limited by computing on the GPU\."
    assert re.fullmatch(said, speed)
    loss, optimizer, trainer, _, command = typed(arguments)
    assert loss == "sp_lightning.loss_in_slices(model)"
    names = {"Trainer": Trainer, "SuperpipelineStrategy": SuperpipelineStrategy, "sp_lightning": sp_lightning}
    made = eval(trainer.replace("Trainer(", "Trainer(accelerator='cpu', "), dict(names))
    assert made.strategy.options.activations == "recompute"
    assert (made.accumulate_grad_batches, made.gradient_clip_val) == (4, 1.0)
    model = nn.Linear(2, 2).bfloat16()
    assert eval(optimizer, {**names, "model": model}).defaults["lr"] > 0
    parsed = parsed_recipe(command.removeprefix("sp-lightning "), monkeypatch, tmp_path)
    assert (parsed.model, parsed.optimizer, parsed.batch_size, parsed.length) == ("Qwen/Qwen3-8B", "int8", 8, 1024)
    assert (parsed.accumulate, parsed.clip, parsed.precision) == (4, 1.0, "bf16-true")
    assert parsed.strategy.options.activations == "recompute"


def test_only_what_is_not_usual_is_typed():
    lines = typed(f"--model {__name__}.Stack --model.width 64 --precision 32-true")
    assert lines == ["torch.optim.AdamW(model.parameters())", "Trainer(strategy='superpipeline', precision='32-true')"]


def parsed_recipe(command: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> argparse.Namespace:
    """The options of a recipe, as it parses them, beside data with the names that a command has."""
    monkeypatch.syspath_prepend(str(DOCUMENT.parents[1] / "examples"))
    monkeypatch.chdir(folder)
    for name in ("CHATS.jsonl", "TEXT.txt", "EXAMPLES.jsonl"):
        (folder / name).touch()
    (folder / "EXAMPLES.jsonl").write_text('{"image": "a.png", "text": "one"}\n' * 2, encoding="utf-8")
    (folder / "a.png").touch()
    (folder / "IMAGES").mkdir(exist_ok=True)
    script, *options = command.split()
    return importlib.import_module(script.replace("-", "_")).parse(options)


def test_every_recipe_takes_what_is_to_be_typed(monkeypatch, tmp_path):
    """With the user's data, a place for the result, and the tokens that were planned; of all models, in all ways."""
    ways = [{}, *({"precision": "bf16-true", "moments": moments} for moments in ("fp32", "int8"))]
    ways += [{"lora": 16}, {"lora": 16, "bits": 4}, {"accumulate": 4, "gradient_clip_val": 1.0}]
    trained = {script: {*entry} - {"size"} for script, entry in known("recipes").items()}
    for name, entry in known("models").items():
        for way in ways:
            given = Assumptions(**way, **batch_of(name))
            kind = "full" if given.lora is None else "lora" if given.bits == 16 else "qlora"
            command = recipe(name, given)
            assert bool(command) == (kind in trained.get(entry.get("recipe"), ()))
            if command:
                parsed = parsed_recipe(command, monkeypatch, tmp_path)
                assert parsed.model == entry["hub"]
                assert kind == "full" or (parsed.rank, parsed.dtype) == (16, "bfloat16")
                assert parsed.save if kind == "full" else parsed.save_adapters
                data = [getattr(parsed, each, None) for each in ("chats", "text", "images", "examples")]
                assert data.count(None) == 3
                assert (parsed.batch_size, parsed.accumulate, parsed.clip) == (
                    1,
                    given.accumulate,
                    given.gradient_clip_val,
                )
    assert recipe("DINOv2-large", Assumptions()) == recipe("Llama-3.1-8B", Assumptions(optimizer="Muon")) == ""


def test_a_recipe_is_named_only_where_it_does_what_was_planned():
    """Images have the tokens that their sides allow, rows are whole, and recipes never make all logits."""
    assert batch_of("FLUX.1-dev") == {"tokens": 1536, "length": 1536}
    assert " --side 1024 " in recipe("FLUX.1-dev", Assumptions(tokens=2 * 4608, length=4608))
    assert "--batch-size 2" in recipe("FLUX.1-dev", Assumptions(tokens=2 * 4608, length=4608))
    assert not recipe("FLUX.1-dev", Assumptions())
    for other in ({"tokens": 3000}, {"loss": "whole"}, {"resident": ("lm_head",)}, {"units": "LlamaDecoderLayer"}):
        assert not recipe("Llama-3.1-8B", Assumptions(**other)), other


def test_a_name_that_is_misspelled_is_answered_with_the_nearest(capsys):
    """Without an organization it is none of the hub, which nobody asks then."""
    with mock.patch("transformers.AutoConfig.from_pretrained", side_effect=AssertionError):
        assert status("sp-lightning plan --model Qwen3-9B") == 2
    assert "Nearest names that are built in: Qwen3-4B, Qwen3-8B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("memory", "moments", "all_on_host", "staying"),
    [
        ("--device_memory 80GiB --host_memory 64GiB", "fp32", 93.7, 16),
        ("--device_memory 40GiB --host_memory 96GiB", "fp32", 93.7, 2),
        ("--device_memory 40GiB --host_memory 40GiB", "int8", 49.3, 15),
    ],
)
def test_units_stay_on_the_gpu_from_the_first_step_on(memory, moments, all_on_host, staying):
    """As few as RAM requires, in the first steps and when training ends; each later plan keeps them there."""
    arguments = f"Llama-3.1-8B {memory} --moments {moments} --precision bf16-true --tokens 8192"
    row = planned(arguments).rows[0]
    workload, _ = estimate(named_model("Llama-3.1-8B"), row.given)
    device_room, host_room = row.given.device_room, row.given.host_room
    assert first_host_bytes(workload, first_choice(workload)) / 2**30 == pytest.approx(all_on_host, abs=0.1)
    first = first_choice(workload, device_room, host_room)
    assert len(first.living) == staying
    assert set(first.living) <= set(row.step.choice.living)
    assert device_bytes(workload, first) <= device_room
    assert first_host_bytes(workload, first) <= row.step.host_bytes <= host_room
    assert planned(f"{arguments} --optimizer_on host").rows[0].error.place == "host"


def test_no_more_units_stay_on_the_gpu_than_there_are():
    """What is resident is no unit."""
    report = planned("DINOv2-large --precision bf16-true --tokens 64 --length 64 --host_bandwidth 1")
    row = report.best
    assert row.living == row.units < len(row.step.choice.living)
    said = f"Of {row.units} units, the GPU keeps {row.units} with optimizer state. Activations: "
    assert row.choice().startswith(said), "none that streams, or that the CPU updates"
    streams = "Of 4 units, the GPU streams 4 through k=4 places, the CPU updates 4. Activations: 4 "
    assert planned(f"{__name__}.Stack --model.width 512 --optimizer_on host").best.choice().startswith(streams)


def test_adapters_have_one_way_to_keep_moments():
    report = planned("Qwen3-0.6B --lora 16")
    assert len(report.rows) == 1
    assert "--train qlora " in typed("Qwen3-0.6B --gpu 4090 --lora 16 --bits 4")[-1]


def test_a_base_of_four_bits():
    """RAM holds half a byte for each of its weights, and all of the tables; the GPU has their scales, and unpacks."""
    base, rounded = (planned(f"Qwen3-8B --lora 16 --bits {bits}").best for bits in (16, 4))
    shapes = named_model("Qwen3-8B")
    linear = sum(layer.weight.numel() for layer in shapes.modules() if isinstance(layer, nn.Linear))
    linear -= shapes.lm_head.weight.numel()
    saved = base.step.host_bytes - rounded.step.host_bytes
    assert saved == pytest.approx(1.5 * linear, rel=0.01)
    assert 0.9 < rounded.step.seconds / base.step.seconds < 1.1, "it sends less, and unpacks"
    assert base.checkpoint_bytes == rounded.checkpoint_bytes


@pytest.mark.parametrize(
    ("arguments", "gib"), [("--moments int8 --precision bf16-true", 45.4), ("", 89.7), ("--lora 16", 0.47)]
)
def test_a_checkpoint_needs_disk_space(arguments, gib):
    """That of trained weights and their optimizer state."""
    report = planned(f"Llama-3.1-8B {arguments}")
    assert report.best.checkpoint_bytes / 2**30 == pytest.approx(gib, rel=0.01)
    size = readable_bytes(report.best.checkpoint_bytes)
    assert f"A checkpoint takes {size} of disk space, and there are two while one is written." in str(report)


class UNet(nn.Module):
    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 8, 4, stride=4)
        self.down = nn.ModuleList(nn.Conv2d(8, 8, kernel, stride=2) for _ in range(3))


def test_convolutions_over_images_are_not_planned(capsys):
    """As their activations are not estimated; those that cut images into patches are."""
    assert status(f"sp-lightning plan {__name__}.UNet --model.kernel 3") == 2
    said = capsys.readouterr().err
    assert "('down.0'): their activations grow with the images, so GPU memory and speed are not planned" in said
    assert "`sp-lightning check cuda --model CLASS --data CLASS`" in said
    assert planned(f"{__name__}.UNet --model.kernel 2").best.step is not None


@pytest.mark.parametrize(
    ("arguments", "desktop", "link"),
    [
        ("--gpu 4090", True, 25), ("--gpu 4090 --no-desktop", False, 25), ("--gpu A100", False, 25),
        ("--gpu 4090 --host 'server DDR4'", False, 25), ("--gpu 4090 --lanes 8", True, 12.5),
        ("--gpu 3090 --devices 2", True, 12.5), ("--gpu 3090 --devices 2 --lanes 16", True, 25),
        ("--gpu 4060ti", True, 12.5), ("--gpu 5060ti --lanes 16", True, 25), ("--gpu A100 --devices 2", False, 25),
    ],
)  # fmt: skip
def test_a_geforce_is_in_a_desktop(arguments, desktop, link):
    """Where several share the lanes of one."""
    given = planned(f"{__name__}.Stack --model.width 64 {arguments}").rows[0].given
    assert (given.desktop, given.link) == (desktop, link)


def test_without_a_model_it_says_what_a_machine_can_train(monkeypatch):
    """Of each model the best way that fits, and its command."""
    entries = known("models")
    few = {name: entries[name] for name in ("Qwen3-1.7B", "Qwen3-4B", "Qwen2.5-VL-7B-Instruct")}
    monkeypatch.setattr("sp_lightning.planning.report.known", lambda _: few)
    machine = "--gpu 3060 --host-memory 24GiB"
    lines = run(f"sp-lightning plan {machine}").splitlines()
    assert lines[0] == "RTX 3060 with 11.7 GiB, and 24.0 GiB of RAM:"
    assert "all weights, int8 moments" in lines[3]
    assert "LoRA" in lines[4]
    assert "Qwen2.5-VL-7B-Instruct     does not fit: it needs " in lines[5]
    commands = [line.split()[1:4] for line in lines if line.startswith("    sp-lightning ")]
    assert commands[1:] == [["finetune-chat", "--model", "Qwen/Qwen3-4B"]]
    few.pop("Qwen3-1.7B")
    found = json.loads(run(f"sp-lightning plan {machine} --json"))
    assert [offer["fits"] for offer in found] == [True, False]
    assert (found[0]["given"]["tokens"], found[0]["given"]["gradient_clip_val"]) == (8192, 1.0)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [((0.5, 7), "0.5 to 7.0 seconds"), ((400, 541), "6.7 to 9.0 minutes"), ((4000, 4000), "67 minutes"),
     ((0.024, 0.03), "24 to 30 milliseconds"), ((9000, 50_000), "2 to 14 hours"), ((1e5, 2e6), "1 to 23 days")],
)  # fmt: skip
def test_times_are_in_the_unit_in_which_one_thinks_of_them(seconds, said):
    assert readable_hours(*seconds) == said


def test_options_are_shown_as_they_are_documented(capsys):
    """With dashes; underscores are understood."""
    with pytest.raises(SystemExit):
        status("sp-lightning plan --help")
    printed = capsys.readouterr().out
    assert "usage: sp-lightning plan [MODEL] [--gpu NAME]" in printed
    assert "--host-memory " in printed
    assert not re.search(r"--\w*_", printed)


def test_the_ladder_of_host_memory():
    """Each rung takes less; the step on the host falls with what the optimizer reads and writes."""
    rungs = planned("Llama-3.1-8B --optimizer_on host").rows
    assert [(rung.given.optimizer_words, rung.given.precision) for rung in rungs] == [
        ("AdamW", "bf16-mixed"),
        ("AdamW(moments='fp32')", "bf16-true"),
        ("AdamW(moments='int8')", "bf16-true"),
    ]
    taken = [rung.step.host_bytes for rung in rungs]
    assert taken == sorted(taken, reverse=True)
    assert rungs[2].step.seconds <= 2.1 < 3.6 <= rungs[0].step.seconds
    alone = planned("Llama-3.1-8B --optimizer_on host --precision bf16-true --moments int8").rows
    assert [row.step.host_bytes for row in alone] == taken[2:]
    clipped = planned("Llama-3.1-8B --optimizer_on host --gradient_clip_val 1").rows
    assert all(row.step.host_bytes - rung.step.host_bytes > 8 * 2**30 for row, rung in zip(clipped, rungs, strict=True))
    assert taken[2] + (6 << 30) < 64 << 30
    assert len(planned("Llama-3.1-8B --optimizer Muon").rows) == 1


def test_devices_share_the_host():
    """Masters, sums of gradients and state are there once, and stepped once; each device adds its gradients."""
    stack = f"{__name__}.Stack --model.width 4096 --model.layers 8 --optimizer_on host"
    one, four = (planned(f"{stack} --devices {devices}").best.step for devices in (1, 4))
    assert four.host_bytes == one.host_bytes + 4 * 8 * (4096 * 4096 + 4096)  # sums in fp32
    clipped = planned(f"{stack} --devices 4 --gradient_clip_val 1").best.step
    assert four.host_bytes == clipped.host_bytes, "all gradients are there in any case"
    assert one.lanes[Lane.HOST] < four.lanes[Lane.HOST] < 3 * one.lanes[Lane.HOST]
    assert four.lanes[Lane.TO_DEVICE] > one.lanes[Lane.TO_DEVICE]
    everywhere = planned(f"{__name__}.Stack --model.width 64 --devices 2 --host_bandwidth 1").best.step
    assert (len(everywhere.choice.living), everywhere.choice.visiting) == (4, ())
    assert everywhere.host_bytes > 0, "in the first steps"


def test_rates_are_measured(monkeypatch):
    monkeypatch.setattr(rates, "_STEPPED", 2**16)
    monkeypatch.setattr(rates, "full_device", lambda _: torch.device("cpu"))
    given = planned(f"{__name__}.Stack --model.width 64 --measure --gpu H100").rows[0].given
    assert given.host_bandwidth not in (60.0, 0.0)
    assert given.link == find("gpus", "H100")["link"]
    assert planned(f"{__name__}.Stack --model.width 64 --measure --host_bandwidth 7").rows[0].given.host_bandwidth == 7


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "",
            "this machine has no GPU. Name one, such as `sp-lightning plan --gpu 4090 --host-memory 64GiB`, or a model",
        ),
        ("Qwen3-9B --gpu 4090", "Nearest names that are built in: Qwen3-4B, Qwen3-8B"),
        ("Qwen2.5-VL-7B", "Nearest names that are built in: Qwen2.5-VL-7B-Instruct,"),
        ("./nothere.json", "A model of the hub has its organization before its name."),
        ("Qwen3-8B --bits 4", "`bits=4` rounds the frozen base of adapters: give `lora` a rank, such as 16."),
        ("--model os.path", "does not correspond to a subclass of Module"),
        ("--model torch.nn.Nothing", "torch.nn.Nothing"),
        ("--model nowhere.Net", "No module named 'nowhere'"),
        ("--model torch.nn.Linear", "required: in_features, out_features"),
        ("--model torch.nn.Linear --model.in_features 2 --model.out_features -3", "with negative dimension -3"),
        ("--model torch.nn.Linear --model.in_features 0 --model.out_features 0", "has no parameters, so there is"),
        ("--model Llama-3.1-8B --model.layers 3", "`--model.` is for the class of a model, which 'Llama-3.1-8B"),
        ("--model Llama-3.1-8B --optimizer LAMB", "`optimizer='LAMB'` is not in torch "),
        ("--model Llama-3.1-8B --optimizer LBFGS", "its step takes a closure, or sparse gradients"),
        ("--model Llama-3.1-8B --optimizer Muon --moments int8", "for AdamW and Adam, not `optimizer='Muon'`"),
        ("--model Llama-3.1-8B --device_memory much", "`device_memory='much'` must be an amount of memory"),
        ("--model Llama-3.1-8B --device_memory 24", "`device_memory=24` must be an amount of memory"),
        ("--model Llama-3.1-8B --link 0", "`link=0.0` must be above zero"),
        ("--model Llama-3.1-8B --host_memory 64", "`host_memory=64` must be an amount of memory"),
        (
            "--model Llama-3.1-8B --gpu 'RTX 9090'",
            "'RTX 9090' is not a card that is built in. The nearest ones: RTX 3090, RTX 4090",
        ),
        ("--model Llama-3.1-8B --devices 0", "`devices=0` must be above zero"),
        ("--model Llama-3.1-8B --precision fp8", "`--precision`: 'fp8' is not one of 32-true, bf16-mixed, 16-mixed, "),
        ("--model Llama-3.1-8B --tokens many", "`--tokens`: Expected a int. Got value: many"),
        (f"--model {__name__}.NoModel", f"module '{__name__}' has no attribute 'NoModel'"),
        ("--model Llama-3.1-8B --layers 3", "unrecognized arguments: --layers 3"),
        ("--model Llama-3.1-8B --units Block", "matches no module"),
    ],
)
def test_errors(arguments, says, capsys):
    assert status(f"sp-lightning plan {arguments}") == 2
    printed = capsys.readouterr().err
    assert printed.startswith("sp-lightning: error: ")
    assert says in printed
    assert len(printed.splitlines()) == 1


def test_without_transformers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert status("sp-lightning plan --model Llama-3.1-8B") == 0
    assert status("sp-lightning plan --model some/other") == 2
    assert "transformers" in capsys.readouterr().err


if __name__ == "__main__":
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(SHOWN.sub(lambda match: match[0].replace(f"text\n{match[2]}", f"text\n{run(match[1])}"), text))
