"""Graphs of the model that loggers draw (`log_graph=True`): traced while the model is still plain.

Lightning asks loggers for them right after `Strategy.setup`, where the model is streamed already, and cannot be traced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sp_lightning.trainer._namespace import Namespace


def log_graphs(loggers: Iterable[Any], module: Any, device: torch.device, lightning: Namespace) -> None:
    """Have loggers log the module's graph now, and not when Lightning asks for it next.

    Args:
        loggers: The Trainer's loggers. Most of them log no graph.
        module: The LightningModule, which is not streamed yet.
        device: The device that it will compute on.
        lightning: The namespace of Lightning in use.
    """
    weight = next(module.parameters(), None)
    if weight is None:
        return  # it will not be streamed
    logs_nothing = lightning.logger.log_graph
    lightning.update_properties(module, device=weight.device)  # loggers move the module's example input there
    for logger in loggers:
        if isinstance(vars(logger).get("log_graph"), _SkipOnce):  # of a run that failed before Lightning asked
            del logger.log_graph
        if getattr(type(logger), "log_graph", logs_nothing) is not logs_nothing and "log_graph" not in vars(logger):
            logger.log_graph(module)
            logger.log_graph = _SkipOnce(logger)
    lightning.update_properties(module, device=device)


class _SkipOnce:
    """Stands in for a logger's `log_graph`, and does nothing but make way for it again when it is called."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        del self._logger.log_graph
