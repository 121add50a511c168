"""Models whose units are looked at."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torchvision.models as vision
import transformers as hf
from torch import nn

from ...zoo.vision import UNet


def llama() -> nn.Module:
    size = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=32000, **size))


FULL_SIZE: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config()),
    "llama": llama,
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config()),
    "albert": lambda: hf.AlbertForMaskedLM(hf.AlbertConfig()),
    "vit": vision.vit_b_16,
    "swin": vision.swin_t,
    "resnet50": vision.resnet50,
    "vgg16": vision.vgg16,
    "convnext": vision.convnext_tiny,
    "unet": lambda: UNet((64, 128, 256, 512)),
}
"""Real architectures in their real shapes."""


@cache
def in_full_size(name: str) -> nn.Module:
    """A model with memory that is never touched: the finder looks at shapes only, so this costs nothing."""
    with torch.device("meta"):
        model = FULL_SIZE[name]()
    model.to_empty(device="cpu")
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model
