"""Units that stay on the GPU from the first step on, because CPU memory has no room for their optimizer state.

Before the planner has measured steps, all units stream, and their optimizer state is in CPU memory. Where that is too
small, as few units as necessary are on the GPU from the start. All later plans keep them there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.optim import Optimizer

from sp_lightning.pipeline import Pipeline, WindowPlan, available_host_memory
from sp_lightning.planning.measure import may_live_on_device, work_of
from sp_lightning.planning.memory import (
    bytes_meanwhile,
    bytes_that_stay,
    first_choice,
    first_host_bytes,
)
from sp_lightning.planning.work import Workload
from sp_lightning.trainer.host_memory import state_bytes


def keep_units_on_device(
    pipeline: Pipeline,
    optimizers: Sequence[Optimizer],
    gradients_pass: bool,
    some_may_wait: bool,
    micro_steps: int,
) -> float | None:
    """Keep as few units on the device as CPU memory requires; return the CPU memory that gradients may take then.

    Activations are not measured yet, so all other device memory is left to them. None if it does not fit.
    """
    if pipeline.processes is not None or pipeline.options.optimizer_on != "auto":
        return None
    device_room, free = pipeline.budget, available_host_memory()
    if device_room is None or free is None:
        return None
    on_accelerator = optimizers if pipeline.device.type != "cpu" else ()
    works = []
    for unit in (*pipeline.arrangement.units, pipeline.arrangement.resident):
        masters = [weight.master for weight in unit.every_weight]
        state = sum(state_bytes(optimizer, masters) for optimizer in optimizers)  # that the first step will make
        lives = may_live_on_device(optimizers, masters)
        works.append(work_of(unit, state, *bytes_meanwhile(on_accelerator, masters), lives=lives))
    workload = Workload(
        units=tuple(works[:-1]),
        resident=works[-1],
        stepping="in backward" if gradients_pass else "after backward",
        micro_steps=micro_steps,
        adds_up=micro_steps > 1,
        may_wait=some_may_wait,
        may_stay=True,
    )
    host_room = free + sum(work.host_bytes - work.state_bytes for work in works)
    first = first_choice(workload, device_room, host_room)
    if first_host_bytes(workload, first) > host_room:
        return None
    if first.living:
        on_device_bytes = bytes_that_stay(workload.numbered(first.living))
        plan = WindowPlan(first.k, on_device=workload.names(first.living), on_device_bytes=on_device_bytes)
        pipeline.keep_on_device(plan)
    if gradients_pass or not some_may_wait:
        return math.inf
    return host_room - sum(work.host_bytes for work in workload.kept_on_host(first).values())
