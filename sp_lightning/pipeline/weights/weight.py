"""One weight and its two Parameter objects.

The *master* is the `nn.Parameter` that the user's module was built with. It stays on the host for good; optimizers,
clipping, EMA and checkpoints see nothing else. The *twin* is a Parameter over device memory; while a unit computes,
twins take the masters' places in the module tree, so the graph is built on the device.

[Note: the tensors]
    tensor          what it is                                      made by                     lives
    master          the user's Parameter, over a segment's buffer   the user                    as long as the module
    leaf            the twin's Parameter, which graphs accumulate   Twin                        from attach to detach
                    into; it stands in for the master in modules
    twin.data       its values, in the unit's place on the device   Unit.set_place              until weights are placed
    lowered copy    the master in autocast's dtype, which is sent   Segment.prepare             while autocast lowers it
                    in its stead, beside the masters
    handle          stands for the leaf, or a view of it, in        SavedTensors.pack           as long as the graph
                    autograd's graphs
    staging         a unit's gradients, packed on the device        StagingBuffers              until they were copied
    landing         gradients on the host on their way into a sum   LandingBuffers              until they were read
                    or into the optimizer
    gradient        the engine's until other code reads `.grad`:    Routes                      until zeroed or used
                    beside the masters, in a landing buffer, or
                    on the device

A leaf that no module has now stands for its master ([Note: one weight, two Parameters] in leaf.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.operations import ABOUT, Args, Kwargs, Meaning, Operation, meaning_of, replace_instances
from sp_lightning.pipeline.torch_private import contains_others, storage_key, without_torch_function
from sp_lightning.pipeline.weights.leaf import EagerLeaf, TwinParameter

if TYPE_CHECKING:
    from sp_lightning.pipeline.units.unit import Unit

_DATA: Any = Tensor.data
USES_TO_WATCH = 2
"""The number of uses in each mode that are watched for writes that torch does not count (see master_access.py)."""


def used_in_backward(name: str) -> RuntimeError:
    """Make the error for a use of a gradient with which its weight was already updated in backward."""
    return RuntimeError(
        f"The gradient of weight {name!r} was already used in backward, where the optimizer has updated its unit. "
        "To read or change gradients before `step()`, train with `overlap_optimizer=False`."
    )


def used_in_step(name: str, use: str) -> RuntimeError:
    """Make the error for a use of a gradient that is gone, because an optimizer's step has used it."""
    return RuntimeError(
        f"The gradient of weight {name!r} was used in an optimizer's step, and has not been zeroed since. Now "
        f"{use}. Plain training would use that gradient again, but superpipeline has dropped it. Call "
        "`zero_grad()` between the step and the next backward. To read gradients after the step, train with "
        "`overlap_optimizer=False`."
    )


def outdated_graph_error(what: str) -> RuntimeError:
    """Make the error for a backward that needs a weight or a unit in a place that it has left."""
    return RuntimeError(
        f"Backward needs {what} of a graph that was built before superpipeline moved its memory "
        "(after a first step, or in `detach()`). Call backward in the step of its forward."
    )


class Life(enum.Enum):
    """The role of a twin's leaf for the program, which may keep the leaf; only `become` changes it.

    DEPARTED <---> IN_USE ----> IN_GRAPHS
    """

    DEPARTED = enum.auto()
    """It stands for the master: no module has it now ([Note: one weight, two Parameters] in leaf.py)."""
    IN_USE = enum.auto()
    """It is the weight: a module has it, or an operation of this step was given it."""
    IN_GRAPHS = enum.auto()
    """Another leaf is the weight. This one has its place in graphs, and in second forwards."""


