"""A file for optimizer state on a drive: it has no name, and is gone with the process, however that ends.

Room on the drive is reserved before a step needs it. Steps read and write the file past the system's cache
(state_ring.py). Everybody else uses a map of it, which is memory like any other: checkpoints, `load_state_dict`, and
users who read `optimizer.state`. Linux keeps both views of a file alike.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.optim.of_torch import OnePass
from sp_lightning.pipeline.gradients.segment_gradients import Gradient
from sp_lightning.pipeline.host_memory import available_host_memory, release
from sp_lightning.pipeline.optimizer.kinds import Step, settings_of, why_not_by_unit
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.pipeline.weights.buffers import tensor_in
from sp_lightning.pipeline.weights.weight import Weight

PAGE = 4096
"""Requests past the cache need memory, offsets and sizes that are multiples of this."""

# file systems in CPU memory, and those of other machines
_NOT_DRIVES = ("tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs")
SHARE_OF_FREE_RAM = 0.8
"""The part of free RAM that state may take; programs, loaders and gradients on their way take more with time."""


def padded(nbytes: int) -> int:
    """Return the bytes of whole pages that hold this many."""
    return -(-nbytes // PAGE) * PAGE


def check_folder(folder: str) -> None:
    """Raise unless a folder can have a file for optimizer state; warn if it is on the system's drive."""
    if not hasattr(os, "O_DIRECT"):
        raise ValueError(f"`nvme_path={folder!r}` needs Linux.")
    with _open(folder):
        device = os.stat(folder).st_dev
    kind = _type_of_file_system(device)
    if kind in _NOT_DRIVES:
        raise ValueError(
            f"`nvme_path={folder!r}` is on {kind}, which is no drive of this machine. Name a folder on one."
        )
    if device == os.stat("/").st_dev:
        warnings.warn(
            f"`nvme_path={folder!r}` is on the drive of the system. Every step writes optimizer state there, which "
            "wears a drive; another one would leave the system its own.",
            stacklevel=2,
        )


def _open(folder: str) -> tempfile._TemporaryFileWrapper[bytes]:
    """Open a new file without a name, or one that loses its name at once where the file system has no other."""
    try:
        return tempfile.TemporaryFile(buffering=0, dir=folder)  # type: ignore[return-value]
    except OSError as error:
        raise ValueError(f"`nvme_path={folder!r}`: no file can be made there: {error.strerror}.") from error


def _type_of_file_system(device: int) -> str:
    """Return the type of a mounted file system; empty if Linux does not list it by its number, as some of btrfs."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    kinds = {line.split()[2]: line.partition(" - ")[2].split()[0] for line in lines}
    return kinds.get(f"{os.major(device)}:{os.minor(device)}", "")


class StateFile:
    """A file of a fixed size, filled with zeros, and its map, `bytes`.

    Args:
        folder: The folder whose drive has it.
        nbytes: Its size.

    Raises:
        ValueError: There is no room for it.
    """

    def __init__(self, folder: str, nbytes: int) -> None:
        file = _open(folder)
        weakref.finalize(self, file.close)
        self.fd = file.fileno()
        try:
            free = shutil.disk_usage(folder).free
            if nbytes > free:  # or the attempt would fill the drive
                raise OSError(0, f"{readable_bytes(free)} are free")
            # where a file system cannot reserve room, the C library writes zeros
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            raise ValueError(
                f"`nvme_path={folder!r}` has no room for {readable_bytes(nbytes)} of optimizer state: {error.strerror}."
            ) from error
        import fcntl  # only Linux has it

        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_RDWR | os.O_DIRECT)
        except OSError:
            warnings.warn(
                f"`nvme_path={folder!r}`: its file system cannot bypass the cache of files (O_DIRECT), so steps are "
                "slower, and optimizer state passes through CPU memory that other programs could use.",
                stacklevel=2,
            )
        self._pages = mmap.mmap(self.fd, nbytes)
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)

    def offset_of(self, tensor: Tensor) -> int:
        """Return where a tensor in the map lies in the file."""
        return tensor.data_ptr() - self.bytes.data_ptr()

    def move(self, is_read: bool, memory: memoryview, offset: int) -> None:
        """Read whole pages from a place in the file into memory, or write them there."""
        while memory:
            moved = (os.preadv if is_read else os.pwritev)(self.fd, [memory], offset)
            if not moved:
                raise OSError(0, "the file has ended")
            memory, offset = memory[moved:], offset + moved

    def write_back(self, tensor: Tensor) -> None:
        """Write a tensor that was changed in the map to the drive, and take it out of RAM."""
        place = self.offset_of(tensor), padded(tensor.nbytes)
        self._pages.flush(*place)
        self._pages.madvise(mmap.MADV_DONTNEED, *place)


# ------------------------------------------------------------------------------------- which state is on the drive


@dataclass
class _Place:
    """The place of a weight's state in a file."""

    unit: str
    file: StateFile
    state: dict[str, Tensor]  # there, except for the count of steps
    is_used: bool = False  # whether it is not all zeros any more


