"""The strategy in LightningCLI: every form that can work, from the command line, from YAML, and from defaults.

Then `sp-lightning`, which is one; `plan` has its own file.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch
import pytest
import pytorch_lightning
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy

import sp_lightning
from sp_lightning import SuperpipelineStrategy
from sp_lightning.cli import COMMANDS, RUNS, main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    assert "Number of units on the device at once" in text


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


# ------------------------------------------------------------------------------------------------------- sp-lightning

BORING = "lightning.pytorch.demos.boring_classes.BoringModel"
QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
QUICK = [*QUIET, "--trainer.max_steps=1", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


@pytest.fixture
def trainers(monkeypatch) -> list[Any]:
    """Trainers of the calls of `fit` and so on, which do nothing else."""
    called: list[Any] = []
    for package in (lightning.pytorch, pytorch_lightning):
        for name in RUNS:
            monkeypatch.setattr(package.Trainer, name, noted(called, getattr(package.Trainer, name)))
    return called


def noted(called: list[Any], method: Any) -> Any:
    @functools.wraps(method)
    def call(trainer: Any, *args: Any, **kwargs: Any) -> None:
        called.append((method.__name__, trainer, kwargs))

    return call


@pytest.mark.parametrize("command", RUNS)
def test_the_default_is_our_strategy(command, trainers):
    assert main([command, f"--model={BORING}", *QUIET, "--trainer.strategy.k=4"]) == 0
    ((called, trainer, kwargs),) = trainers
    assert called == command
    assert type(trainer.strategy) is SuperpipelineStrategy
    assert trainer.strategy.options.k == 4
    assert type(kwargs["model"]) is BoringModel


@pytest.mark.parametrize("strategy", ["superpipeline", {"class_path": CLASS, "init_args": {"k": 4}}, None], ids=str)
def test_configurations(strategy, trainers, tmp_path):
    trainer = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    if strategy is not None:
        trainer["strategy"] = strategy
    path = tmp_path / "run.yaml"
    data = {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"}
    path.write_text(yaml.safe_dump({"trainer": trainer, "model": {"class_path": BORING}, "data": data}))
    assert main(["fit", "--config", str(path)]) == 0
    ((_, made, kwargs),) = trainers
    assert type(made.strategy) is SuperpipelineStrategy
    assert made.strategy.options.k == (4 if isinstance(strategy, dict) else "auto")
    assert type(kwargs["datamodule"]) is BoringDataModule


def test_other_strategies(trainers):
    assert main(["fit", f"--model={BORING}", *QUIET, "--trainer.strategy=auto"]) == 0
    assert type(trainers[0][1].strategy) is SingleDeviceStrategy


def test_modules_of_pytorch_lightning(trainers):
    boring = importlib.import_module("pytorch_lightning.demos.boring_classes")
    assert main(["fit", f"--model={boring.__name__}.BoringModel", *QUIET, "--trainer.strategy.k=4"]) == 0
    ((_, trainer, kwargs),) = trainers
    assert type(trainer) is pytorch_lightning.Trainer
    assert type(trainer.strategy) is sp_lightning.pytorch_lightning.SuperpipelineStrategy
    assert trainer.strategy.options.k == 4
    assert type(kwargs["model"]) is boring.BoringModel


def test_print_config_is_documented_and_can_be_read_again(capsys, trainers, tmp_path):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", f"--model={BORING}", *QUIET, "--trainer.strategy.k=4", "--print_config"])
    printed = capsys.readouterr().out
    comments = " ".join(line.strip(" #") for line in printed.splitlines() if line.strip().startswith("#"))
    documented = inspect.getdoc(SuperpipelineStrategy)
    for name in inspect.signature(SuperpipelineStrategy).parameters:
        (sentence,) = re.findall(rf"^    {name}: (.*?)(?:\. |\.?\n)", documented, re.MULTILINE)
        assert sentence in comments, name
    path = tmp_path / "again.yaml"
    path.write_text(printed)
    assert main(["fit", "--config", str(path)]) == 0
    assert trainers[0][1].strategy.options.k == 4


def test_modules_of_the_current_folder(trainers, tmp_path, monkeypatch):
    source = "from lightning.pytorch.demos.boring_classes import BoringModel\nclass Here(BoringModel): pass\n"
    (tmp_path / "module_in_this_folder.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert main(["fit", "--model=module_in_this_folder.Here", *QUIET]) == 0
    assert type(trainers[0][2]["model"]).__name__ == "Here"
    assert sys.path[0] == str(tmp_path)


def test_a_run_writes_its_configuration_beside_its_logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", f"--model={BORING}", *QUICK]) == 0
    assert main(["fit", f"--model={BORING}", *QUICK]) == 0  # nothing of the first one is in its way
    assert list(tmp_path.iterdir()) == []
    logger = "--trainer.logger=lightning.pytorch.loggers.CSVLogger"
    assert main(["fit", f"--model={BORING}", *QUICK, logger, f"--trainer.logger.save_dir={tmp_path}"]) == 0
    (saved,) = tmp_path.rglob("config.yaml")
    assert yaml.safe_load(saved.read_text())["trainer"]["strategy"]["class_path"] == CLASS


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ("fit", 2, "the following arguments are required"),
        ("train", 2, "invalid choice: 'train'"),
        ("fit --modle x", 2, "unrecognized arguments: --modle x"),
        ("fit --config nowhere.yaml", 2, "config: File does not exist:"),
        ("fit --model nowhere.Net", 2, "model: No module named 'nowhere'"),
        ("fit --model torch.nn.Linear", 2, "model: Import path does not correspond to a subclass of LightningModule"),
        (f"fit --model {BORING} --data nowhere.Data", 2, "data: No module named 'nowhere'"),
        (f"fit --model {BORING} --model.width 3", 2, "model: Option 'width' is not accepted"),
        (f"fit --model {BORING} --trainer.max_steps=x", 2, "trainer.max_steps: expected int, got x"),
        (f"fit --model {BORING} --trainer.strategy.k=many", 2, "trainer.strategy.k: expected int or 'auto', got many"),
        (
            f"fit --model {BORING} --trainer.strategy.prefetch=3",
            2,
            "trainer.strategy: Option 'prefetch' is not accepted",
        ),
        (f"fit --model {BORING} --trainer.strategy.k=1 --trainer.strategy.k_prime=2", 2, "`k_prime=2` is larger than"),
        (f"fit --model {BORING} --trainer.strategy=superpipelines", 2, "invalid strategy name"),
        (
            f"fit --model {BORING} --trainer.devices=2 --trainer.accelerator=cpu"
            " --trainer.strategy.resident_optimizer=true",
            1,
            "`resident_optimizer=True` works on one device only",
        ),
        (f"fit --model {BORING} --trainer.strategy.units=Block", 1, "`units='Block'` matches no module"),
        ("fit --model lightning.pytorch.LightningModule", 1, "No `training_step()` method defined"),
    ],
)
def test_errors_are_one_line(arguments, status, says, capsys):
    assert main([*arguments.split()[:1], *(QUICK if "--model" in arguments else []), *arguments.split()[1:]]) == status
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert line.startswith("sp-lightning: error: ")
    assert says in line


def test_a_bug_keeps_its_traceback(monkeypatch):
    def training_step(self: BoringModel, batch: Any, batch_idx: int) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(BoringModel, "training_step", training_step)
    with pytest.raises(ValueError, match="a bug"):
        main(["fit", f"--model={BORING}", *QUICK])


def yaml_in_the_document() -> list[str]:
    text = (Path(__file__).resolve().parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
    return re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_the_document(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(yaml_in_the_document()) == 2
    Path("run.yaml").write_text(yaml_in_the_document()[number], encoding="utf-8")
    assert main(["fit", "--config", "run.yaml", "--trainer.enable_progress_bar=false"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_without_jsonargparse(monkeypatch, capsys):
    installed = importlib.util.find_spec
    monkeypatch.setattr("sp_lightning.cli.find_spec", lambda name: None if name == "jsonargparse" else installed(name))
    assert main(["fit"]) == 1
    assert "needs jsonargparse: pip install 'sp-lightning[cli]'" in capsys.readouterr().err


def test_help_names_all_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert not [command for command in COMMANDS if command not in printed]


def test_the_program_runs(tmp_path):
    """As users start it; the script that pip makes calls the same function."""
    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"sp-lightning": "sp_lightning.cli:main"}
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "sp_lightning", "fit", f"--model={BORING}", *QUICK],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert "SGD steps each unit in backward" in done.stdout + done.stderr
