"""Images with captions, for finetune_diffusion.py: encoded once, by encoders that stream, and kept in a file."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import recipe
import torch
from data_files import Skipped
from diffusion_models import family_of
from long_runs import Loader, for_validation
from offline import WrittenNumbers, read_captions
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms.functional import to_tensor

import sp_lightning


class CaptionedImages(L.LightningDataModule):
    """Images with captions, and prompts to draw, all of them encoded once and kept in a file.

    Args:
        images: A folder of images with captions. `None` draws digits.
        model: Name of the hub's pipeline whose encoders are used. `None` uses those of the tiny model.
        side: Height and width in pixels, for which images are scaled and cropped. `None` is 512, or 12 without a model.
        prompts: What to draw after each epoch. `None` takes the first captions.
        rows: Images for each prompt.
        batch_size: Images per batch.
        output: Folder for the file, and for what is drawn.
        count: Number of digits to draw for training.

    """

    def __init__(
        self,
        images: str | None = None,
        model: str | None = None,
        side: int | None = None,
        prompts: list[str] | None = None,
        rows: int = 4,
        batch_size: int = 64,
        output: str = "samples",
        count: int = 4096,
    ) -> None:
        super().__init__()
        self.family = family_of(model)
        self.side = self.family.check_side(side)
        self.rows = rows
        self.batch_size = batch_size
        self.output = Path(output)
        self.file = self.output / "encoded.pt"
        self.pairs: Sequence[tuple[Any, str]] | WrittenNumbers
        if images is None:
            self.pairs = WrittenNumbers(count, side=self.side)
            self.prompts = prompts or list("0123456789")
            files: list[Any] = [count]
        else:
            skipped = Skipped()
            self.pairs = read_captions(images, skipped)
            skipped.report(images, len(self.pairs))
            self.prompts = prompts or list(dict.fromkeys(caption for _, caption in self.pairs))[:4]
            files = [(str(path), path.stat().st_mtime_ns, caption) for path, caption in self.pairs]
        self.made_of = repr([model, self.side, self.prompts, files])

    def prepare_data(self) -> None:
        """Encode everything, unless the file has it."""
        # not if it is damaged
        if zipfile.is_zipfile(self.file) and torch.load(self.file, mmap=True)["made_of"] == self.made_of:
            return
        recipe.say(f"Encoding {len(self.pairs)} images and their captions, once: {self.file}")
        with torch.no_grad(), torch.random.fork_rng():
            kept = self.encode(self.trainer.strategy.root_device)
        self.output.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".tmp")
        torch.save({"made_of": self.made_of, **kept}, unfinished)
        unfinished.replace(self.file)

    def encode(self, device: torch.device) -> dict[str, Any]:
        """Return latents and embeddings of all images, of all prompts, and of no caption."""
        pipeline = self.family.pipeline()
        parts = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
        stream = sp_lightning.superpipeline(nn.ModuleList(parts).requires_grad_(False), device)
        examples: list[dict[str, Any]] = []
        skipped = Skipped()
        try:
            for pairs in DataLoader(self.pairs, self.batch_size, collate_fn=list):
                read = [(self.tensor(image, skipped), caption) for image, caption in pairs]
                usable = [(pixels, caption) for pixels, caption in read if pixels is not None]
                if not usable:
                    continue
                images = torch.stack([pixels for pixels, _ in usable]).to(device)
                with stream.step():
                    told = self.family.embed(pipeline, [caption for _, caption in usable], device)
                    latents = self.family.encode(pipeline.vae, images)
                for latent, row in zip(latents.cpu(), rows_of(told), strict=True):
                    examples.append({"latents": latent, "told": row})
            with stream.step():
                nothing, *prompts = rows_of(self.family.embed(pipeline, ["", *self.prompts], device))
        finally:
            stream.detach()
        if not examples:
            sys.exit(f"error: no image can be read{skipped}")
        skipped.report("images", len(examples))
        return {"examples": examples, "nothing": nothing, "prompts": prompts}

    def tensor(self, image: Image.Image | Path, skipped: Skipped) -> Tensor | None:
        """Return the pixels of an image, from -1 to 1; none if it cannot be read."""
        opened = Image.open(image) if isinstance(image, Path) else image
        try:
            pixels = opened.convert("L" if self.family.channels == 1 else "RGB")
        except OSError as error:
            skipped.reasons.append(f"{image}: {error}")
            return None
        square = ImageOps.fit(pixels, (self.side, self.side))
        return 2 * to_tensor(square) - 1

    def setup(self, stage: str) -> None:
        """Read what is kept, and lay out what to draw: the same noise after each epoch, a column for each prompt."""
        kept = torch.load(self.file, mmap=True)
        self.train, self.nothing = kept["examples"], kept["nothing"]
        shape, generator = self.train[0]["latents"].shape, torch.Generator().manual_seed(0)
        self.drawn = [
            {"latents": torch.randn(shape, generator=generator), "told": told, "told_nothing": self.nothing}
            for _ in range(self.rows)
            for told in kept["prompts"]
        ]

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch, without one caption in ten, so that the model can also be asked without one."""
        left_out = torch.rand(len(examples)) < 0.1
        rows = [{**row, "told": self.nothing} if out else row for row, out in zip(examples, left_out, strict=True)]
        return default_collate(rows)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return images in random order."""
        return Loader(self.train, self.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return noise, and what is to be drawn from it."""
        return for_validation(self.drawn, self.batch_size)


def rows_of(told: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the rows of a batch."""
    return [dict(zip(told, row, strict=True)) for row in zip(*(value.cpu() for value in told.values()), strict=True)]
