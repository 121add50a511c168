"""What is measured: a model's shape, its batch, and what a step has to do. The same for every system.

A workload says nothing about how it is computed; that is a system's business. Weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from suite.networks import Network

Kind = Literal["train", "inference"]
Window = tuple[int, int]
"""k and k_prime."""


@dataclass(frozen=True)
class Workload:
    """What a step does.

    Attributes:
        name: Unique.
        kind: Whether weights learn.
        network: Builds the model. Its `forward` takes a batch as keyword arguments and gives the loss, or whatever
            number inference is compared by.
        batch: Makes so many samples with random numbers of a generator.
        samples: How many samples there are in a step.
        items: What counts as work in a sample.
        items_per_sample: How many of them a sample has.
        precision: As in Lightning's Trainer.
        learning_rate: Of AdamW.
        clipping: The norm that gradients are clipped to; None if they are not.
        checkpointing: Whether what blocks save for backward does not fit the device, so that whoever has nothing better
            computes their forward twice.
        device_limit: Bytes that the process may take on the device; None for all there is.
        passes: How often the weights are needed in a step of inference: once for each token that is generated.
        windows: Values of k and k_prime to measure, for systems that have them, beside their own choice.
        ladder: Numbers of samples to climb, as far as each system gets; empty for `samples` alone.
        note: What a reader of the results has to know.
    """

    name: str
    kind: Kind
    network: Callable[[], Network]
    batch: Callable[[int, torch.Generator], dict[str, Tensor]]
    samples: int
    items: Literal["tokens", "images"]
    items_per_sample: int
    precision: str = "bf16-mixed"
    learning_rate: float = 1e-5
    clipping: float | None = None
    checkpointing: bool = False
    device_limit: int | None = None
    passes: int = 1
    windows: tuple[Window, ...] = ()
    ladder: tuple[int, ...] = ()
    note: str = ""

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype that weights are kept and stepped in: bf16 without fp32 masters under `bf16-true`."""
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float32
