"""A GPU whose memory is the host's: what would need CUDA runs here, too, on torch's own code for CUDA.

runtime.cpp   loaded before CUDA's own runtime: memory, streams, events, copies, and a detector of races between them
kernels.cpp   the CPU's kernels, over the memory of the device, instead of CUDA's
build.py      compiles both
device.py     has a process use them

"""

import os

IN_USE = "SECOND_DEVICE" in os.environ
"""Whether CUDA is this device, in this process."""
