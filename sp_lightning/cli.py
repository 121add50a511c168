"""`sp-lightning fit|validate|test|predict|plan|check`, and recipes: the strategy from the command line.

The first four are a LightningCLI for any LightningModule, with our strategy as the default. `plan` predicts the costs
of a model, without the machine for it (see `planning/report.py`), or with measured rates of this machine (see
`planning/rates.py`). `check` compares numbers on this machine with those of plain training. A recipe is a script of
examples/.

Nothing else imports this module. All commands but `check` and recipes need jsonargparse, which the extra
`sp-lightning[cli]` installs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import sp_lightning
from sp_lightning.check import check
from sp_lightning.lightning_cli import (
    PROGRAM,
    RUNS,
    arguments_of_cli,
    cause_of,
    command_line,
    in_one_sentence,
    in_the_namespace_of_the_model,
)
from sp_lightning.pipeline import readable_bytes
from sp_lightning.pipeline.lanes.accelerator import full_device
from sp_lightning.planning import Assumptions, plan
from sp_lightning.planning.known import (
    batch_of,
    find,
    gpu_named,
    known,
    named_model,
    rates_of,
    rates_of_gpu,
    recipe,
)
from sp_lightning.planning.rates import measure
from sp_lightning.planning.report import HEAD_OF_OFFERS, Report, Row, offers

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

COMMANDS = (*RUNS, "plan", "check")
RECIPES = (
    "fabric-loop", "finetune-chat", "finetune-diffusion", "finetune-lm", "finetune-preferences",
    "finetune-trl", "finetune-vision", "finetune-vlm", "lora-lm", "plain-loop", "pretrain",
)  # fmt: skip
"""Scripts of examples/, which are in the wheel."""

_HELP = f"""usage: {PROGRAM} [--help] [--version] COMMAND ...

Train and use models larger than GPU memory, with PyTorch Lightning.

commands:
  fit, validate, test, predict   a LightningCLI for any LightningModule, streamed by default
  plan                           estimate memory and speed, also for a machine that you do not have; without a
                                 model, list what a machine can train
  check                          compare streamed with plain training, on your machine or of your own model

recipes, each a script for a tiny model, or for a model and data of yours:
  {", ".join(RECIPES[:5])},
  {", ".join(RECIPES[5:])}

`{PROGRAM} COMMAND --help` lists the arguments of a command."""

_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def main() -> int:
    """Run `sp-lightning`, and return its status: 0, 2 if an argument is wrong, 1 if `check` or the extra fails."""
    # unlike `python -m`, a console script does not import from the current folder
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    command, arguments = "".join(sys.argv[1:2]), sys.argv[2:]
    if "--version" in sys.argv[1:]:
        print(sp_lightning.__version__)
        return 0
    if command in ("-h", "--help"):
        print(_HELP)
        return 0
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow, and gives no arguments
        command = RUNS[0]
    if command in RECIPES:
        script = _scripts() / f"{command.replace('-', '_')}.py"
        # as Python starts a script: so do the processes that a Trainer starts for several devices
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
        return 0
    if not (command.startswith("-") or command in COMMANDS):
        asked = f", not {command!r}" if command else ""
        expected = f"expected one of {', '.join(COMMANDS)}, or a recipe{asked}"
        return _fail(f"{expected}; see `{PROGRAM} --help` and `plan --help`", 2)
    if command != "check" and _lacks_jsonargparse(command):
        return 1
    try:
        if command == "check":
            return _check(arguments)
        if command == "plan":
            _plan(arguments)
        else:
            _run()
    except argparse.ArgumentError as error:
        return _fail(in_one_sentence(error), 2)
    except (OSError, ValueError) as error:
        # the error is about an argument of our own command, or its files; else the strategy's constructor refused one
        refused = re.findall(r"(?:^|  - )(`\w+=.*)", str(error))
        if command != "plan" and not refused:
            raise
        return _fail(next(iter(refused), str(error)), 2)
    return 0


def _scripts(folder: str = "") -> Path:
    """Return where scripts of examples/ are: in the installed package, or in the clone around it."""
    package = Path(__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "examples" / folder


def _check(arguments: Sequence[str]) -> int:
    """Compare streamed training with plain training: of a small model, or of the program that arguments describe."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} check",
        usage="%(prog)s [DEVICE] [--speed [--nvme-path FOLDER]] [--steps N] "
        "[--config run.yaml | --model CLASS [--data CLASS] ...]",
        description="Train plainly, then streamed in every way, and compare the numbers: without arguments of a small "
        "model on your GPU, in about a minute; with the arguments of `sp-lightning fit` of your own model on the CPU. "
        "DEVICE names another device, such as cuda:1. Paste the last line into an issue.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--speed", action="store_true", help="measure how fast this machine is, in four minutes")
    parser.add_argument("--nvme-path", help="with --speed, measure the drive of this folder instead")
    parser.add_argument("--steps", type=int, default=6, help="steps of your own program (default: %(default)s)")
    device = arguments[0] if arguments and not arguments[0].startswith("-") else None
    options, of_program = parser.parse_known_args(arguments[device is not None :])
    if options.nvme_path is not None and not options.speed:
        raise argparse.ArgumentError(None, "`--nvme-path` needs `--speed`, which measures the drive of this folder")
    try:
        chosen = full_device(device or ("cpu" if of_program else None))
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from None
    if options.speed:
        script, measured = "machine_speed.py", chosen
        if options.nvme_path is not None:
            script, measured = "drive_speed.py", options.nvme_path
        runpy.run_path(str(_scripts("benchmarks") / script))["speed"](measured)
        return 0
    if not of_program:
        return 0 if check(chosen) else 1
    if _lacks_jsonargparse("check --config"):
        return 1
    from sp_lightning.check_program.program import check_program

    return 0 if check_program(of_program, chosen, options.steps) else 1


