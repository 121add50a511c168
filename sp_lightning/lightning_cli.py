"""A LightningCLI for any LightningModule, in the namespace that it belongs to, with our strategy as the default.

It needs jsonargparse, which the extra `sp-lightning[cli]` installs, and nothing imports it before it is used.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

PROGRAM = "sp-lightning"
RUNS = ("fit", "validate", "test", "predict")
"""The commands of LightningCLI."""

STRATEGIES = {
    "lightning.pytorch": "sp_lightning.SuperpipelineStrategy",
    "pytorch_lightning": "sp_lightning.pytorch_lightning.SuperpipelineStrategy",
}
"""Each namespace, and our strategy for its Trainer."""

Result = TypeVar("Result")


def in_the_namespace_of_the_model(call: Callable[[str], Result]) -> Result:
    """Call a function with the name of the namespace that the user's LightningModule belongs to."""
    first, *others = [name for name in STRATEGIES if find_spec(name.partition(".")[0]) is not None]
    try:
        return call(first)
    except argparse.ArgumentError as error:
        # The search for the model imported its module, which in turn imported the namespace that it belongs to.
        used = [name for name in others if name in sys.modules]
        if not used or "does not correspond to a subclass" not in str(error):
            raise
        in_first = error
    try:
        return call(used[0])
    except argparse.ArgumentError as error:
        if 'Parser key "model"' not in str(error):
            raise
    # the model belongs to neither, or to the first: then the data does not belong there
    raise in_first


def in_one_sentence(error: argparse.ArgumentError) -> str:
    """Say what is wrong with an argument. For a class, leave out jsonargparse's list of all types that it has tried."""
    text = re.sub(rf"(?<=required: )({'|'.join(RUNS)})\.model", "--model", str(error))
    option = re.match(r'Parser key "(model|data)"', text)
    cause = cause_of(error)
    if option is not None and cause is not None:
        reason = " ".join(str(cause).split())
        if isinstance(cause, (argparse.ArgumentError, TypeError, ValueError)):  # jsonargparse's own
            return f"`--{option[1]}`: {reason}"
        return f"`--{option[1]}` cannot be imported: {type(cause).__name__}: {reason}"
    options = re.findall(r'Parser key "([\w.]+)"', text)
    if len(options) != 1:  # of a class, within a class; or none that can be parsed
        return re.sub(
            r"^argument (--\S+): expected one argument", r"`\1` needs a value, after `=` if that begins with -", text
        )
    known = ", ".join(re.findall(r"Expected a typing\.Literal\[(.*?)\]", text))
    given = re.findall(r"(?:Got|Given) value: (.*)", text)
    if known and given:
        return f"`--{options[0]}`: {given[-1]!r} is not one of {known.replace(chr(39), '')}"
    reason = re.sub(r"<class '(\w+)'>", r"\1", text.partition(":")[2])
    return f"`--{options[0]}`: {' '.join(reason.split())}"


def cause_of(error: BaseException) -> BaseException | None:
    """Return the error behind jsonargparse's lists of all types that it has tried."""
    cause: BaseException | None = error
    while cause is not None and "Union subtypes" in str(cause):
        cause = cause.__cause__
    return cause


def command_line(namespace: str) -> Any:
    """Return the LightningCLI of a namespace."""
    return import_module(f"{namespace}.cli").LightningCLI


def arguments_of_cli(namespace: str) -> dict[str, Any]:
    """Return the arguments of a LightningCLI: our strategy is its default, and it raises its errors."""
    raises = {"exit_on_error": False}
    return {
        "trainer_defaults": {"strategy": {"class_path": STRATEGIES[namespace]}},
        "parser_kwargs": {
            "prog": PROGRAM,
            "description": "Train and use models larger than GPU memory, with PyTorch Lightning.",
            **raises,
            **{command: dict(raises) for command in RUNS},
        },
        # without a logger it is written to the same place in each run
        "save_config_kwargs": {"overwrite": True},
    }
