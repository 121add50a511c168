"""A second device for torch, whose memory is the host's: what would need a GPU runs here, too.

On the emulated device of `pipeline/transfer/emulated.py` every tensor is a CPU tensor. Here tensors of the device are
of another type: mixing them with those of the host raises, backward runs in a thread of autograd's, random numbers are
the device's own, and an allocator counts, and runs out of memory. Only time is missing: every operation, every copy is
done when it was asked for. What is ordered by streams and events is tested with `pipeline/fake_device.py`.

    device.cpp        the device: an allocator, and a fallback that hands every operation to the CPU's kernels
    accelerator.cpp   makes a torch that was built with CUDA say that this is its accelerator
    build.py          compiles both
    device.py         what users call in Python (`torch.mtia`), and an accelerator for Lightning

`tests/test_second_device.py` compiles it, and runs the tests of `tests/gpu` on it, in a process of their own.
"""

SECOND_DEVICE = "mtia"
"""Its type: one that torch knows as an accelerator with dense tensors, and that nobody has at home."""
