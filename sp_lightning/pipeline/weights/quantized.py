"""Quantized weights: frozen ones of a class of their own, which stream as bytes.

Those of torchao are tensors that contain others (integers, scales), those of bitsandbytes are packed Parameters with a
state. Both know how to move to a device. So the leaf of a twin is what the master's own `to` has made, and only its
memory is ours: each tensor in it becomes a part of the twin's place on the device.

Nobody trains such weights, so masters are not guarded, and nothing is known of gradients here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.torch_private import contains_others, parts_of
from sp_lightning.pipeline.weights.buffers import is_dense, lay_out, tensor_in
from sp_lightning.pipeline.weights.weight import Group, Twin, Weight

_HOST = torch.device("cpu")


def is_quantized(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter is frozen and of a class of its own, and all that it consists of can be moved."""
    if type(parameter) is nn.Parameter or parameter.requires_grad:
        return False
    parts = parts_of(parameter)
    if parts[0] is parameter and any(isinstance(value, Tensor) for value in vars(parameter).values()):
        return False  # bitsandbytes' int8 weights hold another name for their memory, which would not follow
    return all(type(p.data) is Tensor and p.layout is torch.strided and is_dense(p) and p.numel() for p in parts)


def move_parameter(parameter: nn.Parameter, device: torch.device, copy: bool = False) -> None:
    """Move a parameter as `Module.to` does, which knows tensors that contain others, and calls a class's own `to`.

    Args:
        parameter: The parameter.
        device: Where to.
        copy: Whether it gets memory of its own even if it is there already.
    """
    if copy and parameter.device == device:
        _lay(parameter, [part.clone() for part in parts_of(parameter)])
    owner = nn.Module()
    owner.register_parameter("parameter", parameter)
    owner.to(device)


def bring_states_home(weights: Iterable[Weight]) -> None:
    """Move what quantized weights have besides their memory back to the host: it has moved along with their leaves."""
    for weight in weights:
        if isinstance(weight, QuantizedWeight) and not contains_others(weight.master):
            weight.master.to(_HOST)


class QuantizedTwin(Twin):
    """A quantized weight on the device."""

    _places: Sequence[Tensor]

    def _make_leaf(self, compiled: bool) -> nn.Parameter:
        leaf = _copy_on(self.data.device, self.weight.master)
        self._places = _divide(self.data, parts_of(leaf))
        _lay(leaf, self._places)
        return leaf

    def lay_leaf(self) -> None:
        """Lay the leaf over the twin's memory, or over the master's if that was given up."""
        self._places = _divide(self.data, parts_of(self.parameter)) if self.data.numel() else []
        _lay(self.parameter, self._places or parts_of(self.weight.master))

    @property
    def is_touched(self) -> bool:
        """Whether a forward has written to it since the last look.

        Raises:
            RuntimeError: If it has given a part other memory, as bitsandbytes does on a CPU, where it packs weights.
        """
        parts = parts_of(self.parameter)
        if any(part.data_ptr() != place.data_ptr() for part, place in zip(parts, self._places, strict=True)):
            _lay(self.parameter, self._places)
            raise RuntimeError(
                f"A forward gave the quantized weight {self.weight.name!r} other memory. Convert it before training."
            )
        return sum(part._version for part in parts) != self._version_seen

    def note_written_back(self) -> None:
        """Note that every part of the master got a change by an in-place write, which must not count a second time."""
        self.note_unchanged()
        self._write_backs += len(self._places)

    def _version_of_leaf(self) -> int:
        return sum(part._version for part in parts_of(self.parameter))


