"""A GPU whose memory is the host's: what would need CUDA runs here, too, on torch's own code for CUDA.

- `runtime.cpp` is loaded before CUDA's own runtime: memory, streams, events, copies, and a detector of races;
- `management.cpp` is loaded beside it, in place of the library that tells about the devices of a machine;
- `kernels.cpp` has the CPU's kernels, over the memory of the device, instead of CUDA's;
- `build.py` compiles both, with two headers in `include` that CUDA's compiler would bring;
- `device.py` has a process use them;
- `two_devices.py` trains on two of them, and `two_trainers.py` with Hugging Face's Trainer.

`tests/test_second_device.py` runs the tests of `tests/gpu` on it, in a process of their own. It computes at once, and
so tells nothing about time, unless something is made to lag (gpu/unkind.py). It has no kernels that exist for CUDA
alone.
"""

import os
from collections.abc import Sequence
from typing import Any

IN_USE = "SECOND_DEVICE" in os.environ
"""Whether CUDA is this device, in this process."""


def some(cases: Sequence[Any], one_in: int) -> Sequence[Any]:
    """One case in so many, on this device; all of them at night, and on a GPU."""
    from ..selection import is_nightly  # which is known by now

    return cases[::one_in] if IN_USE and not is_nightly else cases
