"""The networks of the workloads: shapes of well-known models, with random weights.

Each takes a batch as keyword arguments and gives the number that it is trained by, or compared by in inference: a loss,
or the mean of the tokens that it generated. All of them are what a user would build: modules of transformers and
torchvision, called as these libraries mean them to be called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class Network(nn.Module, ABC):
    """A model, and where its blocks are: systems that want to be told shard, group or move these."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks, in the order of forward. With what lies outside of them they are the whole model."""

    @abstractmethod
    def checkpoint_blocks(self) -> None:
        """Switch activation checkpointing of blocks on, without reentrance."""

    @abstractmethod
    def forward(self, **batch: Tensor) -> Tensor:
        """Compute the number."""
