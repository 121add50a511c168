"""Quantized weights: frozen ones of a class of their own, which stream as bytes.

torchao's weights are tensors that contain others (integers, scales), those of bitsandbytes are packed Parameters with a
state. Both know how to move to a device. So the leaf of a twin is what the master's own `to` has made, and only its
memory is ours: each tensor in it becomes a part of the twin's place on the device.

Such weights are not trained, so masters are not guarded, and this file does not deal with gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from sp_lightning.optim.layout import fills_memory
from sp_lightning.pipeline.torch_private import contains_others, parts_of
from sp_lightning.pipeline.weights.buffers import lay_out, tensor_in
from sp_lightning.pipeline.weights.weight import Twin, Weight


def is_quantized(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter is frozen, of a class that knows how to move it, and consists of parts that can move."""
    knows_how = contains_others(parameter) or type(parameter).to is not Tensor.to
    if parameter.requires_grad or not knows_how:
        return False
    parts = parts_of(parameter)
    others = vars(parameter).values()
    if parts[0] is parameter and any(isinstance(value, Tensor) for value in others):
        # bitsandbytes' int8 weights hold another name for their memory, which would not follow
        return False
    return all(
        type(part.data) is Tensor and part.layout is torch.strided and fills_memory(part) and part.numel() > 0
        for part in parts
    )


class QuantizedTwin(Twin):
    """A quantized weight on the device."""

    changes_class = False
    _places: Sequence[Tensor]

    def _make_leaf(self, data: Tensor) -> nn.Parameter:
        return _copy_on(data.device, self.weight.master)

    def _point_leaf(self) -> None:
        # A twin without a place has its leaf over the master's memory.
        self._places = _divide(self.data, parts_of(self.parameter)) if self.data.numel() else []
        _lay(self.parameter, self._places or parts_of(self.weight.master))

    def version(self) -> int:
        """Return a version that grows with every change of the weight; the master gets no other memory."""
        return _version_of(self.weight.master) + self.parameter._version

    def note_unchanged(self) -> None:
        """Note that the values are those of the master."""
        self._version_seen = _version_of(self.parameter)

    def is_touched(self) -> bool:
        """Return False, as frozen weights are not written to; raise if a forward has done so, or moved the memory.

        On a CPU, bitsandbytes packs weights into other memory.
        """
        addresses = [part.data_ptr() for part in parts_of(self.parameter)]
        expected_addresses = [place.data_ptr() for place in self._places]
        if _version_of(self.parameter) != self._version_seen or addresses != expected_addresses:
            _lay(self.parameter, self._places)
            raise _written(self.weight)
        return False


class QuantizedWeight(Weight):
    """A quantized weight of the model, whose memory is a tensor of bytes."""

    twin_class = QuantizedTwin

    def __init__(self, name: str, master: nn.Parameter) -> None:
        super().__init__(name, master)
        nbytes = lay_out([part.nbytes for part in parts_of(master)])[1]
        self.layout = self.current_memory = self.engine_memory = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.dtype = self.compute_dtype = torch.uint8

    def point_master_to(
        self,
        host: Tensor,
        is_filled: bool = False,
        address: int | None = None,
    ) -> None:
        """Point the master to `host`, with its values unless others are there; the Parameter object stays the same."""
        places: list[Tensor] = []
        for part, offset in _offsets(parts_of(self.master)):
            place = tensor_in(host, offset, part, part.dtype)
            places.append(place if is_filled else place.copy_(part))
        _lay(self.master, places)
        self.current_memory = self.engine_memory = host

    def write_to_master(self, arrived: Tensor) -> None:
        """Raise an error: quantized weights are not trained."""
        raise _written(self)

    def _is_in_place(self) -> bool:
        """Tell whether the parts of the master fill the engine's memory."""
        start = self.engine_memory.data_ptr()
        parts = _offsets(parts_of(self.master))
        return all(part.data_ptr() == start + offset for part, offset in parts)

    def locate_master(self) -> int:
        """Return its version, or raise if it was given other memory, a reason between steps to attach again."""
        if not self._is_in_place():
            raise RuntimeError(
                f"The quantized weight {self.name!r} was converted, or given other memory, while a "
                "graph waits for its backward or before an optimizer's step. Do so between steps."
            )
        return _version_of(self.master)

    @property
    def is_converted(self) -> bool:
        """Whether the master was converted, given other memory, or made trainable."""
        return self.master.requires_grad or not self._is_in_place()


def _version_of(parameter: nn.Parameter) -> int:
    return sum(part._version for part in parts_of(parameter))


def _written(weight: Weight) -> RuntimeError:
    return RuntimeError(
        f"A forward wrote to the quantized weight {weight.name!r}, or gave it other "
        "memory. Change or convert it before training, or between steps."
    )


def _copy_on(device: torch.device, master: nn.Parameter) -> nn.Parameter:
    """Return a copy of a master on a device, made by its own class."""
    with torch.no_grad():
        values: Tensor = master.clone() if master.device == device else master.to(device)
    copied = values if isinstance(values, nn.Parameter) else nn.Parameter(values, requires_grad=False)
    for name, value in vars(master).items():
        vars(copied).setdefault(name, value)
    return copied


def _offsets(parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Yield each part with its offset in a tensor of bytes that has them all."""
    return zip(parts, lay_out([part.nbytes for part in parts])[0], strict=True)


def _divide(memory: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return parts of a tensor of bytes as tensors like these, over the same storage."""
    with torch.inference_mode(False):
        return [
            memory[offset : offset + part.nbytes].view(part.dtype).as_strided(part.size(), part.stride())
            for part, offset in _offsets(parts)
        ]


def _lay(parameter: nn.Parameter, places: Sequence[Tensor]) -> None:
    for part, place in zip(parts_of(parameter), places, strict=True):
        part.data = place
