"""Workloads: a model's shape, its batch, and what a step has to do. They are the same for every system.

A workload does not say how it is computed; that is up to the system. Weights are random.
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
    """The work of a step.

    Attributes:
        name: Unique name.
        kind: Training or inference.
        network: Builds the model. Its `forward` takes a batch as keyword arguments and returns the loss, or the value
            that inference is compared by.
        batch: Makes a given number of samples, with random numbers from a generator.
        samples: Samples per step.
        items: The unit that work is counted in.
        items_per_sample: Number of items in a sample.
        precision: As in Lightning's Trainer.
        learning_rate: Learning rate of AdamW.
        clipping: The norm that gradients are clipped to; None for no clipping.
        checkpointing: Whether what blocks save for backward does not fit on the device, so that systems with nothing
            better use activation checkpointing.
        device_limit: Bytes of device memory that the process may use; None for all of it.
        passes: How often a step of inference needs the weights: once for each generated token.
        windows: Values of k and k_prime to measure in addition to the system's own choice, for systems that have them.
        budgets: Increasing bytes of device memory to measure systems with that take a budget, None for all there is;
            empty for that alone.
        ladder: Increasing numbers of samples to try, as far as each system gets; empty for `samples` alone.
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
    budgets: tuple[int | None, ...] = ()
    ladder: tuple[int, ...] = ()
    note: str = ""

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype that weights are stored and stepped in: bf16 without fp32 masters under `bf16-true`."""
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float32
