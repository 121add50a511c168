r"""Fine-tune a vision-language model, which answers questions about images, and need not fit in GPU memory.

Images and questions go through the model's own processor and chat template; the loss covers only the answers' tokens.

    sp-lightning finetune-vlm             # a tiny LLaVA learns to read numbers from pictures
    sp-lightning finetune-vlm --model HuggingFaceTB/SmolVLM-256M-Instruct --examples captions.jsonl --save mine
    sp-lightning finetune-vlm --model Qwen/Qwen2-VL-7B-Instruct --examples captions.jsonl --freeze visual \
        --batch-size 4 --lr 1e-5 --save mine
    sp-lightning finetune-vlm --model Qwen/Qwen2.5-VL-7B-Instruct --examples captions.jsonl --precision bf16-true \
        --optimizer int8 --batch-size 1 --accumulate 4 --clip 1 --save mine  # with 6 bytes a parameter instead of 16

Each line of `captions.jsonl` is `{"image": "a.png", "text": "what to answer"}`; image paths are relative to that file.
Without it, Pillow draws numbers to learn from, so nothing is downloaded. `--save` writes a folder for transformers'
`from_pretrained`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import recipe
import torch
from data_files import Skipped
from finetune_lm import OPTIMIZERS, add_optimizer, check_optimizer
from long_runs import Loader, for_validation
from offline import WrittenNumbers, read_examples
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from training import Accuracy, Pace, begin, train
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    ByT5Tokenizer,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    SiglipImageProcessor,
    SiglipVisionConfig,
)

SIDE, PATCH = 32, 8  # image and patch size of the tiny model, in pixels
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
IGNORED = -100


class Answers(L.LightningModule):
    """What learns to answer questions about images; how it reads them, `answer_logits` says."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the mean loss of the answers' tokens."""
        loss = F.cross_entropy(self.answer_logits(batch).float().flatten(0, 1), batch["answers"].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log the share of answers that are correct in every token."""
        answers = batch["answers"]
        right = (self.answer_logits(batch).argmax(-1) == answers) | (answers == IGNORED)
        self.log("val_accuracy", right.all(1).float().mean(), prog_bar=True, batch_size=len(answers))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the trainable weights."""
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return OPTIMIZERS[self.hparams["optimizer"]](trainable, lr=self.hparams["lr"])


class VisionLM(Answers):
    """A vision-language model: tiny and random, or one from the Hugging Face hub.

    Args:
        model: Name of a hub model. `None` builds a tiny LLaVA with random weights.
        freeze: Words such as `["vision"]`; weights whose names contain one of them are not trained.
        lr: Learning rate of AdamW.
        optimizer: One of `finetune_lm.OPTIMIZERS`.

    """

    def __init__(
        self, model: str | None = None, freeze: list[str] | None = None, lr: float = 1e-3, optimizer: str = "adamw"
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if model is None:
            self.model = tiny_llava(tiny_processor().tokenizer)
        else:
            self.model = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).train()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not any(word in name for word in freeze or []))

    def answer_logits(self, batch: dict[str, Any]) -> Tensor:
        """Return the logits for each position of the answers, given all tokens before it."""
        places = batch["answers"].shape[1]
        return self.model(**batch["inputs"], use_cache=False, logits_to_keep=places + 1).logits[:, :-1]


def tiny_processor() -> LlavaProcessor:
    """Return a processor that needs no files, because it tokenizes text into bytes."""
    return LlavaProcessor(
        SiglipImageProcessor(size={"height": SIDE, "width": SIDE}),
        ByT5Tokenizer(extra_ids=0, additional_special_tokens=["<image>"]),
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        image_token="<image>",  # noqa: S106  not a secret
        chat_template=TEMPLATE,
    )