class StatePlaces:
    """Decides which units have their optimizer state on the drive, and has it lie there.

    State lies in RAM as long as there is room: no more is written than must be.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        # None for weights whose state is in RAM
        self._places: weakref.WeakKeyDictionary[Optimizer, dict[nn.Parameter, _Place | None]] = (
            weakref.WeakKeyDictionary()
        )

    def check(self, optimizer: Optimizer, fused: bool) -> None:
        """Raise unless an optimizer makes one pass over memory, so that its state can pass through RAM."""
        why_not = why_not_by_unit(optimizer)
        if why_not is None:
            if all(OnePass(optimizer, settings).is_possible for settings in settings_of(optimizer, fused)):
                return
            why_not = f"{type(optimizer).__name__} with these options makes more than one pass over its state"
        raise ValueError(
            f"`nvme_path={self.folder!r}`: {why_not}. A drive can hold the state of sp_lightning.optim, and of "
            "torch.optim.AdamW and Adam with fused=True, or on a GPU with neither `fused` nor `foreach`."
        )

    def on_drive(self) -> tuple[int, int]:
        """Return how many units have state on the drive, and how many bytes."""
        places = [place for places in self._places.values() for place in places.values() if place]
        return len({place.unit for place in places}), sum(nbytes_of(place.state) for place in places)

    def bring(self, step: Step, states: Mapping[Gradient, dict[str, Any]], coming: int = 0) -> dict[int, StateFile]:
        """Have the state of a unit's weights in its places; return the file of each by the state's identity.

        The state is made if there is none. Nothing is returned unless all of it is on the drive. RAM has to have room
        for these bytes that are still `coming`.
        """
        places = self._places.setdefault(step.optimizer, {})
        if any(gradient.weight.master not in places for gradient in states):
            self._decide(step, places, coming)
        files: dict[int, StateFile] = {}
        for gradient, state in states.items():
            weight = gradient.weight
            place = places.get(weight.master)
            if place is None:
                return {}
            if any(state.get(name) is not value for name, value in place.state.items()):
                found = _state_of(step, gradient)
                if place.is_used:  # the state was dropped, or another one was loaded
                    place = places[weight.master] = self._reserved({weight: found})[weight]
                place.is_used = True
                copied = list(state.values())
                if copied:
                    for name, value in place.state.items():
                        value.copy_(state[name])
                        place.file.write_back(value)
                state.update({**found, **place.state})
                release(copied)
            files[id(state)] = place.file
        return files

    def _decide(self, step: Step, places: dict[nn.Parameter, _Place | None], coming: int) -> None:
        """Decide where state will lie that a step may make, and reserve room for it on the drive."""
        new = {
            gradient.weight: _state_of(step, gradient)
            for gradient in step.optimizer_weights.gradients
            if gradient.weight.master not in places and gradient.weight.master.requires_grad
        }
        sizes: Counter[str] = Counter()
        for weight, state in new.items():
            sizes[weight.unit.name] += nbytes_of(state)
        free = available_host_memory() or 0
        chosen = without_room(sizes, SHARE_OF_FREE_RAM * free - coming)
        reserved = self._reserved({weight: new[weight] for weight in new if weight.unit.name in chosen})
        places.update({weight.master: reserved.get(weight) for weight in new})

    def _reserved(self, states: Mapping[Weight, Mapping[str, Tensor]]) -> dict[Weight, _Place]:
        """Return places for states like these, in a new file."""
        places: dict[Weight, _Place] = {}
        nbytes = sum(map(nbytes_of, states.values()))
        if nbytes:
            file, offset = StateFile(self.folder, nbytes), 0
            for weight, state in states.items():
                places[weight] = place = _Place(weight.unit.name, file, {})
                for name, value in state.items():
                    if name != "step":
                        place.state[name] = tensor_in(file.bytes, offset, value, value.dtype)
                        offset += padded(value.nbytes)
        return places


def _state_of(step: Step, gradient: Gradient) -> dict[str, Tensor]:
    """Return the state of a weight; before its first step that which it will make, without memory."""
    weight = gradient.weight
    one_pass = step.one_passes[step.optimizer_weights.gradients[gradient]]
    return step.optimizer.state.get(weight.master) or one_pass.make_state(
        torch.empty_like(weight.engine_memory, device="meta")
    )


def nbytes_of(state: Mapping[str, Tensor]) -> int:
    """Return the bytes on the drive of a weight's state, or of a part of it."""
    return sum(padded(value.nbytes) for value in state.values())


def without_room(sizes: dict[Any, int], room: float) -> list[Any]:
    """Return the names of units, listed in the order of forward, whose state is to be elsewhere if RAM has this room.

    These are two of three from the end, or more if need be: their gradients come first, the next forward needs them
    last, and others are stepped meanwhile. No more are chosen than must be.
    """
    excess = sum(sizes.values()) - room
    from_end = [*reversed(sizes)]
    for count in range(len(sizes) + 1):
        last = from_end[: 3 * count // 2]
        chosen = [last[place * len(last) // count] for place in range(count)]
        spare = sum(sizes[name] for name in chosen) - excess
        if spare >= 0:
            break
    for name in sorted(chosen, key=sizes.__getitem__, reverse=True):
        if sizes[name] <= spare:
            chosen.remove(name)
            spare -= sizes[name]
    return chosen
