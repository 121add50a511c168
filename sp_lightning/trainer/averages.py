"""Callbacks that average weights: their copy of the model belongs where its weights are, in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sp_lightning.trainer._namespace import Namespace

_HOST = torch.device("cpu")


class Averages:
    """Has the averages of a run's callbacks kept in host memory.

    Args:
        lightning: The namespace of Lightning in use.
    """

    def __init__(self, lightning: Namespace) -> None:
        self._lightning = lightning
        self._told: list[Any] = []

    def begin_run(self, callbacks: Iterable[Any], device: torch.device) -> None:
        """Tell callbacks that leave it open where to keep an average, before their `setup`, which makes it.

        Args:
            callbacks: The Trainer's callbacks.
            device: The device that forward and backward run on.

        Raises:
            MisconfigurationException: If the user wants an average on the device.
        """
        self.end_run()  # one that ended without `teardown`
        if device.type == "cpu":
            return
        for callback in callbacks:
            if isinstance(callback, self._lightning.averaging):
                _check(callback, self._lightning)
                if callback._device is None:  # Lightning would take the module's `device`, where no weight is
                    callback._device = _HOST
                    self._told.append(callback)

    def end_run(self) -> None:
        """Leave it open again: the callbacks may go on in another Trainer."""
        while self._told:
            self._told.pop()._device = None


def _check(callback: Any, lightning: Namespace) -> None:
    name, chosen = type(callback).__name__, callback._device
    lightning.check(
        chosen is None or torch.device(chosen).type == "cpu",
        f"`{name}(device={chosen!r})` keeps a second copy of the whole model on the device, but "
        f"`strategy='superpipeline'` keeps weights in host memory. Leave `device` out, or set it to 'cpu'.",
    )
