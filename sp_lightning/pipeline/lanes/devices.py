"""The device to compute on, and the backend for it."""

from __future__ import annotations

from typing import Literal

import torch

from sp_lightning.pipeline.lanes.accelerator import AcceleratorBackend
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.cores import choose_cores
from sp_lightning.pipeline.lanes.emulated import HostBackend


def full_device(device: torch.device | str | None) -> torch.device:
    """Return the device with its index; by default the current accelerator if torch has streams for it, or the CPU."""
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        has_streams = found is not None and hasattr(torch.get_device_module(found), "Stream")
        device = found if found is not None and has_streams else "cpu"
    device = torch.device(device)
    if device.type != "cpu" and ":" not in str(device):  # no index given
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return device


def make_backend(device: torch.device, host_threads: int | Literal["auto"], processes: int, debug: bool) -> Backend:
    """Make the backend for a device, on a machine that so many `processes` share.

    `debug` poisons unused memory, and delays copies on the emulated device.
    """
    cores = choose_cores(device, host_threads, processes)
    if device.type == "cpu":
        return HostBackend(device, poison=debug, max_delay=0.002 if debug else 0.0, cores=cores)
    return AcceleratorBackend(device, poison=debug, cores=cores)
