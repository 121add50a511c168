"""Diffusion transformers for finetune_diffusion.py: a tiny one, and what is particular to five families of diffusers.

A family says how its transformer is called, and what makes its inputs of captions and images. Latents are in the
transformer's own scale, times between 0 (an image) and 1 (noise), and pixels between -1 and 1.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE, PATCH, WIDTH = 12, 3, 64  # of the tiny model's images, in pixels, and of its tokens


class Family:
    """A family of diffusers' transformers.

    Args:
        name: Name of a pipeline of the hub, or its folder.

    """

    objective = "flow"
    shift = 3.0  # how far times are moved to noise, of which large images need more
    guidance = 5.0
    channels = 3  # of pixels
    zoom = 1  # of pictures that show what is drawn

    def __init__(self, name: str) -> None:
        self.name = name

    def check_side(self, side: int | None) -> int:
        """Return the height and width of images in pixels, after a look at what the user wants."""
        if side is not None and side % 16:
            raise ValueError(f"side: {side} is no multiple of 16, as patches of 2x2 latents of 8x8 pixels need")
        return side or 512

    def transformer(self, dtype: torch.dtype) -> nn.Module:
        """Return the pretrained transformer, on the CPU."""
        return self.load("transformer", dtype).train()

    def vae(self) -> nn.Module:
        """Return the autoencoder of images."""
        return self.load("vae", torch.float32)

    def load(self, part: str, dtype: torch.dtype) -> nn.Module:
        """Return a part of the pipeline."""
        import diffusers

        kind = diffusers.DiffusionPipeline.load_config(self.name)[part][1]
        return getattr(diffusers, kind).from_pretrained(self.name, subfolder=part, torch_dtype=dtype)

    def pipeline(self) -> Any:
        """Return what encodes captions and images: the pipeline without its transformer."""
        import diffusers

        types = {"vae": torch.float32, "default": torch.bfloat16}
        return diffusers.DiffusionPipeline.from_pretrained(self.name, transformer=None, torch_dtype=types)

    def embed(self, pipeline: Any, captions: list[str], device: torch.device) -> dict[str, Tensor]:
        """Return what the transformer is told about captions, by the names of its arguments."""
        raise NotImplementedError

    def encode(self, vae: nn.Module, images: Tensor) -> Tensor:
        """Return the latents of images."""
        mean, std = self.scale(vae, images)
        return (vae.encode(images).latent_dist.mode() - mean) / std

    def decode(self, vae: nn.Module, latents: Tensor) -> Tensor:
        """Return the images of latents."""
        latents = latents.to(vae.dtype)
        mean, std = self.scale(vae, latents)
        return vae.decode(latents * std + mean, return_dict=False)[0]

    def scale(self, vae: nn.Module, like: Tensor) -> tuple[Any, Any]:
        """Return the mean and the deviation of what the autoencoder makes of images."""
        return getattr(vae.config, "shift_factor", None) or 0.0, 1 / vae.config.scaling_factor

    def predict(self, model: nn.Module, latents: Tensor, time: Tensor, told: dict[str, Tensor]) -> Tensor:
        """Return what the transformer says about noisy latents."""
        return model(hidden_states=latents, timestep=1000 * time, **told, return_dict=False)[0]


class SD3(Family):
    """Stable Diffusion 3 and 3.5: it is also told a summary of the caption."""

    def embed(self, pipeline: Any, captions: list[str], device: torch.device) -> dict[str, Tensor]:
        """Return the embeddings of three encoders, and the summary of two."""
        text, _, pooled, _ = pipeline.encode_prompt(
            captions, None, None, do_classifier_free_guidance=False, device=device
        )
        return {"encoder_hidden_states": text, "pooled_projections": pooled}


class Flux(Family):
    """FLUX.1: patches of 2x2 latents come as a row of tokens with their places, and guidance is an input."""

    guidance = 1.0  # one call is enough, as the model has learned to guide itself
    inner_guidance = 3.5

    def embed(self, pipeline: Any, captions: list[str], device: torch.device) -> dict[str, Tensor]:
        """Return the embeddings of one encoder, and the summary of another."""
        text, pooled, _ = pipeline.encode_prompt(captions, device=device)
        return {"encoder_hidden_states": text, "pooled_projections": pooled}

    def predict(self, model: nn.Module, latents: Tensor, time: Tensor, told: dict[str, Tensor]) -> Tensor:
        """Return what the transformer says about noisy latents."""
        patches = F.pixel_unshuffle(latents, 2)
        height, width = patches.shape[-2:]
        places = torch.zeros(height, width, 3, device=latents.device)
        places[..., 1] = torch.arange(height, device=latents.device)[:, None]
        places[..., 2] = torch.arange(width, device=latents.device)
        guidance = latents.new_full((len(latents),), self.inner_guidance) if model.config.guidance_embeds else None
        tokens = model(
            hidden_states=patches.flatten(2).mT,
            timestep=time,
            guidance=guidance,
            img_ids=places.flatten(0, 1),
            txt_ids=places.new_zeros(told["encoder_hidden_states"].shape[1], 3),
            **told,
            return_dict=False,
        )[0]
        return F.pixel_shuffle(tokens.mT.unflatten(2, (height, width)), 2)


class PixArt(Family):
    """PixArt-alpha and -sigma: noise is predicted, captions are masked, and large models are told the image's size."""

    objective = "noise"

    def embed(self, pipeline: Any, captions: list[str], device: torch.device) -> dict[str, Tensor]:
        """Return embeddings, and which of them are no padding."""
        text, mask, _, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, device=device)
        return {"encoder_hidden_states": text, "encoder_attention_mask": mask}

    def predict(self, model: nn.Module, latents: Tensor, time: Tensor, told: dict[str, Tensor]) -> Tensor:
        """Return what the transformer says about noisy latents, without the variance, which is not learned here."""
        size: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
        if model.use_additional_conditions:
            height, width = (8.0 * side for side in latents.shape[-2:])
            size["resolution"] = latents.new_tensor([height, width]).expand(len(latents), 2)
            size["aspect_ratio"] = latents.new_tensor([height / width]).expand(len(latents), 1)
        output = super().predict(model, latents, time, {**told, "added_cond_kwargs": size})
        return output[:, : latents.shape[1]]


