"""A module tree as the search for units sees it: its weights, their bytes, and which of them stay on the device.

To manage a parameter is to point it to memory of the engine's own, which must be possible without other code noticing.
From the tree's modules come *members*: those whose calls enter a unit, and those whose calls only open a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from operator import mul

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sp_lightning.optim.layout import fills_memory
from sp_lightning.pipeline.torch_private import DDP_AVERAGES_NOTHING, parts_of, without_compile
from sp_lightning.pipeline.units.unit import Division, Entry, Member, Unit
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
    # device, first byte, byte after the last one, identity of the owner
    spans: list[tuple[str, int, int, int]] = []
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


def check_module(module: nn.Module, streamed_by_others: Set[int]) -> None:
    """Raise if a module cannot be streamed; `streamed_by_others` are identities of parameters."""
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
        if id(parameter) in streamed_by_others:
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
                f"Parameter {name!r} is {parameter.dtype}, and its `grad_dtype` {parameter.grad_dtype}. "
                "Gradients must have the dtype of their weights. Leave `grad_dtype` as it is."
            )
        if parameter.device.type == "meta":
            raise ValueError(
                f"Parameter {name!r} is on the meta device and has no values. Materialize the "
                "model on the CPU first (`module.to_empty(device='cpu')` and then load or "
                "initialize its weights)."
            )


def make_division(
    tree: Tree,
    groups: Sequence[Sequence[nn.Module]],
    resident_weights: Set[Weight],
) -> Division:
    """Make a unit of each group of modules, without its resident weights, and members of all modules with a call."""
    resident = Unit("resident", resident=True)
    units: list[Unit] = []
    for group in groups:
        unit = _make_unit(tree, group, resident_weights)
        if unit.weights:
            units.append(unit)
        else:  # its modules are called as before
            resident.members += unit.members
    streamed = {weight for unit in units for weight in unit.weights}
    resident.weights = [weight for weight in tree.weights.values() if weight not in streamed]
    for member in resident.members:
        member.unit = resident
    for unit in [*units, resident]:
        for weight in unit.weights:
            weight.unit = unit
    _add_other_entrances(tree, [*units, resident])
    callers = _add_modules_outside(tree, units, resident)
    streamed_members = [member for unit in units for member in unit.members]
    for index, member in enumerate(streamed_members):
        assert member.unit is not None
        member.index = index
        member.is_streamed = True
        member.unit_name = member.unit.name
    return Division(units, resident, streamed_members, callers, tree.unmanaged)


def _make_unit(tree: Tree, group: Sequence[nn.Module], resident_weights: Set[Weight]) -> Unit:
    names = [tree.names[id(module)] for module in group]
    unit = Unit(names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}")
    unit.members = [_make_member(tree, module, unit, module.modules()) for module in group]
    weights = dict.fromkeys(entry.weight for member in unit.members for entry in member.every_entry)
    unit.weights = [weight for weight in weights if weight not in resident_weights]
    # the weights that an optimizer updates are sent in one copy
    unit.weights.sort(key=lambda weight: weight.master.requires_grad)
    return unit


def _make_member(
    tree: Tree,
    module: nn.Module,
    unit: Unit | None,
    owners: Iterable[nn.Module],
) -> Member:
    """Make a member whose call may use the weights that `owners` have themselves."""
    member = Member(tree.names[id(module)], module, unit)
    for owner in owners:
        for name, parameter in owner._parameters.items():
            if id(parameter) in tree.weights:
                member.every_entry.append(Entry(owner._parameters, name, tree.weights[id(parameter)]))
        if isinstance(owner, nn.RNNBase):
            managed = [tree.weights[id(weight)] for weight in owner._flat_weights if id(weight) in tree.weights]
            if len(managed) == len(owner._flat_weights):
                member.recurrent.append((owner, managed))
    return member


def _add_other_entrances(tree: Tree, units: Sequence[Unit]) -> None:
    """Make members of other parts of units that modules around units may call: a compiled self, or a module inside."""
    unit_around = {id(inner): unit for unit in units for member in unit.members for inner in member.module.modules()}
    entrances = {id(member.module) for unit in units for member in unit.members}
    for module in tree.root.modules():
        if id(without_compile(module)) in unit_around:
            continue
        for child in module.children():
            unit = unit_around.get(id(without_compile(child)))
            if unit is not None and id(child) not in entrances and is_called(child):
                entrances.add(id(child))
                unit.members.append(_make_member(tree, child, unit, child.modules()))


def _add_modules_outside(tree: Tree, units: Sequence[Unit], resident: Unit) -> list[Member]:
    """Make resident members of modules outside of units that may use weights: whole subtrees, and modules around units.

    Modules around units that own no weights are returned: they have no unit, and their calls open a step.
    """
    entered = [member.module for unit in (*units, resident) for member in unit.members]
    in_units = {id(inner) for module in entered for inner in module.modules()}
    covered = set(in_units)
    callers: list[Member] = []
    for module in tree.root.modules():
        if id(module) in covered or not is_called(module) or isinstance(module, torch.jit.ScriptModule):
            continue
        owners: Iterable[nn.Module] = [without_compile(module)]
        is_around_units = module is tree.root or any(id(inner) in in_units for inner in module.modules())
        if not is_around_units and tree.may_be_member(module):
            owners = list(module.modules())
            covered.update(map(id, owners))
        member = _make_member(tree, module, resident, owners)
        if member.every_entry:
            resident.members.append(member)
        elif is_around_units:
            callers.append(_make_member(tree, module, None, _looked_into(without_compile(module), entered)))
    return callers


def _looked_into(module: nn.Module, entered: Sequence[nn.Module]) -> Iterable[nn.Module]:
    """Return the modules whose weights a module around units looks at, to choose a fast path: it must see twins."""
    if isinstance(module, nn.TransformerEncoder):
        first_layer: nn.Module | None = next(iter(module.layers), None)
        if first_layer is not None and any(first_layer is other for other in entered):
            return first_layer.modules()
    return ()