def tiny_llava(tokenizer: PreTrainedTokenizerBase) -> LlavaForConditionalGeneration:
    """Return a small LLaVA, with two vision and two language blocks."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    vision = SiglipVisionConfig(**size, num_hidden_layers=2, image_size=SIDE, patch_size=PATCH)
    text = LlamaConfig(
        **size,
        num_hidden_layers=2,
        num_key_value_heads=4,
        vocab_size=len(tokenizer),
        initializer_range=0.1,  # transformers' default is meant for larger models; small ones learn slowly
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_select_strategy="full",
        )
    )


class ImagesAndTexts(L.LightningDataModule):
    """Images, a question about them, and the answers.

    Args:
        examples: A file of JSON lines with `image` and `text`; its last tenth is for validation. `None` draws numbers.
        model: Name of the hub model whose processor prepares the data. `None` uses the tiny one.
        question: The question about each image.
        batch_size: Images per batch.
        digits: Digits of each drawn number.
        count: Number of images to draw for training.

    """

    def __init__(
        self,
        examples: str | None = None,
        model: str | None = None,
        question: str = "Number?",
        batch_size: int = 32,
        digits: int = 1,
        count: int = 4096,
    ) -> None:
        super().__init__()
        self.question = question
        self.batch_size = batch_size
        self.processor: ProcessorMixin = tiny_processor() if model is None else AutoProcessor.from_pretrained(model)
        self.processor.tokenizer.padding_side = "left"  # so that each question ends where its answer begins
        self.train: Sequence[tuple[Any, str]] | WrittenNumbers = WrittenNumbers(count, digits, SIDE)
        self.val: Sequence[tuple[Any, str]] | WrittenNumbers = WrittenNumbers(256, digits, SIDE, first=count)
        if examples is not None:
            skipped = Skipped()
            pairs = read_examples(examples, skipped)
            skipped.report(examples, len(pairs))
            held_out = max(1, len(pairs) // 10)
            self.train, self.val = pairs[:-held_out], pairs[-held_out:]

    def collate(self, pairs: list[tuple[Any, str]]) -> dict[str, Any]:
        """Prepare a batch: questions padded on the left, then answers padded on the right."""
        asked = [{"type": "image"}, {"type": "text", "text": self.question}]
        prompt = self.processor.apply_chat_template([{"role": "user", "content": asked}], add_generation_prompt=True)
        tokenizer = self.processor.tokenizer
        inputs = self.processor(
            text=[prompt] * len(pairs),
            images=[[opened(image)] for image, _ in pairs],
            padding=True,
            add_special_tokens=not prompt.startswith(tokenizer.bos_token or prompt),  # most templates begin with one
            return_tensors="pt",
        )
        answers = tokenizer(
            [text + tokenizer.eos_token for _, text in pairs],
            add_special_tokens=False,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        width = answers["input_ids"].shape[1]
        tokens = inputs["input_ids"].shape
        # If a model takes token types, text has type 0.
        whole = {name: F.pad(value, (0, width)) if value.shape == tokens else value for name, value in inputs.items()}
        for name in ("input_ids", "attention_mask"):
            whole[name][:, -width:] = answers[name]
        return {"inputs": whole, "answers": answers["input_ids"].masked_fill(answers["attention_mask"] == 0, IGNORED)}

    def train_dataloader(self) -> DataLoader[Any]:
        """Return full batches in random order."""
        return Loader(self.train, self.batch_size, shuffle=True, drop_last=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return images that are not in the training set."""
        return for_validation(self.val, self.batch_size, collate_fn=self.collate)


def opened(image: Image.Image | Path) -> Image.Image:
    """Return an image, reading it from its file if necessary."""
    return Image.open(image).convert("RGB") if isinstance(image, Path) else image


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, steps=200, batch_size=32, lr=1e-3)
    recipe.add_long_run(parser, "runs/finetune_vlm")
    add_optimizer(parser)
    parser.add_argument("--model", metavar="NAME", help="a vision-language model of the hub, with a chat template")
    parser.add_argument("--examples", type=recipe.examples, metavar="FILE", help="JSON lines with image and text")
    parser.add_argument("--question", default="Number?", help="question about each image (default: %(default)s)")
    parser.add_argument("--freeze", nargs="*", metavar="WORD", help="do not train weights whose names contain WORD")
    parser.add_argument(
        "--digits", type=recipe.positive, default=1, help="digits of drawn numbers (default: %(default)s)"
    )
    parser.add_argument("--save", type=recipe.new_folder, metavar="FOLDER", help="write model and processor")
    options = recipe.parse(parser, arguments, data="examples", best=("val_accuracy", "max"))
    check_optimizer(parser, options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print the share of correct answers before and after."""
    options = parse(arguments)
    begin(options)
    with recipe.one_line(options.model):
        model = VisionLM(options.model, options.freeze, options.lr, options.optimizer)
        data = ImagesAndTexts(options.examples, options.model, options.question, options.batch_size, options.digits)

    def save(trainer: L.Trainer) -> None:
        if options.save is not None and trainer.is_global_zero:
            model.model.save_pretrained(options.save)
            data.processor.save_pretrained(options.save)

    train(
        options,
        model,
        data,
        callbacks=[Accuracy("Right answers")],
        pace=Pace(lambda batch: batch["inputs"]["input_ids"].numel()),
        save=save,
        **recipe.length_of(options),
        val_check_interval=options.eval_every or options.steps,  # once, at the end
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
