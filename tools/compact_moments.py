"""Train a small language model with both compact optimizers: do 8 bits for a moment cost anything?

    python tools/compact_moments.py --json results.json

A transformer of bytes learns Python's reference manual. Its weights are bf16. The exact optimizer, with fp32 moments,
has the numbers of AdamW with fp32 masters, bit for bit. The other starts from the same weights and sees the same text.
Printed are the losses on text that was held out, for each seed, and how far their mean is from the exact one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_lightning.optim import AdamW

MOMENTS = ("fp32", "int8")
LENGTH, BATCH = 32, 8


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what both make of the input."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Bytes(nn.Module):
    """A language model of bytes."""

    def __init__(self, width: int = 64, layers: int = 1) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return the loss of each byte after the first."""
        x = self.blocks(self.embedding(text[:, :-1]) + self.positions.weight)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), text[:, 1:].flatten())


def batch(text: Tensor, generator: torch.Generator, size: int) -> Tensor:
    """Draw pieces of a text."""
    begins = torch.randint(0, len(text) - LENGTH - 1, (size,), generator=generator)
    return text[begins[:, None] + torch.arange(LENGTH + 1)].long()


def losses(moments: str, seed: int, steps: int, lr: float) -> tuple[float, float]:
    """Train, and return the losses on text that was held out, before and after."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    seen, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    torch.manual_seed(seed)
    model = Bytes().bfloat16()
    optimizer = AdamW(model.parameters(), lr=lr, moments=moments)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, cycle_momentum=False)
    generator = torch.Generator().manual_seed(seed)
    before = held_out_loss(model, held_out)
    for _ in range(steps):
        model(batch(seen, generator, BATCH)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return before, held_out_loss(model, held_out)


@torch.no_grad()
def held_out_loss(model: Bytes, text: Tensor) -> float:
    """Return the loss on pieces of a text, the same ones each time."""
    return float(model(batch(text, torch.Generator().manual_seed(0), 1024)))


def main() -> None:
    """Train all kinds, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--json", help="file to write the losses to")
    arguments = parser.parse_args()
    before, after = [], {}
    for moments in MOMENTS:
        before, after[moments] = zip(
            *(losses(moments, seed, arguments.steps, arguments.lr) for seed in range(arguments.seeds)), strict=True
        )
        exact, mean = after["fp32"], statistics.mean(after[moments])
        away = 100 * (mean / statistics.mean(exact) - 1)
        each = " ".join(f"{loss:.4f}" for loss in after[moments])
        print(f"{moments:<14} {each}  mean {mean:.4f} ({away:+.2f} % of the exact one)", flush=True)
    print("before         " + " ".join(f"{loss:.4f}" for loss in before))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {"torch": torch.__version__, **vars(arguments), "before": before, "losses": after}, file, indent=2
            )


if __name__ == "__main__":
    main()
