"""The strategy, callback and checkpoint plugin for `pytorch_lightning`. `lightning.py` is its twin."""

from __future__ import annotations

from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import ParallelStrategy, SingleDeviceStrategy, StrategyRegistry

from sp_lightning.callback import CallbackMixin
from sp_lightning.strategy import SuperpipelineMixin
from sp_lightning.trainer import Namespace
from sp_lightning.trainer.checkpoint_io import StreamingCheckpointIO


class SuperpipelineCallback(CallbackMixin, Callback):  # type: ignore[misc]  # noqa: D101
    __doc__ = CallbackMixin.__doc__

    lightning = Namespace("pytorch_lightning")


class SuperpipelineCheckpointIO(StreamingCheckpointIO, TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO` without the second copy of the checkpoint in CPU memory."""


class SuperpipelineStrategy(SuperpipelineMixin, ParallelStrategy):  # type: ignore[misc]  # noqa: D101
    __doc__ = SuperpipelineMixin.__doc__

    lightning = Namespace("pytorch_lightning")
    streaming_checkpoint_io = SuperpipelineCheckpointIO


SuperpipelineStrategy.register_strategies(StrategyRegistry)
# Lightning takes a SingleDeviceStrategy to mean only that the module has no wrapper and may be compiled as a whole.
SingleDeviceStrategy.register(SuperpipelineStrategy)
