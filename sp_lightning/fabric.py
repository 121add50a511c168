"""The strategy and checkpoint plugin for `lightning.fabric`. `lightning_fabric.py` is its twin."""

from __future__ import annotations

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from sp_lightning.fabric_strategy import FabricMixin
from sp_lightning.trainer import FabricNamespace
from sp_lightning.trainer.checkpoint_io import StreamingCheckpointIO


class SuperpipelineCheckpointIO(StreamingCheckpointIO, TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO` without the second copy of the checkpoint in CPU memory."""


class SuperpipelineStrategy(FabricMixin, ParallelStrategy):  # noqa: D101
    __doc__ = FabricMixin.__doc__

    lightning = FabricNamespace("lightning.fabric")
    streaming_checkpoint_io = SuperpipelineCheckpointIO
    single_device_strategy = SingleDeviceStrategy


SuperpipelineStrategy.register_strategies(STRATEGY_REGISTRY)
