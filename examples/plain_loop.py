"""The engine without Lightning: a plain PyTorch loop over a streamed model.

sp-lightning plain-loop
"""

import torch
from torch import nn

from sp_lightning import superpipeline


class Block(nn.Module):
    """A residual multilayer perceptron, as a stand-in for any layer of your own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual sum of `x` and the layers' output."""
        return x + self.inner(x)


def main() -> None:
    """Teach a stack of blocks to reverse a vector."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(64) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pipeline = superpipeline(model, k=2)  # on the accelerator if there is one, otherwise on the CPU

    for step in range(31):
        x = torch.randn(32, 64, device=pipeline.device)
        with pipeline.step():
            loss = nn.functional.mse_loss(model(x), x.flip(1))
            loss.backward()
        optimizer.step()  # outside of the step, gradients and weights are ordinary CPU tensors
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")

    print(pipeline.summary())
    print(f"{pipeline.stats.loads} loads of units in {pipeline.stats.steps} steps")
    pipeline.detach()  # the model is an ordinary CPU model again


if __name__ == "__main__":
    main()
