"""Fine-tune a causal language model whose weights need not fit the device.

The LightningModule below is a plain one, which any strategy trains. `strategy="superpipeline"` alone makes the Trainer
keep the weights in host memory and pass them, a few blocks at a time, through the device.

    python examples/finetune_lm.py                              # a tiny random model, below a minute on a laptop
    python examples/finetune_lm.py --model gpt2 --text my.txt   # a model from the Hugging Face hub, your own text
    python examples/finetune_lm.py --strategy auto              # the same run without streaming, for comparison

Without `--text` it learns Python's own reference manual, which every CPython carries: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import sp_lightning

BYTES = 256  # without a hub model the text is read byte by byte
LOGIT_SCALES = ["logit_scale", "logits_scaling", "lm_head_multiplier"]  # Cohere's, Granite's and Falcon-H1's
PRECISIONS = ["32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]


class CausalLM(L.LightningModule):
    """A causal language model: tiny and random, or one from the Hugging Face hub.

    Args:
        model: Name of a hub model. `None` builds a Llama-style one with random weights from the three sizes.
        layers: Blocks of the random model.
        hidden: Width of the random model.
        heads: Attention heads of the random model; they divide `hidden`.
        lr: Learning rate of AdamW.

    """

    def __init__(
        self, model: str | None = None, layers: int = 12, hidden: int = 128, heads: int = 4, lr: float = 3e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if model is not None:
            self.model = AutoModelForCausalLM.from_pretrained(model)
            if any(getattr(self.model.config, name, 1) != 1 for name in LOGIT_SCALES):
                raise ValueError(f"{model} scales its logits, which the loss of this example does not")
        else:
            self.model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=BYTES,
                    hidden_size=hidden,
                    intermediate_size=4 * hidden,
                    num_hidden_layers=layers,
                    num_attention_heads=heads,
                    num_key_value_heads=heads,
                    bos_token_id=None,
                    eos_token_id=None,
                )
            )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean loss of predicting each token from those before it."""
        (tokens,) = batch
        # the number that `self.model(input_ids=tokens, labels=tokens).loss` is, without all logits in memory at once
        hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        softcap = getattr(self.model.config, "final_logit_softcapping", None)  # Gemma's
        loss = sp_lightning.chunked_cross_entropy(
            hidden, head.weight, tokens, bias=head.bias, softcap=softcap, shift=True
        )
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all weights, with the same kernel under every strategy."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], fused=True)


class TextData(L.LightningDataModule):
    """Chunks of one text, cut to equal length and shuffled.

    Args:
        text: A UTF-8 text file. `None` takes Python's reference manual from the standard library.
        model: Name of the hub model whose tokenizer reads the text. `None` reads bytes.
        batch_size: Chunks in a batch.
        length: Tokens in a chunk.

    """

    def __init__(
        self, text: str | None = None, model: str | None = None, batch_size: int = 8, length: int = 64
    ) -> None:
        super().__init__()
        self.text = text
        self.model = model
        self.batch_size = batch_size
        self.length = length

    def setup(self, stage: str) -> None:
        """Read, tokenize and cut the text."""
        text = read_text(self.text)
        if self.model is None:
            tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        else:
            ids = AutoTokenizer.from_pretrained(self.model)(text)["input_ids"]
            tokens = torch.tensor(ids)
        chunks = len(tokens) // self.length
        if chunks < self.batch_size:
            raise ValueError(
                f"the text has {len(tokens)} tokens, but one batch takes "
                f"batch_size * length = {self.batch_size * self.length}: give a longer text or a smaller batch"
            )
        self.chunks = TensorDataset(tokens[: chunks * self.length].view(chunks, self.length))

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """Return full batches in random order."""
        return DataLoader(self.chunks, batch_size=self.batch_size, shuffle=True, drop_last=True)


class Losses(L.Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """Keep the loss of this step."""
        self.values.append(float(outputs["loss"]))


def read_text(path: str | None) -> str:
    """Return the text of a file, or of Python's reference manual."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    # `help("if")` prints from here; CPython ships these chapters as a module, so they are found offline.
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def positive(text: str) -> int:
    """Parse an integer of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 1")
    return int(text)


def auto_or_positive(text: str) -> int | str:
    """Parse `auto` or an integer of at least one."""
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text} is neither 'auto' nor an integer of at least 1")
    return text if text == "auto" else int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what cannot work is said here, before any work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_argument_group("model and text")
    data.add_argument(
        "--model", metavar="NAME", help="a causal language model from the Hugging Face hub, or its folder"
    )
    data.add_argument("--text", metavar="FILE", help="UTF-8 text to learn (default: Python's reference manual)")
    data.add_argument("--layers", type=positive, default=12, help="blocks, without --model (default: %(default)s)")
    data.add_argument("--hidden", type=positive, default=128, help="width, without --model (default: %(default)s)")
    data.add_argument("--heads", type=positive, default=4, help="heads, without --model (default: %(default)s)")
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=positive, default=100, help="optimizer steps (default: %(default)s)")
    train.add_argument("--batch-size", type=positive, default=8, help="chunks in a batch (default: %(default)s)")
    train.add_argument("--length", type=positive, default=64, help="tokens in a chunk (default: %(default)s)")
    train.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    train.add_argument("--seed", type=int, default=0, help="seed of weights and order (default: %(default)s)")
    train.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="where to compute")
    train.add_argument(
        "--precision", choices=PRECISIONS, default="32-true", help="as in Trainer (default: %(default)s)"
    )
    stream = parser.add_argument_group("streaming")
    stream.add_argument("--strategy", choices=["superpipeline", "auto"], default="superpipeline")
    stream.add_argument("--k", type=auto_or_positive, default="auto", help="units on the device (default: %(default)s)")
    stream.add_argument(
        "--k-prime", type=auto_or_positive, default="auto", help="units moved together (default: %(default)s)"
    )
    stream.add_argument("--memory-budget", metavar="SIZE", help="device memory a step may take, such as 12GB")
    options = parser.parse_args(arguments)
    if options.model is None and (options.hidden % options.heads or options.hidden // options.heads % 2):
        parser.error(f"--hidden {options.hidden} must be an even multiple of --heads {options.heads}")
    if options.text is not None and not Path(options.text).is_file():
        parser.error(f"--text {options.text}: no such file")
    if options.strategy == "superpipeline":
        # With nothing but defaults this is the same as Trainer(strategy="superpipeline").
        try:
            options.strategy = sp_lightning.SuperpipelineStrategy(
                k=options.k, k_prime=options.k_prime, memory_budget=options.memory_budget
            )
        except (ValueError, MisconfigurationException) as error:
            parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, then say how the loss fell and what was streamed."""
    options = parse(arguments)
    L.seed_everything(options.seed, verbose=False)
    losses = Losses()
    callbacks: list[L.Callback] = [losses]
    if options.strategy != "auto":
        callbacks.append(sp_lightning.SuperpipelineCallback())  # says what the units are, and what came of it
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        max_steps=options.steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = CausalLM(options.model, options.layers, options.hidden, options.heads, options.lr)
    data = TextData(options.text, options.model, options.batch_size, options.length)
    start = time.perf_counter()
    trainer.fit(model, data)
    seconds = time.perf_counter() - start
    first, last = losses.values[0], losses.values[-1]
    print(f"Loss: first {first:.4f}, last {last:.4f} ({len(losses.values)} steps in {seconds:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
