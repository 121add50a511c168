"""Fine-tune a language model, which need not fit in GPU memory, on chats with TRL's SFTTrainer.

    python examples/finetune_trl.py                     # a tiny random model learns what some of HTTP's errors mean
    python examples/finetune_trl.py --model Qwen/Qwen3-8B --chats chats.jsonl --int8 --max_length 2048 --max_steps 1000

All options of TRL's `SFTConfig` are options. The Trainer's base class and the optimizer of `--int8` are this package's.
Each line of `chats.jsonl` is `{"messages": [{"role": "user", "content": "..."}, ...]}`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import recipe
import torch
from datasets import Dataset, load_dataset
from finetune_chat import make_chat_tokenizer
from offline import chats_about_http
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from sp_lightning.optim import AdamW
from sp_lightning.transformers import SuperpipelineTrainerMixin


class Streamed(SuperpipelineTrainerMixin, SFTTrainer):
    """TRL's Trainer, whose model streams."""


@dataclass
class Options:
    """A model of the hub, a file of chats, and whether to train weights in BF16 exactly, with 6 bytes for each."""

    model: str | None = None
    chats: str | None = None
    int8: bool = False


def main(arguments: Sequence[str]) -> None:
    """Train, and save the model in `--output_dir`."""
    parser = HfArgumentParser([Options, SFTConfig])
    parser.set_defaults(output_dir="runs/finetune_trl", max_steps=60, use_cpu=not torch.cuda.is_available())
    options, config = parser.parse_args_into_dataclasses(arguments)
    dtype = torch.bfloat16 if options.int8 else torch.float32
    with recipe.one_line(options.model):
        tokenizer = make_chat_tokenizer(options.model)
    if options.model is None:
        config.learning_rate = 3e-3
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).to(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    chats = Dataset.from_list([{"messages": messages} for messages in chats_about_http()])
    if options.chats is not None:
        chats = load_dataset("json", data_files=options.chats, split="train")
    named = {"args": config, "train_dataset": chats, "processing_class": tokenizer}
    if options.int8:
        named["optimizer_cls_and_kwargs"] = AdamW, {"lr": config.learning_rate, "moments": "int8"}
    trainer = Streamed(model, **named)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(sys.argv[1:])
