"""Random module graphs, sizes of the window, policies and ways of training: always bit-equal to a plain loop."""

from __future__ import annotations

import random
import warnings
from contextlib import ExitStack
from dataclasses import replace
from typing import get_args
from unittest.mock import patch

import pytest
from hypothesis import note

from sp_lightning.pipeline import HostBackend, PipelineOptions
from sp_lightning.pipeline.activations import offload
from sp_lightning.pipeline.activations.policy import AutoPolicy
from sp_lightning.pipeline.options import Policy

from .drawing import random_programs
from .helpers import Plan, assert_exact, memory_with, reference_of, slow_host, torchs_defaults
from .random_graphs import Example, examples, units_are_leaves, units_are_nodes

# Found once, as are the next ones: a block twice in a reentrant checkpoint, whose graph is built in backward, under
# autocast without a cache.
TWICE_IN_A_REENTRANT_CHECKPOINT = Example(
    trees=[("reentrant", [("leaf", "block"), ("again", 0)])],
    k=1,
    k_prime=1,
    units=units_are_leaves,
    activations="keep",
    room=None,
    mixed=False,
    lag=0,
    plan=Plan(steps=1, accumulate=2, clip=None, autocast=True, cast_cache=False, sanity=False),
)

# A reentrant checkpoint within a unit runs another unit again, whose backward comes before the rest of its.
ANOTHER_UNIT_IN_A_CHECKPOINT = replace(
    TWICE_IN_A_REENTRANT_CHECKPOINT,
    trees=[
        ("checkpoint", [("inplace", [("leaf", "linear"), ("leaf", "linear")]), ("reentrant", [("leaf", "linear")])]),
        ("again", 2),
        ("chain", [("again", 2), ("leaf", "linear")]),
    ],
    units=units_are_nodes,
    plan=Plan(steps=1, accumulate=1, clip=None, autocast=False, cast_cache=False, sanity=False),
)

# Backward unpacks weights of a unit that it has not reached, as its frozen part has no graph of its own.
FROZEN_IN_A_CHECKPOINT = replace(
    ANOTHER_UNIT_IN_A_CHECKPOINT, trees=[("checkpoint", [("leaf", "block"), ("frozen", ("leaf", "block"))])], units=None
)

# What blocks share is resident, and a checkpoint within such a block gave a user's function the master.
SHARED = replace(FROZEN_IN_A_CHECKPOINT, trees=[("branches", [("leaf", "stash")]), ("reentrant", [("again", 0)])])


@random_programs(20, of=4, example=examples())
def test_random_graphs_are_exact(example: Example) -> None:
    """No graph, order, size of the window or policy for activations changes a number."""
    note(str(example))
    assert_exact_graph(example)


@pytest.mark.parametrize(
    "example",
    [TWICE_IN_A_REENTRANT_CHECKPOINT, ANOTHER_UNIT_IN_A_CHECKPOINT, FROZEN_IN_A_CHECKPOINT, SHARED],
    ids=["twice", "another unit", "frozen", "shared"],
)
def test_graphs_that_were_found_once(example: Example) -> None:
    assert_exact_graph(example)


def assert_exact_graph(example: Example) -> None:
    options = PipelineOptions(k=example.k, k_prime=example.k_prime, activations=example.activations, debug=True)
    with torchs_defaults(example.dtype), ExitStack() as stack:
        reference = reference_of(example.case(), example.plan)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # too little room
        stack.enter_context(patch.object(HostBackend, "memory", return_value=memory_with(example.room)))
        stack.enter_context(slow_host(example.lag))
        if example.mixed:
            chance = random.Random(0)
            stack.enter_context(patch.object(AutoPolicy, "begin_call", lambda *args: chance.choice(get_args(Policy))))
            stack.enter_context(patch.object(offload, "MIN_OFFLOAD_BYTES", 0))
        assert_exact(example.case(), options, example.plan, reference)
