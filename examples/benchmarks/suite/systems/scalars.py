"""For systems that shard parameters, and take none without a dimension, such as CLIP's `logit_scale`."""

from __future__ import annotations

from torch import nn


def scalars_to_vectors(module: nn.Module) -> None:
    """Give each parameter without a dimension one of size one: what FSDP2's error tells users to do.

    It is broadcast as before, so that all numbers stay the same.
    """
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.dim() == 0:
                vector = nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad)
                setattr(owner, name, vector)
