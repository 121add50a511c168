"""The rates of this machine, and the least time that they allow for a step.

Five rates are measured in the same run as everything else: pinned copies to the device, to the host, and both at once;
AdamW on the host with torch's fused kernel; and a large matrix product on the device. Without a GPU, copies go from
memory to memory, as on the emulated device, and the CPU computes the product.

A step takes at least as long as the busiest of these four, if all of them run at once and nothing waits:

    compute     operations of forward and backward, without recomputation  / rate of the matrix product
    to device   weights that the host has stepped, in the compute dtype;
                frozen ones (and in inference all) to the extent that the
                device has no room for them, once for each pass            / rate of copies to the device
    to host     gradients of trained weights, as they were computed        / rate of copies to the host
    optimizer   trained parameters                                         / rate of AdamW

For a system that keeps everything on the device, only computing counts. If simultaneous copies in both directions are
slower than each alone, the two cannot both reach their limit; the result contains the rate of both at once for that.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure(quick: bool) -> dict[str, Any]:
    """Measure all rooflines.

    Args:
        quick: Whether to use small amounts, for a machine without a GPU.

    Returns:
        Rates: bytes, parameters and operations per second.
    """
    on_gpu = torch.cuda.is_available()
    copies = _copies_of_gpu(1 << 30) if on_gpu else _copies_of_cpu(1 << 24 if quick else 1 << 28)
    device = torch.device("cuda" if on_gpu else "cpu")
    size, parameters = (256, 1 << 20) if quick else (8192, 1 << 28)
    return {
        **copies,
        "adamw_parameters_per_second": {name: _adamw(parameters, dtype, rounds=5) for name, dtype in _DTYPES.items()},
        "matmul_flops": {name: _matmul(size, dtype, device, rounds=10) for name, dtype in _DTYPES.items()},
    }


def limit(
    description: Mapping[str, Any], samples: int, rooflines: Mapping[str, Any], device_bytes: int | None, offloads: bool
) -> dict[str, Any]:
    """Return the least time of a step, as defined in this module's docstring.

    Args:
        description: A workload, as described by `demand.describe`.
        samples: Samples per step.
        rooflines: The rates from `measure`.
        device_bytes: Memory of the device; None if nothing limits it.
        offloads: Whether the system keeps anything on the host.

    Returns:
        The seconds of each of the four, and the largest of them with its name.
    """
    demand, precision, trains = description["demand"], description["precision"], description["kind"] == "train"
    multiplied_as = "float32" if precision == "32-true" else "bfloat16"
    least = {"compute": demand["flops_per_sample"] * samples / rooflines["matmul_flops"][multiplied_as]}
    if offloads:
        trained = demand["trained_bytes"] if trains else 0
        room = min(filter(None, (device_bytes, description["device_limit"])), default=demand["sent_bytes"])
        passes = 2 if trains else description["passes"]
        frozen = passes * max(0, demand["sent_bytes"] - trained - room)
        stepped_as = "bfloat16" if precision == "bf16-true" else "float32"
        stepped = demand["trained"] if trains else 0
        least["to device"] = (trained + frozen) / rooflines["to_device_bytes_per_second"]
        least["to host"] = trained / rooflines["to_host_bytes_per_second"]
        least["optimizer"] = stepped / rooflines["adamw_parameters_per_second"][stepped_as]
    slowest = max(least, key=lambda lane: least[lane])
    return {"lanes": least, "lane": slowest, "seconds": least[slowest]}


# -------------------------------------------------------------------------------------------------------------- copies


def _copies_of_gpu(nbytes: int) -> dict[str, float]:
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()  # until then, the memory belongs to the current stream

    def up() -> None:
        with torch.cuda.stream(streams[0]):
            device[0].copy_(host[0], non_blocking=True)

    def down() -> None:
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[1], non_blocking=True)

    def both() -> None:
        up()
        down()

    seconds = [_median_seconds(copy, 5, torch.cuda.synchronize) for copy in (up, down, both)]
    return _copy_rates(nbytes, *seconds)


def _copies_of_cpu(nbytes: int) -> dict[str, float]:
    memory = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(4)]

    def up() -> None:
        memory[0].copy_(memory[1])

    def down() -> None:
        memory[2].copy_(memory[3])

    def both() -> None:
        other = threading.Thread(target=down)
        other.start()
        up()
        other.join()

    return _copy_rates(nbytes, *(_median_seconds(copy, 5) for copy in (up, down, both)))


def _copy_rates(nbytes: int, up: float, down: float, both: float) -> dict[str, float]:
    return {
        "to_device_bytes_per_second": nbytes / up,
        "to_host_bytes_per_second": nbytes / down,
        "both_ways_bytes_per_second": 2 * nbytes / both,
    }


# ---------------------------------------------------------------------------------------------------- the optimizer


def _adamw(parameters: int, dtype: torch.dtype, rounds: int) -> float:
    """Return parameters per second, over one large tensor, so that only memory and cores are the limit."""
    weight = torch.nn.Parameter(torch.full((parameters,), 0.5, dtype=dtype))
    weight.grad = torch.full_like(weight, 0.01)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return parameters / _median_seconds(optimizer.step, rounds)


# -------------------------------------------------------------------------------------------------------- computing


def _matmul(size: int, dtype: torch.dtype, device: torch.device, rounds: int) -> float:
    """Return operations per second of a product of square matrices, several in a row."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out: Tensor = torch.empty_like(left)
    times = 5

    def multiply() -> None:
        for _ in range(times):
            torch.mm(left, right, out=out)

    wait = torch.cuda.synchronize if device.type == "cuda" else None
    return times * 2 * size**3 / _median_seconds(multiply, rounds, wait)


def _median_seconds(work: Callable[[], Any], rounds: int, wait: Callable[[], Any] | None = None) -> float:
    seconds = []
    for turn in range(rounds + 2):
        begin = time.perf_counter()
        work()
        if wait is not None:
            wait()
        if turn >= 2:  # the first rounds touch new memory and choose kernels
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
