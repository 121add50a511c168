"""A model with two kinds of input: LLaVA, whose CLIP tower feeds a Llama."""

from __future__ import annotations

import torch
import transformers as hf
from torch import nn

from .case import Batch, Case, own_loss
from .language import LAYERS, SMALL, tokens

IMAGE_TOKEN, PATCHES = 1, 4


def llava() -> nn.Module:
    """A CLIP tower whose last layer but one feeds a Llama: its last layer gets no gradient."""
    vision = hf.CLIPVisionConfig(**LAYERS, image_size=8, patch_size=4, projection_dim=8)
    text = hf.LlamaConfig(**{**SMALL, "max_position_embeddings": 32}, num_key_value_heads=2)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    return hf.LlavaForConditionalGeneration(config).train()


def llava_batch() -> Batch:
    ids = torch.cat([torch.full((2, PATCHES), IMAGE_TOKEN), tokens()], 1)
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(2, 3, 8, 8),
        "labels": ids.masked_fill(ids == IMAGE_TOKEN, -100),
    }


CASES = [Case("llava", llava, llava_batch, own_loss, heavy=True, autocast=True)]
