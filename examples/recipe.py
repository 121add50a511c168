"""What the example scripts share: command-line options, and a record of losses. A script of your own needs neither."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import needed  # noqa: F401
import torch
from data_files import Skipped
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from long_runs import prepare_long_run, say
from offline import read_examples

import sp_lightning

PRECISIONS = ["32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]

TINY_MODELS = ("vit", "resnet")  # names that stand for no pretrained model


def positive(text: str) -> int:
    """Parse an integer of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 1")
    return int(text)


def whole(text: str) -> int:
    """Parse an integer of at least zero."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 0")
    return int(text)


def seed(text: str) -> int:
    """Parse an integer that random numbers begin with."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 0 and below 2^32")
    return int(text)


def amount(text: str) -> float:
    """Parse a number of at least zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return number


def auto_or_positive(text: str) -> int | str:
    """Parse `auto` or an integer of at least one."""
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text} is neither 'auto' nor an integer of at least 1")
    return text if text == "auto" else int(text)


def file(text: str) -> str:
    """Parse the name of a file that exists."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file")
    return text


def folder(text: str) -> str:
    """Parse the name of a folder that exists."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return text


def new_folder(text: str) -> str:
    """Parse the name of a folder, which is made now, so that what is written after hours has a place."""
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: a file, not a folder")
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=text).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: nothing can be written there: {error.strerror}") from None
    return text


def new_file(text: str) -> str:
    """Parse the name of a file to be written, whose folder is made now."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: a folder, not a file")
    new_folder(str(Path(text).parent))
    return text


def texts(text: str) -> str:
    """Parse the name of a file, or of a folder with text in it."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or folder")
    if Path(text).is_dir() and not any(Path(text).glob("*.txt")):
        raise argparse.ArgumentTypeError(f"{text}: no .txt file in this folder")
    return text


def examples(text: str) -> str:
    """Parse the name of a file of images and answers, all of whose images exist."""
    try:
        read_examples(file(text), Skipped())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options for devices, precision and streaming; each script adds its own."""
    parser = Parser(
        prog=f"sp-lightning {Path(sys.argv[0]).stem.replace('_', '-')}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("running")
    run.add_argument("--seed", type=seed, default=0, help="seed of weights and order (default: %(default)s)")
    run.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="(default: %(default)s)")
    run.add_argument("--devices", type=positive, default=1, help="number of GPUs (default: %(default)s)")
    run.add_argument("--precision", choices=PRECISIONS, default="32-true", help="the Trainer's (default: %(default)s)")
    stream = parser.add_argument_group("streaming")
    stream.add_argument("--strategy", choices=["superpipeline", "auto"], default="superpipeline", help="auto is plain")
    stream.add_argument("--k", type=auto_or_positive, default="auto", help="units in GPU memory (default: %(default)s)")
    stream.add_argument("--k-prime", type=positive, default=1, help="neighbors in a unit (default: %(default)s)")
    stream.add_argument("--memory-budget", metavar="SIZE", help="GPU memory that a step may use, such as 12GB")
    stream.add_argument(
        "--activations",
        choices=["auto", "keep", "recompute", "offload"],
        default="auto",
        help="what happens to activations (default: %(default)s)",
    )
    stream.add_argument(
        "--optimizer-on",
        choices=["auto", "host"],
        default="auto",
        help="update units where it is fastest, or on the CPU",
    )
    stream.add_argument(
        "--nvme-path", type=folder, metavar="FOLDER", help="a drive for optimizer state that RAM has no room for"
    )
    return parser


def add_training(
    parser: argparse.ArgumentParser,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None,
    lr: float,
    lr_by_size: bool = False,
) -> None:
    """Add the options of a training run, counted in steps or in epochs, with a script's own defaults.

    These are for the tiny model: with `--model`, a run of `add_long_run` is one epoch by default. With `lr_by_size`,
    `--model` without `--lr` leaves the learning rate to `learning_rate`. Without a `batch_size`, the script chooses it
    by the model: one with `--model`.
    """
    train = parser.add_argument_group("training")
    if epochs:
        train.add_argument("--epochs", type=positive, help=f"(default: {epochs}, or 1 with --model)")
    else:
        often = f"default: {steps}, or an epoch with --model" if steps else "instead of --hours"
        train.add_argument("--steps", type=positive, help=f"steps of the optimizer ({often})")
    size = "rows in a batch " + ("(default: %(default)s)" if batch_size else "(default: 64, or 1 with --model)")
    train.add_argument("--batch-size", type=positive, default=batch_size, help=size)
    by_size = "; with --model, what suits its size" if lr_by_size else ""
    train.add_argument("--lr", type=amount, help=f"learning rate (default: {lr}{by_size})")
    parser.set_defaults(usual_lr=lr, lr_by_size=lr_by_size, usual_steps=steps, usual_epochs=epochs)