def _lacks_jsonargparse(command: str) -> bool:
    if find_spec("jsonargparse") is not None:
        return False
    _fail(f"`{command}` needs jsonargparse: pip install 'sp-lightning[cli]'", 1)
    return True


def _run() -> None:
    """Run LightningCLI in the namespace of the user's LightningModule, with our strategy as the default."""
    in_the_namespace_of_the_model(lambda namespace: command_line(namespace)(**arguments_of_cli(namespace)))


def _fail(message: str, status: int) -> int:
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    return status


def _plan(arguments: Sequence[str]) -> None:
    """Print the plan for a model, or which models a machine can train."""
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    # dashes are underscores in names
    arguments = [re.sub(r"(?<=^--)[\w.-]+", lambda name: name[0].replace("-", "_"), each) for each in arguments]
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    peek.add_argument("--model", default="")
    name: str = peek.parse_known_args(arguments)[0].model
    is_class = _CLASS_PATH.fullmatch(name) and not Path(name).exists() and find("models", name) is None
    parser = _plan_parser()
    if is_class:
        parser.add_subclass_arguments(nn.Module, "model", required=True, fail_untyped=False)
    elif any(each.startswith("--model.") for each in arguments):
        raise argparse.ArgumentError(None, f"`--model.` is for the class of a model, which {name!r} is not")
    else:
        parser.add_argument(
            "--model",
            type=str,
            default="",
            help=f"{', '.join(known('models'))}; "
            "or the class of a LightningModule or nn.Module, whose arguments follow as "
            "`--model.name value`; or a configuration of transformers: a folder, a config.json, "
            "a name on the hub. Without a model, the plan is what your machine can train",
        )
    options = parser.parse_args(arguments)
    rates: dict[str, Any] = batch_of(name) if name else {"tokens": 8192, "gradient_clip_val": 1.0}
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    gpu = gpu_named(options.gpu or found)
    if options.gpu or gpu:
        rates |= rates_of_gpu(options.gpu or found, options.lanes, options.devices)
    if options.gpu is None:
        rates.pop("device_memory", None)  # the GPU itself is asked
    if options.host is not None:
        rates |= rates_of("hosts", options.host)
    if options.nvme is not None:
        rates |= rates_of("drives", options.nvme)
    if options.measure:
        rates |= measure()
    if any(each.partition("=")[0] == "--compute" for each in arguments):
        rates.pop("compute_at_best", None)  # it belongs to another speed
    parser.set_defaults(rates)
    options = parser.parse_args(arguments)
    given = Assumptions(**{field.name: options[field.name] for field in fields(Assumptions)})
    on = f" on {gpu}" if options.gpu else ""
    if not name:
        if not (options.gpu or options.device_memory or found):
            hint = f"Name one, such as `{PROGRAM} plan --gpu 4090 --host-memory 64GiB`"
            other = f"or a model, as in `{PROGRAM} plan Qwen3-8B`"
            raise argparse.ArgumentError(None, f"this machine has no GPU. {hint}, {other}")
        _print_offers(given, gpu or found or "A GPU", options.json)
        return
    module = _module(name, parser, options) if is_class else named_model(name)
    report = plan(module, given, name + on)
    if options.json:
        print(json.dumps(_as_json(report), indent=2))
        return
    print(report)
    if report.best.step is not None and (command := recipe(name, report.best.given)):
        print(f"Or with a recipe, and your data:\n    {PROGRAM} {command}")


