"""`sp-lightning plan`: what it takes, what it prints, and that the documentation prints the same.

Run as a script, it writes what the commands print now into docs/cli.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import transformers
from lightning.pytorch import LightningModule
from torch import nn

from sp_lightning.cli import main
from sp_lightning.planning.known import find, known, named_model

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
SHOWN = re.compile(r"```bash\n(sp-lightning plan [^\n]+)\n```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.fixture(autouse=True)
def nothing_is_measured(tmp_path, monkeypatch):
    """What `sp-lightning measure` has kept on the machine of the tests changes no plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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


def planned(arguments: str) -> dict:
    return json.loads(run(f"sp-lightning plan --device_memory 24GiB --json --model {arguments}"))


def test_the_document_shows_what_is_printed():
    shown = SHOWN.findall(DOCUMENT.read_text(encoding="utf-8"))
    assert shown
    for command, output in shown:
        assert run(command) == output, f"`python {Path(__file__).name}` writes it anew"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Llama-3.1-8B", 8_030_261_248),
        ("Qwen2.5-14B", 14_770_033_664),
        ("meta-llama/llama-3.1-70b", 70_553_706_496),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656),
        ("google/gemma-3-1b-it", 999_885_952),
    ],
)
def test_published_sizes(name, parameters):
    report = planned(f"{name} --precision bf16-true --activations recompute")
    assert report["parameters"] == parameters
    assert report["best"]["device_bytes"] < 24 * 2**30


def test_all_models_that_are_built_in():
    """At least twenty; each is a class of its library, with arguments that it takes."""
    models = known("models")
    assert len(models) >= 20
    for name, entry in models.items():
        library, _, cls = entry["class"].partition(".")
        if find_spec(library) is not None and library == "transformers":
            assert set(entry["arguments"]) <= set(vars(getattr(transformers, cls)(**entry["arguments"]))), name
    assert named_model("facebook/DINOv2-large").num_parameters() == 304_368_640


def test_gpus_and_hosts_by_name():
    """What is known of a card is assumed, and options win; each has a source; what was measured is of another one."""
    for kind in ("gpus", "hosts"):
        assert all(entry.pop("source") for entry in known(kind).values())
    stack = f"{__name__}.Stack --model.width 64"
    assumed = planned(f"{stack} --gpu 'rtx 4090' --host 'Desktop DDR5' --compute 50")["assumptions"]
    card, host = find("gpus", "RTX 4090"), find("hosts", "desktop DDR5")
    assert assumed["to_device"] == card["to_device"]
    assert assumed["host_bandwidth"] == host["host_bandwidth"]
    assert assumed["compute"] == 50 != card["compute"]


def test_the_class_of_a_module():
    report = planned(f"{__name__}.Stack --model.width 64 --model.layers=6")
    assert report["parameters"] == 6 * (64 * 64 + 64)
    assert len(report["units"]) == 6
    assert report["best"] == report["rows"]["AdamW, bf16-mixed"]
    clipped = planned(f"{__name__}.Stack --model.width 64 --model.layers=6 --gradient_clip_val 1")
    assert clipped["best"]["seconds"] >= report["best"]["seconds"]
    scaled = f"{__name__}.Stack --model.width 64 --precision 16-mixed"
    waits = planned(scaled)["best"], planned(f"{scaled} --gradient_clip_val 1")["best"]
    assert waits[0] == waits[1], "a loss scaler waits for all gradients anyway"


