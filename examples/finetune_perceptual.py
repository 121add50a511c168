"""Let a language model see: a linear projection and one token are trained, two pretrained models stay as they are.

What a frozen vision encoder sees goes through the projection and becomes tokens, which a frozen language model reads
after a learned one and continues with the answer, after eP-ALM (arXiv 2303.11403). More than 99 % of the weights are
frozen: they have no gradients and no optimizer state, and they only go to the device. The language model's blocks are
needed in the backward as well, the vision encoder's are not.

    python examples/finetune_perceptual.py      # two tiny models with random weights, and pictures of digits
    python examples/finetune_perceptual.py --model facebook/opt-6.7b --vision facebook/dinov2-large --examples my.jsonl

Each line of `my.jsonl` is `{"image": "a.png", "text": "what to answer"}`; image paths are relative to that file.

Without `--model` and `--vision`, nothing is downloaded: both models are random, know nothing, and still stay frozen. A
random network keeps much of what it is given, so the projection finds directions in which the digits lie apart, and
turns them so that the random language model happens to continue with the right one. That shows the method's mechanics;
the knowledge that makes it useful comes with pretrained models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import lightning as L
import recipe
import torch
from finetune_lm import make_tokenizer
from finetune_vlm import IGNORED, PATCH, SIDE, Answers, ImagesAndTexts, opened
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    ViTConfig,
    ViTModel,
)


class PerceptualLM(Answers):
    """A frozen language model that sees through a frozen vision encoder, by a linear projection and a learned token.

    Args:
        model: Name of a causal language model of the hub. `None` builds a tiny one with random weights.
        vision: Name of a vision encoder of the hub: a ViT, DINOv2, CLIP, SigLIP. `None` builds a tiny ViT.
        lr: Learning rate of AdamW.
        dtype: Storage dtype of the frozen weights: `"float32"` or `"bfloat16"`. What is trained is in fp32.

    """

    def __init__(
        self, model: str | None = None, vision: str | None = None, lr: float = 3e-3, dtype: str = "float32"
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        stored = getattr(torch, dtype)
        self.language = tiny_language_model() if model is None else AutoModelForCausalLM.from_pretrained(model)
        encoder = tiny_vision_encoder() if vision is None else AutoModel.from_pretrained(vision)
        self.vision = getattr(encoder, "vision_model", encoder)  # CLIP and SigLIP come with a model of text
        for frozen in (self.language, self.vision):
            frozen.to(stored).eval().requires_grad_(False)
        width = self.language.get_input_embeddings().embedding_dim
        self.projection = nn.Linear(self.vision.config.hidden_size, width)
        self.token = nn.Parameter(torch.randn(width) * 0.1)
        self.strict_loading = False  # a checkpoint contains only these two

    def answer_logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits for each position of the answers, given all tokens before it."""
        answers = batch["answers"]
        words = self.language.get_input_embeddings()(torch.cat([batch["question"], answers.clamp(min=0)], 1))
        features = self.vision(batch["pixels"].to(words.dtype)).last_hidden_state
        seen = self.projection(features.to(self.token.dtype))
        tokens = torch.cat([self.token.expand(len(seen), 1, -1), seen], 1).to(words.dtype)
        # Nothing is masked: only answers are padded, on the right, where a causal model does not look.
        output = self.language(
            inputs_embeds=torch.cat([tokens, words], 1), use_cache=False, logits_to_keep=answers.shape[1] + 1
        )
        return output.logits[:, :-1]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the frozen models out of the checkpoint."""
        recipe.leave_out_frozen(self, checkpoint)


def tiny_vision_encoder() -> PreTrainedModel:
    """Return a small ViT with random weights."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = ViTConfig(**size, image_size=SIDE, patch_size=PATCH, initializer_range=0.05)
    return ViTModel(config, add_pooling_layer=False)


def tiny_language_model() -> PreTrainedModel:
    """Return a small Llama with random weights."""
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    # Far larger weights than usual, so that tokens mix and the model is sure of something, even if it knows nothing.
    return LlamaForCausalLM(LlamaConfig(**size, vocab_size=len(make_tokenizer(None)), initializer_range=0.125))


class ImagesAndAnswers(ImagesAndTexts):
    """Images, a question about them, and the answers, for a vision encoder and a language model that are two models.

    Args:
        examples: A file of JSON lines with `image` and `text`; its last tenth is for validation. `None` draws numbers.
        model: Name of the hub's language model, for its tokenizer. `None` tokenizes into bytes.
        vision: Name of the hub's vision encoder, for its image processor. `None` uses the tiny one.
        question: The question about each image, or what an answer begins with.
        batch_size: Images per batch.
        digits: Digits of each drawn number.
        count: Number of images to draw for training.

    """

    def __init__(
        self,
        examples: str | None = None,
        model: str | None = None,
        vision: str | None = None,
        question: str = "",
        batch_size: int = 32,
        digits: int = 1,
        count: int = 4096,
    ) -> None:
        super().__init__(examples, None, question, batch_size, digits, count)
        self.tokenizer = make_tokenizer(model)
        self.images = self.processor.image_processor if vision is None else AutoImageProcessor.from_pretrained(vision)

    def collate(self, pairs: list[tuple[Any, str]]) -> dict[str, Tensor]:
        """Prepare a batch."""
        question = self.tokenizer(self.question, add_special_tokens=False)["input_ids"]
        answers = self.tokenizer(
            [text + self.tokenizer.eos_token for _, text in pairs],
            add_special_tokens=False,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        return {
            "pixels": self.images([opened(image) for image, _ in pairs], return_tensors="pt")["pixel_values"],
            "question": torch.tensor([question] * len(pairs), dtype=torch.long),
            "answers": answers["input_ids"].masked_fill(answers["attention_mask"] == 0, IGNORED),
        }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, steps=200, batch_size=32, lr=3e-3)
    parser.add_argument("--model", metavar="NAME", help="a causal language model of the hub, which stays frozen")
    parser.add_argument("--vision", metavar="NAME", help="a vision encoder of the hub, which stays frozen")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of frozen weights (default: %(default)s)"
    )
    parser.add_argument("--examples", type=recipe.examples, metavar="FILE", help="JSON lines with image and text")
    parser.add_argument("--question", default="", help="question about each image (default: none)")
    parser.add_argument(
        "--save", type=recipe.new_file, metavar="FILE", help="write what was trained when training is over"
    )
    return recipe.parse(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print the share of correct answers before and after."""
    options = parse(arguments)
    L.seed_everything(options.seed, verbose=False)
    losses = recipe.Losses()
    trainer = L.Trainer(
        strategy=options.strategy,  # `SuperpipelineStrategy()`, unless the command line says otherwise
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        max_steps=options.steps,
        val_check_interval=options.steps,  # once, at the end
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[losses, *options.callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = PerceptualLM(options.model, options.vision, options.lr, options.dtype)
    data = ImagesAndAnswers(options.examples, options.model, options.vision, options.question, options.batch_size)
    weights = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    every, trained = sum(size for size, _ in weights), sum(size for size, learns in weights if learns)
    recipe.say(f"{trained} of {every} parameters are trained, {1 - trained / every:.2%} are frozen")
    (before,) = trainer.validate(model, data, verbose=False)
    recipe.fit(trainer, model, data)
    if options.save is not None:
        trainer.save_checkpoint(options.save)
    recipe.say(losses)
    after = trainer.callback_metrics["val_accuracy"].item()
    recipe.say(f"Right answers: before {before['val_accuracy']:.0%}, after {after:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
