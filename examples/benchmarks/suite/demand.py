"""What a step of a workload has to do at least, in numbers: parameters, bytes that move, multiplications."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from suite.workloads import Workload


@dataclass(frozen=True)
class Demand:
    """The work of one step, for one sample where it grows with the batch.

    Attributes:
        parameters: Numbers in all weights.
        trained: Numbers in those that learn.
        sent_bytes: All weights as they are computed with.
        trained_bytes: Those of them that learn; as many are gradients.
        flops_per_sample: Multiplications and additions of forward, and of backward in training; none is counted twice,
            also where blocks are computed again.
        model_flops_per_sample: The same as it is usually given: two for each parameter and token, two more for the
            gradient that is passed on, and two for each that learns ("6N"). None where items are not tokens.
    """

    parameters: int
    trained: int
    sent_bytes: int
    trained_bytes: int
    flops_per_sample: float
    model_flops_per_sample: float | None


def demand_of(workload: Workload) -> Demand:
    """Count with one sample, with tensors that have shapes and no memory.

    Libraries initialise meta tensors without looking at them, but look at masks in forward; they know fake tensors as
    what must not be looked at.
    """
    with torch.device("meta"):
        network = workload.network().eval()
    parameters = sum(weight.numel() for weight in network.parameters())
    trained = sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        network.to_empty(device="cpu")
        batch = workload.batch(1, torch.Generator())
        with FlopCounterMode(display=False) as counter:
            network.multiply(**batch)
    trains = workload.kind == "train"
    number = 4 if workload.precision == "32-true" else 2
    with_backward = 2 + trained / parameters if trains else 1
    two_each = 2 * (2 * parameters + trained) if trains else 2 * parameters
    return Demand(
        parameters,
        trained,
        parameters * number,
        trained * number,
        flops_per_sample=counter.get_total_flops() * with_backward,
        model_flops_per_sample=two_each * workload.items_per_sample if workload.items == "tokens" else None,
    )


def describe(workload: Workload) -> dict[str, Any]:
    """A workload as JSON: what it is, and what it demands, or why that could not be counted."""
    left_out = ("name", "network", "batch")
    options = {name: value for name, value in vars(workload).items() if name not in left_out}
    try:
        return {**options, "demand": asdict(demand_of(workload)), "error": None}
    except Exception as error:  # of a library that is new here; it must not cost the measurements
        return {**options, "demand": None, "error": f"{type(error).__name__}: {error}"}
