"""What happens at the same time, in numbers: a training step on a device with given bandwidths and compute times.

Times are virtual (simulated.py): each unit takes so many milliseconds to compute, to send, to get its gradient back and
to be stepped, and a step of all units is to take about as long as the busiest of these alone, not as long as their sum.
"""

from __future__ import annotations

import pytest

from .planning.parts import Blocks
from .simulated import MACHINES, Lane, Machine

UNITS = 60


def busy_times(machine: Machine, k: int, blocks: int = UNITS) -> dict[Lane, float]:
    """What each lane has to do in one training step."""
    return {
        **dict.fromkeys(Lane, 0.0),
        Lane.COMPUTE: blocks * (machine.forward + machine.backward),
        Lane.UP: (2 * blocks - k) * machine.up,
        Lane.DOWN: blocks * machine.down,
        Lane.HOST: blocks * machine.step,
    }


def train(name: str, k: int, k_prime: int = 1) -> tuple[float, dict[Lane, float]]:
    """Milliseconds of a step in the steady state, the mean of three, and what each lane did in the last of them."""
    model = Blocks(**vars(MACHINES[name]), units=UNITS * k_prime)
    trained = model.train(k=k, k_prime=k_prime, steps=5)
    return sum(trained.seconds[-3:]) / 3, trained.busy


@pytest.mark.parametrize(("k", "k_prime"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("name", MACHINES)
def test_a_step_takes_as_long_as_the_busiest_lane(name, k, k_prime):
    (milliseconds, busy), expected = train(name, k, k_prime), busy_times(MACHINES[name], k, UNITS * k_prime)
    assert busy == pytest.approx(expected, rel=0.05)
    at_best, lanes = max(expected.values()), {lane.value: round(seconds) for lane, seconds in expected.items()}
    print(f"\n{name} (k={k}, k'={k_prime}): {lanes} ms; a step takes {milliseconds:.1f} ms, at best {at_best:.1f}")
    assert milliseconds <= 1.1 * at_best


@pytest.mark.parametrize("k", [8, 30, 60])
def test_units_that_are_stepped_late_hold_up_no_others(k):
    """Their copies are asked for in backward, so the last units' first; the optimizer steps the first units first."""
    name = "the optimizer falls behind in backward"
    milliseconds, _ = train(name, k)
    assert milliseconds <= 1.04 * max(busy_times(MACHINES[name], k).values())
