"""Fine-tune a causal language model whose weights need not fit in GPU memory.

The LightningModule below is an ordinary one, which any strategy can train. This is all it takes to keep its weights in
CPU memory and stream them through GPU memory, a few blocks at a time:

    import sp_lightning
    trainer = L.Trainer(strategy="superpipeline")
    trainer.fit(CausalLM(), TextData())

`main`, at the end of this file, does the same with options from the command line:

    sp-lightning finetune-lm                              # a tiny random model, on any machine
    sp-lightning finetune-lm --model gpt2 --text my.txt   # a model from the Hugging Face hub, your own text
    sp-lightning finetune-lm --strategy auto              # the same run without streaming, for comparison
    sp-lightning finetune-lm --precision bf16-true --optimizer int8   # with 6 bytes a parameter instead of 16
    sp-lightning finetune-lm --save-every 500 --resume                # continues where it was stopped

Without `--text`, it learns Python's own reference manual, which ships with every CPython, so nothing is downloaded.
`--save` writes an ordinary Lightning checkpoint, from which `lora_lm.py` can continue.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pickle import UnpicklingError
from typing import Any

import lightning as L
import recipe
import torch
from language_models import load, make_tokenizer, new_model
from long_runs import Loader, for_validation
from offline import read_text
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from training import Pace, begin, save_checkpoint, train

import sp_lightning

MODEL_OPTIONS = ["model", "layers", "hidden", "heads", "experts", "lr", "dtype", "weights"]
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, fused=True),  # the same kernel under every strategy
    "unfused": torch.optim.AdamW,  # Lightning clips nothing for a fused one under mixed precision
    "split": sp_lightning.optim.AdamW,  # this and the next for bf16 weights
    "int8": partial(sp_lightning.optim.AdamW, moments="int8"),
}


class CausalLM(L.LightningModule):
    """A causal language model: tiny and random, or one from the Hugging Face hub.

    Args:
        model: Name of a hub model. `None` builds a Llama-style one with random weights from the three sizes.
        layers: Number of blocks in the random model.
        hidden: Hidden size of the random model.
        heads: Number of attention heads in the random model; must divide `hidden`.
        lr: Learning rate of AdamW. `None` takes what suits the size of a pretrained model.
        dtype: Storage dtype of the weights, whatever `precision` computes in. AdamW needs `"float32"`; weights that are
            not trained (the base of adapters, generation) can use `"bfloat16"`, at half the host memory.
        generation: Arguments for transformers' `generate` in prediction.
        weights: A checkpoint of this module, with the same sizes, to start from.
        optimizer: One of `OPTIMIZERS`: AdamW, by how it keeps masters and moments (docs/optimizers.md).
        four_bit: Load the hub model with 4-bit linear layers of bitsandbytes, as a frozen base of adapters.
        experts: Number of experts in each block of the random model, two of which compute a token. 0 has none.

    """

    objective_rate = 1.0  # how much of the usual learning rate the objective takes

    def __init__(
        self,
        model: str | None = None,
        layers: int = 12,
        hidden: int = 128,
        heads: int = 4,
        lr: float | None = 1e-3,
        dtype: str = "float32",
        generation: dict[str, Any] | None = None,
        weights: str | None = None,
        optimizer: str = "adamw",
        four_bit: bool = False,
        experts: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if model is not None:
            self.model = load(model, getattr(torch, dtype), four_bit).train()
        else:
            self.model = new_model(layers, hidden, heads, experts).to(getattr(torch, dtype))
        sp_lightning.loss_in_slices(self.model)  # without all logits in memory at once
        if weights is not None:
            try:
                saved = torch.load(weights, map_location="cpu", mmap=True, weights_only=True)
                self.load_state_dict(saved["state_dict"])
            except (RuntimeError, LookupError, TypeError, UnpicklingError) as error:
                raise ValueError(f"{weights} is no checkpoint of this model and these sizes: {error}") from error

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean loss of predicting each token from those before it."""
        (tokens,) = batch
        loss = self.loss(tokens, tokens)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Log the loss on text that is not learned."""
        self.log("val_loss", self.loss(batch[0], batch[0]), prog_bar=True, sync_dist=True)

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each label from the tokens before it."""
        return self.model(input_ids=tokens, labels=labels, use_cache=False, **inputs).loss

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the tokens that transformers' `generate` appends to each prompt."""
        tokens = self.model.generate(**batch, **(self.hparams["generation"] or {}))
        return tokens[:, batch["input_ids"].shape[1] :]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the weights that are trained."""
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if (lr := self.hparams["lr"]) is None:
            is_full = all(parameter.requires_grad for parameter in self.model.parameters())
            lr = recipe.learning_rate(self.model.num_parameters(), is_full, self.objective_rate)
        return OPTIMIZERS[self.hparams["optimizer"]](trainable, lr=lr)

    @property
    def strict_loading(self) -> bool:
        """Whether a checkpoint has all weights: what is frozen is left out."""
        return all(parameter.requires_grad for parameter in self.parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the frozen base of adapters out of the checkpoint."""
        if not self.strict_loading:
            recipe.leave_out_frozen(self, checkpoint)


