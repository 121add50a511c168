"""A module tree as the search for units sees it: its weights, their bytes, and which of them stay on the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import nn

from sp_lightning.pipeline.torch_private import without_compile
from sp_lightning.pipeline.units.parameters import (
    check_parameter,
    is_manageable,
    named_own_parameters,
    tied_by_memory,
)
from sp_lightning.pipeline.weights.lowering import forward_of_class
from sp_lightning.pipeline.weights.quantized import QuantizedWeight, is_quantized
from sp_lightning.pipeline.weights.weight import Weight


class Atom(NamedTuple):
    """A module that is not divided further, with its name in the tree."""

    name: str
    module: nn.Module


class Tree:
    """A module with everything below it.

    Args:
        root: The module.
        resident: Names of modules and parameters that stay on the device.
        split: Modules that are not called themselves; only their children are.
        used_outside: Parameters that stay on the device, by identity.
        on_meta: Whether parameters may be on the meta device.

    Attributes:
        root: The module.
        weights: Weights that the engine can manage, by the identity of the parameter.
        unmanaged: Parameters that it cannot manage, by name.
        resident_modules: Modules that stay on the device, by identity.
        resident_weights: Weights that stay on the device, by the identity of the parameter.
        total: The bytes of all weights that may stream.

    Raises:
        ValueError: If there is nothing to stream, a name is unknown, or a parameter has no values on the CPU.
    """

    def __init__(
        self,
        root: nn.Module,
        resident: Sequence[str],
        split: Collection[nn.Module] = (),
        used_outside: Collection[int] = (),
        on_meta: bool = False,
    ) -> None:
        self.root = root
        self.weights: dict[int, Weight] = {}
        self.unmanaged: dict[str, nn.Parameter] = {}
        self.resident_modules: set[int] = set()
        self.resident_weights: set[int] = set(used_outside)
        self._split = {id(module) for module in split}
        self._collect_weights(on_meta)
        self._keep_resident(resident)
        self._bytes = {id(module): self._subtree_bytes(module) for module in root.modules()}
        self.total = self.bytes_of(root)

    def bytes_of(self, module: nn.Module) -> int:
        """Return the bytes of all weights at and below a module that may stream."""
        return self._bytes[id(module)]

    def streamable_children(self, module: nn.Module) -> list[Atom]:
        """Return the children that have something to stream."""
        inner = without_compile(module)
        prefix = "" if inner is module else "_orig_mod."
        return [Atom(prefix + name, child) for name, child in inner.named_children() if self.bytes_of(child)]

    def may_be_member(self, module: nn.Module) -> bool:
        """Tell whether calls of a module can be relied on: it has a forward, and its parent does not bypass it."""
        return is_called(module) and id(module) not in self._split

    def _collect_weights(self, on_meta: bool) -> None:
        named = list(named_own_parameters(self.root))
        if not named:
            raise ValueError(f"`{type(self.root).__name__}` has no parameters, so there is nothing to stream.")
        for name, _, parameter in named:
            check_parameter(name, parameter, on_meta)
        tied = set() if on_meta else tied_by_memory(self.root)
        seen: set[int] = set()
        for name, owner, parameter in named:
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not is_manageable(owner, parameter) or id(parameter) in tied:
                self.unmanaged[name] = parameter
            elif is_quantized(parameter):
                self.weights[id(parameter)] = QuantizedWeight(name, parameter)
            else:
                self.weights[id(parameter)] = Weight(name, parameter)

    def _keep_resident(self, names: Sequence[str]) -> None:
        modules = dict(self.root.named_modules(remove_duplicate=False))
        parameters = dict(self.root.named_parameters(remove_duplicate=False))
        for name in names:
            if name in modules:
                self.resident_modules.add(id(modules[name]))
                self.resident_weights |= {id(parameter) for parameter in modules[name].parameters()}
            elif name in parameters:
                self.resident_weights.add(id(parameters[name]))
            else:
                known = ", ".join(child for child, _ in self.root.named_children())
                raise ValueError(
                    f"`resident` names {name!r}, which is neither a module nor a parameter. Top-level modules: {known}."
                )
        for weight in [self.weights[key] for key in self.resident_weights & self.weights.keys()]:
            if isinstance(weight, QuantizedWeight):  # nobody notices uses outside of its module, so it is all there
                del self.weights[id(weight.master)]
                self.unmanaged[weight.name] = weight.master

    def _subtree_bytes(self, module: nn.Module) -> int:
        own = {id(p): self.weights[id(p)].nbytes for p in module.parameters() if id(p) in self.weights}
        return sum(nbytes for key, nbytes in own.items() if key not in self.resident_weights)


def is_called(module: nn.Module) -> bool:
    """Tell whether a module has a forward at all; parents can only reach into containers without one."""
    return forward_of_class(module) is not nn.Module.forward or "forward" in vars(module)
