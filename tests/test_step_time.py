"""What happens at the same time, in numbers: a training step on a device with given bandwidths and compute times.

Times are virtual (simulated.py): each unit takes so many milliseconds to compute, to send, to get its gradient back and
to be stepped, and a step of all units is to take about as long as the busiest of these alone, not as long as their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.optim import SGD

from sp_lightning.pipeline import Pipeline, PipelineOptions

from .simulated import (
    MACHINES,
    STEP_BYTES,
    UNIT_BYTES,
    WIDTH,
    Lane,
    Machine,
    SimulatedBackend,
    SimulatedProcesses,
    TimedBlock,
)
from .zoo.blocks import Chain

UNITS = 60


def busy_times(machine: Machine, k: int) -> dict[Lane, float]:
    """What each lane has to do in one training step."""
    return {
        Lane.COMPUTE: UNITS * (machine.forward + machine.backward),
        Lane.UP: (2 * UNITS - k) * machine.up,
        Lane.DOWN: UNITS * machine.down,
        Lane.VISIT: 0.0,
        Lane.HOST: UNITS * machine.step,
    }


@dataclass
class Measured:
    """One training step in the steady state: its time, and what each lane did in it."""

    time: float
    busy: dict[Lane, float]


def train(machine: Machine, k: int, k_prime: int = 1, steps: int = 3, devices: int = 1) -> Measured:
    """Train on the simulated device; milliseconds are its seconds."""
    backend = SimulatedBackend(UNIT_BYTES / machine.up, UNIT_BYTES / machine.down, STEP_BYTES / machine.step)
    model = Chain(TimedBlock(WIDTH, backend, machine.forward, machine.backward) for _ in range(UNITS))
    options = PipelineOptions(k, k_prime, units=[TimedBlock])
    processes = SimulatedProcesses(devices, backend) if devices > 1 else None
    pipe = Pipeline(model, "cpu", options=options, backend=backend, processes=processes)
    optimizer = SGD(model.parameters(), lr=1e-3)
    for step in range(2 + steps):
        if step == 2:  # the order of the units is known
            begin = backend.now
        pipe.meet_processes()
        loss = model(torch.ones(1, WIDTH)).sum()
        with pipe.optimizers.stepping_in_backward(optimizer):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    end = backend.now
    busy = {lane: backend.busy(lane, begin, end) / steps for lane in Lane}
    pipe.detach()
    return Measured((end - begin) / steps, busy)


@pytest.mark.parametrize(("k", "k_prime"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("name", MACHINES)
def test_a_step_takes_as_long_as_the_busiest_lane(name, k, k_prime):
    machine = MACHINES[name]
    measured, expected = train(machine, k, k_prime), busy_times(machine, k)
    assert measured.busy == pytest.approx(expected, rel=0.05)
    at_best, lanes = max(expected.values()), {lane.value: round(seconds) for lane, seconds in expected.items()}
    print(f"\n{name} (k={k}, k'={k_prime}): {lanes} ms; a step takes {measured.time:.1f} ms, at best {at_best:.1f}")
    assert measured.time <= 1.1 * at_best


@pytest.mark.parametrize("name", MACHINES)
def test_four_devices_take_as_long_as_the_busiest_lane(name):
    """Each has links of its own. They share the host, where one adds their gradients up, and one steps."""
    machine, k = MACHINES[name], 4
    measured, expected = train(machine, k, devices=4), busy_times(machine, k)
    expected[Lane.HOST] += UNITS * machine.step * (4 + 1) * UNIT_BYTES / STEP_BYTES
    assert measured.busy == pytest.approx(expected, rel=0.05)
    at_best, lanes = max(expected.values()), {lane.value: round(seconds) for lane, seconds in expected.items()}
    print(f"\n{name}: {lanes} ms; a step of four devices takes {measured.time:.1f} ms, at best {at_best:.1f}")
    assert measured.time <= 1.1 * at_best


@pytest.mark.parametrize("k", [8, 30, 60])
def test_units_that_are_stepped_late_hold_up_no_others(k):
    """Their copies are asked for in backward, so the last units' first; the optimizer steps the first units first."""
    machine = MACHINES["the optimizer falls behind in backward"]
    assert train(machine, k).time <= 1.04 * max(busy_times(machine, k).values())