class QuantizedWeight(Weight):
    """A quantized weight of the model, whose memory is a tensor of bytes."""

    def __init__(self, name: str, master: nn.Parameter) -> None:
        super().__init__(name, master)
        parts = parts_of(master)
        self._form = _form_of(parts)
        _, self._nbytes = lay_out([part.nbytes for part in parts])
        self.host = self.home = torch.empty(self._nbytes, dtype=torch.uint8, device="meta")
        self.dtype = self.compute_dtype = torch.uint8

    @property
    def layout(self) -> Tensor:
        """Its memory as a plain tensor, on the meta device until it has some."""
        return self.host

    @property
    def nbytes(self) -> int:
        """The bytes of its memory on the host."""
        return self._nbytes

    @property
    def compute_bytes(self) -> int:
        """The bytes of the weight as it is sent."""
        return self._nbytes

    @property
    def version(self) -> int:
        """A number that grows with every change of the master that torch counts, and when it is given other memory."""
        return sum(part._version for part in parts_of(self.master)) + self.replacements

    def make_twin(self, group: Group, data: Tensor, compiled: bool) -> Twin:
        """Make a twin over memory on the device."""
        return QuantizedTwin(self, group, data, compiled)

    def adopt(self, host: Tensor) -> None:
        """Move the master's values into `host` and point the master there; the Parameter object stays the same."""
        if self.master.device != host.device:
            move_parameter(self.master, host.device)
        parts = parts_of(self.master)
        places = _divide_apart(host, parts)
        for part, place in zip(parts, places, strict=True):
            place.copy_(part)
        _lay(self.master, places)
        self.host = self.home = host

    def lies_in(self, memory: Tensor) -> bool:
        """Tell whether the parts of the master lie just where this tensor of bytes has them."""
        offsets, nbytes = lay_out([part.nbytes for part in parts_of(self.master)])
        start = memory.data_ptr()
        places = zip(parts_of(self.master), offsets, strict=True)
        return nbytes == memory.nbytes and all(part.data_ptr() == start + offset for part, offset in places)

    def follow(self) -> bool:
        """If a part of the master was given other memory, move the values back into ours; tell whether it was."""
        if self.lies_in(self.home):
            return False
        if self.is_converted:
            raise RuntimeError(
                f"The quantized weight {self.name!r} was converted, or made trainable, while a graph waits for its "
                "backward or an optimizer has not stepped yet. Do so between steps."
            )
        self.adopt(self.home)
        self.replacements += 1
        return True

    @property
    def is_converted(self) -> bool:
        """Whether the master has become another tensor, whose values cannot simply be moved back into our memory."""
        return self.master.requires_grad or _form_of(parts_of(self.master)) != self._form

    def values(self) -> Tensor:
        """Return a copy of the values in the form that `host` has."""
        values = torch.zeros(self._nbytes, dtype=torch.uint8)
        parts = parts_of(self.master)
        for part, place in zip(parts, _divide(values, parts), strict=True):
            place.copy_(part)
        return values

    def overwrite(self, values: Tensor) -> None:
        """Write values in the form that `host` has to the master."""
        parts = parts_of(self.master)
        for part, value in zip(parts, _divide(values, parts), strict=True):
            part.copy_(value)


def _copy_on(device: torch.device, master: nn.Parameter) -> nn.Parameter:
    """Return a copy of a master on a device, made by its own class."""
    with torch.no_grad():
        made: Tensor = master.clone() if master.device == device else master.to(device)
    copied = made if isinstance(made, nn.Parameter) else nn.Parameter(made, requires_grad=False)
    for name, value in vars(master).items():
        vars(copied).setdefault(name, value)
    return copied


def _form_of(parts: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return what must stay the same about parts for them to be exchanged."""
    return [(part.shape, part.stride(), part.dtype) for part in parts]


def _divide_apart(memory: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return parts of a tensor of bytes as tensors like these, each with a storage of its own."""
    offsets, _ = lay_out([part.nbytes for part in parts])
    return [tensor_in(memory, offset, part, part.dtype) for offset, part in zip(offsets, parts, strict=True)]


def _divide(memory: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return parts of a tensor of bytes as tensors like these, over the same storage."""
    places = []
    start = memory.storage_offset()
    with torch.inference_mode(False):
        for part, offset in zip(parts, lay_out([part.nbytes for part in parts])[0], strict=True):
            empty = torch.empty(0, dtype=part.dtype, device=memory.device)
            at = (start + offset) // part.element_size()
            places.append(empty.set_(memory.untyped_storage(), at, part.size(), part.stride()))
    return places


def _lay(parameter: nn.Parameter, places: Sequence[Tensor]) -> None:
    for part, place in zip(parts_of(parameter), places, strict=True):
        part.data = place
