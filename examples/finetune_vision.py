"""Fine-tune an image classifier, transformer or convolutional, whose weights need not fit in GPU memory.

    sp-lightning finetune-vision                       # a small ViT from transformers learns to read digits
    sp-lightning finetune-vision --model resnet        # a small ResNet from torchvision, with its BatchNorm
    sp-lightning finetune-vision --model vit_h_14 --images FOLDER --side 518 --save mine.ckpt   # of torchvision
    sp-lightning finetune-vision --model google/vit-large-patch16-224 --images FOLDER --side 224 --save mine.ckpt

FOLDER contains the folders `train` and `val`, each with a folder of images for every class. Without it, Pillow draws
digits to learn from, so nothing is downloaded. `--save` writes an ordinary Lightning checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import lightning as L
import recipe
import torch
from long_runs import Loader, for_validation
from offline import WrittenNumbers
from PIL.Image import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import models, transforms
from torchvision.datasets import ImageFolder
from torchvision.models.resnet import BasicBlock, ResNet
from training import Accuracy, Pace, begin, save_checkpoint, train
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

# torchvision's weights were trained with these.
NORMALIZE = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


class ImageClassifier(L.LightningModule):
    """An image classifier: tiny and random, or pretrained, from torchvision or the Hugging Face hub.

    Args:
        model: `"vit"` and `"resnet"` are tiny models with random weights. Other names refer to pretrained models of
            torchvision (`"vit_l_16"`, `"resnet152"`) or of the hub.
        classes: Number of classes.
        lr: Learning rate of AdamW.

    """

    def __init__(self, model: str = "vit", classes: int = 10, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = build(model, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return a score for each class."""
        output = self.model(images)
        return output if isinstance(output, Tensor) else output.logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the share of images that are classified correctly."""
        images, labels = batch
        correct = self(images).argmax(-1) == labels
        self.log("val_accuracy", correct.float().mean(), prog_bar=True, batch_size=len(labels))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the most likely class of each image."""
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all weights, with the same kernel under every strategy."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], fused=True)


def build(model: str, classes: int) -> nn.Module:
    """Build the network with the given name."""
    if model == "vit":
        return ViTForImageClassification(
            ViTConfig(
                image_size=32,
                patch_size=8,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=6,
                num_attention_heads=4,
                initializer_range=0.1,  # transformers' default is meant for larger models; small ones learn slowly
                num_labels=classes,
            )
        )
    if model == "resnet":
        return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=classes)
    if model in models.list_models(module=models):
        return with_new_head(models.get_model(model, weights="DEFAULT"), classes)
    return AutoModelForImageClassification.from_pretrained(
        model, num_labels=classes, ignore_mismatched_sizes=True, dtype=torch.float32
    ).train()


def with_new_head(network: nn.Module, classes: int) -> nn.Module:
    """Replace the last linear layer, in which torchvision's classifiers end, by a new one for other classes."""
    linear = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise ValueError(f"{type(network).__name__} has no linear layer to end in: choose another model")
    name, last = linear[-1]
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, nn.Linear(last.in_features, classes))
    return network


class Images(L.LightningDataModule):
    """Images and their classes.

    Args:
        folder: Contains `train` and `val`, with a folder for each class. `None` draws digits.
        side: Height and width that images are resized to.
        batch_size: Images per batch.
        count: Number of digits to draw for training.

    """

    def __init__(self, folder: str | None = None, side: int = 32, batch_size: int = 32, count: int = 4096) -> None:
        super().__init__()
        self.batch_size = batch_size
        prepare = transforms.Compose(
            [transforms.Resize((side, side)), transforms.ToTensor(), transforms.Normalize(**NORMALIZE)]
        )
        if folder is not None:
            self.train: Dataset[tuple[Tensor, int]] = ImageFolder(str(Path(folder, "train")), prepare)
            self.val: Dataset[tuple[Tensor, int]] = ImageFolder(str(Path(folder, "val")), prepare)
            self.classes = len(self.train.classes)
        else:
            self.train = Digits(WrittenNumbers(count, side=side), prepare)
            self.val = Digits(WrittenNumbers(256, side=side, first=count), prepare)
            self.classes = 10

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Return full batches in random order."""
        return Loader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Return images that are not in the training set."""
        return for_validation(self.val, self.batch_size)

    predict_dataloader = val_dataloader


class Digits(Dataset[tuple[Tensor, int]]):
    """Drawn digits as tensors, with their classes."""

    def __init__(self, drawn: WrittenNumbers, prepare: transforms.Compose) -> None:
        self.drawn = drawn
        self.prepare = prepare

    def __len__(self) -> int:
        """Return the number of digits."""
        return len(self.drawn)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image and its class."""
        image: Image
        image, text = self.drawn[index]
        return self.prepare(image), int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, steps=120, batch_size=32, lr=2e-3)
    recipe.add_long_run(parser, "runs/finetune_vision")
    parser.add_argument(
        "--model", default="vit", metavar="NAME", help="vit, resnet, or a name of torchvision or the hub"
    )
    parser.add_argument("--images", type=recipe.folder, metavar="FOLDER", help="with train/CLASS/ and val/CLASS/")
    parser.add_argument("--side", type=recipe.positive, default=32, help="pixels (default: %(default)s)")
    parser.add_argument("--save", type=recipe.new_file, metavar="FILE", help="write a checkpoint when training is over")
    return recipe.parse(parser, arguments, data="images", best=("val_accuracy", "max"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print the accuracy before and after."""
    options = parse(arguments)
    begin(options)
    with recipe.one_line(options.model):
        data = Images(options.images, options.side, options.batch_size)
        model = ImageClassifier(options.model, data.classes, options.lr)

    train(
        options,
        model,
        data,
        callbacks=[Accuracy("Accuracy")],
        pace=Pace(lambda batch: len(batch[0]), "images"),
        save=partial(save_checkpoint, options),
        **recipe.length_of(options),
        val_check_interval=options.eval_every or options.steps,  # once, at the end
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
