"""Optimizers for tensors in host memory: one pass over memory, and fewer bytes for each parameter.

They are plain `torch.optim.Optimizer`s for fp32 and bf16 parameters on the CPU; `docs/host_memory.md` has the table.
"""

from sp_lightning.optim.optimizers import SGD, Adam, AdamW, Lion

__all__ = ["SGD", "Adam", "AdamW", "Lion"]
