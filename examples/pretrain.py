"""Pretrain a language model from scratch in a budget of time, as Cramming does (arXiv 2212.14034).

`--hours` says how long to train; the number of steps and tokens follows from the machine. The learning rate has a
one-cycle schedule over this time: it rises for one half of it, and falls to zero in the other.

    sp-lightning pretrain                           # a tiny masked model, in half a minute
    sp-lightning pretrain --objective causal        # a tiny model that predicts the next token
    sp-lightning pretrain --steps 100               # a budget of steps: the same numbers each time
    sp-lightning pretrain --model google-bert/bert-large-uncased --text FOLDER --hours 24 --save bert.ckpt
    sp-lightning pretrain --model google-bert/bert-large-uncased --text FOLDER --hours 24 --resume bert.ckpt

`--model` names the architecture and the tokenizer; its weights are not read. With `--save`, a checkpoint is written
every quarter of an hour and at the end. With `--resume`, a run continues from a checkpoint, with the time and tokens
that are left. Without `--text`, it learns Python's reference manual.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import recipe
import torch
from finetune_lm import TextData, make_tokenizer
from float8 import add_fp8, check_fp8, prepare_fp8
from lightning.pytorch.callbacks import ModelCheckpoint
from long_runs import Loader
from torch import Tensor
from torch.utils.data import DataLoader
from training import Pace, begin
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, LlamaConfig

import sp_lightning

HIDDEN = 0.25  # the share of tokens that a masked model has to guess
IGNORED = -100


class Budget(L.Callback):
    """Ends training when the time is up, and lets the learning rate follow the time; counts tokens.

    Checkpoints contain what has been used.

    Args:
        hours: The time for training. `None` takes the Trainer's `max_steps` as the budget instead.

    Raises:
        ValueError: If there is no time.

    """

    def __init__(self, hours: float | None = 0.01) -> None:
        if hours is not None and not hours > 0:
            raise ValueError(f"a budget of {hours} hours leaves no time to train: it must be above 0")
        self.seconds = None if hours is None else hours * 3600
        self.used, self.tokens = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return what has been used, for a checkpoint."""
        return {"used": self.used, "tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.used, self.tokens = state_dict["used"], state_dict["tokens"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock, or go on."""
        self.start = time.perf_counter() - self.used
        trainer.should_stop = self.part(trainer) >= 1

    def part(self, trainer: L.Trainer) -> float:
        """Return the part of the budget that is used."""
        return trainer.global_step / trainer.max_steps if self.seconds is None else self.used / self.seconds

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Set the learning rate of this step: a line up and a line down, with the optimizer's own at the top."""
        for group in [group for optimizer in trainer.optimizers for group in optimizer.param_groups]:
            top = group.setdefault("initial_lr", group["lr"])
            group["lr"] = top * (1 - abs(2 * self.part(trainer) - 1))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: dict[str, Tensor], *_: Any
    ) -> None:
        """Look at the clock, which is the first device's if there are several, so that all agree."""
        self.tokens += batch["input_ids"].numel() * trainer.world_size
        self.used = trainer.strategy.broadcast(time.perf_counter() - self.start)
        trainer.should_stop = trainer.should_stop or self.part(trainer) >= 1

    def __str__(self) -> str:
        """Return what was used, in one line."""
        budget = "" if self.seconds is None else f" of {self.seconds:.1f}"
        speed = self.tokens / max(self.used, 1e-9)
        return f"Budget: {self.used:.1f}{budget} s, {self.tokens:,} tokens, {speed:,.0f} tokens/s"


class NewLM(L.LightningModule):
    """A language model with new weights, masked or causal.

    Args:
        model: Name of a hub model whose architecture is used. `None` builds a small one from the three sizes.
        objective: `"masked"` guesses tokens that are hidden; `"causal"` predicts each token from those before it.
        layers: Number of blocks in the small model.
        hidden: Hidden size of the small model.
        heads: Number of attention heads in the small model; must divide `hidden`.
        lr: Learning rate of AdamW, at the top of the schedule.

    """

    def __init__(
        self,
        model: str | None = None,
        objective: str = "masked",
        layers: int = 4,
        hidden: int = 128,
        heads: int = 4,
        lr: float = 2e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        kind, family = {
            "masked": (AutoModelForMaskedLM, BertConfig),
            "causal": (AutoModelForCausalLM, LlamaConfig),
        }[objective]
        if model is not None:
            config = AutoConfig.from_pretrained(model)
        else:
            config = family(
                vocab_size=len(make_tokenizer(None)),
                hidden_size=hidden,
                intermediate_size=4 * hidden,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                # transformers' default is meant for larger models; a small one learns slowly with it
                initializer_range=hidden**-0.5,
            )
        self.model = kind.from_config(config).float().train()
        if objective == "causal":
            sp_lightning.loss_in_slices(self.model)  # without all logits in memory at once

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of the tokens to guess, as transformers computes it."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss on a text that is not learned."""
        self.log("test_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all weights, with the same kernel under every strategy."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], fused=True)


