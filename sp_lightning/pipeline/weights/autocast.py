"""Autocast: which weights are sent in the dtype that it casts them to, and how numbers stay those of autocast.

[Note: weights that autocast lowers]
A weight that autocast casts anyhow is sent already cast, at half the bytes. For torch's layers, the engine knows these
weights before the first step. For others (a Parameter that a forward gives to `F.linear`), the leaves tell in the
first step, in which such weights are on the device in their own dtype.

That is a guess: a hook may read `layer.weight`, a forward may switch autocast off, a layer may be called twice. So a
leaf sees each operation on it. It serves as the operand of operations that autocast casts for, in each graph for as
long as autocast's cache would have one cast of it. Any other use of a lowered weight gets it in its own dtype at once,
and the weight is sent in that dtype from then on. Earlier casts stay for as long as autocast would keep them. So
numbers are those of plain autocast in every step.

Gradients of several casts add up in fp32. So if a graph has another cast of a lowered weight, or an earlier graph that
may share its backward has one, this cast gets a leaf of its own over the same memory, and the weight is sent as it is
from the next arrangement on.

Code that torch compiles tells nothing, so no weight of a model with such code is lowered.

[Note: autocast of each module]
A stem may run in fp32 where blocks run in bf16, and an evaluation in fp32 where training runs in bf16. So each module
has a dtype of its own, as last seen in its call, and its weights are placed for that. A module that is called otherwise
is placed for it from the next step on. If nothing is in use yet, this is the switch of a whole evaluation: weights are
placed at once, and the modules that were called like this one follow it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F

from sp_lightning.pipeline.graphs import Graphs
from sp_lightning.pipeline.operations import (
    Args,
    Kwargs,
    Meaning,
    Operation,
    autocast_dtype,
    instances_in,
    meaning_of,
    replace_instances,
)
from sp_lightning.pipeline.torch_private import (
    explain_graph_break,
    in_backward,
    running_node,
    without_torch_function,
)
from sp_lightning.pipeline.weights.leaf import EagerLeaf, TwinParameter
from sp_lightning.pipeline.weights.weight import Life, Twin, Weight, become

_CAST_LAYERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
"""Layers of torch's whose weights autocast casts on every device, and which do nothing else with them.

Cells of RNNs would belong here, but they are called for each token, and gradients of several casts add up in fp32.
"""

WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Layers of torch's that read weights of the layers in them, without calling these.

In evaluation, some may be a single operation, which gets the weights as they are. With leaves that tell how they are
used, torch would compute other numbers without it.
"""

# Autocast casts the operands of these functions on every device, and once, whatever the other operands are.
_NAMES = (
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell",
)  # fmt: skip
CASTING = {getattr(place, name) for place in (torch, Tensor, F) for name in _NAMES if hasattr(place, name)}
_OF_THE_LEAF = (Meaning.DEVICE, Meaning.METADATA, Meaning.GRADIENT, Meaning.MEMORY)


class Autocasts:
    """The dtypes that autocast casts to where modules are called, by their names ([Note: autocast of each module])."""

    def __init__(self) -> None:
        self.default: torch.dtype | None = None  # the dtype for modules that are not in `noted`
        # The last dtype of modules that were called under another one.
        self.noted: dict[str, torch.dtype | None] = {}
        # Modules that were called under several dtypes, in one step or in several processes: they count as under none.
        self.mixed: set[str] = set()

    def common(self, names: Iterable[str]) -> torch.dtype | None:
        """Return the dtype that calls of these modules cast to; None if they have none in common.

        A module that is not noted counts only if none is: maybe its parts are called, and the module is not.
        """
        dtypes = {self.noted[name] for name in names if name in self.noted} or {self.default}
        return dtypes.pop() if len(dtypes) == 1 else None

    def mix(self, name: str) -> None:
        """Note that a module is called under several dtypes."""
        self.mixed.add(name)
        self.noted[name] = None

    def switch(self, before: torch.dtype | None, after: torch.dtype | None, seen: Collection[str]) -> None:
        """Expect another dtype for modules that had `before`, except for those `seen` in this step."""
        for name in seen:
            self.noted.setdefault(name, self.default)
        for name, dtype in self.noted.items():
            if dtype is before and name not in self.mixed and name not in seen:
                self.noted[name] = after
        if self.default is before:
            self.default = after

    def agree(self, other: Autocasts) -> None:
        """Learn what another process has noted."""
        for name, dtype in other.noted.items():
            if name in other.mixed or self.noted.setdefault(name, dtype) is not dtype:
                self.mix(name)


