"""Train a small language model in BF16, and with its linear layers' products in FP8: does that cost anything?

    python tools/fp8_loss.py

torchao converts the layers but the head, and emulates FP8 on the CPU, with the rounding of a GPU. Both models begin
with the same weights, see the same text, Python's reference manual, and stream. Printed are the mean losses since the
line before, and the losses on text that was held out.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from compact_moments import Bytes, batch, held_out_loss
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import sp_lightning

EVERY = 50  # steps from one line to the next


def losses(recipe: str | None, steps: int, width: int, size: int) -> list[tuple[float, float]]:
    """Train, and return the losses of each line."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    seen, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    torch.manual_seed(0)
    model = Bytes(width, layers=4).bfloat16()
    if recipe is not None:
        config = Float8LinearConfig.from_recipe_name(recipe)
        object.__setattr__(config, "emulate", True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, _: layer is not model.head)
    optimizer = sp_lightning.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    lines, total = [], 0.0
    with sp_lightning.superpipeline(model, units=[type(model.blocks[0])], k=2) as pipeline:
        for step in range(1, steps + 1):
            with pipeline.step():
                loss = model(batch(seen, generator, size))
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
            if step % EVERY == 0:
                with pipeline.step():
                    lines.append((total / EVERY, held_out_loss(model, held_out)))
                print(recipe or "bf16", step, *lines[-1], flush=True)
                total = 0.0
    return lines


def main() -> None:
    """Train both, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--size", type=int, default=32, help="pieces of text in a step")
    parser.add_argument("--recipe", default="tensorwise", help="one of torchao's (default: %(default)s)")
    given = parser.parse_args()
    both = [losses(recipe, given.steps, given.width, given.size) for recipe in (None, given.recipe)]
    print("| steps | BF16 | FP8 | BF16, held out | FP8, held out |\n| --- | --- | --- | --- | --- |")
    for number, ((loss, after), (loss_8, after_8)) in enumerate(zip(*both, strict=True), start=1):
        print(f"| {number * EVERY} | {loss:.4f} | {loss_8:.4f} | {after:.4f} | {after_8:.4f} |")
    print(
        f"After {given.steps} steps, FP8's loss on text that was held out is {100 * (after_8 / after - 1):+.2f} % off."
    )


if __name__ == "__main__":
    main()
