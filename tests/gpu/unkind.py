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
from sp_lightning.pipeline.lanes.accelerator import AcceleratorBackend

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
    "check.py: _train": "what is compared, and plain training",
    "check.py: lost_uploads": "what is compared",
    "check_program/observer.py: _note": "what is compared",
    "check_program/observer.py: digest": "what is compared",
    "fabric_strategy.py: clip_gradients_norm": "users of Fabric get the norm on the device",
    "optim/one_kernel.py: _compile": "updates are compiled, once",
    "optim/optimizers.py: _loaded": "a checkpoint is loaded",
    "pipeline/activations/contract.py: _digest": "the first calls of a unit that recomputes are looked at",
    "pipeline/calls/guard.py: serve": "a weight is used outside of its unit, in the step that finds it out",
    "pipeline/optimizer/clipping.py: scale": "a factor, of what lives on the device",
    "pipeline/optimizer/clipping.py: measure_here": "norms, of what lives on the device: the host waits once",
    "pipeline/optimizer/staying.py: move": "buffers, as the module is attached",
    "pipeline/optimizer/staying.py: move_parameters": "a plan has a unit live on the device, or no longer",
    "pipeline/optimizer/staying.py: move_state": "a plan has a unit live on the device, or no longer",
    "pipeline/optimizer/visit.py: _run": "a gradient of what the host updates, as the device has no memory for that",
    "pipeline/pipeline.py: _give_back": "buffers, as the module is given back",
    "trainer/checkpoint_io.py: _write": "a checkpoint, of what lives on the device and the host has no room to copy",
    "trainer/checkpoint_io.py: state_dict_on_host": "a checkpoint, of what lives on the device",
    "trainer/precision.py: _unscale_grads_": "a factor, of what lives on the device",
}
"""Who in the package may have memory copied that is not page-locked, and why."""


@contextmanager
def pageable_copies() -> Iterator[set[str]]:
    """Who else had memory copied that is not page-locked: the device has whoever asks for that wait.

    What Lightning, torch and tests copy themselves is theirs.
    """
    found: set[str] = set()

    def tell(nbytes: int) -> None:
        ours: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file != Path(__file__) and any(file.is_relative_to(place) for place in OTHERS):
                break
            if frame.f_code.co_name == "_run_in_one_thread":  # autograd copies for users
                break
            # functions that users call by way of ours (torch's in leaf.py, a Trainer's) copy for the users
            if file.is_relative_to(PACKAGE) and file.name not in ("leaf.py", "transformers.py"):
                ours.append(f"{file.relative_to(PACKAGE).as_posix()}: {frame.f_code.co_name}")
            frame = frame.f_back
        if ours and not PAGEABLE.keys() & set(ours):
            found.add(" < ".join([each for each in ours if "/lanes/" not in each][:3] or ours))

    called = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(tell)
    tells: Callable[[object], None] = ctypes.CDLL(None).second_device_tell_of_pageable
    tells(called)
    try:
        yield found
    finally:
        tells(None)
