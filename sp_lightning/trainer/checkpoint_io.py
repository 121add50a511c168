"""Checkpoints without a second copy of the model in host memory.

Lightning's default serializes into memory before it writes, and reads through a file object: save and load each take
the checkpoint's size once more. Here the checkpoint is serialized straight into a temporary file beside the target, and
memory-mapped on load. The content is what Lightning writes: same keys, dtypes and values, loadable without this
package.
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
    """Writes and reads local checkpoints without a copy in memory, and leaves remote ones to Lightning.

    A mixin: each namespace's `SuperpipelineCheckpointIO` combines it with that namespace's `TorchCheckpointIO`.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path` atomically: a reader sees the old file or the new one, never a part.

        Args:
            checkpoint: The checkpoint.
            path: A local path or an fsspec address.
            storage_options: Not supported, as in Lightning's `TorchCheckpointIO`.

        Raises:
            TypeError: If `storage_options` is given.
        """
        target = _local(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())  # or a power cut after the rename could leave an empty file
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
        """Load the checkpoint at `path`. A local file is memory-mapped: its tensors are read when they are used.

        Args:
            path: A local path or an fsspec address.
            map_location: As in `torch.load`.
            weights_only: As in `torch.load`; `None` means the default of the installed Lightning.

        Returns:
            The checkpoint.

        Raises:
            FileNotFoundError: If there is no such file.
        """
        base = super().load_checkpoint
        # Lightning 2.5 has no `weights_only` here, and always loads everything.
        optional = "weights_only" in inspect.signature(base).parameters
        source = _local(path)
        if source is None or not zipfile.is_zipfile(source):  # torch cannot mmap files older than its zip format
            return base(path, map_location=map_location, **({"weights_only": weights_only} if optional else {}))
        if weights_only is None and not optional:
            weights_only = False
        checkpoint: dict[str, Any] = torch.load(source, map_location, weights_only=weights_only, mmap=True)
        return checkpoint


def _local(path: str | Path) -> Path | None:
    # Lightning uses fsspec for the rest, which recognizes addresses ("s3://...", "zip::...") like this.
    remote = "://" in str(path) or "::" in str(path)
    return None if remote else Path(path).expanduser()


def standalone(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU as `torch.save` should see it: the same memory in a storage of exactly its size.

    Weights may share a flat buffer, and `torch.save` writes the whole storage behind a view: one weight picked out of a
    checkpoint would bring its neighbors along.

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
    # Via numpy: its array is a view of the memory, from which torch makes a storage of just the array's extent. As
    # bytes, because numpy has no bfloat16.
    memory = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)


def own_memory(optimizer: Optimizer) -> None:
    """Copy the state of `optimizer` that `load_state_dict` left in a memory-mapped checkpoint file.

    `Optimizer.load_state_dict` keeps the tensors that it is given. Memory-mapped ones would be read from disk in the
    middle of a step.

    Args:
        optimizer: An optimizer whose state was just loaded.
    """
    for state in optimizer.state.values():
        if isinstance(state, dict):
            for name, value in state.items():
                if isinstance(value, Tensor) and value.layout is torch.strided:
                    # Storages from torch's own allocator are resizable; memory-mapped ones are not.
                    state[name] = value if value.untyped_storage().resizable() else value.clone()
