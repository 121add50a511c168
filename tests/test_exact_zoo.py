"""Every model of the zoo trains bit-equal to plain PyTorch, on the emulated device with delays and poisoned slots."""

from __future__ import annotations

import pytest

from sp_lightning import SuperpipelineStrategy
from sp_lightning.pipeline import PipelineOptions

from .helpers import Plan, assert_exact, assert_same_trace, lightning_reference, lightning_run
from .zoo import CASES

EVERYTHING = 10_000  # more slots than any model here has units
GRID = [(1, 1), (3, 2), (EVERYTHING, 1)]
FEW = [(1, 1), (3, 2)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning",  # reentrant checkpoints in evaluation
    "ignore:The PyTorch API of nested tensors:UserWarning",
)


def grid() -> list[object]:
    """All combinations for cheap models, a few for those that take longer."""
    return [
        pytest.param(name, k, k_prime, id=f"{name}-k{'N' if k == EVERYTHING else k}-kprime{k_prime}")
        for name, case in CASES.items()
        for k, k_prime in (FEW if case.heavy else GRID)
    ]


@pytest.mark.parametrize(("name", "k", "k_prime"), grid())
def test_zoo_is_exact(name: str, k: int, k_prime: int) -> None:
    """Losses, gradients, weights, buffers and optimizer state in fp32; some runs begin with a sanity check."""
    options = PipelineOptions(k=k, k_prime=k_prime, debug=k_prime == 2)
    assert_exact(CASES[name], options, Plan.of(CASES[name], sanity=k == 1))


@pytest.mark.parametrize(
    ("name", "k", "k_prime", "cast_cache"),
    [
        *((name, 1, 1, False) for name, case in CASES.items() if case.autocast and not case.heavy),
        *((name, 3, 2, True) for name, case in CASES.items() if case.autocast),
    ],
)
def test_zoo_is_exact_under_autocast(name: str, k: int, k_prime: int, cast_cache: bool) -> None:
    """Streaming weights that are already cast gives autocast's own numbers, with its cache and without (Lightning)."""
    options = PipelineOptions(k=k, k_prime=k_prime, debug=True)
    assert_exact(CASES[name], options, Plan.of(CASES[name], autocast=True, cast_cache=cast_cache, sanity=k == 3))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.lightning])
def test_zoo_is_exact_under_lightning(name: str) -> None:
    """The Trainer with our strategy against the Trainer with its own: sanity check, accumulation, clipping and all."""
    actual = lightning_run(CASES[name], SuperpipelineStrategy(k=2, k_prime=1, debug=True))
    assert_same_trace(lightning_reference(name, "32-true"), actual)


@pytest.mark.parametrize(
    "name",
    ["gpt2-tied", "gpt2-checkpoint-plain", "llava", "unet", "siamese", "albert", "gan", "lstm", "multihead-attention"],
)
def test_zoo_is_exact_under_lightnings_mixed_precision(name: str) -> None:
    """``precision="bf16-mixed"`` gives autocast's own numbers."""
    actual = lightning_run(CASES[name], SuperpipelineStrategy(k=2, k_prime=1, debug=True), "bf16-mixed")
    assert_same_trace(lightning_reference(name, "bf16-mixed"), actual)
