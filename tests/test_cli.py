"""The strategy in LightningCLI, from the command line and from YAML, in every form that can work.

Then `sp-lightning`, which is one; `plan` has its own file.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch
import pytest
import pytorch_lightning
import pytorch_lightning.demos.boring_classes
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import sp_lightning
from sp_lightning import SuperpipelineStrategy
from sp_lightning.cli import COMMANDS, RECIPES, RUNS
from sp_lightning.cli import main as program

from .processes import run_python

CLASS = "sp_lightning.SuperpipelineStrategy"


def cli(*arguments: str, **options: Any) -> SuperpipelineStrategy:
    """The strategy of the Trainer that LightningCLI builds from a command line."""
    with mock.patch.object(sys, "argv", ["script", *QUIET, *arguments]):
        strategy = LightningCLI(BoringModel, run=False, save_config_callback=None, **options).trainer.strategy
    assert type(strategy) is SuperpipelineStrategy
    return strategy


def config(path: Path, trainer: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump({"trainer": trainer}))
    return f"--config={path}"


@pytest.mark.parametrize(
    "arguments",
    [
        [f"--trainer.strategy={CLASS}", "--trainer.strategy.k=4"],
        ["--trainer.strategy=SuperpipelineStrategy", "--trainer.strategy.k=4"],
        [f"--trainer.strategy.class_path={CLASS}", "--trainer.strategy.init_args.k=4"],
        ['--trainer.strategy={"class_path": "' + CLASS + '", "init_args": {"k": 4}}'],
    ],
)
def test_class(arguments):
    assert cli(*arguments).options.k == 4


def test_yaml(tmp_path):
    assert cli(config(tmp_path / "a.yaml", {"strategy": "superpipeline"})).options.k == "auto"
    arguments = {"k": 4, "memory_budget": "12GB", "units": ["Block", "torch.nn.Linear"], "pin_memory": False}
    strategy = config(tmp_path / "b.yaml", {"strategy": {"class_path": CLASS, "init_args": arguments}})
    options = cli(strategy).options
    assert (options.k, options.memory_budget, options.pin_memory) == (4, "12GB", False)
    assert list(options.units)[0] == "Block"
    assert cli(strategy, "--trainer.strategy.k=9").options.k == 9


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("k", "3", 3),
        ("memory_budget", "0.5", 0.5),
        ("memory_budget", "1000000000", 1000000000),
        ("memory_budget", "null", None),
        ("units", "[Block, Head]", ["Block", "Head"]),
        ("resident", "[head, wte]", ["head", "wte"]),
        ("activations", "offload", "offload"),
        ("pin_memory", "true", True),
        ("compile", "{dynamic: false}", {"dynamic": False}),
    ],
)
def test_arguments(argument, value, expected):
    options = cli(f"--trainer.strategy={CLASS}", f"--trainer.strategy.{argument}={value}").options
    assert getattr(options, argument) == expected
    assert type(getattr(options, argument)) is type(expected)


BORING = "lightning.pytorch.demos.boring_classes.BoringModel"
QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
QUICK = [*QUIET, "--trainer.max_steps=1", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


def main(arguments: list[str]) -> int:
    """The exit status of a command line."""
    with mock.patch.object(sys, "argv", ["sp-lightning", *arguments]):
        return program()


@pytest.fixture
def trainers(monkeypatch) -> list[Any]:
    """Trainers of the calls of `fit` and so on, which do nothing else."""
    called: list[Any] = []
    for package, name in product((lightning.pytorch, pytorch_lightning), RUNS):

        @functools.wraps(getattr(package.Trainer, name))
        def note(trainer: Any, *args: Any, _name: str = name, **kwargs: Any) -> None:
            called.append((_name, trainer, kwargs))

        monkeypatch.setattr(package.Trainer, name, note)
    return called


@pytest.mark.parametrize(
    ("command", "package", "ours"),
    [*product(RUNS, [lightning.pytorch], [sp_lightning]), ("fit", pytorch_lightning, sp_lightning.pytorch_lightning)],
)
def test_the_default_is_our_strategy(command, package, ours, trainers):
    boring = package.demos.boring_classes.BoringModel
    assert main([command, f"--model={boring.__module__}.BoringModel", *QUIET, "--trainer.strategy.k=4"]) == 0
    ((called, trainer, kwargs),) = trainers
    assert (called, type(trainer), type(kwargs["model"])) == (command, package.Trainer, boring)
    assert type(trainer.strategy) is ours.SuperpipelineStrategy
    assert trainer.strategy.options.k == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("fit", "the following arguments are required"),
        ("", "expected one of fit, validate, test, predict, plan, check, or a recipe; see"),
        ("train", "expected one of fit, validate, test, predict, plan, check, or a recipe, not 'train'; see"),
        ("fit --modle x", "unrecognized arguments: --modle x"),
        ("fit --config nowhere.yaml", "nowhere.yaml"),
        ("fit --model nowhere.Net", "No module named 'nowhere'"),
        ("fit --model torch.nn.Linear", "does not correspond to a subclass of LightningModule"),
        (f"fit --model {BORING} --data {BORING}", f"error: `--data`: Import path {BORING} does not correspond to a"),
        (f"fit --model {BORING} --trainer.strategy.k=many", "many"),
        (f"fit --model {BORING} --trainer.strategy.prefetch=3", "prefetch"),
        (f"fit --model {BORING} --trainer.strategy.k=0", "error: `k=0` must be 'auto' or an integer of at least 1.\n"),
    ],
)
def test_errors_in_arguments(arguments, says, capsys):
    assert main(arguments.split()) == 2
    printed = capsys.readouterr().err
    assert "sp-lightning: error: " in printed
    assert says in printed


def test_the_document(tmp_path, monkeypatch):
    text = (Path(__file__).resolve().parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(shown, encoding="utf-8")
    assert main(["fit", "--config", "run.yaml", "--trainer.enable_progress_bar=false"]) == 0


@pytest.mark.parametrize("command", ["", "fit", "plan", "check"])
def test_the_version(command, capsys):
    assert main([*command.split(), "--version"]) == 0
    assert capsys.readouterr().out == f"{sp_lightning.__version__}\n"


def test_help_lists_all_commands(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)
    scripts = (Path(__file__).resolve().parents[1] / "examples").glob("*.py")
    recipes = [path for path in scripts if "\nif __name__ ==" in path.read_text(encoding="utf-8")]
    assert list(RECIPES) == sorted(path.stem.replace("_", "-") for path in recipes)
    assert all(recipe in printed for recipe in RECIPES)
    with pytest.raises(SystemExit) as ended:
        main(["check", "--help"])
    assert ended.value.code == 0
    assert "usage: sp-lightning check" in capsys.readouterr().out


def test_a_shell_may_ask_what_follows(monkeypatch):
    """Argcomplete runs the program without arguments, and its text parser answers."""
    asked: list[bool] = []
    monkeypatch.setattr("sp_lightning.cli._run", lambda: asked.append(True))
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    assert main([]) == 0
    assert asked


def test_without_jsonargparse(monkeypatch, capsys):
    installed = importlib.util.find_spec
    monkeypatch.setattr("sp_lightning.cli.find_spec", lambda name: None if name == "jsonargparse" else installed(name))
    for command in ("fit", "plan", "check --config"):
        assert main(command.split()) == 1
        assert f"`{command}` needs jsonargparse: pip install 'sp-lightning[cli]'" in capsys.readouterr().err
    monkeypatch.setattr("sp_lightning.cli.check", lambda device: device.type == "cpu")
    assert [main(command.split()) for command in ("--help", "--version", "check cpu")] == [0, 0, 0]


def test_the_program_runs(tmp_path):
    """As users start it; the script that pip makes calls the same function, see test_layout."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    command = "-m", "sp_lightning", "fit", f"--model={BORING}", *QUICK[:-1]
    said = "".join(run_python(*command, cwd=tmp_path, PYTHONPATH=path))
    assert "SGD updates each unit in backward" in said
