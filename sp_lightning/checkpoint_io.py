"""Checkpoints without a second copy of the model in host memory.

Lightning's default serialises into memory before it writes, and reads through a file object: the size of the
checkpoint once more on save and on load (hazard 22). Here the file is written as it is serialised, beside its final
place, and mapped into memory on load. The content is what Lightning writes: same keys, dtypes and values, loadable
without this package.
"""

from __future__ import annotations

import inspect
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

if TYPE_CHECKING:
    from lightning.fabric.plugins import TorchCheckpointIO as _Base
else:
    _Base = object


def _on_host(storage: Any, location: str) -> Any:
    return storage


class StreamingCheckpointIO(_Base):
    """Writes and reads local checkpoints without copies in memory; other places are left to Lightning.

    A mixin: `SuperpipelineCheckpointIO` of each namespace joins it with that namespace's `TorchCheckpointIO`.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`: a reader sees the old file or the new one, never a part.

        Args:
            checkpoint: What to write.
            path: Where to write it: a local path or an fsspec address.
            storage_options: Not supported, as in Lightning's `TorchCheckpointIO`.

        Raises:
            TypeError: `storage_options` is given.
        """
        target = _local(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())  # or a power cut after the rename could leave an empty file with this name
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = _on_host,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read the checkpoint at `path`; the tensors of a local file are read when they are used.

        Args:
            path: A local path or an fsspec address.
            map_location: As in `torch.load`.
            weights_only: As in `torch.load`; `None` is what the installed Lightning takes for a default.

        Returns:
            The checkpoint.

        Raises:
            FileNotFoundError: There is no such file.
        """
        base = super().load_checkpoint
        # Lightning 2.5 has no `weights_only` here, and loads everything.
        optional = "weights_only" in inspect.signature(base).parameters
        source = _local(path)
        if source is None or not zipfile.is_zipfile(source):  # torch cannot map files from before its zip format
            return base(path, map_location=map_location, **({"weights_only": weights_only} if optional else {}))
        if weights_only is None and not optional:
            weights_only = False
        checkpoint: dict[str, Any] = torch.load(source, map_location, weights_only=weights_only, mmap=True)
        return checkpoint


def _local(path: str | Path) -> Path | None:
    # How fsspec, which Lightning hands the rest to, tells an address ("s3://...", "zip::...") from a path.
    remote = "://" in str(path) or "::" in str(path)
    return None if remote else Path(path).expanduser()


def standalone(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU as `torch.save` should see it: with a storage of its own size, but the same memory.

    Weights are views of a flat buffer, and `torch.save` writes the whole storage behind a view: one weight picked out
    of a checkpoint would bring its neighbours along.

    Args:
        tensor: A weight or a buffer, detached.
    """
    if tensor.device.type not in ("cpu", "meta"):
        return tensor.cpu()
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or tensor.is_meta or tensor.numel() == 0 or not tensor.is_contiguous():
        return tensor
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    # numpy's array is a view of the memory, and torch makes a storage of the array's extent from it. Bytes, as numpy
    # has no bfloat16.
    memory = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)


def own_memory(optimizer: Optimizer) -> None:
    """Copy the state of `optimizer` that `load_state_dict` left in a mapped checkpoint file.

    `Optimizer.load_state_dict` keeps the tensors that it is given. In a mapped file they would be read from disk in
    the middle of a step.

    Args:
        optimizer: An optimizer whose state was just loaded.
    """
    for state in optimizer.state.values():
        if isinstance(state, dict):
            for name, value in state.items():
                if isinstance(value, Tensor) and value.layout is torch.strided:
                    # Storages of torch's own allocator can be resized; memory that came from a file cannot.
                    state[name] = value if value.untyped_storage().resizable() else value.clone()
