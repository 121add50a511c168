"""Published model shapes, as transformers configurations and torchvision networks, and batches for them.

transformers takes seconds to import, so each configuration is created only when its workload is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from suite.networks import CausalLM, Classifier, Generator, Llava, Network, OwnLoss, default_dtype

Batch = Callable[[int, torch.Generator], dict[str, Tensor]]

_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_QWEN = {"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-xl": ("GPT2Config", {"n_embd": 1600, "n_layer": 48, "n_head": 25, **_NO_DROPOUT}),
    "qwen2.5-1.5b": (
        "Qwen2Config",
        {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, **_QWEN},
    ),
    "qwen2.5-3b": (
        "Qwen2Config",
        {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16, **_QWEN},
    ),
    "qwen2.5-7b": (
        "Qwen2Config",
        {
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152_064,
            "tie_word_embeddings": False,
        },
    ),
    "llama-3.1-8b": (
        "LlamaConfig",
        {"hidden_size": 4096, "intermediate_size": 14_336, "num_key_value_heads": 8, "vocab_size": 128_256},
    ),
    "toy": (
        "LlamaConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 256,
        },
    ),
}
"""Names of configuration classes, and their arguments."""

_BIGG_VISION = {
    "hidden_size": 1664,
    "intermediate_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 224,
}
_BIGG_TEXT = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
_CLIP_L = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 336,
}
_TOY_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 32,
}
_TOY_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}


# ------------------------------------------------------------------------------------------------------------ networks


def decoder_config(shape: str, **changes: Any) -> Any:
    """Make the configuration of one of `DECODERS`, with some arguments changed."""
    import transformers

    name, numbers = DECODERS[shape]
    return getattr(transformers, name)(**{**numbers, **changes})


def causal_lm(shape: str, **changes: Any) -> Callable[[], Network]:
    """Return a function that builds a decoder of which all weights are trained."""
    return lambda: CausalLM(decoder_config(shape, **changes))


def lora_lm(shape: str, rank: int) -> Callable[[], Network]:
    """Return a function that builds a decoder, frozen in bf16, with trainable adapters in fp32."""

    def build() -> Network:
        with default_dtype(torch.bfloat16):
            return CausalLM(decoder_config(shape), adapters=rank)

    return build


def generator(shape: str, new_tokens: int) -> Callable[[], Network]:
    """Return a function that builds a decoder that continues prompts."""
    return lambda: Generator(decoder_config(shape), new_tokens)


def vision_transformer(toy: bool = False) -> Callable[[], Network]:
    """Return a function that builds a ViT-bigG/14 with a thousand classes, or a small one with ten."""

    def build() -> Network:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(**(_TOY_VISION if toy else _BIGG_VISION), num_labels=10 if toy else 1000)
        return OwnLoss(lambda: ViTForImageClassification(config))

    return build


def clip(toy: bool = False) -> Callable[[], Network]:
    """Return a function that builds a CLIP of the size of OpenCLIP's ViT-bigG/14, or a small one."""

    def build() -> Network:
        from transformers import CLIPConfig, CLIPModel

        text, vision, width = (_TOY_TEXT, _TOY_VISION, 32) if toy else (_BIGG_TEXT, _BIGG_VISION, 1280)
        config = CLIPConfig(text_config=dict(text), vision_config=dict(vision), projection_dim=width)
        return OwnLoss(lambda: CLIPModel(config), return_loss=True)

    return build


IMAGE_TOKEN = 0


def llava(toy: bool = False) -> Callable[[], Network]:
    """Return a function that builds a LLaVA-1.5 7B (CLIP-L/14 at 336 pixels, Llama 2 7B), or a small one."""

    def build() -> Network:
        from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

        text = DECODERS["toy"][1] if toy else {"vocab_size": 32_064}  # all other defaults are those of Llama 2 7B
        config = LlavaConfig(
            vision_config=CLIPVisionConfig(**(_TOY_VISION if toy else _CLIP_L)),
            text_config=LlamaConfig(**text),
            image_token_index=IMAGE_TOKEN,
        )
        return Llava(lambda: LlavaForConditionalGeneration(config), use_cache=False)

    return build


def torchvision_classifier(name: str, **options: Any) -> Callable[[], Network]:
    """Return a function that builds a torchvision network."""

    def build() -> Network:
        from torchvision.models import get_model

        return Classifier(lambda: get_model(name, **options))

    return build


# ------------------------------------------------------------------------------------------------------------- batches


def tokens(vocabulary: int, length: int) -> Batch:
    """Return a function that makes batches of texts."""
    return lambda samples, generator: {"input_ids": _integers(vocabulary, (samples, length), generator)}


def images(side: int, classes: int = 1000) -> Batch:
    """Return a function that makes batches of square images with their classes."""
    return lambda samples, generator: {
        "pixel_values": _pixels(samples, side, generator),
        "labels": _integers(classes, (samples,), generator),
    }


def pairs(vocabulary: int, length: int, side: int) -> Batch:
    """Return a function that makes batches of images with matching texts."""
    return lambda samples, generator: {
        "pixel_values": _pixels(samples, side, generator),
        "input_ids": _integers(vocabulary, (samples, length), generator),
    }


def talks(vocabulary: int, length: int, side: int, patches: int) -> Batch:
    """Return a function that makes batches of images, each taking `patches` tokens at the start of a training text."""

    def make(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        text = 1 + _integers(vocabulary - 1, (samples, length), generator)
        ids = torch.cat([torch.full((samples, patches), IMAGE_TOKEN), text], dim=1)
        labels = ids.where(ids != IMAGE_TOKEN, -100)
        return {"pixel_values": _pixels(samples, side, generator), "input_ids": ids, "labels": labels}

    return make


def _integers(end: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(end, shape, generator=generator)


def _pixels(samples: int, side: int, generator: torch.Generator) -> Tensor:
    return torch.randn(samples, 3, side, side, generator=generator)
