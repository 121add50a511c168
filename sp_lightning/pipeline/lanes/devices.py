"""The device to compute on, and the backend for it."""

from __future__ import annotations

import torch

from sp_lightning.pipeline.lanes.accelerator import AcceleratorBackend
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.cores import choose_cores
from sp_lightning.pipeline.lanes.emulated import HostBackend
from sp_lightning.pipeline.options import PipelineOptions


def _best_device() -> torch.device:
    """Return the current accelerator if torch has streams for it, or else the CPU."""
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        if device is not None and hasattr(torch.get_device_module(device), "Stream"):
            return device
    return torch.device("cpu")


def full_device(device: torch.device | str | None) -> torch.device:
    """Return the device with its index; by default the current accelerator, or else the CPU."""
    device = _best_device() if device is None else torch.device(device)
    if device.type != "cpu" and ":" not in str(device):  # no index given
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return device


def make_backend(device: torch.device, options: PipelineOptions, processes: int = 1) -> Backend:
    """Make the backend for a device, on a machine that so many `processes` share.

    `debug` poisons unused memory, and delays copies on the emulated device.
    """
    cores = choose_cores(device, options.host_threads, processes)
    if device.type == "cpu":
        return HostBackend(device, poison=options.debug, max_delay=0.002 if options.debug else 0.0, cores=cores)
    return AcceleratorBackend(device, poison=options.debug, cores=cores)
