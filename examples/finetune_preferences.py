r"""Teach a language model, which need not fit in GPU memory, which of two answers is preferred (DPO, arXiv 2305.18290).

The answer that was chosen should become more probable, compared with a reference, than the one that was rejected. The
reference is the model as it was: without its adapters, or with `--train full` a frozen copy, which streams as well.

    sp-lightning finetune-preferences             # a tiny random model learns to answer in a friendly way
    sp-lightning finetune-preferences --model Qwen/Qwen2.5-7B-Instruct --pairs pairs.jsonl --length 1024 \
        --train full --precision bf16-true --optimizer int8 --save mine   # 6 bytes a parameter, 2 of the reference
    sp-lightning finetune-preferences --model Qwen/Qwen2.5-32B-Instruct --pairs pairs.jsonl --length 1024 \
        --train qlora --dtype bfloat16 --save-adapters mine     # `pip install bitsandbytes accelerate`

Each line of `pairs.jsonl` is `{"prompt": ..., "chosen": ..., "rejected": ...}`, in any of the forms in `pairs.py`; the
last tenth is for validation. `--save` writes a folder for transformers' `from_pretrained`, with adapters merged,
`--save-adapters` one for peft.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import lightning as L
import recipe
import torch
from chats import Text, batch, split
from data_files import Skipped
from finetune_chat import add_chat_model, check_train, make_chat_tokenizer, parse_chat_options, save_results
from finetune_lm import MODEL_OPTIONS, CausalLM, make_tokenizer
from float8 import prepare_fp8
from long_runs import Loader, for_validation
from lora_lm import add_adapters, without_adapters
from offline import preferences_about_http
from pairs import Pair, encode_pair, make_pair, read_pairs
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from training import Pace, begin, train
from transformers import PreTrainedModel

import sp_lightning

PREFERENCE_OPTIONS = [*MODEL_OPTIONS, "optimizer", "train", "rank", "alpha", "beta"]
LOGIT_SCALES = ["logit_scale", "logits_scaling", "lm_head_multiplier"]  # Cohere's, Granite's and Falcon-H1's


class PreferenceLM(CausalLM):
    """A causal language model that learns to prefer answers, and the reference that it is compared with.

    Args:
        model: Name of a hub model, or its folder. `None` builds a Llama-style one from the three sizes.
        layers: Number of blocks in the random model.
        hidden: Hidden size of the random model.
        heads: Number of attention heads in the random model; must divide `hidden`.
        lr: Learning rate of AdamW. `None` takes what suits the size of a pretrained model.
        dtype: Storage dtype of the weights; those of a frozen base can be `"bfloat16"`.
        weights: A checkpoint of `finetune_lm.py`, with the same sizes, to start from.
        optimizer: One of `finetune_lm.OPTIMIZERS`.
        train: `"full"` trains all weights, `"lora"` adapters, `"qlora"` adapters on a base of 4 bits.
        rank: Rank of the adapters.
        alpha: The adapters' output is scaled by `alpha / rank`.
        experts: Number of experts in each block of the random model, two of which compute a token. 0 has none.
        beta: Reward for each unit of log-probability that an answer gains over the reference.

    """

    objective_rate = 0.05  # 5e-7 for all weights of a model of 8 billion, as its recipes have it

    def __init__(
        self,
        model: str | None = None,
        layers: int = 4,
        hidden: int = 64,
        heads: int = 4,
        lr: float | None = 5e-4,
        dtype: str = "float32",
        weights: str | None = None,
        optimizer: str = "adamw",
        train: Literal["full", "lora", "qlora"] = "lora",
        rank: int = 8,
        alpha: float = 16,
        experts: int = 0,
        beta: float = 0.1,
    ) -> None:
        check_train(train, model)
        is_rounded = train == "qlora"
        super().__init__(model, layers, hidden, heads, lr, dtype, None, weights, optimizer, is_rounded, experts)
        if any(getattr(self.model.config, name, 1) != 1 for name in LOGIT_SCALES):
            raise ValueError(f"{model} scales its logits, which the loss of this recipe does not")
        self.model.eval()  # no dropout, which would tell the model and its reference apart
        self.reference: PreTrainedModel | None = None
        if train == "full":
            self.reference = copy.deepcopy(self.model).requires_grad_(False)
        else:
            add_adapters(self.model, self.model.get_output_embeddings(), rank, alpha)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch of pairs."""
        measures = self.measures(batch)
        self.log_dict({f"train_{name}": value for name, value in measures.items()}, prog_bar=True)
        return measures["loss"]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss, the margin and the accuracy of pairs."""
        measures = self.measures(batch)
        self.log_dict({f"val_{name}": value for name, value in measures.items()}, sync_dist=True)

    def measures(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss, the mean margin, and how often it is positive: a margin of zero counts half."""
        margins = self.margins(batch)
        return {
            "loss": -F.logsigmoid(margins).mean(),
            "margin": margins.mean(),
            "accuracy": (margins.sign().mean() + 1) / 2,
        }

    def margins(self, batch: dict[str, Tensor]) -> Tensor:
        """Return by how much the reward of each chosen answer exceeds that of the rejected one."""
        before = self.log_probabilities_before(batch)  # first: backward begins with what is left on the device
        rewards = self.hparams["beta"] * (log_probabilities(self.model, batch) - before)
        chosen, rejected = rewards.chunk(2)
        return chosen - rejected

    @torch.no_grad()
    def log_probabilities_before(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the log-probability that the reference gives to each answer."""
        if self.reference is not None:
            return log_probabilities(self.reference, batch)
        with without_adapters(self.model):
            return log_probabilities(self.model, batch)


def log_probabilities(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return the log-probability of each answer. Texts are padded on the right, where a causal model does not look."""
    hidden = model.base_model(input_ids=batch["tokens"], use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    softcap = getattr(model.config, "final_logit_softcapping", None)  # Gemma's
    losses = sp_lightning.chunked_cross_entropy(
        hidden, head.weight, batch["labels"], bias=head.bias, reduction="none", softcap=softcap, shift=True
    )
    return -losses.sum(1)


class PreferenceData(L.LightningDataModule):
    """Pairs of answers for training and validation.

    Args:
        pairs: A file of JSON lines with `chosen` and `rejected`; its last tenth is for validation. `None` uses
            friendly and rude answers about HTTP.
        model: Name of the hub model whose tokenizer and template are used. `None` tokenizes into bytes.
        batch_size: Pairs per batch.
        length: Tokens of prompt and answer; longer ones are cut.

    """

    def __init__(
        self, pairs: str | None = None, model: str | None = None, batch_size: int = 8, length: int = 256
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length
        skipped = Skipped()
        found = read_pairs(pairs, skipped) if pairs else [make_pair("", line) for line in preferences_about_http()]
        have_messages = any(isinstance(pair.chosen, list) for pair in found)
        self.tokenizer = make_chat_tokenizer(model) if have_messages else make_tokenizer(model)
        learned, held_out = split(self.encode(found, skipped), pairs, skipped)
        skipped.report(pairs, len(learned) + len(held_out))
        self.train, self.val = learned, held_out

    def encode(self, pairs: list[Pair], skipped: Skipped) -> list[tuple[Text, Text]]:
        """Return pairs as tokens, without those of which nothing that differs is left."""
        encoded = [skipped.attempt(encode_pair, self.tokenizer, pair, self.length) for pair in pairs]
        return [pair for pair in encoded if pair is not None]

    def collate(self, pairs: list[tuple[Text, Text]]) -> dict[str, Tensor]:
        """Make a batch: the chosen answers, and then the rejected ones, each in a row as long as the longest."""
        texts = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
        longest = max(len(tokens) for tokens, _ in texts)
        return batch([[text] for text in texts], longest, self.tokenizer.pad_token_id)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return pairs in random order."""
        return Loader(self.train, self.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return pairs that are not in the training set."""
        return for_validation(self.val, self.batch_size, collate_fn=self.collate)


class PrintMargins(L.Callback):
    """Prints what validation finds: with Lightning's default check of two batches, also before training."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the loss, the margin and the accuracy."""
        loss, margin, accuracy = (trainer.callback_metrics[f"val_{name}"] for name in ("loss", "margin", "accuracy"))
        when = "Before" if trainer.sanity_checking else recipe.moment(trainer)
        recipe.say(f"\n{when}: validation loss {loss:.4f}, margin {margin:.2f}, accuracy {accuracy:.0%}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, epochs=3, batch_size=8, lr=5e-4, lr_by_size=True)
    recipe.add_long_run(parser, "runs/finetune_preferences")
    data = add_chat_model(parser, trained="lora")
    data.add_argument("--pairs", type=recipe.file, metavar="FILE", help="JSON lines with chosen and rejected answers")
    data.add_argument("--length", type=recipe.positive, default=256, help="tokens of both parts (default: %(default)s)")
    parser.add_argument(
        "--beta", type=recipe.amount, default=0.1, help="DPO's beta: reward per log-probability (default: %(default)s)"
    )
    return parse_chat_options(parser, arguments, data="pairs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print margins before and after each epoch, and at the end how the loss fell and what was streamed."""
    options = parse(arguments)
    begin(options)
    with recipe.one_line(options.model):
        check_train(options.train, options.model)
        data = PreferenceData(options.pairs, options.model, options.batch_size, options.length)
        recipe.say(f"{len(data.train):,} pairs; for validation, {len(data.val):,} pairs")
        model = PreferenceLM(**{name: getattr(options, name) for name in PREFERENCE_OPTIONS})
    prepare_fp8(options, model)
    train(
        options,
        model,
        data,
        callbacks=[PrintMargins()],
        pace=Pace(lambda batch: batch["tokens"].numel()),
        save=partial(save_results, options, model, data.tokenizer),
        max_epochs=options.epochs,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