def _print_offers(given: Assumptions, gpu: str, as_json: bool) -> None:
    """Print what a machine can train, each model as soon as it is planned."""
    say = partial(print, flush=True)
    if as_json:
        found = [
            {"kind": each.kind, "model": each.model, "command": each.command, **_row(each.row)}
            for each in offers(given)
        ]
        say(json.dumps(found, indent=2))
        return
    memory = f"{readable_bytes(given.device_bytes)}, and {readable_bytes(given.host_bytes)} of RAM"
    say(f"{gpu} with {memory}:\n\n{HEAD_OF_OFFERS}")
    commands = []
    for offer in offers(given):
        say(offer)
        if offer.row.step is not None:
            commands.append(f"    {PROGRAM} {offer.command}")
    assumed = textwrap.fill(f"Assumed: {given}", 110)
    say("", assumed, "", "Type one of these, with your data:", *commands, sep="\n")


def _as_json(report: Report) -> dict[str, Any]:
    """Return a plan as plain data: each row has its assumptions, and the costs of a step if one fits."""
    return {
        "title": report.title,
        "best": report.rows.index(report.best),
        "rows": [_row(row) for row in report.rows],
        "remedies": [{"change": change, **_row(row)} for change, row in report.remedies],
    }


def _row(row: Row) -> dict[str, Any]:
    given = {**asdict(row.given), "device_bytes": row.given.device_bytes, "host_bytes": row.given.host_bytes}
    step = row.step
    answer = {"given": given, "fits": step is not None}
    if step is None:
        return {**answer, "missing": row.missing()}
    return {
        **answer,
        "device_bytes": step.device_bytes,
        "host_bytes": step.host_bytes,
        "checkpoint_bytes": row.checkpoint_bytes,
        "seconds": step.seconds,
        "tokens_per_second": row.tokens_per_second,
        "bottleneck": step.bottleneck.value,
        "bytes_to_drive": step.bytes_to_drive,
        "k": step.choice.k,
        "policies": Counter(way.policy for way in step.choice.ways),
        "units": row.units,
        "units_on_device": row.living,
        "units_updated_on_device": len(step.choice.visiting),
    }


def _plan_parser() -> ArgumentParser:
    from jsonargparse import ActionYesNo, ArgumentParser

    class WithDashes(ArgumentParser):
        def format_help(self, *arguments: Any) -> str:
            text: str = super().format_help(*arguments)
            return re.sub(r"--\w+", lambda option: option[0].replace("_", "-"), text)

    parser = WithDashes(
        prog=f"{PROGRAM} plan",
        usage="%(prog)s [MODEL] [--gpu NAME] [--tokens N] [--lora RANK] ...",
        exit_on_error=False,
        description="Estimate whether a model fits a GPU and the CPU memory of its machine, how fast it trains there, "
        "and which command trains it. Needs neither weights nor a GPU: it estimates from shapes and assumptions.",
    )
    parser.add_argument(
        "--gpu",
        help=f"whose memory, link and speed to assume: {', '.join(known('gpus'))}",
    )
    parser.add_argument(
        "--host",
        help=f"whose memory bandwidth to assume: {', '.join(known('hosts'))}; of a GeForce, a desktop DDR5 by default",
    )
    parser.add_argument(
        "--lanes",
        type=int,
        choices=(1, 2, 4, 8, 16),
        help="PCIe lanes of each GPU: the card's, or 8 for several GPUs in a desktop",
    )
    parser.add_argument(
        "--nvme",
        help=f"the drive for optimizer state that RAM has no room for: {', '.join(known('drives'))}",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the rates of this machine, in seconds, and assume them",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object, for scripts")
    parser.add_argument(
        "--desktop",
        action=ActionYesNo,
        default=False,
        help="whether a desktop takes 1 GiB of GPU memory and 3 GiB of RAM; the default follows `--host` and `--gpu`",
    )
    parser.add_argument("--fp8", action="store_true", help="whether linear layers multiply in FP8")
    parser.add_class_arguments(Assumptions, skip={"desktop", "fp8"})
    return parser


def _module(name: str, parser: ArgumentParser, options: Any) -> nn.Module:
    """Build a module on the meta device, where it takes no memory."""
    try:
        with torch.device("meta"):
            module: nn.Module = parser.instantiate(options).model
            # LightningModules may build their layers there
            getattr(module, "configure_model", lambda: None)()
    except Exception as error:
        reason = " ".join(str(cause_of(error) or error).split())
        raise argparse.ArgumentError(None, f"model: {name} cannot be built: {reason}") from error
    return module
