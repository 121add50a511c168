"""Would it pay to send the weights of FP8 layers in 8 bits? The planner's clock says it for four machines.

    python tools/fp8_streamed.py

Beside `plan --fp8`, which sends 16 bits: a unit's converted weights are sent in half their bytes, and the GPU casts
them no more. The CPU casts them once in a step instead, which reads 2 bytes and writes 1 for each, and takes 1 of RAM;
a unit that the GPU updates sends 1 more down. docs/tried.md has the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plan_machines import IN_EIGHT_BITS, machine
from torch import nn

from sp_lightning import Assumptions
from sp_lightning.planning.choose import choose
from sp_lightning.planning.estimate import assumed_machine, divide, estimate_work
from sp_lightning.planning.known import named_model
from sp_lightning.planning.work import UnitWork, Workload

MACHINES = [
    ("RTX 4090", "desktop DDR5", "96GiB"),
    ("RTX 5090", "desktop DDR5", "192GiB"),
    ("L40S", "server DDR5", "256GiB"),
    ("H100", "server DDR5", "256GiB"),
]
CAST, READ = 5, 3  # bytes that a cast moves for a number: in GPU memory, and in CPU memory


def in_8_bits(workload: Workload, given: Assumptions) -> Workload:
    """Return the work if converted weights were sent in 8 bits: nearly all of a decoder's block."""
    rate = 0.8 * given.device_bandwidth * 1e9

    def changed(unit: UnitWork) -> UnitWork:
        numbers = unit.weight_bytes // 2
        seconds = CAST * numbers / rate
        ways = tuple(replace(way, repeating=max(0.0, way.repeating - seconds)) for way in unit.ways)
        return replace(
            unit,
            weight_bytes=numbers,
            bytes_after_step=unit.bytes_after_step // 2,
            forward_seconds=unit.forward_seconds - seconds,
            backward_seconds=unit.backward_seconds - seconds,
            ways=ways,
            step_bytes=unit.step_bytes + READ * numbers,
            host_bytes=unit.host_bytes + numbers,
            visit_down=unit.visit_down + (numbers if unit.visit_down else 0),
        )

    # embedding and head are units of their own, with words as one of their sizes, and stay as they are
    most = sorted(unit.weight_bytes for unit in workload.units)[len(workload.units) // 2]
    units = [changed(unit) if unit.weight_bytes == most else unit for unit in workload.units]
    return replace(workload, units=tuple(units))


def seconds(module: nn.Module, given: Assumptions, is_sent_in_8_bits: bool) -> float:
    """Return the fastest step."""
    workload = estimate_work(divide(module, given), given)
    if is_sent_in_8_bits:
        workload = in_8_bits(workload, given)
    return choose(workload, assumed_machine(given), given.device_room, host_budget=given.host_room).seconds


def main() -> None:
    """Print a table."""
    module = named_model("Qwen3-8B")
    print(
        "| Qwen3-8B, FP8, clipped, tokens in a step | sent in 16 bits | in 8 bits | less |\n| --- | --- | --- | --- |"
    )
    for place in MACHINES:
        for tokens, accumulate in ((2048, 1), (8192, 1), (8192, 8)):
            how: dict[str, Any] = {**machine(*place), **IN_EIGHT_BITS, "fp8": True, "gradient_clip_val": 1.0}
            given = Assumptions(tokens=tokens, accumulate=accumulate, **how)
            before, after = (seconds(module, given, is_so) for is_so in (False, True))
            less = f"{100 * (1 - after / before):.1f} %"
            print(f"| {place[0]}, {tokens * accumulate:,} | {before:.2f} s | {after:.2f} s | {less} |", flush=True)


if __name__ == "__main__":
    main()
