"""Has a process use the device, whose runtime was loaded before it began (LD_PRELOAD)."""

from __future__ import annotations

import torch

CYCLES_IN_A_MICROSECOND = 1000


def install(library: str) -> None:
    """Give CUDA the kernels of the CPU, as `build` has compiled them."""
    torch.ops.load_library(library)
    torch.ops.second_device.take_over()
    # Libraries and kernels that exist for CUDA alone.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.mha.set_fastpath_enabled(False)
    torch.cuda._sleep = _sleep


def _sleep(cycles: int) -> None:
    torch.ops.second_device.sleep(cycles // CYCLES_IN_A_MICROSECOND)
