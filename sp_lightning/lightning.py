"""The strategy, callback and checkpoint plugin for `lightning.pytorch`. `pytorch_lightning.py` is its twin."""

from __future__ import annotations

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy, StrategyRegistry

from sp_lightning.callback import CallbackMixin
from sp_lightning.strategy import SuperpipelineMixin
from sp_lightning.trainer import Namespace
from sp_lightning.trainer.checkpoint_io import StreamingCheckpointIO


class SuperpipelineCallback(CallbackMixin, Callback):  # noqa: D101
    __doc__ = CallbackMixin.__doc__

    lightning = Namespace("lightning.pytorch")


class SuperpipelineCheckpointIO(StreamingCheckpointIO, TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO` without the second copy of the checkpoint in CPU memory."""


class SuperpipelineStrategy(SuperpipelineMixin, ParallelStrategy):  # type: ignore[misc]  # noqa: D101
    __doc__ = SuperpipelineMixin.__doc__

    lightning = Namespace("lightning.pytorch")
    streaming_checkpoint_io = SuperpipelineCheckpointIO


SuperpipelineStrategy.register_strategies(StrategyRegistry)
# Lightning takes a SingleDeviceStrategy to mean only that the module has no wrapper and may be compiled as a whole.
SingleDeviceStrategy.register(SuperpipelineStrategy)
