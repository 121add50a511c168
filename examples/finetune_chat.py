r"""Fine-tune a language model, which need not fit in GPU memory, on chats: all weights, or adapters (LoRA, QLoRA).

Chats go through the tokenizer's own template, several of them in one row, without attention across them; the loss
covers what the assistant says. After each epoch, the model answers questions from chats that it has not seen.

    sp-lightning finetune-chat                    # a tiny random model learns what some of HTTP's errors mean
    sp-lightning finetune-chat --model Qwen/Qwen2.5-7B-Instruct --chats chats.jsonl --length 1024 \
        --precision bf16-true --optimizer int8 --save mine      # with 6 bytes a parameter instead of 16
    sp-lightning finetune-chat --model Qwen/Qwen2.5-32B-Instruct --chats chats.jsonl --length 1024 \
        --train qlora --dtype bfloat16 --save-adapters mine     # `pip install bitsandbytes accelerate`
    sp-lightning finetune-chat --model Qwen/Qwen3-30B-A3B --chats chats.jsonl --length 2048 \
        --train lora --dtype bfloat16 --save-adapters mine      # a mixture of experts: adapters on its attention

Each line of `chats.jsonl` is `{"messages": [{"role": "user", "content": "..."}, ...]}`, as in data sets of the hub, or
a chat of ShareGPT or Alpaca (`chats.py`); the last tenth is for validation. For long runs, add `--clip 1 --accumulate 8
--warmup 50 --schedule cosine --save-every 100 --resume`: the same command continues where it was stopped. `--save`
writes a folder for transformers' `from_pretrained`, with adapters merged, `--save-adapters` one for peft.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import lightning as L
import recipe
from chats import IGNORED, Message, Text, batch, encode, pack, prompt, read_chats, split
from data_files import Skipped
from finetune_lm import MODEL_OPTIONS, CausalLM, add_model, add_optimizer, check_optimizer, check_sizes, make_tokenizer
from float8 import add_fp8, check_fp8, prepare_fp8
from long_runs import Loader, for_validation
from lora_lm import add_adapters, add_rank, check_adapters, merge_adapters, save_adapters
from offline import chats_about_http
from torch import Tensor
from torch.utils.data import DataLoader
from training import Pace, begin, train
from transformers import PreTrainedTokenizerBase

CHAT_OPTIONS = [*MODEL_OPTIONS, "optimizer", "train", "rank", "alpha"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


class ChatLM(CausalLM):
    """A causal language model that learns to answer.

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
        answer_tokens: Length at which an answer in validation ends, at the latest.

    """

    def __init__(
        self,
        model: str | None = None,
        layers: int = 4,
        hidden: int = 64,
        heads: int = 4,
        lr: float | None = 3e-3,
        dtype: str = "float32",
        weights: str | None = None,
        optimizer: str = "adamw",
        train: Literal["full", "lora", "qlora"] = "full",
        rank: int = 8,
        alpha: float = 16,
        experts: int = 0,
        answer_tokens: int = 64,
    ) -> None:
        check_train(train, model)
        is_rounded = train == "qlora"
        super().__init__(model, layers, hidden, heads, lr, dtype, None, weights, optimizer, is_rounded, experts)
        kinds = {"conv", "linear_attention"}.intersection(getattr(self.model.config, "layer_types", None) or [])
        if kinds or not self.model.is_backend_compatible():
            raise ValueError(f"{type(self.model).__name__} does not tell apart the chats in a row")
        if train != "full":
            add_adapters(self.model, self.model.get_output_embeddings(), rank, alpha)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of the assistant's tokens."""
        loss = self.loss(batch["tokens"], batch["labels"], position_ids=batch["positions"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Tensor | None:
        """Log the loss of chats, or answer questions."""
        if "prompts" in batch:
            return self.model.generate(
                **batch["prompts"], max_new_tokens=self.hparams["answer_tokens"], do_sample=False
            )
        loss = self.loss(batch["tokens"], batch["labels"], position_ids=batch["positions"])
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, add_dataloader_idx=False)
        return None


def check_train(train: str, model: str | None) -> None:
    """Report what a base of 4 bits lacks, before any work begins."""
    if train == "qlora":
        if model is None:
            raise ValueError("qlora loads a model in 4 bits: name one, or the folder of one")
        missing = [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"qlora needs what is not installed: pip install {' '.join(missing)}")


def make_chat_tokenizer(model: str | None) -> PreTrainedTokenizerBase:
    """Return a hub model's tokenizer, or a byte-level one that needs no files, with a template for chats."""
    tokenizer = make_tokenizer(model)
    if model is None:
        tokenizer.chat_template = TEMPLATE
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {model} has no chat template: take a model that was tuned for chats")
    return tokenizer


class ChatData(L.LightningDataModule):
    """Rows of chats for training and validation, and questions to answer.

    Args:
        chats: A file of chats, in a form of `chats.py`; the last tenth is for validation. `None` uses some about HTTP.
        model: Name of the hub model whose tokenizer and template are used. `None` tokenizes into bytes.
        batch_size: Rows per batch.
        length: Tokens per row; longer chats are cut.
        samples: Number of validation chats whose last answer is to be given by the model.

    """

    def __init__(
        self,
        chats: str | None = None,
        model: str | None = None,
        batch_size: int = 2,
        length: int = 256,
        samples: int = 4,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length
        self.tokenizer = make_chat_tokenizer(model)
        skipped = Skipped()
        found = [("", messages) for messages in chats_about_http()] if chats is None else read_chats(chats, skipped)
        written = [(messages, skipped.attempt(self.write, place, messages)) for place, messages in found]
        usable = [(messages, texts) for messages, texts in written if texts]
        skipped.report(chats, len(usable))
        learned, held_out = split(usable, chats, skipped)
        self.train = self.rows([text for _, texts in learned for text in texts])
        self.val = self.rows([text for _, texts in held_out for text in texts])
        self.asked = [messages for messages, _ in held_out][:samples]
        chats_and_rows = [f"{sum(map(len, rows)):,} chats in {len(rows):,} rows" for rows in (self.train, self.val)]
        self.size = f"{chats_and_rows[0]} of {length:,} tokens; for validation, {chats_and_rows[1]}"

    def write(self, place: str, messages: list[Message]) -> list[Text]:
        """Return a chat as texts, by the tokenizer's template."""
        try:
            return list(encode(self.tokenizer, messages))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None

    def rows(self, texts: list[Text]) -> list[list[Text]]:
        """Return texts in rows, without those of which nothing that is learned is left."""
        if long := sum(len(tokens) > self.length for tokens, _ in texts):
            recipe.say(f"{long} of {len(texts)} chats are cut to {self.length} tokens")
        cut = [(tokens[: self.length], labels[: self.length]) for tokens, labels in texts]
        learned = [text for text in cut if any(label != IGNORED for label in text[1])]
        if not learned:
            raise ValueError(f"no answer begins within the first {self.length} tokens of a chat")
        if useless := len(cut) - len(learned):
            recipe.say(f"{useless} of {len(cut)} chats are left out, as no answer begins within {self.length} tokens")
        return pack(learned, self.length)

    def collate(self, rows: list[list[Text]]) -> dict[str, Tensor]:
        """Make a batch of rows."""
        return batch(rows, self.length, self.tokenizer.pad_token_id)

    def ask(self, chats: list[list[Message]]) -> dict[str, Any]:
        """Make a batch of prompts, padded on the left, for the last answer of each chat."""
        turns = [max(i for i, message in enumerate(chat) if message["role"] == "assistant") for chat in chats]
        before = [chat[:turn] for chat, turn in zip(chats, turns, strict=True)]
        prompts = self.tokenizer.pad(
            {"input_ids": [prompt(self.tokenizer, chat) for chat in before]}, return_tensors="pt"
        )
        return {"prompts": dict(prompts), "questions": [chat[-1]["content"] for chat in before]}

    def train_dataloader(self) -> DataLoader[Any]:
        """Return rows in random order."""
        return Loader(self.train, self.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        """Return rows and questions that are not in the training set."""
        return [
            for_validation(self.val, self.batch_size, collate_fn=self.collate),
            for_validation(self.asked, self.batch_size, collate_fn=self.ask),
        ]


class PrintAnswers(L.Callback):
    """Prints the loss in validation, and the answers to questions."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Tensor | None, batch: dict[str, Any], *_: Any
    ) -> None:
        """Keep the answers, if there are any in this batch."""
        if outputs is not None:
            tokens = outputs[:, batch["prompts"]["input_ids"].shape[1] :]
            answers = trainer.datamodule.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            self.lines += [f"    {pair[0]!r} -> {pair[1]!r}" for pair in zip(batch["questions"], answers, strict=True)]

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the loss and the answers."""
        loss = trainer.callback_metrics["val_loss"]
        recipe.say("\n".join([f"\n{recipe.moment(trainer)}: validation loss {loss:.4f}", *self.lines]))
        self.lines.clear()


def save(module: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    """Write the model, with adapters merged, and the tokenizer for `from_pretrained`."""
    if module.hparams["train"] == "qlora":
        module.model = module.model.dequantize()
    merge_adapters(module.model)
    module.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_results(
    options: argparse.Namespace, module: CausalLM, tokenizer: PreTrainedTokenizerBase, trainer: L.Trainer
) -> None:
    """Write the adapters and the model, as far as that was asked for."""
    if not trainer.is_global_zero:
        return
    if options.save_adapters is not None:
        save_adapters(module.model, options.save_adapters, options.model, options.rank, options.alpha)
    if options.save is not None:
        save(module, tokenizer, options.save)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, epochs=10, batch_size=2, lr=3e-3, lr_by_size=True)
    recipe.add_long_run(parser, "runs/finetune_chat")
    data = add_chat_model(parser, trained="full")
    data.add_argument("--chats", type=recipe.file, metavar="FILE", help="JSON or JSON lines (default: chats on HTTP)")
    data.add_argument("--length", type=recipe.positive, default=256, help="tokens in a row (default: %(default)s)")
    return parse_chat_options(parser, arguments, data="chats")


def add_chat_model(parser: argparse.ArgumentParser, trained: str) -> argparse._ArgumentGroup:
    """Add the options for a chat model, and for what is trained of it; return the group for its data."""
    data = add_model(parser)
    parser.set_defaults(layers=4, hidden=64)
    add_optimizer(parser)
    add_fp8(parser)
    add_rank(parser).add_argument(
        "--train", choices=["full", "lora", "qlora"], default=trained, help="(default: %(default)s)"
    )
    parser.add_argument("--save", type=recipe.new_folder, metavar="FOLDER", help="write model and tokenizer")
    return data


def parse_chat_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, data: str
) -> argparse.Namespace:
    """Parse the command line of a recipe for a chat model, and check its options."""
    options = recipe.parse(parser, arguments, data=data, best=("val_loss", "min"))
    check_sizes(parser, options)
    check_optimizer(parser, options)
    check_adapters(parser, options)
    check_fp8(parser, options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print answers after each epoch, and at the end how the loss fell and what was streamed."""
    options = parse(arguments)
    begin(options)
    with recipe.one_line(options.model):
        check_train(options.train, options.model)
        data = ChatData(options.chats, options.model, options.batch_size, options.length)
        recipe.say(data.size)
        model = ChatLM(**{name: getattr(options, name) for name in CHAT_OPTIONS})
    prepare_fp8(options, model)
    train(
        options,
        model,
        data,
        callbacks=[PrintAnswers()],
        pace=Pace(lambda batch: batch["tokens"].numel()),
        save=partial(save_results, options, model, data.tokenizer),
        max_epochs=options.epochs,
        num_sanity_val_steps=0,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
