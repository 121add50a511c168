"""`sp-lightning fit|validate|test|predict|plan`: the strategy from the command line.

The first four are a LightningCLI for any LightningModule, with our strategy as the default. `plan` predicts what a
model would take, without the machine for it (`plan_command.py`). Errors in arguments are reported in one line.

Nothing else imports this module: it needs jsonargparse, which the extra `sp-lightning[cli]` installs.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sp_lightning.trainer._namespace import FABRIC, namespace

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.cli import ArgsType, LightningArgumentParser
    from lightning.pytorch.cli import LightningCLI as _Base
else:
    _Base = object

PROGRAM = "sp-lightning"
RUNS = ("fit", "validate", "test", "predict")
"""The commands of LightningCLI."""
COMMANDS = (*RUNS, "plan")

_STRATEGIES = {
    "lightning.pytorch": "sp_lightning.SuperpipelineStrategy",
    "pytorch_lightning": "sp_lightning.pytorch_lightning.SuperpipelineStrategy",
}
_NEEDED = ("jsonargparse", "docstring_parser", "typeshed_client")  # what `jsonargparse[signatures]` installs

# Lines in jsonargparse's messages that show how it parsed a value, not what is wrong with it.
_STRUCTURE = re.compile(r"$|'[\w.]+':$|Does not validate|Subtypes:|Errors:|Given value|Expected a (path but|<|typing)")


class CommandLineMixin(_Base):
    """Our changes to LightningCLI, shared by both namespaces."""

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        assert isinstance(args, list)
        self.config = parser.parse_args(["--print_config=comments" if a == "--print_config" else a for a in args])

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:  # a value that a class rejects, not the parser, is an invalid argument, too
            raise ArgumentError(None, str(error)) from error

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        assert self.subcommand is not None
        if self.config[self.subcommand].trainer.logger is False:
            # LightningCLI saves the configuration beside the logs; without logs, it would do so in the current folder.
            self.save_config_callback = None
        return super().instantiate_trainer(**kwargs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sp-lightning`.

    Args:
        arguments: The arguments after the program's name; `None` takes them from `sys.argv`.

    Returns:
        The exit status: 0 on success, 2 if an argument is wrong, 1 if the command cannot be carried out.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        return _fail(f"the command line needs {', '.join(missing)}: pip install 'sp-lightning[cli]'", 1)
    if os.getcwd() not in sys.path:  # unlike `python -m`, a console script does not import from the current folder
        sys.path.insert(0, os.getcwd())
    try:
        if arguments[:1] == ["plan"]:
            from sp_lightning import plan_command  # needs jsonargparse

            plan_command.run(arguments[1:], f"{PROGRAM} plan")
        else:
            _run(arguments)
    except ArgumentError as error:
        command = " ".join([PROGRAM, *[name for name in arguments[:1] if name in COMMANDS]])
        return _fail(f"{one_line(str(error))} (all arguments: {command} --help)", 2)
    except Exception as error:
        if not _is_refusal(error):
            raise
        return _fail(one_line(str(error)), 1)
    return 0


def _run(arguments: list[str]) -> None:
    """Run LightningCLI in the namespace that the user's LightningModule belongs to."""
    first, *others = [name for name in _STRATEGIES if find_spec(name.partition(".")[0]) is not None]
    try:
        run_in(first, arguments)
    except ArgumentError as error:
        # The search for the model imported its module, which in turn imported the namespace that it belongs to.
        used = [name for name in others if name in sys.modules]
        if not used or "does not correspond to a subclass" not in str(error):
            raise
        run_in(used[0], arguments)


def run_in(name: str, arguments: list[str]) -> None:
    """Run the LightningCLI of one namespace, with our strategy as the default.

    Args:
        name: "lightning.pytorch" or "pytorch_lightning".
        arguments: The command line.

    Raises:
        argparse.ArgumentError: If an argument is unknown, missing or invalid.
    """
    command_line: Any = type("SuperpipelineCLI", (CommandLineMixin, import_module(f"{name}.cli").LightningCLI), {})
    quiet = {"exit_on_error": False}
    command_line(
        args=arguments,
        trainer_defaults={"strategy": {"class_path": _STRATEGIES[name]}},
        parser_kwargs={
            "prog": PROGRAM,
            "description": "Train and use models larger than the memory of the device, with PyTorch Lightning. "
            f"Before that, `{PROGRAM} plan --help`: what a model would take, on a machine of any kind.",
            **quiet,
            **{command: dict(quiet) for command in RUNS},
        },
    )


def one_line(message: str) -> str:
    """Condense an error message into one line.

    Args:
        message: A message of jsonargparse, which lists all types that a value could have had as a tree, or any other.
    """
    keys = dict.fromkeys(re.findall(r'Parser key "([^"]+)":', message))
    inner = message.partition("Problem with given class_path")[2] or message
    lines = [re.sub(r'^(- |Parser key "[^"]+":)*', "", line.strip()).strip() for line in inner.splitlines()]
    told = [line for line in dict.fromkeys(lines) if not _STRUCTURE.match(line)]
    said = "; ".join(told) or _wrong_type(inner)
    return ": ".join(filter(None, [".".join(keys), said])) or " ".join(message.split())


def _wrong_type(message: str) -> str:
    """Return which types a value could have had, and the value; nothing if the message does not say both."""
    expected = re.findall(r"Expected a ([^\n]+?)(?:\. Got|\n)", message)
    given = re.findall(r"(?:Given|Got) value: (.+)", message)
    if not (expected and given):
        return ""
    types = " or ".join(dict.fromkeys(expected))
    types = re.sub(r"<class '([\w.]+)'>|typing\.Literal\[([^]]+)\]|typing\.", r"\1\2", types)
    return f"expected {types}, got {given[0]}"


def _is_refusal(error: Exception) -> bool:
    """Tell whether Lightning or this package raised an error on purpose; anything else is a bug."""
    if any(isinstance(error, namespace(name).misconfiguration) for name in FABRIC if name in sys.modules):
        return True
    raised_in = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)][-1]
    return isinstance(error, ValueError) and Path(__file__).parent in Path(raised_in).parents


def _fail(message: str, status: int) -> int:
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    return status
