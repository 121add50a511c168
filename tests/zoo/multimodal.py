"""Models with two towers or two kinds of input: CLIP, LLaVA."""

from __future__ import annotations

import torch
import transformers as hf
from torch import nn

from .case import Batch, Case, own_loss
from .language import LAYERS, SMALL, tokens

IMAGE_TOKEN, PATCHES = 1, 4


def clip() -> nn.Module:
    text = {**SMALL, "eos_token_id": 2, "bos_token_id": 0}
    vision = {**LAYERS, "image_size": 8, "patch_size": 4}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).train()


def clip_batch() -> Batch:
    return {"input_ids": tokens(3), "pixel_values": torch.randn(3, 3, 8, 8)}


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


CASES = [
    Case(
        "clip",
        clip,
        clip_batch,
        own_loss,
        lambda model, batch: model(**batch, return_loss=True),
        heavy=True,
        lightning=True,
        autocast=True,
    ),
    Case("llava", llava, llava_batch, own_loss, heavy=True, autocast=True, lightning=True),
]
