"""What a device says of its memory, and how it says that there is none left."""

from __future__ import annotations

from typing import NamedTuple

import torch

_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",  # with expandable segments
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that the device has no memory left.

    The driver and libraries take memory of their own, and report in their own words that there is none.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


class DeviceMemory(NamedTuple):
    """The memory of a device, in bytes."""

    total: int  # as much as this process may have
    free: int  # what can be allocated now
    allocated: int  # what is allocated now
    peak: int  # the most that was allocated since the peak was counted anew
    peak_so_far: int  # the most that was allocated at all
    retries: int  # how often the allocator ran out of memory, freed its cache and tried again
