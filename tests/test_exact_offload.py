"""`activations="offload"`: plain training's numbers, a part of its memory, counted copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from sp_lightning.pipeline import PipelineOptions
from sp_lightning.pipeline.activations import offload as offload_module
from sp_lightning.pipeline.activations.offload import HostPool
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.torch_private import storage_key
from sp_lightning.pipeline.weights.buffers import HostBuffer

from .helpers import Plan, Run, assert_exact, assert_same_story, attached, sgd
from .zoo import CASES
from .zoo.blocks import Block, Chain, chain

USUAL = offload_module.MIN_OFFLOAD_BYTES


@pytest.fixture(autouse=True)
def everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most models here are tiny."""
    monkeypatch.setattr(offload_module, "MIN_OFFLOAD_BYTES", 1)


@pytest.fixture
def usual_sizes(everything_leaves: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For models that are large enough."""
    monkeypatch.setattr(offload_module, "MIN_OFFLOAD_BYTES", USUAL)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HostPool]]:
    """After detach no pipeline holds host memory; yields the pools that have lent some."""
    pools: list[HostPool] = []
    take = HostPool.take

    def watched(pool: HostPool, nbytes: int) -> HostBuffer:
        pools.append(pool)
        return take(pool, nbytes)

    monkeypatch.setattr(HostPool, "take", watched)
    yield pools
    assert all(pool.nbytes == 0 for pool in pools)


@pytest.mark.parametrize(("name", "cast_cache"), [("gpt2-tied", False), ("unet", True), ("lstm", True)])
def test_zoo_is_exact_under_autocast(name: str, cast_cache: bool) -> None:
    plan = Plan.of(CASES[name], steps=2, autocast=True, cast_cache=cast_cache)
    assert_exact(CASES[name], PipelineOptions(k=2, k_prime=1, activations="offload", debug=True), plan)


# ------------------------------------------------------------------------------------------------------------ memory

BLOCKS, WIDTH, LENGTH, ROWS = 12, 32, 48, 4


def transformer() -> nn.Module:
    """Twelve blocks with dropout, pre-norm."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*layers)


def tokens() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH)


@cache
def peaks(activations: str) -> list[int]:
    """Of three steps, as the engine counts them; what torch counts is in tests/gpu."""
    torch.manual_seed(0)
    counted = []
    with attached(transformer(), units=None, k=2, activations=activations, debug=False) as pipe:
        for _ in range(3):
            pipe.stats.clear()
            pipe.module(tokens()).square().mean().backward()
            counted.append(pipe.stats.activation_peak_bytes)
            assert pipe.stats.activation_bytes == 0
        return counted


@pytest.mark.usefixtures("usual_sizes")
@pytest.mark.parametrize("activations", ["offload", "recompute"])
def test_peak_memory_of_a_transformer(activations: str) -> None:
    """A quarter of what is kept otherwise, from the first step on."""
    kept = peaks("keep")
    assert min(kept) >= sum(saved_by_each_block()), "the measurement misses something"
    assert max(peaks(activations)) <= 0.25 * min(kept)


def saved_by_each_block() -> list[int]:
    """What autograd saves of each block in plain training, besides weights and small memory: each memory once."""
    x, found, seen, alive = tokens(), [], set(), []
    for block in transformer():
        weights = {storage_key(parameter) for parameter in block.parameters()}
        held: list[Tensor] = []
        alive.append(held)  # or an identity would be used again

        def pack(tensor: Tensor, held: list[Tensor] = held) -> Tensor:
            held.append(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            x = block(x)
        memories: dict[int, int] = {}
        for tensor in held:
            key = storage_key(tensor)
            if key not in weights | seen and tensor.untyped_storage().nbytes() >= offload_module.MIN_OFFLOAD_BYTES:
                memories[key] = tensor.untyped_storage().nbytes()
        seen |= memories.keys()
        found.append(sum(memories.values()))
    return found


@pytest.mark.usefixtures("usual_sizes")
def test_offloaded_bytes_are_those_of_saved_tensors() -> None:
    """Each memory once, but for the last block's; nothing is late, and the host waits no more than otherwise."""
    saved = saved_by_each_block()
    with attached(transformer(), units=None, k=2, activations="offload") as pipe:
        for _ in range(3):
            pipe.stats.clear()
            pipe.module(tokens()).square().mean().backward()
            assert pipe.stats.offloaded_bytes == pipe.stats.fetched_bytes == sum(saved[:-1])
            assert pipe.stats.activation_misses == 0
            assert pipe.stats.host_syncs <= 1
        gradients = sum(parameter.nbytes for parameter in pipe.module.parameters())
        assert 0 <= pipe.stats.bytes_to_host - pipe.stats.offloaded_bytes - gradients < 0.1 * gradients


# ------------------------------------------------------------------------------------------------------------- stories


class SavesOnCpu(Block):
    """A block whose author had the same idea."""

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return super().forward(x)


@pytest.mark.parametrize("activations", ["offload", "recompute"])
def test_tensors_kept_by_user_hooks_are_left_alone(activations: Policy) -> None:
    """Inside of a unit and around the model."""

    def inside(run: Run) -> None:
        for step in range(2):
            run.normal_step(f"step {step}", sgd(run.model), seed=step)
        if run.pipe is not None:
            assert run.pipe.stats.offloaded_bytes == run.pipe.stats.recomputed == 0

    def around(run: Run) -> None:
        with save_on_cpu():
            inside(run)

    assert_same_story(inside, lambda: Chain(SavesOnCpu() for _ in range(4)), activations=activations)
    assert_same_story(around, partial(chain, 4), activations=activations)


# ------------------------------------------------------------------------------------- what else becomes of host memory


def test_growing_batches_do_not_pile_up() -> None:
    """Other sizes each step, as with sentences of any length: what has become useless makes room."""
    with attached(chain(6), activations="offload") as pipe:
        for rows in range(1_000, 12_000, 1_000):
            pipe.stats.clear()
            pipe.module(torch.randn(rows, 12)).sum().backward()
            assert 0 < pipe._engine.offloader.pool.nbytes <= 1.5 * pipe.stats.offloaded_bytes


def test_a_graph_may_be_dropped_by_any_thread() -> None:
    """Python's collector, or a queue to another thread, may hold the last reference to it."""
    with attached(chain(6), activations="offload") as pipe:
        for _ in range(3):
            held = [pipe.module(Run.rows(0))]
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
        pipe.stats.clear()
        pipe.module(Run.rows(0)).sum().backward()
        assert pipe._engine.offloader.pool.nbytes <= 2 * 4096 * pipe.stats.offloaded_bytes
