"""Checkpoints without a second copy of the model in host memory.

Lightning's default serializes into memory before it writes, and reads through a file object: save and load each take
the checkpoint's size once more. Here the checkpoint is serialized straight into a temporary file next to the target,
and memory-mapped on load. Users get tensors in memory of their own, because a program that writes the file again
changes mapped memory. Only tensors that a strategy copies into weights and optimizers stay in the file until then. The
content is that of Lightning's files: same keys, dtypes and values, loadable without this package.
"""

from __future__ import annotations

import copy
import glob
import inspect
import os
import sys
import zipfile
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from sp_lightning.optim.optimizers import COMPACT, AdamW
from sp_lightning.pipeline import Progress
from sp_lightning.pipeline.host_memory import has_room_for, private_files
from sp_lightning.pipeline.operations import instances_in
from sp_lightning.pipeline.torch_private import contains_others, parts_of
from sp_lightning.trainer import FabricNamespace, Namespace, StrategyPart
from sp_lightning.trainer.narrator import CountedCopies, CountedFile
from sp_lightning.trainer.processes import Meetings

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
else:
    TorchCheckpointIO = object

StateDict: TypeAlias = dict[str, Any]
"""A checkpoint, or a part of one: values by their names."""


class StreamingCheckpointIO(TorchCheckpointIO):
    """Writes and reads local checkpoints without a copy in memory, and leaves remote ones to Lightning.

    A mixin: each namespace's `SuperpipelineCheckpointIO` combines it with that namespace's `TorchCheckpointIO`.

    Args:
        progress: Shows how much is written; by default in the log.

    Attributes:
        streamed: The keys whose tensors a strategy copies into weights and optimizers; these are the Trainer's.
    """

    streamed: Collection[str] = ("state_dict", "optimizer_states")

    def __init__(self, progress: Progress | None = None) -> None:
        super().__init__()
        self._progress = progress or Progress()

    @override
    def save_checkpoint(
        self,
        checkpoint: StateDict,
        path: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Write to a local path, or an fsspec address, atomically: a reader sees the old file or the new one.

        Raises:
            TypeError: If `storage_options` is given, as in Lightning's `TorchCheckpointIO`.
        """
        target = _local(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".{glob.escape(target.name)}.[0-9]*.tmp"):
            # a process that was killed while it saved has left the file; only Linux tells
            if sys.platform == "linux" and not Path("/proc", left.suffixes[-2][1:]).exists():
                left.unlink(missing_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                work = self._progress.begin(f"Saving {target.name}", nbytes_of(checkpoint))
                _write(checkpoint, CountedFile(file, work))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> StateDict:
        """Load the checkpoint at `path`. The `streamed` part of a local file is read when it is used.

        Without `weights_only`, the default is that of the installed Lightning.

        Raises:
            FileNotFoundError: If there is no such file.
        """
        base = super().load_checkpoint
        choice = {"weights_only": weights_only}
        if "weights_only" not in inspect.signature(base).parameters:
            choice = {}  # Lightning 2.5 always loads everything
            weights_only = bool(weights_only)
        source = _local(path)
        # torch cannot mmap files older than its zip format
        if source is None or not zipfile.is_zipfile(source):
            return base(path, map_location=map_location, **choice)
        checkpoint: StateDict = torch.load(source, map_location, weights_only=weights_only, mmap=True)
        mapped = {id(part): part for name, part in checkpoint.items() if name in self.streamed}
        return copy.deepcopy(checkpoint, mapped)


# The addresses of the memory of weights and state that are written from the device.
_written_from_device: ContextVar[Collection[int]] = ContextVar("_written_from_device", default=())


def _tag_as_on_host(storage: Any) -> str | None:
    """Have the file say "cpu" for weights and state that torch writes from a device, one tensor after the other."""
    addresses = _written_from_device.get()
    return "cpu" if addresses and storage.data_ptr() in addresses else None


# before torch's own, which begin at 10
torch.serialization.register_package(1, _tag_as_on_host, lambda *_: None)


def _write(checkpoint: StateDict, file: CountedFile) -> None:
    handled = sys.exc_info()[1]  # if it is saved because of an exception
    streamed = [checkpoint.get(name) for name in StreamingCheckpointIO.streamed]
    parts = [part for tensor in _tensors_on_device(streamed) for part in parts_of(tensor)]
    token = _written_from_device.set({part.untyped_storage().data_ptr() for part in parts})
    try:
        torch.save(checkpoint, cast("IO[bytes]", file))
    except RuntimeError as error:
        cause = error.__context__
        # torch's writer goes on to complain that the file is too short
        if isinstance(cause, KeyboardInterrupt | OSError) and cause is not handled:
            raise cause from None
        raise
    finally:
        _written_from_device.reset(token)


def nbytes_of(checkpoint: Any) -> int:
    """Return the bytes of all tensors in a checkpoint; tied weights count once."""
    parts = [part for tensor in instances_in(checkpoint, Tensor) for part in parts_of(tensor)]
    return sum({part.data_ptr(): part.nbytes for part in parts if part.layout is torch.strided}.values())


class WritesCheckpoints:
    """The part of a strategy, the Trainer's or Fabric's, that has its checkpoint plugin."""

    lightning: ClassVar[FabricNamespace]
    streaming_checkpoint_io: ClassVar[type[StreamingCheckpointIO]]
    progress: Progress  # shows how far long work has come
    _checkpoint_io: CheckpointIO | None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that writes and reads checkpoints: the user's own, or else ours."""
        if self._checkpoint_io is None:
            self._checkpoint_io = self.streaming_checkpoint_io(self.progress)
        elif isinstance(self._checkpoint_io, self.lightning.wrapping_checkpoint_io):
            # Set the wrapped plugin; the wrapper's setter keeps one that the user chose.
            self._checkpoint_io.checkpoint_io = self.streaming_checkpoint_io(self.progress)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io


class CheckpointsMixin(WritesCheckpoints, StrategyPart):
    """The part of the Trainer's strategy that deals with checkpoints."""

    lightning: ClassVar[Namespace]
    meetings: Meetings

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # The base class moves optimizer state to the device, but state belongs where its weight is.
        states = checkpoint["optimizer_states"]
        with CountedCopies(self.progress.begin("Loading optimizer state", nbytes_of(states))):
            for optimizer, state in zip(self.optimizers, states, strict=False):
                self._place_state(optimizer)
                try:
                    optimizer.load_state_dict({**state, "state": {}} if self.meetings.follows else state)
                except ValueError as error:
                    groups = state.get("param_groups") or [{}]  # a user's optimizer may keep none
                    words = groups[-1].get(COMPACT)
                    if words is None or isinstance(optimizer, AdamW):
                        raise
                    message = f"{type(optimizer).__name__} cannot load this checkpoint: {words}."
                    raise self.lightning.misconfiguration(message) from error
                self._place_state(optimizer)
                read_from_file(optimizer)

    def _place_state(self, optimizer: Optimizer) -> None:
        """Have state lie on the drive, if it belongs there, before it is loaded, and after that."""
        if self.pipeline is not None:
            self.pipeline.optimizers.place_state(optimizer)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return optimizer_state_on_host(super().optimizer_state(optimizer))

    @override
    def lightning_module_state_dict(self) -> StateDict:
        return state_dict_on_host(super().lightning_module_state_dict())


def optimizer_state_on_host(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return an optimizer's state for a checkpoint, which must not depend on the current place of the state.

    If the host has no room for state on the device, it stays there, and is written from there.
    """
    if not has_room_for(2 * bytes_on_device(state)):  # it may take half of what is free
        return state
    return cast("dict[str, Tensor]", tree_map_only(Tensor, Tensor.cpu, state))


def state_dict_on_host(state: StateDict) -> StateDict:
    """Move tensors on the device to the host: buffers, and weights that stay there; in place, as `state` has metadata.

    If the host has no room for them, they stay there, and are written from there. Tensors that consist of others move
    in any case, because their class writes on which device they are.
    """
    has_room = has_room_for(2 * bytes_on_device(state))  # they may take half of what is free
    for name, value in state.items():
        if isinstance(value, Tensor) and value.device.type != "meta" and (has_room or contains_others(value)):
            state[name] = value.cpu()
    return state


def bytes_on_device(state: Any) -> int:
    """Return the bytes of all tensors that are on a device."""
    return sum(tensor.nbytes for tensor in _tensors_on_device(state))


def _tensors_on_device(state: Any) -> list[Tensor]:
    tensors = instances_in(state, Tensor)
    return [tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")]


def own_all_but_weights(state: StateDict, module: nn.Module) -> StateDict:
    """Give all tensors but weights memory of their own, and return them: modules may keep them, as metrics do."""
    weights = dict(module.named_parameters(remove_duplicate=False))
    others = copy.deepcopy({name: value for name, value in state.items() if name not in weights})
    state.update(others)
    return others


def read_from_file(optimizer: Optimizer) -> None:
    """Copy state that torch's optimizers have left in a mapped checkpoint."""
    files = list(private_files())

    def read(tensor: Tensor) -> Tensor:
        is_mapped = any(begin <= tensor.data_ptr() < end for begin, end in files)
        return tensor.clone() if is_mapped else tensor

    for state in optimizer.state.values():
        state.update(tree_map_only(Tensor, read, state))


def _local(path: str | Path) -> Path | None:
    # Lightning uses fsspec for the rest, which recognizes addresses ("s3://...", "zip::...") like this.
    remote = "://" in str(path) or "::" in str(path)
    return None if remote else Path(path).expanduser()
