"""In tests, every operation is checked for weights that are not where they should be: an oracle beside the numbers.

It is on for pipelines whose backend poisons memory, as under `debug=True`: in steps, and in backward passes wherever
they run. A tensor in a unit's place may be read only while the unit is readable: numbers show a wrong read only where
other values lie by then. On the emulated device, host and device are the same memory, so only this check notices an
operation that mixes a master with tensors on the "device"; on a GPU torch would raise.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from sp_lightning.pipeline import HostBackend, pipeline
from sp_lightning.pipeline.calls.calls import Calls
from sp_lightning.pipeline.engine import Engine
from sp_lightning.pipeline.gradients.segment_gradients import SegmentGradients
from sp_lightning.pipeline.lanes.at_work import optimizer_steps
from sp_lightning.pipeline.operations import instances_in
from sp_lightning.pipeline.optimizer.clipping import EarlyStep
from sp_lightning.pipeline.torch_private import graph_task, in_backward, storage_key
from sp_lightning.pipeline.units.unit import Residency, Unit
from sp_lightning.pipeline.weights.weight import Weight

# under a dispatch mode torch 2.9 compiles in each call anew, as guards on tensors do not hold there
_COMPILES_ANEW = torch.__version__ < "2.10"
_HAVE_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
_OF_MODES = DispatchKeySet(DispatchKey.Python) | DispatchKeySet(DispatchKey.PythonTLSSnapshot)
_STEP = Calls.step
_RUN_BACKWARD = torch.autograd._engine_run_backward
_STEP_IN_BACKWARD = EarlyStep.step_with
# autograd's number of the backward in which a unit was stepped last
_STEPPED_IN: WeakKeyDictionary[Unit, int] = WeakKeyDictionary()


@contextmanager
def steps_checked() -> Iterator[None]:
    """Check the steps and backward passes of all pipelines that poison memory."""

    @contextmanager
    def checked(self: Calls, *args: Any, **kwargs: Any) -> Iterator[None]:
        engine = self._story._engine
        with _STEP(self, *args, **kwargs):
            is_checked = engine.graphs.scopes == 1 and _can_check(engine)
            with AccessCheck(engine) if is_checked else nullcontext():
                yield

    def backward_checked(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for engine in [attached._parts for attached in pipeline._attached]:
                if engine.graphs.scopes == 0 and _can_check(engine):
                    stack.enter_context(AccessCheck(engine))
            return _RUN_BACKWARD(*args, **kwargs)

    def stepped_in_backward(self: EarlyStep, of_segment: SegmentGradients) -> None:
        _STEPPED_IN[of_segment.unit] = graph_task()
        _STEP_IN_BACKWARD(self, of_segment)

    with (
        patch.object(Calls, "step", checked),
        patch.object(torch.autograd, "_engine_run_backward", backward_checked),
        patch.object(EarlyStep, "step_with", stepped_in_backward),
    ):
        yield


def _can_check(engine: Engine) -> bool:
    if not engine.backend.poison or (engine.arrangement.compiled and _COMPILES_ANEW):
        return False
    return not changes_kernels(engine.module)


def changes_kernels(module: nn.Module) -> bool:
    """Tell whether a mode would change which kernels run: in inference, it turns off a fused fast path."""
    return not torch.is_grad_enabled() and any(isinstance(part, _HAVE_FAST_PATH) for part in module.modules())


class Places:
    """Whose memory is whose, while weights have the places that they have now."""

    def __init__(self, engine: Engine) -> None:
        arrangement = engine.arrangement
        self._masters = {storage_key(weight.current_memory): weight for weight in arrangement.weights}
        for living in arrangement.parameters_on_device:  # a user may have made views of one vector of all weights
            self._masters.pop(storage_key(living), None)
        places = [(unit, unit.presence.place) for unit in arrangement.in_window if unit.presence.place.nbytes]
        self._spans = [(unit, place.data_ptr(), place.data_ptr() + place.nbytes) for unit, place in places]
        # Not the engine's own `conflicts`: they are checked, too.
        self.others_in_place_of = {
            unit: [other for other in self._lying_in(begin, end) if other is not unit]
            for unit, begin, end in self._spans
        }
        self._begins = sorted(begin for _, begin, _ in self._spans)
        self._ends = sorted(end for *_, end in self._spans)

    def _lying_in(self, begin: int, end: int) -> list[Unit]:
        return [unit for unit, start, stop in self._spans if start < end and begin < stop]

    def lying_at(self, address: int) -> list[Unit]:
        """The units in whose places an address is."""
        # as many places have ended as have begun: there is none here
        if bisect_right(self._begins, address) == bisect_right(self._ends, address):
            return []
        return self._lying_in(address, address + 1)

    def master_in(self, memory: int) -> Weight | None:
        """The weight whose master lies in a storage; a user may have moved it since, and others may lie there."""
        weight = self._masters.get(memory)
        return weight if weight is not None and storage_key(weight.current_memory) == memory else None


class AccessCheck(TorchDispatchMode):
    """Raises when an operation reads the place of a unit that is not readable, or computes with a master."""

    supports_higher_order_operators = True  # `flex_attention` is one operation here

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._placed = (0, 0)
        # Elsewhere, copies that are waited for may end later, for all that the host knows.
        self._computing_waits = type(engine.backend).wait is HostBackend.wait

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled, and check what it runs."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        engine = self._engine
        if engine.is_arranged and not (engine.at_work or _is_view(func)):
            operands = [(tensor, storage_key(tensor)) for tensor in _tensors_in(args, kwargs)]
            self._check_places(func, operands)
            if len(operands) > 1 and not (_is_mutable(func) or optimizer_steps.depth):
                self._check_masters(func, operands)
        with _as_without_mode() if _comes_whole(func) and not types else nullcontext():
            return func(*args, **(kwargs or {}))

    @property
    def _places(self) -> Places:
        engine = self._engine
        placed = engine.stats.arrangements, len(engine.arrangement.in_window)  # a weight may have become resident
        if placed != self._placed:
            self._placed, self._current = placed, Places(engine)
        return self._current

    def _check_places(self, func: Any, operands: Sequence[tuple[Tensor, int]]) -> None:
        twins, places = self._engine.arrangement.twins, self._places
        for tensor, memory in operands:
            twin = twins.get(memory)
            if twin is not None:
                reads = f"{func} reads weight {twin.weight.name!r}"
                # a backward of another graph may have used the new values in its forward
                was_stepped = (
                    twin.unit.update.is_stepped_in_backward
                    and in_backward()
                    and _STEPPED_IN.get(twin.unit) == graph_task()
                )
                if was_stepped and twin.parameter.requires_grad:
                    raise AssertionError(f"{reads}, which was stepped in this backward.")
                self._check_unit(reads, [twin.unit])
            # seen through numpy, for example; other classes may have no address
            elif type(tensor) is Tensor and (units := places.lying_at(tensor.data_ptr())):
                self._check_unit(f"{func} reads the place of weights", units)

    def _check_unit(self, reads: str, units: Sequence[Unit]) -> None:
        """Raise unless one of these units is readable, and no other unit has come to its place since."""
        unit = max(units, key=lambda unit: unit.presence.residency is Residency.READABLE)
        waited = unit.presence.residency is Residency.READABLE
        if self._computing_waits:
            waited &= all(ticket.done for ticket in unit.presence.uploads)
        if not waited:
            raise AssertionError(f"{reads}, but {_describe(unit)}: its copy to the device was not waited for.")
        if any(segment.epoch_on_device != segment.epoch for segment in unit.segments):
            raise AssertionError(f"{reads}, but {_describe(unit)} with values from before its masters changed.")
        for other in self._places.others_in_place_of.get(unit, ()):
            if other.presence.residency is not Residency.ABSENT:
                raise AssertionError(f"{reads}, but {_describe(other)} in the place of unit {unit.name!r}.")

    def _check_masters(self, func: Any, operands: Sequence[tuple[Tensor, int]]) -> None:
        masters = [self._places.master_in(memory) for _, memory in operands]
        mixed = next(filter(None, masters), None)
        if mixed is None:
            return
        others = [operand for (operand, _), master in zip(operands, masters, strict=True) if master is None]
        device = self._engine.device.type
        # or they are copies on a GPU's host
        if any(other.device.type == device and other.dim() > 0 for other in others):
            raise AssertionError(f"{func} mixes the master of {mixed.name!r}, on the host, with a device tensor.")


def _tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Tensor]:
    """An operation's operands that have memory."""
    tensors = []
    for value in [*args, *kwargs.values()] if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += instances_in(value, Tensor)
    return [tensor for tensor in tensors if tensor.layout is torch.strided]


def _comes_whole(func: Any) -> bool:
    """Tell whether an operation is one of several that a mode sees in inference: elsewhere it sees each of them."""
    return torch.is_inference_mode_enabled() and isinstance(func, OpOverload) and func._can_decompose()


@contextmanager
def _as_without_mode() -> Iterator[None]:
    """Run operations as if no mode had been there.

    Below the mode, `linear` would find that its transposed weight requires no gradient. Then it multiplies a batch that
    is not contiguous by another kernel, which rounds otherwise on some CPUs.
    """
    with enable_reentrant_dispatch(), torch._C._ExcludeDispatchKeyGuard(_OF_MODES):
        yield


def _describe(unit: Unit) -> str:
    return f"unit {unit.name!r} is {unit.presence.residency.name}"


@functools.cache
def _is_view(func: Any) -> bool:
    """Tell whether an operation only makes an alias of its operand."""
    if isinstance(func, HigherOrderOperator):
        return False
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


@functools.cache
def _is_mutable(func: Any) -> bool:
    return not isinstance(func, HigherOrderOperator) and func._schema.is_mutable