class Wan(Family):
    """Wan: a model of videos, here of one frame, whose latents are scaled channel by channel."""

    def embed(self, pipeline: Any, captions: list[str], device: torch.device) -> dict[str, Tensor]:
        """Return embeddings of the length that the model was trained with: it sees padding, too."""
        text, _ = pipeline.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=512, device=device
        )
        return {"encoder_hidden_states": text}

    def encode(self, vae: nn.Module, images: Tensor) -> Tensor:
        """Return the latents of images."""
        return super().encode(vae, images.unsqueeze(2))

    def decode(self, vae: nn.Module, latents: Tensor) -> Tensor:
        """Return the images of latents."""
        return super().decode(vae, latents).squeeze(2)

    def scale(self, vae: nn.Module, like: Tensor) -> tuple[Any, Any]:
        """Return the mean and the deviation of each channel."""
        mean, std = (like.new_tensor(values) for values in (vae.config.latents_mean, vae.config.latents_std))
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


class QwenImage(Wan):
    """Qwen-Image: patches of 2x2 latents come as a row of tokens, captions are masked, and latents are Wan's."""

    guidance = 4.0
    tokens = 512  # of a caption, with padding

    def embed(self, pipeline: Any, captions: list[str], device: torch.device) -> dict[str, Tensor]:
        """Return embeddings of one length, and which of them are no padding."""
        text, mask = pipeline.encode_prompt(captions, device=device, max_sequence_length=self.tokens)
        mask = text.new_ones(text.shape[:2]) if mask is None else mask.to(text.dtype)
        missing = self.tokens - text.shape[1]
        return {
            "encoder_hidden_states": F.pad(text, (0, 0, 0, missing)),
            "encoder_hidden_states_mask": F.pad(mask, (0, missing)),
        }

    def predict(self, model: nn.Module, latents: Tensor, time: Tensor, told: dict[str, Tensor]) -> Tensor:
        """Return what the transformer says about noisy latents."""
        patches = F.pixel_unshuffle(latents.squeeze(2), 2)
        size = patches.shape[-2:]
        shapes = [[(1, *size)]] * len(latents)
        tokens = model(hidden_states=patches.flatten(2).mT, timestep=time, img_shapes=shapes, **told, return_dict=False)
        return F.pixel_shuffle(tokens[0].mT.unflatten(2, size), 2).unsqueeze(2)


