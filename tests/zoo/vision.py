"""Vision models: transformers, residual and plain convolutions, a U-Net."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torchvision.models import ResNet, SwinTransformer
from torchvision.models.resnet import Bottleneck

from .case import Batch, Case, own_loss
from .language import LAYERS

CLASSES = 7


def images(side: int, rows: int = 2) -> Batch:
    return torch.randn(rows, 3, side, side), torch.randint(0, CLASSES, (rows,))


def image_call(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0])


def class_loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch[1])


def vit() -> nn.Module:
    sizes = {**LAYERS, "num_hidden_layers": 4, "image_size": 8, "patch_size": 4}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, num_labels=CLASSES, hidden_dropout_prob=0.1)).train()


def vit_batch() -> Batch:
    pixels, labels = images(8)
    return {"pixel_values": pixels, "labels": labels}


def swin() -> nn.Module:
    return SwinTransformer([2, 2], 8, [2, 2], [2, 2], [2, 2], stochastic_depth_prob=0.3, num_classes=CLASSES)


def resnet50(bottlenecks: Sequence[int] = (3, 4, 6, 3)) -> nn.Module:
    """ResNet-50 with a sixteenth of its width: wide on meta, each layer then made anew."""
    with torch.device("meta"):
        model = ResNet(Bottleneck, list(bottlenecks), num_classes=CLASSES)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d):
                inputs = max(child.in_channels // 16, 3)
                shape = (child.kernel_size, child.stride, child.padding)
                setattr(parent, name, nn.Conv2d(inputs, child.out_channels // 16, *shape, bias=False))
            elif isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.BatchNorm2d(child.num_features // 16))
            elif isinstance(child, nn.Linear):
                setattr(parent, name, nn.Linear(child.in_features // 16, child.out_features))
    return model


def small_resnet50() -> nn.Module:
    return resnet50((1, 2, 2, 1))


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.SiLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Skips from far down the order of units to far up."""

    def __init__(self, widths: tuple[int, ...] = (4, 8, 12)) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        channels = 3
        for width in widths:
            self.down.append(DoubleConv(channels, width))
            channels = width
        self.middle = DoubleConv(channels, channels)
        self.grow, self.up = nn.ModuleList(), nn.ModuleList()
        for width in reversed(widths):
            self.grow.append(nn.ConvTranspose2d(channels, width, 2, stride=2))
            self.up.append(DoubleConv(2 * width, width))
            channels = width
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], 1))
        return self.head(x)


CASES = [
    Case("vit", vit, vit_batch, own_loss, autocast=True, heavy=True),
    Case("swin", swin, lambda: images(16), class_loss, image_call, heavy=True, autocast=True),
    Case("resnet50", small_resnet50, lambda: images(32), class_loss, image_call, heavy=True, autocast=True),
    Case("channels-last", lambda: UNet().to(memory_format=torch.channels_last), lambda: (torch.randn(2, 3, 16, 16),)),
    Case("unet", UNet, lambda: (torch.randn(2, 3, 16, 16),), autocast=True),
]
