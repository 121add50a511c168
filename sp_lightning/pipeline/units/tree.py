"""A module tree as the search for units sees it: its weights, their bytes, and which of them stay on the device.

To manage a parameter is to point it to memory of the engine's own, which must be possible without other code noticing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from operator import mul

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sp_lightning.optim.layout import fills_memory
from sp_lightning.pipeline.torch_private import DDP_AVERAGES_NOTHING, parts_of, without_compile
from sp_lightning.pipeline.weights.quantized import QuantizedWeight, is_quantized
from sp_lightning.pipeline.weights.weight import Weight


class Tree:
    """A module with everything below it; the arguments are those of `find_units`."""

    def __init__(
        self,
        root: nn.Module,
        resident: Sequence[str],
        split: Collection[str] = (),
    ) -> None:
        self.root = root
        # modules that claim to be equal to others need names, too: torch would leave them out
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self.names = {id(module): name for name, module in reversed(self._modules.items())}
        # weights that the engine can manage, by the identity of the parameter
        self.weights: dict[int, Weight] = {}
        self.unmanaged: dict[str, nn.Parameter] = {}  # parameters that it cannot manage, by name
        self._split = split
        self._collect_weights()
        # weights that the user wants to stay on the device
        self.resident = {self.weights[id(master)] for master in self._named(resident) if id(master) in self.weights}
        for identity, weight in list(self.weights.items()):
            if weight in self.resident and isinstance(weight, QuantizedWeight):
                # the engine would not notice uses of it outside of its module
                del self.weights[identity]
                self.unmanaged[weight.name] = weight.master
        self._bytes = {
            id(module): sum(weight.nbytes for weight in self.weights_of(module) if weight not in self.resident)
            for module in self._modules.values()
        }
        self.total = self.bytes_of(root)  # the bytes of all weights that may stream

    def weights_of(self, module: nn.Module) -> list[Weight]:
        """Return the weights at and below a module."""
        identities = map(id, module.parameters())
        return [self.weights[identity] for identity in identities if identity in self.weights]

    def bytes_of(self, module: nn.Module) -> int:
        """Return the bytes of all weights at and below a module that may stream."""
        return self._bytes[id(module)]

    def streamable_children(self, module: nn.Module) -> list[nn.Module]:
        """Return the children that have something to stream."""
        return [child for child in without_compile(module).children() if self.bytes_of(child)]

    def may_be_member(self, module: nn.Module) -> bool:
        """Tell whether the engine can rely on calls of a module: it has a forward that its parent does not bypass."""
        return is_called(module) and self.names[id(module)] not in self._split

    def _collect_weights(self) -> None:
        tied = _tied_by_memory(self.root)
        seen: set[int] = set()
        for name, owner, parameter in named_own_parameters(self.root):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            kind = _kind_of_weight(owner, parameter)
            if kind is None or id(parameter) in tied:
                self.unmanaged[name] = parameter
            else:
                self.weights[id(parameter)] = kind(name, parameter)

    def _named(self, names: Sequence[str]) -> Iterator[nn.Parameter]:
        """Yield the parameters that the user wants to be resident."""
        parameters = dict(self.root.named_parameters(remove_duplicate=False))
        for name in names:
            if name in self._modules:
                yield from self._modules[name].parameters()
            elif name in parameters:
                yield parameters[name]
            else:
                children = ", ".join(child for child, _ in self.root.named_children())
                raise ValueError(
                    f"`resident` names {name!r}, which is neither a module nor a parameter. "
                    f"Top-level modules: {children}."
                )


def is_called(module: nn.Module) -> bool:
    """Tell whether a module has a forward at all; parents can only reach into containers without one."""
    # not by `getattr`, which would run the descriptor of a scripted module, nor by `inspect.getattr_static`, which
    # `torch.compile` would trace when it meets the engine in a model
    forwards = [vars(base)["forward"] for base in type(module).__mro__ if "forward" in vars(base)]
    return forwards[0] is not nn.Module.forward or "forward" in vars(module)


def named_own_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield full name, owner and parameter for every place of every parameter (shared ones once per place)."""
    for module_name, module in root.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, module, parameter


def _kind_of_weight(owner: nn.Module, parameter: nn.Parameter) -> type[Weight] | None:
    """Return the kind of a weight, plain and dense or quantized; None if it cannot be pointed to other memory."""
    if isinstance(owner, torch.jit.ScriptModule):
        return None
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse:
        return None  # its gradient is as small as it can be
    if type(parameter) is nn.Parameter and type(parameter.data) is Tensor:
        return Weight if parameter.layout is torch.strided and fills_memory(parameter) else None
    return QuantizedWeight if is_quantized(parameter) else None


def _tied_by_memory(root: nn.Module) -> set[int]:
    """Find parameters that share memory with others or with buffers, as after `b.weight.data = a.weight.data`."""
    spans: list[tuple[str, int, int, int]] = []  # device, first byte, byte after the last one, identity of the owner
    for owner in [*root.parameters(), *root.buffers()]:
        for part in parts_of(owner):
            is_plain = type(part.data) is Tensor and part.layout is torch.strided
            if not is_plain or is_lazy(part):
                continue
            first_byte = part.data_ptr()
            if first_byte:  # else it is empty, or a meta tensor
                last_element = sum(map(mul, (size - 1 for size in part.shape), part.stride()))
                after = first_byte + (last_element + 1) * part.itemsize
                spans.append((str(part.device), first_byte, after, id(owner)))
    tied: set[int] = set()
    reached = ("", 0)  # the device, and the byte on it, up to which there are spans so far
    furthest_owner = 0  # the owner of the span that ends there
    for device, first_byte, after, owner_identity in sorted(spans):
        if (device, first_byte) < reached:
            tied |= {owner_identity, furthest_owner}
        if (device, after) > reached:
            reached = device, after
            furthest_owner = owner_identity
    return tied


def check_module(module: nn.Module, taken: Set[int]) -> None:
    """Raise if a module cannot be streamed; `taken` are the identities of parameters that others stream."""
    if isinstance(module, type):
        raise ValueError(f"Only a module can be streamed. This is the class `{module.__name__}`. Build it first.")
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"Only a module can be streamed. This is a `{type(module).__name__}`. Put several "
            "modules into one, such as an `nn.Sequential`."
        )
    if any(isinstance(inner, nn.parallel.DistributedDataParallel) for inner in module.modules()):
        raise ValueError(DDP_AVERAGES_NOTHING)
    for name, parameter in module.named_parameters():
        if id(parameter) in taken:
            raise ValueError(
                f"Parameter {name!r} already belongs to a pipeline, which streams it. Call its `detach()` first."
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Parameter {name!r} has no shape yet (a lazy module). Run one forward on example "
                "data before the model is given to superpipeline."
            )
        if parameter.is_inference():
            raise ValueError(
                f"Parameter {name!r} was made in inference mode, so nothing can follow writes to "
                "it. Build the model outside of `torch.inference_mode()`."
            )
        if getattr(parameter, "grad_dtype", parameter.dtype) not in (parameter.dtype, None):
            raise ValueError(
                f"Parameter {name!r} is {parameter.dtype}, and its `grad_dtype` {parameter.grad_dtype}: superpipeline "
                "has gradients in the dtype of their weights. Leave `grad_dtype` as it is."
            )
        if parameter.device.type == "meta":
            raise ValueError(
                f"Parameter {name!r} is on the meta device and has no values. Materialize the "
                "model on the CPU first (`module.to_empty(device='cpu')` and then load or "
                "initialize its weights)."
            )
