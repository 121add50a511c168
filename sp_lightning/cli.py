"""`sp-lightning fit|validate|test|predict|plan`: the strategy from the command line.

The first four are a LightningCLI for any LightningModule, with our strategy as the default. `plan` predicts what a
model would take, without the machine for it (`plan_command.py`).

Nothing else imports this module: it needs jsonargparse, which the extra `sp-lightning[cli]` installs.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentError
from importlib import import_module
from importlib.util import find_spec
from typing import Any

PROGRAM = "sp-lightning"
RUNS = ("fit", "validate", "test", "predict")
"""The commands of LightningCLI."""

_STRATEGIES = {
    "lightning.pytorch": "sp_lightning.SuperpipelineStrategy",
    "pytorch_lightning": "sp_lightning.pytorch_lightning.SuperpipelineStrategy",
}
_NEEDED = ("jsonargparse", "docstring_parser", "typeshed_client")  # what `jsonargparse[signatures]` installs


def main() -> int:
    """Run `sp-lightning` with the arguments in `sys.argv`.

    Returns:
        The exit status: 0 on success, 2 if an argument is wrong, 1 if the command line is not installed.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        return _fail(f"the command line needs {', '.join(missing)}: pip install 'sp-lightning[cli]'", 1)
    if os.getcwd() not in sys.path:  # unlike `python -m`, a console script does not import from the current folder
        sys.path.insert(0, os.getcwd())
    command, arguments = sys.argv[1:2], sys.argv[2:]
    try:
        if command == ["plan"]:
            from sp_lightning import plan_command  # needs jsonargparse

            plan_command.run(arguments, f"{PROGRAM} plan")
        else:
            _run()
    except ArgumentError as error:
        return _fail(str(error), 2)
    return 0


def _run() -> None:
    """Run LightningCLI in the namespace that the user's LightningModule belongs to."""
    first, *others = [name for name in _STRATEGIES if find_spec(name.partition(".")[0]) is not None]
    try:
        _run_in(first)
    except ArgumentError as error:
        # The search for the model imported its module, which in turn imported the namespace that it belongs to.
        used = [name for name in others if name in sys.modules]
        if not used or "does not correspond to a subclass" not in str(error):
            raise
        _run_in(used[0])


def _run_in(name: str) -> None:
    """Run the LightningCLI of one namespace, with our strategy as the default."""
    command_line: Any = import_module(f"{name}.cli").LightningCLI
    raises = {"exit_on_error": False}
    command_line(
        trainer_defaults={"strategy": {"class_path": _STRATEGIES[name]}},
        parser_kwargs={
            "prog": PROGRAM,
            "description": "Train and use models larger than the memory of the device, with PyTorch Lightning. "
            f"Before that, `{PROGRAM} plan --help`: what a model would take, on a machine of any kind.",
            **raises,
            **{command: dict(raises) for command in RUNS},
        },
        save_config_kwargs={"overwrite": True},  # without a logger it is written to the same place in each run
    )


def _fail(message: str, status: int) -> int:
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    return status