class TextData(L.LightningDataModule):
    """Chunks of a text, of equal length and shuffled.

    Args:
        text: A UTF-8 text file. `None` uses Python's reference manual from the standard library.
        model: Name of the hub model whose tokenizer is used. `None` tokenizes into bytes.
        batch_size: Chunks per batch.
        length: Tokens per chunk.
        stride: Tokens from the start of one chunk to the start of the next; `None` means `length`. A smaller stride
            yields more chunks from a short text.
        held_out: Share of the chunks that is not learned, but for validation.

    """

    def __init__(
        self,
        text: str | None = None,
        model: str | None = None,
        batch_size: int = 8,
        length: int = 64,
        stride: int | None = None,
        held_out: float = 0.0,
    ) -> None:
        super().__init__()
        self.text = text
        self.model = model
        self.batch_size = batch_size
        self.length = length
        self.stride = stride or length
        self.held_out = held_out

    def setup(self, stage: str) -> None:
        """Read, tokenize and cut the text."""
        tokens = torch.tensor(make_tokenizer(self.model)(read_text(self.text))["input_ids"])
        chunks = max(0, len(tokens) - self.length) // self.stride + 1
        if len(tokens) < self.length or chunks < self.batch_size:
            raise ValueError(
                f"the text has {len(tokens)} tokens, but one batch takes {self.batch_size} chunks of {self.length}: "
                f"give a longer text, a smaller batch, shorter chunks or a smaller stride"
            )
        self.learned: Dataset[Any] = TensorDataset(tokens.unfold(0, self.length, self.stride))
        if self.held_out:
            shares = [1 - self.held_out, self.held_out]
            self.learned, self.kept = random_split(self.learned, shares, torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[Any]:
        """Return full batches in random order."""
        return Loader(self.learned, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        """Return what is held out, if anything is."""
        return [for_validation(self.kept, self.batch_size)] if self.held_out else []


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, steps=100, batch_size=8, lr=1e-3, lr_by_size=True)
    recipe.add_long_run(parser, "runs/finetune_lm")
    add_model_and_text(parser)
    parser.add_argument("--save", type=recipe.new_file, metavar="FILE", help="write a checkpoint when training is over")
    add_optimizer(parser)
    options = recipe.parse(parser, arguments, data="text", best=("val_loss", "min"), always_validates=False)
    check_sizes(parser, options)
    check_optimizer(parser, options)
    return options


def add_model_and_text(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model and its training text."""
    data = add_model(parser)
    data.add_argument(
        "--text", type=recipe.file, metavar="FILE", help="UTF-8 text to learn (default: Python's reference manual)"
    )
    data.add_argument("--length", type=recipe.positive, default=64, help="tokens in a row (default: %(default)s)")
    data.add_argument("--stride", type=recipe.positive, help="tokens from row to row of the text (default: --length)")


def text_data(options: argparse.Namespace) -> TextData:
    """Return the training text; a twentieth of it is for validation, if that is asked for."""
    names = ["text", "model", "batch_size", "length", "stride"]
    return TextData(**{name: getattr(options, name) for name in names}, held_out=0.05 if options.eval_every else 0.0)


def add_model(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options for the model, and return their group, for those for its data."""
    data = parser.add_argument_group("model and data")
    data.add_argument(
        "--model", metavar="NAME", help="a causal language model from the Hugging Face hub, or its folder"
    )
    data.add_argument(
        "--weights", type=recipe.file, metavar="FILE", help="start from a checkpoint of finetune_lm.py --save"
    )
    data.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="dtype of weights in CPU memory (default: %(default)s)",
    )
    for name, size, what in [("layers", 12, "blocks"), ("hidden", 128, "width"), ("heads", 4, "heads")]:
        data.add_argument(
            f"--{name}", type=recipe.positive, default=size, help=f"{what}, without --model (default: %(default)s)"
        )
    data.add_argument(
        "--experts", type=recipe.whole, default=0, help="experts in a block, without --model (default: none)"
    )
    return data


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    """Add the option for the optimizer."""
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="torch's AdamW, fused (adamw) or not (unfused); with bf16-true also sp_lightning.optim's, in 12 bytes a "
        "parameter (split), or in 6 with moments in 8 bits (int8) (default: %(default)s)",
    )


def check_optimizer(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Report an optimizer that the weights' dtype is not for, and take one whose gradients can be clipped."""
    if options.optimizer in ("split", "int8") and options.precision != "bf16-true":
        parser.error(f"--optimizer {options.optimizer} is for bf16 weights: add --precision bf16-true")
    if options.optimizer == "adamw" and options.clip and options.precision.endswith("mixed"):
        options.optimizer = "unfused"


def check_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Report sizes that do not describe a model."""
    if options.model is None and (options.hidden % options.heads or options.hidden // options.heads % 2):
        parser.error(f"--hidden {options.hidden} must be an even multiple of --heads {options.heads}")


def train_on_text(options: argparse.Namespace, model: L.LightningModule, save: Callable[[L.Trainer], None]) -> None:
    """Train a language model on the text of the command line."""
    train(
        options,
        model,
        text_data(options),
        callbacks=[],
        pace=Pace(lambda batch: batch[0].numel()),
        save=save,
        **recipe.length_of(options),
        limit_val_batches=None if options.eval_every else 0,  # of the text, all is learned
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, then print how the loss fell and what was streamed."""
    options = parse(arguments)
    begin(options)
    with recipe.one_line(options.model):
        model = CausalLM(**{name: getattr(options, name) for name in [*MODEL_OPTIONS, "optimizer"]})

    train_on_text(options, model, save=partial(save_checkpoint, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