class Twin:
    """A weight on the device: tensors over a unit's place, which does not change until weights are placed again."""

    changes_class = True  # whether the class of its leaf tells the leaf's role

    def __init__(self, weight: Weight, unit: Unit, data: Tensor) -> None:
        self.weight = weight
        self.life = Life.DEPARTED
        with torch.inference_mode(False):
            self.parameter = self._make_leaf(data)  # the leaf that graphs are built on
        # The hook that collects gradients of the leaf, once it requires one.
        self.gradient_hook: RemovableHandle | None = None
        # How many writes of a forward were written back to the master, which counts them, too.
        self.write_backs = 0
        self.set_place(unit, data)

    def _make_leaf(self, data: Tensor) -> nn.Parameter:
        weight = self.weight
        leaf = weight.leaf_class(data, requires_grad=False)
        leaf.weight = weight  # the leaf may outlive this object
        if isinstance(leaf, EagerLeaf):
            leaf.__dict__ = weight.master.__dict__
        return leaf

    def set_place(self, unit: Unit, data: Tensor) -> None:
        """Move the twin to another place on the device; it keeps its leaf, in which earlier graphs accumulate."""
        self.unit = unit  # the values are valid while this unit is on the device
        self.data = data  # the values as a tensor outside of autograd
        self.key = storage_key(data)  # the identity of the memory
        with torch.inference_mode(False), without_torch_function():
            self._point_leaf()
        self.note_unchanged()

    def _point_leaf(self) -> None:
        # This bypasses the leaf's own setter: dynamo would compile it, and torch 2.14 cannot.
        _DATA.__set__(self.parameter, self.data)
        become(Life.IN_USE if self.weight.leaf_count else Life.DEPARTED, [self])

    def stop_watching(self) -> None:
        """Stop the leaf from reporting its uses."""
        self.weight.leaf_class = EagerLeaf
        become(self.life, [self])

    def version(self) -> int:
        """Return a version that grows with every change of the weight, on the host or by a forward.

        It counts what torch counts, and other memory that the master is given. Saved-tensor hooks switch off autograd's
        own check, so saved weights are checked against this.
        """
        weight = self.weight
        return weight.master._version + weight.replacements + self.parameter._version - self.write_backs

    def is_touched(self) -> bool:
        """Tell whether a forward may have written to the twin since its values were those of the master."""
        return self.parameter._version != self._version_seen

    def note_unchanged(self) -> None:
        """Note that the values are those of the master."""
        self._version_seen = self.parameter._version

    def refuse_gradients(self) -> None:
        """Raise an error for any gradient that still arrives: the twin was given up, and the gradient would be lost."""
        name = self.weight.name
        # The hook is part of a reference cycle through C++, which Python's collector cannot see.
        if self.gradient_hook is not None:
            self.gradient_hook.remove()

        def refuse(_: Tensor) -> None:
            raise outdated_graph_error(f"weight {name!r}")

        with without_torch_function():
            if self.parameter.requires_grad:
                # This hook runs before the accumulation, which would complain of shapes.
                Tensor.register_hook(self.parameter, refuse)  # type: ignore[no-untyped-call]


def become(life: Life, twins: Iterable[Twin]) -> None:
    """Set the role of the leaves of twins; those of quantized weights keep their class."""
    for twin in twins:
        assert twin.life is not Life.IN_GRAPHS, twin.weight.name
        twin.life = life
        if twin.changes_class:
            twin.parameter.__class__ = DepartedLeaf if life is Life.DEPARTED else twin.weight.leaf_class


class Handle:
    """The object that autograd saves in place of a weight, or of a view of one: an alias of its fixed place.

    The engine may give the place to another unit between forward and backward. So backward unpacks a handle, makes sure
    that the weight is on the device, and reads it there (activations/saved.py).

    Attributes:
        alias: The tensor over the place.
        key: The identity of the place.
    """

    __slots__ = ("_readers", "_twin", "_version", "alias", "key")

    def __init__(self, twin: Twin, tensor: Tensor) -> None:
        self.key = twin.key
        self._twin = twin
        with without_torch_function():
            self.alias = tensor if twin.changes_class or not contains_others(tensor) else tensor.detach()
            self._version = twin.version()
        self._readers = twin.unit.readers
        self._readers.handles += 1

    @property
    def name(self) -> str:
        """The weight's name in errors."""
        return f"weight {self._twin.weight.name!r}"

    @property
    def is_changed(self) -> bool:
        """Whether the weight has changed since it was saved."""
        with without_torch_function():
            return self._twin.version() != self._version

    def __del__(self) -> None:
        self._readers.handles -= 1


class UsesUnderAutocast(Protocol):
    """Decides which leaf a use of a weight gets that autocast may lower (autocast.py)."""

    def as_is(self, weight: Weight, leaf: nn.Parameter) -> nn.Parameter:
        """Note that a weight is used in its own dtype, and return a leaf in that dtype."""

    def to_cast(self, weight: Weight, builds_graph: bool) -> nn.Parameter:
        """Note that autocast casts a weight, and return the leaf to cast."""


class GradientLife(enum.Enum):
    """The state of a weight's gradient, as far as it is the engine's.

    NONE ----> OURS ----> USED             a step has used it, and it stays for a loop that adds to it
      ^         | ^--------' |             backward has added to it
      '---------+------------+             it was shown as `.grad`, or zeroed
      ^         '------------+---> SPENT   the engine has dropped it, as a step has used it
      '------------------------------'     it was zeroed
    """

    NONE = enum.auto()
    OURS = enum.auto()
    """The engine has it, or it is on its way; no step has used it."""
    USED = enum.auto()
    SPENT = enum.auto()
    """To read, clip or step it raises an error, whatever backward brings, until it is zeroed."""