def add_long_run(parser: argparse.ArgumentParser, output: str) -> None:
    """Add the options of runs that take hours."""
    options = parser.add_argument_group("long runs")
    options.add_argument("--clip", type=amount, metavar="NORM", help="clip gradients to this norm")
    options.add_argument("--accumulate", type=positive, default=1, metavar="N", help="batches in a step (default: 1)")
    options.add_argument("--warmup", type=whole, default=0, metavar="N", help="steps in which the learning rate rises")
    options.add_argument(
        "--schedule", choices=["constant", "cosine"], default="constant", help="learning rate after --warmup"
    )
    options.add_argument("--eval-every", type=positive, metavar="N", help="validate every N batches")
    options.add_argument(
        "--save-every",
        type=positive,
        metavar="N",
        help="write a checkpoint every N steps (default with --model: each tenth of the run, at most 100 steps)",
    )
    options.add_argument(
        "--log-every", type=positive, default=10, metavar="N", help="log a line every N steps (default: 10)"
    )
    options.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="continue from the last checkpoint in --output, if there is one (default with --model, if it is one of "
        "the same command)",
    )
    options.add_argument(
        "--output",
        type=new_folder,
        metavar="FOLDER",
        help=f"for logs and checkpoints (default: {output}, with a number if another command's run is there)",
    )
    parser.set_defaults(usual_output=output)


def parse(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    *,
    data: str | None = None,
    best: tuple[str, str] | None = None,
    always_validates: bool = True,
) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins.

    `strategy`, `callbacks` and `accelerator` of the result are what the Trainer takes. `resume` is the checkpoint to go
    on from, if there is one; `lr` is `None` where the model chooses; `given` has all options as they were given;
    `missing` is the option for data, if a pretrained model would learn from a toy data set.

    Args:
        parser: Has the recipe's options.
        arguments: The command line.
        data: The option for the user's data.
        best: The metric by which the best checkpoint is kept, and whether it is at its `"min"` or `"max"`.
        always_validates: Whether that metric is there without `--eval-every`.

    """
    options = parser.parse_args(arguments)
    options.is_pretrained = getattr(options, "model", None) not in (None, *TINY_MODELS)
    if options.is_pretrained and not Path(options.model).is_dir() and is_path(options.model):
        parser.error(f"argument --model: {options.model}: no such folder")
    is_one_epoch = options.is_pretrained and hasattr(options, "save_every")
    if getattr(options, "epochs", 0) is None:
        options.epochs = 1 if is_one_epoch else options.usual_epochs
    elif getattr(options, "steps", 0) is None and not is_one_epoch:
        options.steps = options.usual_steps
    of_parser = ("usual_lr", "lr_by_size", "usual_steps", "usual_epochs", "usual_output", "is_pretrained")
    options.given = {name: value for name, value in vars(options).items() if name not in of_parser}
    lacks_data = data is not None and getattr(options, data) is None and options.is_pretrained
    options.missing = data if lacks_data else None
    options.callbacks = []
    if options.strategy == "superpipeline":
        try:
            options.strategy = sp_lightning.SuperpipelineStrategy(**streaming(options))
        except (ValueError, MisconfigurationException) as error:
            parser.error(str(error))
        options.callbacks = [sp_lightning.SuperpipelineCallback()]  # says at the end what limits a step
        if options.accelerator == "auto" and torch.backends.mps.is_available():
            options.accelerator = "cpu"  # Lightning would choose a Mac's GPU, which cannot stream
    if getattr(options, "lr", 0) is None and not (options.lr_by_size and options.model):
        options.lr = options.usual_lr
    if hasattr(options, "save_every"):
        try:
            prepare_long_run(options, data, best if always_validates or options.eval_every else None)
            new_folder(options.output)
        except argparse.ArgumentTypeError as error:
            parser.error(f"--output: {error}")
        except ValueError as error:
            parser.error(str(error))
    return options


def is_path(model: str) -> bool:
    """Tell whether the name of a model can only be that of a folder: the hub has no such names."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or Path(model).is_file()


