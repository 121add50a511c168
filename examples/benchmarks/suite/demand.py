"""The minimum work of a step of a workload, in numbers: parameters, bytes to move, operations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from suite.workloads import Workload


@dataclass(frozen=True)
class Demand:
    """The work of one step, per sample where it grows with the batch.

    Attributes:
        parameters: Number of parameters.
        trained: Number of trained parameters.
        sent_bytes: Bytes of all weights in the compute dtype.
        trained_bytes: Bytes of the trained weights among them, which is also the size of their gradients.
        flops_per_sample: Multiplications and additions of forward, and in training of backward, without those of
            recomputed blocks.
        model_flops_per_sample: The same by the usual convention: two for each parameter and token, two more for the
            gradient that is passed on, and two for each trained parameter ("6N"). None if items are not tokens.
    """

    parameters: int
    trained: int
    sent_bytes: int
    trained_bytes: int
    flops_per_sample: float
    model_flops_per_sample: float | None


def demand_of(workload: Workload) -> Demand:
    """Count the demand of one sample, on tensors that have shapes but no memory.

    Libraries can initialize meta tensors, but read the values of masks in forward; with fake tensors, they know that
    they must not.
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
    """Describe a workload as JSON: its options, and its demand or why that could not be counted."""
    left_out = ("name", "network", "batch")
    options = {name: value for name, value in vars(workload).items() if name not in left_out}
    try:
        return {**options, "demand": asdict(demand_of(workload)), "error": None}
    except Exception as error:  # a new version of a library may raise anything, which must not prevent the measurements
        return {**options, "demand": None, "error": f"{type(error).__name__}: {error}"}