class Weight:
    """A weight of the model."""

    unit: Unit
    twin: Twin
    twin_class = Twin

    def __init__(self, name: str, master: nn.Parameter) -> None:
        self.name = name
        self.master = master
        # The master's memory as a plain tensor, and the engine's memory for it. They differ after `p.data = ...`.
        self.current_memory = self.engine_memory = master.data
        self._address = 0  # the address of `host` when the master was last located
        self.layout: Tensor = master  # a tensor with the weight's shape and strides in memory
        self.dtype = master.dtype
        # The weight is sent in this dtype, and its gradients come in it: its own dtype, or autocast's.
        self.compute_dtype = master.dtype
        self.leaf_class: type[TwinParameter] = EagerLeaf
        # For each cast in graphs that may have a backward, the twin whose leaf gets the gradients of that cast.
        self.casts: dict[object, Twin] = {}
        self.cast_in = 0  # the number of the graph with the last cast
        # The object that sees uses under autocast; None while the master is not guarded.
        self.lowering: UsesUnderAutocast | None = None
        self.gradient_life = GradientLife.NONE
        self.replacements = 0  # how often the master was found in other memory
        # Whether a forward has written to the weight in a way that torch does not count.
        self.changes_unseen = False
        # How many more uses outside of modules are watched for such writes, in evaluation and in training.
        self.uses_to_watch = {False: USES_TO_WATCH, True: USES_TO_WATCH}
        # Whether the master is on the device, and has left host memory.
        self.stays_on_device = False
        self.leaf_count = 0  # how many entries of the module tree hold a leaf of the weight now
        # The twins that graphs alone have: the lowered one that was replaced, and one for each other cast.
        self.twins_in_graphs: list[Twin] = []

    @property
    def nbytes(self) -> int:
        """The bytes of the weight in host memory."""
        return self.layout.numel() * self.dtype.itemsize

    @property
    def lowered(self) -> bool:
        """Whether the weight is sent in autocast's dtype, and not in its own."""
        return self.compute_dtype != self.dtype

    @property
    def compute_bytes(self) -> int:
        """The bytes of the weight as it is sent."""
        return self.layout.numel() * self.compute_dtype.itemsize

    def point_master_to(self, host: Tensor, is_filled: bool = False, address: int | None = None) -> None:
        """Point the master to `host`, and copy its values there unless it `is_filled`. The Parameter stays the same.

        `address` is where the engine has put the master before. If the user has moved it since, to a flat buffer for
        example, it stays there, and is sent from there.
        """
        if address not in (None, self.master.data_ptr()) and not self.stays_on_device:
            self.engine_memory = host
            return
        if not is_filled:
            host.copy_(self.master.data)
        self.master.data = host
        self.current_memory = self.engine_memory = host
        self._address = host.data_ptr()

    def write_to_master(self, arrived: Tensor) -> None:
        """Write values to the master that a forward has written on the device."""
        self.master.copy_(arrived)  # torch counts this write

    def leave_device(self) -> None:
        """Release the place on the device, and the other twins that graphs have."""
        data = self.twin.data
        self.twin.set_place(self.twin.unit, torch.empty(0, dtype=data.dtype, device=data.device))
        for twin in self.twins_in_graphs:
            twin.refuse_gradients()
        self.twins_in_graphs.clear()

    def leave_host(self) -> None:
        """Release host memory: the weight stays on the device, or is not streamed any more."""
        self.current_memory = self.engine_memory = torch.empty(0, dtype=self.dtype, device="cpu")
        self.stays_on_device = True
        self.gradient_life = GradientLife.NONE  # its `.grad` is the user's from now on
        self.casts = {}  # their nodes hold device memory

    def locate_master(self) -> int:
        """Locate the master, which `p.data = ...` may have put into other memory, or back; return its version.

        The engine's memory keeps its values: code that swaps an average in keeps the weights there (`backup = p.data`).
        """
        address = self.master.data_ptr()
        if address != self._address:
            if self.is_converted:
                before = self.engine_memory
                raise RuntimeError(
                    f"Weight {self.name!r} was {before.dtype} of shape {list(before.shape)} and "
                    f"is {self.master.dtype} of shape {list(self.master.shape)} now, while a graph "
                    "waits for its backward or before an optimizer's step. Convert the module "
                    "between steps."
                )
            self._address = address
            is_in_place = address == self.engine_memory.data_ptr()
            self.current_memory = self.engine_memory if is_in_place else self.master.data
            self.replacements += 1
        return self.master._version + self.replacements

    @property
    def is_converted(self) -> bool:
        """Whether the master has become another tensor: `module.double()`, `module.to(memory_format=...)`.

        `torch.utils.swap_tensors` changes its class, too, even if it looks the same.
        """
        if self.lowering is not None and type(self.master) is nn.Parameter:
            return True
        return self.master.data_ptr() != self._address and form_of(self.master) != form_of(self.engine_memory)


def form_of(tensor: Tensor) -> tuple[object, ...]:
    """Return all properties in which tensors with the same values may differ."""
    return tensor.dtype, tensor.shape, tensor.device, tensor.stride()


class DepartedLeaf(EagerLeaf):
    """A leaf that no module has now, though the program may."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """The master's values, without history."""
        return self.weight.master.data

    @data.setter
    def data(self, values: Tensor) -> None:
        self.weight.master.data = values

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Give the master other memory."""
        return self.weight.master.set_(source, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Operation,
        types: Iterable[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run an operation with the master in place of the leaf."""
        kwargs = kwargs or {}
        if meaning_of(func) in (*ABOUT, Meaning.MEMORY):
            with without_torch_function():
                return func(*args, **kwargs)
        args, kwargs = replace_instances((args, kwargs), cls, lambda leaf: leaf.weight.master)
        return func(*args, **kwargs)