def length_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the Trainer's arguments for how long to train: steps, or one epoch."""
    return {"max_epochs": 1} if options.steps is None else {"max_steps": options.steps}


def streaming(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a strategy that were given on the command line."""
    names = ["k", "k_prime", "memory_budget", "activations", "optimizer_on", "nvme_path"]
    given = {name: getattr(options, name) for name in names}
    is_compiled = getattr(options, "fp8", False) and is_on_gpu(options)
    return {**given, "compile": True} if is_compiled else given  # or casts to FP8 would pass over memory many times


def is_on_gpu(options: argparse.Namespace) -> bool:
    """Tell whether a recipe runs on a GPU of CUDA."""
    return options.accelerator != "cpu" and torch.cuda.is_available()


# parts of the errors of transformers and diffusers about a model that they do not find
_NOT_FOUND = ("couldn't connect", "annot connect", "is not a local folder", "Repo id must", "model_index.json")


@contextlib.contextmanager
def one_line(model: str | None = None) -> Iterator[None]:
    """Report what is wrong with a user's model or data in one line, without a traceback."""
    try:
        yield
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())
        if model is not None and any(part in text for part in _NOT_FOUND):
            hub = "the hub has no such model for this recipe, or is not reached"
            text = f"--model {model}: there is no such folder, and {hub}"
        sys.exit(f"error: {text}")


def fit(trainer: L.Trainer, *arguments: Any, **options: Any) -> None:
    """Call `trainer.fit`, and report in one line that the memory budget is too small for this model."""
    try:
        trainer.fit(*arguments, **options)
    except ValueError as error:
        if not str(error).startswith("`memory_budget="):
            raise
        sys.exit(f"error: {error}")


def learning_rate(parameters: int, is_full: bool, part: float = 1.0) -> float:
    """Return a learning rate that suits a pretrained model of this size, and say so.

    It falls with the cube root of the size, from 4e-5 for GPT-2 to 1e-5 for a model of 8 billion parameters and 5e-6
    for one of 70, as recipes for these do; adapters (LoRA) take ten times as much.

    Args:
        parameters: Number of all parameters.
        is_full: Whether all of them are trained, or adapters alone.
        part: What an objective takes of it.

    """
    rate = float(f"{1e-5 * (8e9 / parameters) ** (1 / 3) * (1 if is_full else 10) * part:.0e}")
    trained = "full training" if is_full else "adapters"
    say(f"Learning rate {rate:.0e}, as suits {trained} of {parameters / 1e9:.2g} B parameters; --lr takes another")
    return rate


def moment(trainer: L.Trainer) -> str:
    """Return when a validation takes place: after an epoch, or every so many batches."""
    if trainer.check_val_every_n_epoch is None:
        return f"Step {trainer.global_step}"
    return f"Epoch {trainer.current_epoch + 1}"


def leave_out_frozen(module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Keep only trained weights in a checkpoint that is about to be saved."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    state = checkpoint["state_dict"]
    checkpoint["state_dict"] = {name: value for name, value in state.items() if name in trained}


class Losses(L.Callback):
    """Records the loss of every batch, the optimizer's steps and the total training time."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.steps = 0
        self.seconds = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.start = time.perf_counter()
        self.steps_before = trainer.global_step  # a run that is resumed has taken some

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """Record the loss of this batch."""
        self.values.append(float(outputs["loss"]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self.start
        self.steps = trainer.global_step - self.steps_before

    def __str__(self) -> str:
        """Return the first and the last loss, and the time, in one line."""
        if not self.values:
            return "Loss: no step was taken"
        first, last = self.values[0], self.values[-1]
        return f"Loss: first {first:.4f}, last {last:.4f} ({self.steps} steps in {self.seconds:.1f} s)"