class Casts:
    """Records how autocast uses weights, from attach to detach; it knows masters by their identities."""

    def __init__(self) -> None:
        self.lowered: set[int] = set()  # masters that autocast casts
        # Masters that are used in their own dtype, alone or besides a cast.
        self.used_as_is: set[int] = set()
        # Whether a step has shown that a weight is better sent in another dtype.
        self.has_news = False
        self._probe: nn.Parameter | None = None

    def choose_dtypes(
        self,
        module: nn.Module,
        sent_together: Iterable[Sequence[Weight]],
        autocasts: Mapping[Weight, torch.dtype],
    ) -> None:
        """Decide which weights are sent in autocast's dtype, and which ones have to be watched in a step.

        `autocasts` has the dtype for each weight whose modules are called under autocast.
        """
        self.lowered |= weights_of_cast_layers(module)
        layers = [layer for layer in module.modules() if isinstance(layer, WITH_FAST_PATH)]
        as_is = self.used_as_is | {id(parameter) for layer in layers for parameter in layer.parameters()}
        for weights in sent_together:
            watched = [
                weight
                for weight in weights
                if weight in autocasts and weight.dtype is torch.float32 and id(weight.master) not in as_is
            ]
            casts = [weight for weight in watched if id(weight.master) in self.lowered]
            are_many = 2 * sum(weight.nbytes for weight in casts) >= sum(weight.nbytes for weight in weights)
            if are_many:  # otherwise most weights would be copied for the sake of a few
                for weight in casts:
                    weight.compute_dtype = autocasts[weight]
            for weight in watched:
                weight.leaf_class = LoweredParameter

    def leave_device(self) -> None:
        """Release memory on the device."""
        self._probe = None

    def note_as_is(self, weight: Weight) -> None:
        """Note that a weight is used in its own dtype. It is sent in that dtype once weights are placed again."""
        self.used_as_is.add(id(weight.master))

    def note_cast(self, weight: Weight) -> None:
        """Note that autocast casts a weight. If nothing else uses it, it is sent lowered from then on."""
        master = id(weight.master)
        self.has_news |= master not in self.lowered and master not in self.used_as_is
        self.lowered.add(master)

    def cast_in_cache(self, device: torch.device) -> object:
        """Return an object that is the same for as long as autocast's cache has one cast of each weight.

        Without the cache, each use makes a new cast. With it, a cast stays until autocast's outermost scope ends, and
        nothing reports that end. So a parameter of our own is cast, too: the node of its cast lives with the cache.
        """
        if not torch.is_autocast_cache_enabled():
            return object()
        if self._probe is None:
            self._probe = nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device=device))
        nothing = self._probe.detach()[:, :0]
        # This product saves nothing for backward.
        product: Any = torch.addmm(self._probe, nothing, nothing.t()).grad_fn
        return product.next_functions[0][0]


def weights_of_cast_layers(module: nn.Module) -> set[int]:
    """Return the identities of weights that one layer owns, and whose layer has torch's own forward."""
    owners = Counter(id(weight) for part in module.modules() for weight in part._parameters.values())
    layers = [part for part in module.modules() if part.__class__ in _CAST_LAYERS and "forward" not in vars(part)]
    identities = {id(weight) for layer in layers for weight in layer._parameters.values() if weight is not None}
    return {identity for identity in identities if owners[identity] == 1}


class WeightsOnDevice(Protocol):
    """Brings weights for uses that the engine has not expected (calls/guard.py)."""

    def serve(self, weight: Weight) -> nn.Parameter:
        """Return the weight on the device in its own dtype, which may take memory until weights are placed next."""

    def bring(self, twin: Twin) -> None:
        """Have a twin that is not in the module tree collect gradients, and bring its unit."""


