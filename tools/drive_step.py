"""Measure steps with optimizer state on a drive: ours, beside RAM, the drive itself, and DeepSpeed's ZeRO-Infinity.

    python tools/drive_step.py /scratch --json out.json
    python tools/drive_step.py /scratch --deepspeed PYTHON     # of an environment with deepspeed, built with libaio

Each trains the same model of linear layers, in bf16 on the CPU, in a process of its own, and they take turns. For each
the table has the seconds of a step, the bytes that the process reads from drives and writes to them, and its anonymous
memory at the end, without what it had before the model. All state is on the drive, as if no RAM were free. *Floor* is
the time in which the drive alone reads as many bytes as such a step, while it writes as many.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, STEPS, WARM_UP = 1024, 8, 3
OF_LAYER = 4 * WIDTH**2  # about its parameters
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
ENVIRONMENT |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
OURS = [f"ours, {moments} moments, {where}" for moments, where in product(("int8", "fp32"), ("RAM", "drive"))]
THEIRS = ["ZeRO-Infinity, RAM", "ZeRO-Infinity, drive"]


def numbers_in(file: str, *words: str) -> list[int]:
    """Return the numbers after these words in a file of /proc."""
    lines = (line.split() for line in Path("/proc/self", file).read_text().splitlines())
    found = {line[0].rstrip(":"): int(line[1]) for line in lines if line[0].rstrip(":") in words}
    return [found[word] for word in words]


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    return 1024 * numbers_in("status", "RssAnon")[0]


def bytes_moved() -> list[int]:
    """Return the bytes that this process has read from drives, and written to them."""
    return numbers_in("io", "read_bytes", "write_bytes")


def model_of(parameters: int) -> nn.Sequential:
    """Return a model of about as many parameters, with the same weights each time."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(parameters // OF_LAYER)
    ]
    return nn.Sequential(*layers)


def steps_of_ours(model: nn.Module, folder: str, name: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a function that makes a step, with state in RAM or on the drive."""
    import sp_lightning
    from sp_lightning.pipeline.optimizer import state_file

    state_file.SHARE_OF_FREE_RAM = 0.0
    warnings.simplefilter("ignore")  # the drive may be that of the system
    model = model.to(torch.bfloat16)
    path = folder if name.endswith("drive") else None
    with sp_lightning.superpipeline(model, "cpu", nvme_path=path):
        moments = "int8" if "int8" in name else "fp32"
        optimizer = sp_lightning.optim.AdamW(model.parameters(), lr=1e-3, moments=moments)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        yield step


def steps_of_theirs(model: nn.Module, folder: str, name: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield the same for ZeRO-3, whose bf16 parameters are in RAM."""
    import deepspeed

    place = {"device": "nvme", "nvme_path": folder} if name.endswith("drive") else {"device": "cpu"}
    options = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": place,
            "offload_param": {"device": "cpu"},
            "sub_group_size": 10_000_000 if name.endswith("drive") else 1_000_000_000,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "aio": {"block_size": 8 << 20, "queue_depth": 8, "overlap_events": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        return loss

    yield step


def trained(folder: str, parameters: int, name: str) -> dict[str, Any]:
    """Train in one way, and return what each step took."""
    is_ours = name in OURS
    os.environ.update(ENVIRONMENT)
    for module in ("sp_lightning.optim.kernels",) if is_ours else ("deepspeed",):
        import_module(module)  # which takes memory
    before = anonymous_bytes()
    model = model_of(parameters)
    steps = steps_of_ours if is_ours else steps_of_theirs
    count = sum(parameter.numel() for parameter in model.parameters())
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    losses, seconds, moved = [], [], []
    for step in steps(model, folder, name):
        for _ in range(STEPS):
            begin, earlier = time.perf_counter(), bytes_moved()
            losses.append(step(x).item())
            seconds.append(time.perf_counter() - begin)
            moved.append([now - then for now, then in zip(bytes_moved(), earlier, strict=True)])
        held = anonymous_bytes() - before
    read, written = (median(each) / count for each in zip(*moved[WARM_UP:], strict=True))
    return {
        "parameters": count,
        "seconds": sum(seconds[WARM_UP:]) / (STEPS - WARM_UP),
        "bytes_read": read,
        "bytes_written": written,
        "ram_bytes": held / count,
        "losses": losses,
    }


def floor(folder: str, nbytes: int) -> float:
    """Return the seconds in which a drive reads this many bytes while it writes as many."""
    from mmap import mmap

    from sp_lightning.pipeline.optimizer.state_file import StateFile
    from sp_lightning.pipeline.optimizer.state_ring import BUFFER

    nbytes = nbytes // BUFFER * BUFFER
    file = StateFile(folder, nbytes)
    memory = [memoryview(mmap(-1, BUFFER)) for _ in range(2)]

    def move(is_read: bool) -> None:
        for offset in range(0, nbytes, BUFFER):
            file.move(is_read, memory[is_read], offset)

    move(is_read=False)
    threads = [threading.Thread(target=move, args=(is_read,)) for is_read in (True, False)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def measured(python: str, arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Train in one way, in a process of its own."""
    command = [python, __file__, arguments.folder, "--parameters", str(arguments.parameters), "--only", name]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Let all ways take turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=320_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deepspeed", help="Python of an environment that has it")
    parser.add_argument("--json")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(trained(arguments.folder, arguments.parameters, arguments.only)))
        return
    pythons = dict.fromkeys(OURS, sys.executable)
    if arguments.deepspeed:
        pythons |= dict.fromkeys(THEIRS, arguments.deepspeed)
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for name, python in pythons.items():
            run = measured(python, arguments, name)
            if run["bytes_written"] > 1:
                run["floor"] = floor(arguments.folder, int(run["bytes_written"] * run["parameters"]))
            runs.setdefault(name, []).append(run)
    print(f"{'':<26}{'s a step':>9}{'floor':>8}{'read':>8}{'written':>9}{'RAM':>7}   bytes per parameter")
    for name, of_name in runs.items():
        middle = {key: median(run[key] for run in of_name) for key in of_name[0] if key != "losses"}
        print(
            f"{name:<26}{middle['seconds']:>9.2f}{middle.get('floor', 0):>8.2f}{middle['bytes_read']:>8.1f}"
            f"{middle['bytes_written']:>9.1f}{middle['ram_bytes']:>7.1f}   last loss {of_name[0]['losses'][-1]:.6g}"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"torch": torch.__version__, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
