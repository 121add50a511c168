"""State that a forward depends on besides its inputs and its module: random generators, autocast, torch's settings.

A forward that runs again in backward (recompute.py) begins with all of it as it was the first time.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn

# What decides which kernels run, or what a new tensor is, if a context manager around the forward sets it: how to read
# and to set it.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (partial(getattr, mkldnn, "enabled"), partial(setattr, mkldnn, "enabled")),
    (partial(getattr, cudnn, "enabled"), partial(setattr, cudnn, "enabled")),
    (partial(getattr, cudnn, "benchmark"), partial(setattr, cudnn, "benchmark")),
    (partial(getattr, cudnn, "deterministic"), partial(setattr, cudnn, "deterministic")),
)


class RandomStates:
    """A snapshot of random generators: torch's, the device's, Python's, numpy's.

    Args:
        device: The device whose generator is included.
    """

    def __init__(self, device: torch.device) -> None:
        self._api: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._on_device = None if self._api is None else self._api.get_rng_state(device)
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._device = device

    def restore(self) -> None:
        """Set all generators to this snapshot."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._on_device is not None:
            self._api.set_rng_state(self._on_device, self._device)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Surroundings:
    """A snapshot of what a forward depends on besides its inputs and its module.

    Args:
        device: The device that the forward runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = RandomStates(device)
        kinds = {device.type, "cpu"}
        self._autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self._has_cache = torch.is_autocast_cache_enabled()
        self._default_device = torch.get_default_device()
        self._settings = [read() for read, _ in _SETTINGS]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the snapshot for the duration of the block; then return random generators to their present state."""
        now, settings = RandomStates(self._device), [read() for read, _ in _SETTINGS]
        try:
            self._random.restore()
            _change_settings(settings, self._settings)
            with ExitStack() as stack:
                for kind, (enabled, dtype) in self._autocast.items():
                    stack.enter_context(torch.autocast(kind, dtype, enabled, self._has_cache))
                if self._default_device != torch.get_default_device():
                    stack.enter_context(self._default_device)
                yield
        finally:
            _change_settings(self._settings, settings)
            now.restore()


def _change_settings(before: list[Any], after: list[Any]) -> None:
    for (_, write), old, new in zip(_SETTINGS, before, after, strict=True):
        if old != new:
            write(new)