def test_a_configuration_of_transformers(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = planned(f"{tmp_path} --tokens 8")
    assert report == {**planned(f"{tmp_path / 'config.json'} --tokens 8"), "model": report["model"]}
    vision = {"model_type": "vit", "image_size": 32, "patch_size": 16, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(vision))
    assert len(planned(str(tmp_path))["units"]) >= 5


def test_assumptions_change_the_plan():
    stack = f"{__name__}.Stack --model.width 512 --optimizer_on host"
    slow, fast = (planned(f"{stack} --to_device {rate}") for rate in (0.01, 1000))
    assert slow["best"]["bottleneck"] == "to device"
    assert slow["best"]["seconds"] > 10 * fast["best"]["seconds"]
    assert slow["assumptions"]["to_device"] == 0.01
    printed = run(f"sp-lightning plan --model {__name__}.Stack --model.width 512 --device_memory 1MiB")
    assert "921.6 KiB of device memory is too little: it takes" in printed


def test_the_ladder_of_host_memory():
    """Each rung takes less; the step on the host falls with what the optimizer reads and writes."""
    rows = planned("Llama-3.1-8B --optimizer_on host")["rows"]
    rungs = list(rows.values())[:3]
    assert list(rows)[:3] == [
        "AdamW, bf16-mixed",
        "AdamW(moments='fp32'), bf16-true",
        "AdamW(moments='int8'), bf16-true",
    ]
    taken = [rung["host_bytes"] for rung in rungs]
    assert taken == sorted(taken, reverse=True)
    assert rungs[2]["seconds"] <= 2.1 < 3.6 <= rungs[0]["seconds"]
    assert all(rung["steps"] == {"live": 0, "visit": 0, "host": 34} for rung in rungs)
    alone = planned("Llama-3.1-8B --optimizer_on host --precision bf16-true --moments int8")["rows"]
    assert [row["host_bytes"] for row in alone.values()][0] == taken[2]
    assert len(alone) < len(rows)
    clipped = planned("Llama-3.1-8B --optimizer_on host --gradient_clip_val 1")["rows"]
    assert all(row["host_bytes"] - rows[label]["host_bytes"] > 8 * 2**30 for label, row in list(clipped.items())[:3])
    assert taken[2] + (6 << 30) < 64 << 30
    assert "AdamW(moments" not in "".join(planned("Llama-3.1-8B --optimizer Muon")["rows"])


def test_devices_share_the_host():
    """Masters, sums of gradients and state are there once, and stepped once; each device adds its gradients."""
    stack = f"{__name__}.Stack --model.width 4096 --model.layers 8 --optimizer_on host"
    one, four = (planned(f"{stack} --devices {devices}") for devices in (1, 4))
    taken = four["best"]["host_bytes"]
    assert taken == one["best"]["host_bytes"] + 4 * one["parameters"]  # sums in fp32
    clipped = planned(f"{stack} --devices 4 --gradient_clip_val 1")
    assert taken == clipped["best"]["host_bytes"], "all gradients are there in any case"
    assert one["best"]["lanes"]["host"] < four["best"]["lanes"]["host"] < 3 * one["best"]["lanes"]["host"]
    assert four["best"]["lanes"]["to device"] > one["best"]["lanes"]["to device"]
    everywhere = run(f"sp-lightning plan --devices 2 --model {__name__}.Stack --model.width 64")
    assert "; 4 units live on the device with their state, 0 visit it to be stepped there, 0 are " in everywhere
    assert planned(f"{__name__}.Stack --model.width 64 --devices 2")["best"]["host_bytes"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "the following arguments are required: model"),
        ("--model os.path", "os.path is not a class of modules"),
        ("--model torch.nn.Nothing", "has no attribute 'Nothing'"),
        ("--model nowhere.Net", "No module named 'nowhere'"),
        ("--model torch.nn.Linear", "required: model.in_features, model.out_features"),
        (
            "--model torch.nn.Linear --model.in_features 2 --model.out_features -3",
            "model: torch.nn.Linear cannot be built: RuntimeError('Trying to create tensor with negative dimension -3",
        ),
        ("--model torch.nn.Linear --model.in_features 0 --model.out_features 0", "has no parameters, so there is"),
        ("--model Llama-3.1-8B --model.layers 3", "--model.layers is for the class of a model"),
        ("--model Llama-3.1-8B --optimizer LAMB", "`optimizer='LAMB'` is not one of"),
        (
            "--model Llama-3.1-8B --optimizer Muon --moments int8",
            "`moments` is for AdamW and Adam, not `optimizer='Muon'`",
        ),
        ("--model Llama-3.1-8B --device_memory much", "`device_memory='much'` must be an amount of memory"),
        ("--model Llama-3.1-8B --device_memory 24", "`device_memory=24` must be an amount of memory"),
        ("--model Llama-3.1-8B --to_host 0", "`to_host=0.0` must be above zero"),
        ("--model Llama-3.1-8B --devices 0", "`devices=0` must be above zero"),
        ("--model Llama-3.1-8B --precision fp8", "'32-true'"),
        ("--model Llama-3.1-8B --layers 3", "unrecognized arguments: --layers 3"),
        ("--model Llama-3.1-8B --units Block", "matches no module"),
    ],
)
def test_errors(arguments, says, capsys):
    assert status(f"sp-lightning plan {arguments}") == 2
    printed = capsys.readouterr().err
    assert printed.startswith("sp-lightning: error: ")
    assert says in printed


def test_without_transformers(monkeypatch, capsys):
    finds = "sp_lightning.planning.known.find_spec"
    monkeypatch.setattr(finds, lambda name: None if name == "transformers" else find_spec(name))
    assert status("sp-lightning plan --model Llama-3.1-8B") == 2
    assert "needs transformers: pip install transformers" in capsys.readouterr().err


if __name__ == "__main__":
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # where nothing is measured
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(SHOWN.sub(lambda match: match[0].replace(f"text\n{match[2]}", f"text\n{run(match[1])}"), text))