class Lowering:
    """Decides, for each use of a weight that autocast may lower, which leaf that use gets."""

    def __init__(self, casts: Casts, graphs: Graphs, device: WeightsOnDevice) -> None:
        self._casts = casts
        self._graphs = graphs
        self._device = device

    def as_is(self, weight: Weight, leaf: nn.Parameter) -> nn.Parameter:
        """Note that a weight is used in its own dtype, and return its leaf in that dtype."""
        self._casts.note_as_is(weight)
        if leaf.dtype is not weight.dtype:
            return self._device.serve(weight)
        # no graph has a cast of lowered values: no need to watch
        if not (weight.lowered or weight.twins_in_graphs):
            weight.twin.stop_watching()
        return leaf

    def to_cast(self, weight: Weight, builds_graph: bool) -> nn.Parameter:
        """Note that autocast casts a weight, and return the leaf to cast, which gets the gradients of this cast alone.

        If the twin's leaf already gets the gradients of another cast, this is the leaf of a new twin.
        """
        casts, graphs, twin = self._casts, self._graphs, weight.twin
        if builds_graph or not weight.master.requires_grad:
            casts.note_cast(weight)
        if not builds_graph:
            return twin.parameter
        if weight.cast_in != graphs.current.number and not graphs.earlier_waiting():
            # no backward adds the gradients of earlier casts to those of this one
            weight.casts = {}
        weight.cast_in = graphs.current.number
        cast = casts.cast_in_cache(twin.data.device)
        if weight.casts and cast not in weight.casts:
            casts.note_as_is(weight)
            if weight.lowered:
                casts.has_news = True
                twin = weight.twin_class(weight, twin.unit, twin.data)
                become(Life.IN_GRAPHS, [twin])
                weight.twins_in_graphs.append(twin)
        twin = weight.casts.setdefault(cast, twin)
        # Autocast used the lowered values before the weight was used in its own dtype, and still does.
        if twin is not weight.twin:
            self._device.bring(twin)
        return twin.parameter


class LoweredParameter(EagerLeaf):
    """The leaf of a weight that is sent lowered, or in its own dtype as long as it is only watched."""

    __slots__ = ()

    weight: Weight

    @TwinParameter.data.getter  # type: ignore[attr-defined, untyped-decorator]
    def data(self) -> Tensor:
        """The values in the weight's own dtype: they may be written to, which the weight counts."""
        with without_torch_function():
            return self._as_is().detach()

    def _as_is(self) -> nn.Parameter:
        """Return the weight in its own dtype, which is this leaf if it is only watched."""
        lowering = self.weight.lowering
        return self if lowering is None else lowering.as_is(self.weight, self)

    @classmethod
    def __torch_function__(
        cls,
        func: Operation,
        types: Iterable[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run an operation with the lower values if that is right, else with the weight as it is."""
        kwargs = kwargs or {}
        # the guard of masters knows what is in graphs
        if func in (torch.autograd.grad, torch.autograd.backward):
            args, kwargs = replace_instances((args, kwargs), cls, lambda leaf: leaf.weight.master)
            return func(*args, **kwargs)
        with without_torch_function():
            meaning = meaning_of(func)
            if meaning is Meaning.DTYPE:
                return func(args[0].weight.master)
            # A dispatch mode passes on operations of backward.
            backward_does_it = isinstance(func, OpOverload) and in_backward()
            if meaning in _OF_THE_LEAF or backward_does_it:
                return func(*args, **kwargs)
            # Autocast leaves operations with `out` alone.
            is_casting = func in CASTING and "out" not in kwargs
            leaves = instances_in((args, kwargs), cls)
            operands = {id(leaf): leaf._to_cast() if is_casting else leaf._as_is() for leaf in leaves}
            has_others = not set(types) <= {cls, Tensor}  # masters of another model, say
            if not has_others and all(operands[id(leaf)] is leaf for leaf in leaves):
                return func(*args, **kwargs)
            for leaf in leaves:
                # The operation is dispatched again. Without a view, another cast would get a leaf of its own then.
                if has_others or leaf.weight.lowered:
                    operands[id(leaf)] = operands[id(leaf)].view_as(leaf)
            args, kwargs = replace_instances((args, kwargs), cls, lambda leaf: operands.get(id(leaf), leaf))
        return func(*args, **kwargs)

    def _to_cast(self) -> nn.Parameter:
        """Return the operand for autocast's cast: a leaf that gets the gradients of this cast alone, or the weight.

        A second forward in backward, which saves tensors, casts as the first did. Reentrant checkpoints build graphs.
        """
        weight, lowering = self.weight, self.weight.lowering
        dtype = autocast_dtype(self.device.type)
        if lowering is None or dtype is None or (weight.lowered and dtype is not self.dtype):
            return self._as_is()
        if in_backward() and type(running_node()).__name__ != "CheckpointFunctionBackward":
            return self
        builds_graph = self.requires_grad and torch.is_grad_enabled()
        return lowering.to_cast(weight, builds_graph)


explain_graph_break(
    vars(LoweredParameter)["__torch_function__"].__func__,
    "under autocast, superpipeline has to see how weights are used; compile the module that owns them",
)
