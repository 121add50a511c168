"""Runs checks in several processes at once, which meet in a process group, as a launcher would start them."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from .access_check import steps_checked
from .helpers import PATIENCE
from .order_check import order_checked

Check = Callable[[], None]

_PATIENCE = timedelta(seconds=4 * PATIENCE)  # of one process with the others: a check that hangs fails


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
        start_server()
        ended: Exception | None = None
        try:
            arguments = list(checks), count, port, folder, os.getcwd()
            multiprocessing.start_processes(_run, arguments, nprocs=count, start_method="forkserver")
        except Exception as error:  # the group has broken down; the cause comes first
            ended = error
        failures = [path.read_text() for path in sorted(Path(folder).iterdir(), key=os.path.getmtime)]
    assert not failures, "\n\n".join(failures)
    assert ended is None, ended


def start_server() -> None:
    """Have a process import what takes seconds, once: those of all checks are forked from it."""
    server = forkserver._forkserver
    server.set_forkserver_preload(["tests.helpers", "tests.zoo", "tests.lightning_modules", "tests.random_graphs"])
    before = os.getcwd()
    os.chdir(Path(__file__).parents[1])  # where it finds them
    server.ensure_running()
    os.chdir(before)


def new_process(target: Callable[..., None], *arguments: object) -> multiprocessing.Process:
    """Start a function of a module in a process of its own."""
    start_server()
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    process.start()
    return process


def _run(rank: int, checks: list[Check], count: int, port: int, folder: str, here: str) -> None:
    os.chdir(here)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), WORLD_SIZE=str(count))
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank))
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported stays
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=count, timeout=_PATIENCE)
    for check in checks:
        torch.manual_seed(rank)
        try:
            with order_checked(), steps_checked():
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


SERVER = """
import json, os, sys
{imports}

for line in sys.stdin:
    here, variables, code, *outputs = json.loads(line)
    if not (child := os.fork()):
        os.chdir(here)
        os.environ.update(variables)
        for number, output in enumerate(outputs, start=1):
            os.dup2(os.open(output, os.O_WRONLY), number)
        exec(code, {{}})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Fork = Callable[..., tuple[int, str, str]]


@contextmanager
def forks(imports: str, folder: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Fork]:
    """Yield what runs code in a process of its own, forked from one with imports; its status and what it printed."""
    command, pipe = [sys.executable, "-c", SERVER.format(imports=imports)], subprocess.PIPE
    outputs = [folder / name for name in ("stdout", "stderr")]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], env=environment, stdin=pipe, stdout=pipe, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def fork(code: str, **variables: str) -> tuple[int, str, str]:
            for output in outputs:
                output.write_text("")
            print(json.dumps([os.getcwd(), variables, code, *map(str, outputs)]), file=server.stdin, flush=True)
            return int(server.stdout.readline()), *(output.read_text() for output in outputs)

        yield fork