class Texts(TextData):
    """Chunks of a text; the tokens to guess are hidden anew each time.

    Args:
        text: A UTF-8 text file, or a folder with `.txt` files. `None` uses Python's reference manual.
        model: Name of the hub model whose tokenizer is used. `None` tokenizes into bytes.
        objective: As in the model.
        batch_size: Chunks per batch.
        length: Tokens per chunk.

    """

    def __init__(
        self,
        text: str | None = None,
        model: str | None = None,
        objective: str = "masked",
        batch_size: int = 16,
        length: int = 64,
    ) -> None:
        super().__init__(text, model, batch_size, length, held_out=0.05)
        tokenizer = make_tokenizer(model)
        # Text never becomes the byte tokenizer's token for what is unknown: it takes the place of what is hidden.
        self.mask = tokenizer.unk_token_id if model is None else tokenizer.mask_token_id
        self.masked = objective == "masked"
        if self.masked and self.mask is None:
            raise ValueError(f"the tokenizer of {model} has no token for what is hidden: take `causal`")

    def collate(self, chunks: list[tuple[Tensor]]) -> dict[str, Tensor]:
        """Hide tokens of a batch, unless the model cannot see what comes next anyway."""
        tokens = torch.stack([chunk for (chunk,) in chunks])
        if not self.masked:
            return {"input_ids": tokens, "labels": tokens}
        hidden = torch.rand(tokens.shape) < HIDDEN
        return {"input_ids": tokens.masked_fill(hidden, self.mask), "labels": tokens.masked_fill(~hidden, IGNORED)}

    def train_dataloader(self) -> DataLoader[Any]:
        """Return full batches in random order."""
        return Loader(self.learned, self.batch_size, shuffle=True, drop_last=True, collate_fn=self.collate)

    val_dataloader = L.LightningDataModule.val_dataloader  # none: what was put aside is for the test alone

    def test_dataloader(self) -> DataLoader[Any]:
        """Return what was put aside."""
        return DataLoader(self.kept, self.batch_size, collate_fn=self.collate)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, steps=None, batch_size=16, lr=2e-3)
    parser.add_argument("--hours", type=float, default=0.01, help="time for training (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="a model of the hub, for its architecture and tokenizer")
    parser.add_argument("--objective", choices=["masked", "causal"], default="masked", help="(default: %(default)s)")
    parser.add_argument("--text", type=recipe.texts, metavar="PATH", help="a UTF-8 file, or a folder of .txt files")
    parser.add_argument("--length", type=recipe.positive, default=64, help="tokens in a chunk (default: %(default)s)")
    parser.add_argument(
        "--save",
        type=recipe.new_file,
        metavar="FILE.ckpt",
        help="write a checkpoint every quarter of an hour and at the end",
    )
    parser.add_argument("--resume", type=recipe.file, metavar="FILE", help="a checkpoint written by --save")
    add_fp8(parser)
    options = recipe.parse(parser, arguments, data="text")
    check_fp8(parser, options)
    try:
        options.budget = Budget(None if options.steps else options.hours)
    except ValueError as error:
        parser.error(f"--hours: {error}")
    if options.save is not None:
        path = Path(options.save)
        often = {"train_time_interval": timedelta(minutes=15), "enable_version_counter": False}
        options.callbacks.append(ModelCheckpoint(path.parent, path.stem, **often))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train until the budget is used, then print what it bought."""
    options = parse(arguments)
    begin(options)
    losses = recipe.Losses()
    trainer = L.Trainer(
        strategy=options.strategy,  # `SuperpipelineStrategy()`, unless the command line says otherwise
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        max_steps=options.steps or -1,
        max_epochs=-1,
        callbacks=[losses, options.budget, *options.callbacks, Pace(lambda batch: batch["input_ids"].numel())],
        logger=False,
        enable_checkpointing=options.save is not None,
        enable_model_summary=False,
    )
    with recipe.one_line(options.model):
        model = NewLM(options.model, options.objective, lr=options.lr)
        data = Texts(options.text, options.model, options.objective, options.batch_size, options.length)
    prepare_fp8(options, model)
    recipe.fit(trainer, model, data, ckpt_path=options.resume)
    if options.save is not None:
        trainer.save_checkpoint(options.save)
    (after,) = trainer.test(model, data, verbose=False)
    recipe.say(losses)
    recipe.say(options.budget)
    recipe.say(f"Loss on text that was put aside: {after['test_loss']:.4f}")
    if options.save is not None:
        recipe.say(f"Checkpoint in {options.save}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
