"""Optimizers with fewer bytes for each parameter, whose step on the CPU is one pass over memory.

They are plain `torch.optim.Optimizer`s for fp32 and bf16 parameters on the CPU and on accelerators, with the same state
on both; `docs/optimizers.md` has the table.
"""

from sp_lightning.optim.optimizers import Adam, AdamW, Lion

__all__ = ["Adam", "AdamW", "Lion"]
