"""Runs checks in several processes at once, which meet in a process group, as a launcher would start them."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

Check = Callable[[], None]

_PATIENCE = timedelta(seconds=60)  # of one process with the others: a check that hangs fails


def in_processes(checks: Sequence[Check], count: int = 2) -> None:
    """Run checks, one after the other, in each of several new processes; fail with what went wrong in any of them.

    Args:
        checks: Functions of a module, which are the same in all processes.
        count: How many processes.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        _start_server()
        ended: Exception | None = None
        try:
            arguments = list(checks), count, port, folder, os.getcwd()
            multiprocessing.start_processes(_run, arguments, nprocs=count, start_method="forkserver")
        except Exception as error:  # the group has broken down; the cause comes first
            ended = error
        failures = [path.read_text() for path in sorted(Path(folder).iterdir(), key=os.path.getmtime)]
    assert not failures, "\n\n".join(failures)
    assert ended is None, ended


def _start_server() -> None:
    """Have a process import what takes seconds, once: those of all checks are forked from it."""
    server = forkserver._forkserver
    server.set_forkserver_preload(["tests.helpers", "tests.zoo", "tests.lightning_modules", "tests.random_graphs"])
    before = os.getcwd()
    os.chdir(Path(__file__).parents[1])  # where it finds them
    server.ensure_running()
    os.chdir(before)


def _run(rank: int, checks: list[Check], count: int, port: int, folder: str, here: str) -> None:
    os.chdir(here)
    os.environ.update(
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        RANK=str(rank),
        WORLD_SIZE=str(count),
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=count, timeout=_PATIENCE)
    for check in checks:
        torch.manual_seed(rank)
        try:
            check()
            failed = False
        except BaseException:
            failed = True
            text = f"{check.__name__}, process {rank}:\n{traceback.format_exc()}"
            Path(folder, f"{check.__name__}-{rank}").write_text(text)
        answers = [False] * count
        dist.all_gather_object(answers, failed)
    # Without `destroy_process_group`, which the interpreter's own end would do, too: torch joins gloo's threads there
    # while it holds the GIL, which they may need to free what they sent last, and both wait forever.
    os._exit(0)
