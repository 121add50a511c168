"""The strategy in LightningCLI: every form that can work, from the command line, from YAML, and from defaults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import sp_lightning
from sp_lightning import SuperpipelineStrategy

CLASS = "sp_lightning.SuperpipelineStrategy"
CALLBACK = "sp_lightning.SuperpipelineCallback"


def cli(*arguments: str, **options: Any) -> SuperpipelineStrategy:
    """The strategy of the Trainer that LightningCLI builds from a command line."""
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    with mock.patch.object(sys, "argv", ["script", *quiet, *arguments]):
        strategy = LightningCLI(BoringModel, run=False, save_config_callback=None, **options).trainer.strategy
    assert type(strategy) is SuperpipelineStrategy
    return strategy


def config(path: Path, trainer: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump({"trainer": trainer}))
    return f"--config={path}"


@pytest.mark.parametrize("name", ["superpipeline", "Superpipeline", "superpipeline_recompute"])
def test_name(name):
    assert cli(f"--trainer.strategy={name}").options.k == "auto"


@pytest.mark.parametrize(
    "arguments",
    [
        [f"--trainer.strategy={CLASS}", "--trainer.strategy.k=4"],
        ["--trainer.strategy=SuperpipelineStrategy", "--trainer.strategy.k=4"],
        [f"--trainer.strategy.class_path={CLASS}", "--trainer.strategy.init_args.k=4"],
        ['--trainer.strategy={"class_path": "' + CLASS + '", "init_args": {"k": 4}}'],
    ],
    ids=["class", "short class", "class_path", "json"],
)
def test_class(arguments):
    assert cli(*arguments).options.k == 4


def test_class_path_alone():
    assert cli(f"--trainer.strategy.class_path={CLASS}").options.k == "auto"


def test_yaml(tmp_path):
    assert cli(config(tmp_path / "a.yaml", {"strategy": "superpipeline"})).options.k == "auto"
    arguments = {
        "k": 4,
        "k_prime": 2,
        "memory_budget": "12GB",
        "units": ["Block", "torch.nn.Linear"],
        "resident": ["head"],
        "activations": "recompute",
        "pin_memory": False,
        "host_threads": 3,
        "compile": True,
        "debug": True,
    }
    strategy = config(tmp_path / "b.yaml", {"strategy": {"class_path": CLASS, "init_args": arguments}})
    options = cli(strategy).options
    assert (options.k, options.k_prime, options.memory_budget, options.resident) == (4, 2, "12GB", ["head"])
    assert (options.activations, options.pin_memory, options.debug) == ("recompute", False, True)
    assert (options.host_threads, options.compile) == (3, True)
    assert list(options.units)[0] == "Block"
    assert cli(strategy, "--trainer.strategy.k=9").options.k == 9


@pytest.mark.parametrize("reverse", [False, True])
def test_yaml_with_the_callback_in_any_order(tmp_path, reverse):
    entries = [
        ("strategy", "superpipeline"),
        ("callbacks", [{"class_path": CALLBACK, "init_args": {"timeline": "a.html"}}]),
    ]
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({"trainer": dict(reversed(entries) if reverse else entries)}, sort_keys=False))
    assert cli(f"--config={path}").options.k == "auto"


@pytest.mark.parametrize(
    ("defaults", "arguments", "k"),
    [
        ({"strategy": "superpipeline"}, [], "auto"),
        ({"strategy": {"class_path": CLASS, "init_args": {"k": 4}}}, [], 4),
        ({"strategy": {"class_path": CLASS}}, ["--trainer.strategy.k=7"], 7),
    ],
    ids=str,
)
def test_trainer_defaults(defaults, arguments, k):
    assert cli(*arguments, trainer_defaults=defaults).options.k == k


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("k", "auto", "auto"),
        ("k", "3", 3),
        ("k_prime", "2", 2),
        ("memory_budget", "12GB", "12GB"),
        ("memory_budget", "0.5", 0.5),
        ("memory_budget", "1000000000", 1000000000),
        ("memory_budget", "null", None),
        ("units", "Block", "Block"),
        ("units", "[Block, Head]", ["Block", "Head"]),
        ("resident", "[head, wte]", ["head", "wte"]),
        ("activations", "offload", "offload"),
        ("pin_memory", "auto", "auto"),
        ("pin_memory", "true", True),
        ("host_threads", "auto", "auto"),
        ("host_threads", "2", 2),
        ("compile", "true", True),
        ("debug", "true", True),
    ],
)
def test_arguments(argument, value, expected):
    options = cli(f"--trainer.strategy={CLASS}", f"--trainer.strategy.{argument}={value}").options
    assert getattr(options, argument) == expected
    assert type(getattr(options, argument)) is type(expected)


@pytest.mark.parametrize(
    "argument",
    ["--trainer.strategy.k=many", "--trainer.strategy.activations=drop", "--trainer.strategy.prefetch=3"],
)
def test_bad_arguments_stop_the_parser(argument, capsys):
    with pytest.raises(SystemExit):
        cli(f"--trainer.strategy={CLASS}", argument)
    assert argument.rsplit(".", 1)[1].split("=")[0] in capsys.readouterr().err


def test_help_shows_every_argument(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli(f"--trainer.strategy.help={CLASS}")
    text = " ".join(capsys.readouterr().out.split())
    names = "k k_prime memory_budget units resident activations pin_memory host_threads compile debug timeout"
    for name in names.split():
        assert f"--trainer.strategy.init_args.{name} " in text or f"--trainer.strategy.{name} " in text
    assert "How many units are on the device at once" in text


def test_print_config_can_be_read_again(tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli(f"--trainer.strategy={CLASS}", "--trainer.strategy.k=4", "--print_config")
    text = capsys.readouterr().out
    strategy = yaml.safe_load(text)["trainer"]["strategy"]
    assert strategy["class_path"] == CLASS
    assert strategy["init_args"]["k"] == 4
    assert strategy["init_args"]["memory_budget"] is None
    path = tmp_path / "again.yaml"
    path.write_text(text)
    assert cli(f"--config={path}").options.k == 4


def test_the_callback_by_its_short_name():
    assert sp_lightning.SuperpipelineCallback is not None
    cli("--trainer.strategy=superpipeline", "--trainer.callbacks+=SuperpipelineCallback")


def test_environment_variable(monkeypatch):
    from lightning.pytorch import Trainer

    monkeypatch.setenv("PL_TRAINER_STRATEGY", "superpipeline")
    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    assert type(Trainer(**quiet).strategy) is SuperpipelineStrategy
