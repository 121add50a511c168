"""Noticing that modules or parameters have come to a module tree, or have gone, since it was divided into units."""

from __future__ import annotations

import torch
from torch import nn


class Shape:
    """Which children each module of a tree has, and how many parameters of its own.

    Args:
        root: The module at the top. What is in scripted modules cannot change.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = [module for module in root.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._dicts = [each for module in modules for each in (module._modules, module._parameters)]
        self._sizes = [*map(len, self._dicts)]
        self._parents = [module._modules for module in modules if module._modules]
        self._children = self._identities()

    def has_changed(self) -> bool:
        """Tell whether the tree is another one now: asked in every step, so without a look at the parameters."""
        return [*map(len, self._dicts)] != self._sizes or self._identities() != self._children

    def _identities(self) -> list[int]:
        return [id(child) for children in self._parents for child in children.values()]
