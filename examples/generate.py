"""Generate text with a causal language model larger than the device, a batch of prompts at a time: `trainer.predict`.

transformers' own `generate` does the work, with its key/value cache on the device. Every new token moves the whole
model through the device once, for all prompts of a batch together. So make batches large: until computing takes as long
as copying, a batch of twice the size takes the same time.

    python examples/generate.py                                   # learns a short text first, on any machine
    python examples/generate.py --weights lm.ckpt "The with statement"     # a checkpoint from finetune_lm.py --save
    python examples/generate.py --model Qwen/Qwen2.5-14B --dtype bfloat16 --prompts prompts.txt --batch-size 64
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import finetune_lm
import lightning as L
import recipe
from finetune_lm import CausalLM, make_tokenizer
from lightning.pytorch.callbacks import BasePredictionWriter
from offline import zen_of_python
from torch import Tensor
from torch.utils.data import DataLoader

PROMPTS = ["Beautiful is", "Explicit is better", "Errors should", "Although practicality"]

LESSON = ["--layers=6", "--hidden=64", "--steps=120", "--batch-size=13", "--stride=1", "--lr=3e-3"]


class Prompts(L.LightningDataModule):
    """Prompts, padded on the left to the longest one in their batch.

    Args:
        prompts: The prompts; `None` uses the beginnings of four lines of the Zen of Python.
        file: A UTF-8 file with a prompt in each line, used instead of `prompts`.
        model: Name of the hub model whose tokenizer is used. `None` tokenizes into bytes.
        batch_size: Prompts per batch.

    """

    def __init__(
        self,
        prompts: list[str] | None = None,
        file: str | None = None,
        model: str | None = None,
        batch_size: int = 8,
    ) -> None:
        super().__init__()
        self.prompts = Path(file).read_text(encoding="utf-8").splitlines() if file else prompts or PROMPTS
        self.tokenizer = make_tokenizer(model)
        # The byte tokenizer has no token for the beginning of a text, and would append its end token to the prompt.
        self.add_special_tokens = model is not None
        self.batch_size = batch_size

    def collate(self, prompts: list[str]) -> dict[str, Tensor]:
        """Tokenize a batch."""
        tokens = self.tokenizer(
            prompts,
            padding=True,
            add_special_tokens=self.add_special_tokens,
            return_token_type_ids=False,
            return_tensors="pt",
        )
        return dict(tokens)

    def predict_dataloader(self) -> DataLoader[str]:
        """Return the prompts in order."""
        return DataLoader(self.prompts, batch_size=self.batch_size, collate_fn=self.collate)


class PrintTexts(BasePredictionWriter):
    """Prints each prompt with its continuation as soon as its batch is done."""

    def __init__(self) -> None:
        super().__init__("batch")

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Tensor,
        batch_indices: Sequence[int] | None,
        batch: dict[str, Tensor],
        *_: Any,
    ) -> None:
        """Print the texts of a batch."""
        decode = trainer.datamodule.tokenizer.batch_decode
        prompts = decode(batch["input_ids"], skip_special_tokens=True)
        for prompt, text in zip(prompts, decode(prediction, skip_special_tokens=True), strict=True):
            print(f"{prompt!r} -> {text!r}")


def learn_the_zen(checkpoint: Path, accelerator: str) -> None:
    """Make finetune_lm.py learn the Zen of Python by heart, so that there is something to generate."""
    text = checkpoint.with_name("zen.txt")
    text.write_text(zen_of_python(), encoding="utf-8")
    finetune_lm.main([*LESSON, f"--text={text}", f"--save={checkpoint}", f"--accelerator={accelerator}"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    parser.add_argument("prompt", nargs="*", help="texts to continue")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="NAME", help="a causal language model from the Hugging Face hub")
    source.add_argument("--weights", type=recipe.file, metavar="FILE", help="a checkpoint of finetune_lm.py")
    parser.add_argument("--prompts", type=recipe.file, metavar="FILE", help="a UTF-8 file with a prompt in each line")
    parser.add_argument(
        "--batch-size", type=recipe.positive, default=8, help="prompts per batch (default: %(default)s)"
    )
    parser.add_argument(
        "--new-tokens", type=recipe.positive, default=32, help="maximum per prompt (default: %(default)s)"
    )
    parser.add_argument("--sample", action="store_true", help="sample tokens instead of taking the most likely")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="storage dtype of the weights (default: %(default)s)",
    )
    return recipe.parse(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Load or train a model, then print its continuation of each prompt."""
    options = parse(arguments)
    choices = {
        "generation": {"max_new_tokens": options.new_tokens, "do_sample": options.sample},
        "dtype": options.dtype,
    }
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.weights
        if options.model is None and checkpoint is None:
            checkpoint = Path(folder, "zen.ckpt")
            learn_the_zen(checkpoint, options.accelerator)
        if checkpoint is None:
            model = CausalLM(options.model, **choices)
        else:
            model = CausalLM.load_from_checkpoint(checkpoint, map_location="cpu", weights=None, **choices)
    L.seed_everything(options.seed, verbose=False)
    trainer = L.Trainer(
        strategy=options.strategy,  # `SuperpipelineStrategy()`, unless the command line says otherwise
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        callbacks=[PrintTexts(), *options.callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    data = Prompts(options.prompt, options.prompts, model.hparams["model"], options.batch_size)
    trainer.predict(model, data, return_predictions=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
