"""What a device and its host do to those who take them for kind: they lag, and copies of pageable memory wait."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from unittest.mock import patch

import lightning
import torch
from torch import Tensor

import sp_lightning
from sp_lightning.pipeline.lanes.devices import AcceleratorBackend

from ..helpers import slow_host

PACKAGE = Path(sp_lightning.__file__).parent
OTHERS = [Path(__file__).parents[1], Path(lightning.__file__).parent]
CYCLES = 1_000_000  # that each copy takes longer: about a millisecond


@contextmanager
def slow_copies(to: str) -> Iterator[None]:
    """Every copy to the host, or to the device, takes longer, and holds up those behind it."""
    copy = AcceleratorBackend.copy

    def slow(self: AcceleratorBackend, target: Tensor, source: Tensor) -> None:
        if (target.device.type == "cpu") == (to == "host"):
            torch.cuda._sleep(CYCLES)
        copy(self, target, source)

    with patch.object(AcceleratorBackend, "copy", slow):
        yield


LAGS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "nothing": nullcontext,
    "host": slow_host,
    "up": partial(slow_copies, "device"),
    "down": partial(slow_copies, "host"),
}
"""What lags, of which each test has one."""

PAGEABLE = {
    "optim/compact.py": "a checkpoint is loaded",
    "fabric_strategy.py": "a norm, which users of Fabric get on the device",
    "pipeline/calls/debug.py": "values are looked at",
    "pipeline/optimizer/clipping.py": "norms and a factor, of what lives on the device: the host waits once",
    "pipeline/optimizer/state.py": "a plan has a unit live on the device, or no longer",
    "pipeline/pipeline.py": "the module is given back",
    "pipeline/units/tree.py": "buffers move to the device as a module is attached, or is given another",
    "pipeline/weights/quantized.py": "a plan has a unit live on the device, or no longer",
    "trainer/precision.py": "a factor, of what lives on the device",
}
"""Where in the package memory is copied that is not page-locked, and why it may be."""


@contextmanager
def pageable_copies() -> Iterator[set[str]]:
    """Where else memory was copied that is not page-locked: the device makes whoever asks for it wait.

    Files of the package, with the functions that asked. What Lightning and tests copy themselves is theirs.
    """
    found: set[str] = set()

    def tell(nbytes: int) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE) and file.relative_to(PACKAGE).as_posix() not in PAGEABLE:
                found.add(f"{file.relative_to(PACKAGE)}: {frame.f_code.co_name}")
            if any(file.is_relative_to(place) for place in (PACKAGE, *OTHERS)):
                return
            frame = frame.f_back

    called = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(tell)
    tells: Callable[[object], None] = ctypes.CDLL(None).second_device_tell_of_pageable
    tells(called)
    try:
        yield found
    finally:
        tells(None)
