r"""Fine-tune a diffusion transformer, whole or with adapters (LoRA), whose weights need not fit in GPU memory.

Captions and images are encoded once, before training, by text encoders that are streamed, too. After each
epoch, the model draws a grid of images, one column for each prompt.

    sp-lightning finetune-diffusion       # a tiny transformer learns to draw digits from noise
    sp-lightning finetune-diffusion --model black-forest-labs/FLUX.1-dev --images FOLDER --side 512 \
        --train qlora --dtype bfloat16 --batch-size 1 --accumulate 4 --save-every 100 --resume --save-adapters mine \
        # `pip install diffusers accelerate bitsandbytes`; `--train lora` has a base of 16 bits

The model is a pipeline of diffusers with a transformer: FLUX.1, Qwen-Image, Stable Diffusion 3, PixArt, Wan 2.1 (as a
model of images).
Each image of FOLDER has its caption in a text file beside it (`a.png`, `a.txt`), or in the folder's `metadata.jsonl`,
`{"file_name": "a.png", "text": "what it shows"}`, as in data sets of the hub. `--save` writes the transformer for
`from_pretrained`, with adapters merged, `--save-adapters` a file for `pipeline.load_lora_weights`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import lightning as L
import recipe
import torch
from captioned_images import CaptionedImages
from diffusion_models import family_of
from finetune_lm import OPTIMIZERS, add_optimizer, check_optimizer
from float8 import add_fp8, check_fp8, prepare_fp8
from lora_lm import adapter_weights, add_adapters, add_rank, check_adapters, merge_adapters, quantize
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.utils import save_image
from training import Pace, begin, train

MODEL_OPTIONS = ["model", "objective", "train", "rank", "alpha", "lr", "dtype", "optimizer", "denoising", "guidance"]
DATA_OPTIONS = ["images", "model", "side", "prompts", "rows", "batch_size", "output"]


class Flow:
    """Flow matching: the way from an image (time 0) to noise (time 1) is straight, and its direction is predicted."""

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def shifted(self, time: Tensor) -> Tensor:
        """Return times that are nearer to noise."""
        return self.shift * time / (1 + (self.shift - 1) * time)

    def random(self, count: int) -> Tensor:
        """Return times to learn from, most of them in the middle."""
        return self.shifted(torch.randn(count, dtype=torch.float32).sigmoid())

    def way_back(self, steps: int) -> Tensor:
        """Return times from noise to an image."""
        return self.shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float32))

    def mix(self, image: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return what lies between image and noise."""
        return (1 - time) * image + time * noise

    def target(self, image: Tensor, noise: Tensor) -> Tensor:
        """Return what is to be predicted."""
        return noise - image

    def split(self, mixed: Tensor, predicted: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return image and noise, if the prediction is right."""
        return mixed - time * predicted, mixed + (1 - time) * predicted


class Noise:
    """Denoising diffusion (DDPM) in a thousand times: the noise in an image is predicted."""

    def __init__(self) -> None:
        self.kept = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float32)).cumprod(0)

    def random(self, count: int) -> Tensor:
        """Return times to learn from."""
        return torch.randint(1000, (count,)).float() / 1000

    def way_back(self, steps: int) -> Tensor:
        """Return times from noise to an image."""
        return torch.linspace(999, 0, steps + 1, dtype=torch.float32).round() / 1000

    def shares(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return how much there is of image and noise."""
        kept = self.kept.to(time.device)[(1000 * time).round().long()]
        return kept.sqrt(), (1 - kept).sqrt()

    def mix(self, image: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return what lies between image and noise."""
        of_image, of_noise = self.shares(time)
        return of_image * image + of_noise * noise

    def target(self, image: Tensor, noise: Tensor) -> Tensor:
        """Return what is to be predicted."""
        return noise

    def split(self, mixed: Tensor, predicted: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return image and noise, if the prediction is right."""
        of_image, of_noise = self.shares(time)
        return (mixed - of_noise * predicted) / of_image, predicted


class DiffusionModel(L.LightningModule):
    """A diffusion transformer: tiny and random, or one of a pipeline of the Hugging Face hub.

    Args:
        model: Name of a pipeline of the hub, or its folder. `None` builds a tiny transformer.
        objective: `"flow"` or `"noise"`; `None` takes what the hub's model was trained with, and flow for the tiny one.
        train: `"full"` trains all weights of the transformer, `"lora"` adapters in its blocks, `"qlora"` adapters in
            blocks whose frozen weights have 4 bits.
        rank: Rank of the adapters.
        alpha: The adapters' output is scaled by `alpha / rank`.
        lr: Learning rate of AdamW. `None` takes what suits the size of a pretrained transformer.
        dtype: Storage dtype of the transformer; that of a frozen base can be `"bfloat16"`.
        optimizer: One of `finetune_lm.OPTIMIZERS`.
        denoising: Steps from noise to an image in validation.
        guidance: How far a prediction with the caption is taken away from one without; 1 does not ask for that one.
            `None` takes what is usual for the model.

    """

    def __init__(
        self,
        model: str | None = None,
        objective: Literal["flow", "noise"] | None = None,
        train: Literal["full", "lora", "qlora"] = "full",
        rank: int = 8,
        alpha: float = 16,
        lr: float | None = 4e-3,
        dtype: str = "float32",
        optimizer: str = "adamw",
        denoising: int = 16,
        guidance: float | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if train == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError("qlora needs what is not installed: pip install bitsandbytes")
        self.family = family_of(model)
        objective = objective or self.family.objective
        if model is not None and objective != self.family.objective:
            raise ValueError(f"{model} was trained for the objective {self.family.objective}, not {objective}")
        self.objective = Flow(self.family.shift) if objective == "flow" else Noise()
        self.guidance = self.family.guidance if guidance is None else guidance
        self.transformer = self.family.transformer(getattr(torch, dtype))
        self.size = sum(parameter.numel() for parameter in self.transformer.parameters())
        if train != "full":
            self.transformer.requires_grad_(False)
            for blocks in self.transformer.children():
                if isinstance(blocks, nn.ModuleList):
                    if train == "qlora":
                        quantize(blocks)
                    add_adapters(blocks, self.transformer.proj_out, rank, alpha)
        self.vae = self.family.vae().requires_grad_(False)
        self.strict_loading = False  # a checkpoint contains only what is trained

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch of images, each at a time of its own between image and noise."""
        image = batch["latents"].float()
        noise = torch.randn_like(image)
        time = self.objective.random(len(image)).to(image.device)
        level = time.view([-1] + [1] * (image.dim() - 1))  # beside the other dimensions of an image
        predicted = self.predict(self.objective.mix(image, noise, level), time, batch["told"])
        loss = F.mse_loss(predicted, self.objective.target(image, noise))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return images that are drawn from noise."""
        mixed = batch["latents"].float()
        image = mixed
        for time, earlier in pairwise(self.objective.way_back(self.hparams["denoising"]).to(mixed.device)):
            times = time.expand(len(mixed))
            predicted = self.predict(mixed, times, batch["told"])
            if self.guidance != 1:
                unguided = self.predict(mixed, times, batch["told_nothing"])
                predicted = unguided + self.guidance * (predicted - unguided)
            image, noise = self.objective.split(mixed, predicted, time)
            mixed = self.objective.mix(image, noise, earlier)
        return self.family.decode(self.vae, image)

    def predict(self, latents: Tensor, time: Tensor, told: dict[str, Tensor]) -> Tensor:
        """Return what the transformer, which computes in its own dtype, says about noisy latents."""
        dtype = self.transformer.proj_out.weight.dtype
        told = {name: value.to(dtype) for name, value in told.items()}
        return self.family.predict(self.transformer, latents.to(dtype), time, told).float()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the weights that are trained."""
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        lr = self.hparams["lr"]
        if lr is None:
            lr = recipe.learning_rate(self.size, self.hparams["train"] == "full")
        return OPTIMIZERS[self.hparams["optimizer"]](trainable, lr=lr)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave what is frozen out of the checkpoint."""
        recipe.leave_out_frozen(self, checkpoint)


class SaveSamples(L.Callback):
    """Writes what is drawn in a validation as one picture."""

    def __init__(self) -> None:
        self.images: list[Tensor] = []

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Tensor, *_: Any
    ) -> None:
        """Keep what is drawn."""
        self.images.append(outputs)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the picture."""
        data = trainer.datamodule
        images = torch.cat(self.images)
        if trainer.world_size > 1:  # each device draws one, then the next
            images = pl_module.all_gather(images).transpose(0, 1).flatten(0, 1)
        images = images[: len(data.drawn)].float().cpu()
        zoomed = images.repeat_interleave(data.family.zoom, 2).repeat_interleave(data.family.zoom, 3)
        by_step = trainer.check_val_every_n_epoch is None
        name = f"step_{trainer.global_step:06}" if by_step else f"epoch_{trainer.current_epoch + 1:02}"
        file = data.output / f"{name}.png"
        if trainer.is_global_zero:
            save_image(zoomed, file, nrow=len(data.prompts), normalize=True, value_range=(-1, 1))
        recipe.say(f"\n{recipe.moment(trainer)}: {file}")
        self.images.clear()


def save(module: DiffusionModel, folder: str) -> None:
    """Write the transformer, with adapters merged, for `from_pretrained`."""
    merge_adapters(module.transformer)
    module.transformer.save_pretrained(folder)


def save_adapters(module: DiffusionModel, folder: str) -> None:
    """Write the adapters by the names of diffusers, which takes them to be scaled already."""
    weights = adapter_weights(module.transformer, "transformer.", is_scaled=True)
    save_file(weights, Path(folder, "pytorch_lora_weights.safetensors"), metadata={"format": "pt"})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, epochs=8, batch_size=None, lr=4e-3, lr_by_size=True)
    recipe.add_long_run(parser, "samples")
    parser.add_argument(
        "--model", metavar="NAME", help="a pipeline of diffusers: FLUX.1, Qwen-Image, SD3, PixArt, Wan 2.1"
    )
    parser.add_argument("--objective", choices=["flow", "noise"], help="what is predicted (default: as the model was)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="storage of the weights")
    parser.add_argument("--images", type=recipe.folder, metavar="FOLDER", help="images with captions")
    parser.add_argument("--side", type=recipe.positive, help="pixels (default: 512, or 12 without --model)")
    parser.add_argument("--prompts", nargs="+", metavar="TEXT", help="what to draw (default: the first captions)")
    parser.add_argument("--rows", type=recipe.positive, help="images of each (default: 4, or 1 with --model)")
    parser.add_argument("--denoising", type=recipe.positive, default=16, help="steps to draw (default: %(default)s)")
    parser.add_argument(
        "--guidance", type=recipe.amount, help="of what is drawn (default: what is usual for the model)"
    )
    parser.add_argument("--save", type=recipe.new_folder, metavar="FOLDER", help="write the transformer")
    add_optimizer(parser)
    add_fp8(parser)
    add_rank(parser).add_argument(
        "--train", choices=["full", "lora", "qlora"], default="full", help="(default: %(default)s)"
    )
    options = recipe.parse(parser, arguments, data="images")
    is_large = options.model is not None
    options.batch_size = options.batch_size or (1 if is_large else 64)
    options.rows = options.rows or (1 if is_large else 4)
    check_optimizer(parser, options)
    check_adapters(parser, options)
    check_fp8(parser, options)
    if options.save and options.model is None:
        parser.error("--save writes a transformer of diffusers: add --model")
    if options.save and options.train == "qlora":
        parser.error("--save writes whole weights, which --train qlora rounds: take --save-adapters")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write a picture after each epoch, and print how the loss fell and what was streamed."""
    options = parse(arguments)
    begin(options)
    with recipe.one_line(options.model):
        data = CaptionedImages(**{name: getattr(options, name) for name in DATA_OPTIONS})
        model = DiffusionModel(**{name: getattr(options, name) for name in MODEL_OPTIONS})
    prepare_fp8(options, model.transformer)

    def save_results(trainer: L.Trainer) -> None:
        if options.save_adapters is not None and trainer.is_global_zero:
            save_adapters(model, options.save_adapters)
        if options.save is not None and trainer.is_global_zero:
            save(model, options.save)

    train(
        options,
        model,
        data,
        callbacks=[SaveSamples()],
        pace=Pace(lambda batch: len(batch["latents"]), "images"),
        save=save_results,
        max_epochs=options.epochs,
        num_sanity_val_steps=0,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
