"""A file for optimizer state on a drive: it has no name, and is gone with the process, however that ends.

Room on the drive is reserved before a step needs it. Steps read and write the file past the system's cache
(state_ring.py). Everybody else uses a map of it, which is memory like any other: checkpoints, `load_state_dict`, and
users who read `optimizer.state`. Linux keeps both views of a file alike.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import warnings
import weakref
from pathlib import Path

import torch
from torch import Tensor

from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.pipeline.weights.buffers import tensor_in

PAGE = 4096
"""Requests past the cache need memory, offsets and sizes that are multiples of this."""

_IN_RAM = ("tmpfs", "ramfs", "devtmpfs")
_OVER_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "fuse.sshfs", "fuse.glusterfs")
_CANNOT_RESERVE = (errno.EINVAL, errno.EOPNOTSUPP)


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
    if kind in _IN_RAM:
        raise ValueError(f"`nvme_path={folder!r}` is {kind}, which is CPU memory. Name a folder on a drive.")
    if kind in _OVER_NETWORK:
        raise ValueError(
            f"`nvme_path={folder!r}` is {kind}: it is on another machine. Name a folder on a drive of this one."
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
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0]
    return ""


class StateFile:
    """A file of a fixed size, filled with zeros, and its map.

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
            _reserve(self.fd, nbytes)
        except OSError as error:
            raise ValueError(
                f"`nvme_path={folder!r}` has no room for {readable_bytes(nbytes)} of optimizer state: {error.strerror}."
            ) from error
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
            self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._begin = self._bytes.data_ptr()

    def offset_of(self, tensor: Tensor) -> int:
        """Return where a tensor in the map lies in the file."""
        return tensor.data_ptr() - self._begin

    def view(self, offset: int, like: Tensor) -> Tensor:
        """Return the tensor at this place, of the shape and dtype of another one; it keeps the map."""
        return tensor_in(self._bytes, offset, like, like.dtype)

    def write_back(self, offset: int, nbytes: int) -> None:
        """Write a place that was changed in the map to the drive, and take it out of RAM."""
        self._pages.flush(offset, padded(nbytes))
        self._pages.madvise(mmap.MADV_DONTNEED, offset, padded(nbytes))


def _reserve(fd: int, nbytes: int) -> None:
    """Give a file its size, and room on the drive if the file system can reserve that."""
    found = os.fstatvfs(fd)
    free = found.f_bavail * found.f_frsize
    if nbytes > free:  # or the attempt would fill the drive
        raise OSError(errno.ENOSPC, f"{readable_bytes(free)} are free")
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise
        os.ftruncate(fd, nbytes)