class Tiny(Family):
    """A tiny transformer with random weights, for small gray images, which are their own latents."""

    shift = 1.0
    guidance = 2.0
    channels = 1
    zoom = 4

    def check_side(self, side: int | None) -> int:
        """Return the height and width of images in pixels, after a look at what the user wants."""
        if side not in (None, SIDE):
            raise ValueError(f"side: the tiny model knows images of {SIDE} pixels, not {side}: name a model")
        return SIDE

    def transformer(self, dtype: torch.dtype) -> nn.Module:
        """Return a new transformer."""
        return TinyTransformer().to(dtype)

    def vae(self) -> nn.Module:
        """Return what does nothing."""
        return nn.Identity()

    def pipeline(self) -> Any:
        """Return an encoder of captions with fixed random weights: the mean of a vector for each byte."""
        vectors = torch.randn(257, WIDTH, generator=torch.Generator().manual_seed(0))
        return TinyPipeline(nn.EmbeddingBag.from_pretrained(vectors), nn.Identity())

    def embed(self, pipeline: Any, captions: list[str], device: torch.device) -> dict[str, Tensor]:
        """Return a vector for each caption."""
        texts = [torch.tensor([[256, *caption.encode()]], device=device) for caption in captions]  # 256 begins a text
        return {"text": torch.cat([pipeline.text_encoder(text) for text in texts])}

    def encode(self, vae: nn.Module, images: Tensor) -> Tensor:
        """Return the images."""
        return images

    def decode(self, vae: nn.Module, latents: Tensor) -> Tensor:
        """Return the latents."""
        return latents

    def predict(self, model: nn.Module, latents: Tensor, time: Tensor, told: dict[str, Tensor]) -> Tensor:
        """Return what the transformer says about noisy latents."""
        return model(latents, time, **told)


class TinyPipeline:
    """What encodes captions and images, by the names that diffusers' pipelines have."""

    def __init__(self, text_encoder: nn.Module, vae: nn.Module) -> None:
        self.text_encoder = text_encoder
        self.vae = vae
        self.components = {"text_encoder": text_encoder, "vae": vae}


class TinyTransformer(nn.Module):
    """A small diffusion transformer (DiT): its norms are scaled and shifted by time and caption."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH**2, WIDTH)
        self.places = nn.Parameter(torch.randn((SIDE // PATCH) ** 2, WIDTH) * 0.1)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.caption = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.proj_out = nn.Linear(WIDTH, PATCH**2)
        self.register_buffer("frequencies", torch.logspace(0, 3, WIDTH // 2), persistent=False)

    def forward(self, latents: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """Return a prediction of the latents' shape."""
        angles = time[:, None] * self.frequencies
        waves = torch.cat([angles.cos(), angles.sin()], 1).to(text.dtype)
        told = F.silu(self.time(waves) + self.caption(text))
        patches = F.pixel_unshuffle(latents, PATCH)
        tokens = self.patches(patches.flatten(2).mT) + self.places
        for block in self.blocks:
            tokens = block(tokens, told)
        output = self.proj_out(self.norm(tokens))
        return F.pixel_shuffle(output.mT.unflatten(2, patches.shape[-2:]), PATCH)


class TinyBlock(nn.Module):
    """Attention and a multilayer perceptron, each scaled, shifted and gated by what the block is told."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.told = nn.Linear(WIDTH, 6 * WIDTH)
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.to_out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        nn.init.zeros_(self.told.weight)  # at first, a block changes nothing
        nn.init.zeros_(self.told.bias)

    def forward(self, tokens: Tensor, told: Tensor) -> Tensor:
        """Return the tokens, changed."""
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = self.told(told)[:, None].chunk(6, -1)
        seen = self.to_qkv(self.norm(tokens) * (1 + scale) + shift)
        heads = seen.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        tokens = tokens + gate * self.to_out(mixed)
        return tokens + mlp_gate * self.mlp(self.norm(tokens) * (1 + mlp_scale) + mlp_shift)


FAMILIES = {
    "FluxTransformer2DModel": Flux,
    "SD3Transformer2DModel": SD3,
    "PixArtTransformer2DModel": PixArt,
    "WanTransformer3DModel": Wan,
    "QwenImageTransformer2DModel": QwenImage,
}


def family_of(model: str | None) -> Family:
    """Return the family of a pipeline of the hub, or that of the tiny model.

    Raises:
        ValueError: If a package is missing, or the transformer is of another family.

    """
    if model is None:
        return Tiny("tiny")
    missing = [name for name in ("diffusers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the model {model} needs what is not installed: pip install {' '.join(missing)}")
    import diffusers

    parts = diffusers.DiffusionPipeline.load_config(model)
    _, kind = parts.get("transformer", (None, None))
    if kind in FAMILIES:
        return FAMILIES[kind](model)
    known = f"this recipe trains FLUX.1, Stable Diffusion 3, PixArt, Wan 2.1 and Qwen-Image ({', '.join(FAMILIES)})"
    if "unet" in parts:
        raise ValueError(
            f"{model} has a UNet, as SDXL and Stable Diffusion 1 and 2 do. These are small enough for most GPUs, and "
            f"diffusers has scripts that train them; {known}"
        )
    raise ValueError(f"{model} has the transformer {kind}: {known}")
