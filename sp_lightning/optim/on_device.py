"""A step of weights on an accelerator (a stand-in until torch's operations are there)."""

from __future__ import annotations

import numpy as np

from sp_lightning.optim.passes import Pass


def step_range(step: Pass, begin: int, size: int) -> None:
    """Step a range of a weight."""
    from sp_lightning.optim.kernels import kernel_of, step_shares
    from sp_lightning.optim.layout import GROUP

    memory = step.memory
    count = memory.weight.numel()
    row = []
    for name, tensor in zip(memory._fields, memory, strict=True):
        if tensor is None:
            row.append(0)
        elif name.endswith("scale"):
            row.append(tensor.data_ptr() - begin // GROUP * 4)
        else:
            row.append(tensor.data_ptr() - begin * tensor.itemsize)
    arrays = (np.array(x, dtype=np.int64) for x in ([row], [(0, begin, begin + count)], [0, 1]))
    step_shares(kernel_of(step.kind), step.rule, step.scaling, *arrays, step.seed or 0)
