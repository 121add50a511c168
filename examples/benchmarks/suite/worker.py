"""The code of one measuring process: build a workload, run it on a system, and write the measurements as one record."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from sp_lightning.pipeline import readable_bytes
from suite import host_memory, rooflines
from suite.demand import describe
from suite.module import Batches, BenchModule, Clock
from suite.sets import WORKLOADS
from suite.systems import make_system
from suite.systems.base import System
from suite.weights import build_network
from suite.workloads import Window, Workload

_SPARE = 1  # one step after the measured ones: its beginning is the end of the last one


@dataclass(frozen=True)
class Job:
    """The measurement that one process makes.

    Attributes:
        workload: Name of the workload.
        system: Name of the system.
        window: k and k_prime; None for the system's own choice.
        samples: Samples per step.
        round: Index of the round, which is how often the same was measured before.
        warm_up: Steps that do not count.
        steps: Steps that count.
        budget: Bytes of device memory to keep to; None for all there is.
    """

    workload: str
    system: str
    window: Window | None
    samples: int
    round: int
    warm_up: int
    steps: int
    budget: int | None = None

    def __str__(self) -> str:
        window = f" k={self.window[0]} k_prime={self.window[1]}" if self.window else ""
        budget = f" in {readable_bytes(self.budget)}" if self.budget is not None else ""
        return f"{self.workload} x {self.samples}: {self.system}{window}{budget}, round {self.round + 1}"


def record(job: Job, status: str, **values: Any) -> dict[str, Any]:
    """Return the JSON record of a job. `status` is "ok", "failed" or "skipped"; the last two have an `error`."""
    return {**asdict(job), "status": status, "error": None, **values}


def failure(kind: str, message: str, details: str = "") -> dict[str, str]:
    """Describe an error for a record: its type, the first line of its message, and the end of the details."""
    return {"type": kind, "message": message.strip().partition("\n")[0], "details": details[-4000:]}


def run(job: Job, path: Path, log: Path) -> None:
    """Measure, and write the record. Errors become part of the record.

    Args:
        job: The measurement to make.
        path: File to write the record to.
        log: File for everything that is printed.
    """
    _begin(log)
    try:
        result = measure(job)
    except BaseException as error:  # including what a system raises to end the process
        error_of = failure(type(error).__name__, str(error), traceback.format_exc())
        result = record(job, "failed", error=error_of, host_peak_bytes=host_memory.peak_bytes())
    path.write_text(json.dumps(result), encoding="utf-8")


def prepare(names: Sequence[str], path: Path, log: Path) -> None:
    """Measure the rooflines, compute the demand of each workload, and write both.

    Args:
        names: Names of the workloads.
        path: File to write the results to.
        log: File for everything that is printed.
    """
    _begin(log)
    measured = rooflines.measure(quick=not torch.cuda.is_available())
    result: dict[str, Any] = {"rooflines": measured, "workloads": {}}
    for name in names:
        result["workloads"][name] = describe(WORKLOADS[name])
        path.write_text(json.dumps(result), encoding="utf-8")


def grow_host(nbytes: int, path: Path, log: Path) -> None:
    """Make the machine provide all the memory it can have (see `host_memory`), and write how that went.

    Args:
        nbytes: How much memory that is.
        path: File to write the outcome to.
        log: File for everything that is printed.
    """
    _begin(log)
    path.write_text(json.dumps(host_memory.grow(nbytes)), encoding="utf-8")


def measure(job: Job) -> dict[str, Any]:
    """Make a measurement in this process.

    Returns:
        The record, with status "ok".
    """
    workload = replace(WORKLOADS[job.workload], samples=job.samples)
    system = make_system(job.system, job.window, job.budget)
    begin = time.perf_counter()
    device = _device(system.device_limit(workload))
    L.seed_everything(0, verbose=False)
    network = build_network(workload).train(workload.kind == "train")
    if workload.kind == "train" and system.checkpoints_blocks(workload):
        network.checkpoint_blocks()
    module = system.prepare(BenchModule(network, workload, system), workload, device)
    built = time.perf_counter() - begin
    steps = job.warm_up + job.steps + _SPARE + system.observed_steps
    clock = Clock(device)
    batches = Batches(workload, steps, pinned=device.type == "cuda")
    if system.runs_in_trainer:
        _run_trainer(module, workload, system, batches, clock, device)
    else:
        _run_plainly(module, workload, batches, clock, device)
    seconds, facts = clock.seconds(), system.facts()
    return record(
        job,
        "ok",
        build_seconds=built,
        seconds=time.perf_counter() - begin,
        warm_up_seconds=seconds[: job.warm_up],
        step_seconds=seconds[job.warm_up : job.warm_up + job.steps],
        values=clock.values(),
        **_device_memory(device, facts),
        host_peak_bytes=host_memory.peak_bytes(),
        waits=system.waits(),
        facts=facts,
    )


def _run_trainer(
    module: L.LightningModule, workload: Workload, system: System, batches: Batches, clock: Clock, device: torch.device
) -> None:
    arguments = {"gradient_clip_val": workload.clipping, **system.trainer_arguments(workload)}
    callbacks = [clock, *arguments.pop("callbacks", [])]
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_steps=len(batches),
        callbacks=callbacks,
        use_distributed_sampler=False,
        barebones=True,  # no progress bars, loggers or checkpoints
        **arguments,
    )
    if workload.kind == "train":
        trainer.fit(module, batches.loader())
    else:
        trainer.predict(module, batches.loader(), return_predictions=False)


def _run_plainly(
    module: L.LightningModule, workload: Workload, batches: Batches, clock: Clock, device: torch.device
) -> None:
    """Predict as Lightning would, with a module whose weights the system has placed itself."""
    with torch.inference_mode():
        for index in range(len(batches)):
            batch = {name: _as_input(tensor, workload, device) for name, tensor in batches[index].items()}
            clock.mark_start()
            clock.record_value(module.predict_step(batch, index))


def _as_input(tensor: Tensor, workload: Workload, device: torch.device) -> Tensor:
    dtype = workload.weight_dtype if tensor.is_floating_point() else None
    return tensor.to(device, dtype, non_blocking=True)


def _device(limit: int | None) -> torch.device:
    """Return the device, limited to so many bytes of its memory. A CPU is never limited."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    if limit is not None:
        _, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    return device


def _device_memory(device: torch.device, facts: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the peaks of allocated and reserved memory, and how often torch freed all that it had cached to go on.

    All are None on a CPU, where torch counts none of them.

    Our own system has torch count anew in the steps that it measures, and reports the peak of allocated memory from
    before that; the peak of reserved memory is then that of the later steps.
    """
    if device.type != "cuda":
        return {"device_peak_bytes": None, "device_reserved_bytes": None, "allocation_retries": None}
    return {
        "device_peak_bytes": max(torch.cuda.max_memory_allocated(device), facts.get("counted_device_peak_bytes", 0)),
        "device_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "allocation_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }


def _begin(log: Path) -> None:
    """Set up the process: its own session, output to a file, first candidate of the OOM killer, fewer warnings."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent to a hanging process before it is ended
    with suppress(OSError):  # not available on every kernel
        Path("/proc/self/oom_score_adj").write_text("1000")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
