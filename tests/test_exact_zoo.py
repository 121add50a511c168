"""Every model of the zoo trains bit-equal to plain PyTorch, on the emulated device with delays and poisoned slots."""

from __future__ import annotations

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from sp_lightning import SuperpipelineStrategy
from sp_lightning.pipeline import PipelineOptions

from .helpers import Plan, assert_exact, assert_same_trace, lightning_run
from .zoo import CASES

EVERYTHING = 10_000  # more slots than any model here has units
OTHERS = [(3, 2), (EVERYTHING, 1)]
MIXED = {
    "gpt2-tied", "gpt2-checkpoint-plain", "llava", "unet", "siamese", "albert", "gan", "lstm", "multihead-attention",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning",  # reentrant checkpoints in evaluation
    "ignore:The PyTorch API of nested tensors:UserWarning",
)


def grid() -> list[object]:
    """For each model the smallest window and another one; those that more tests train, or that take long, have one.

    Under autocast, every other model has the smallest window: here, it is the others that do. Every other model begins
    with a sanity check, whatever the window, as plain training is then the same. A plain run has one window of each.
    """
    chosen = []
    for number, (name, case) in enumerate(CASES.items()):
        windows = [(1, 1), OTHERS[number // 2 % 2]]
        if case.heavy or case.autocast or case.lightning:
            windows = [windows[number % 2]]
        plain = number // 4 % len(windows)
        chosen += [
            pytest.param(name, *window, number % 2 == 0, marks=[pytest.mark.slow] * (place != plain))
            for place, window in enumerate(windows)
        ]
    return chosen


@pytest.mark.parametrize(("name", "k", "k_prime", "sanity"), grid())
def test_zoo_is_exact(name: str, k: int, k_prime: int, sanity: bool) -> None:
    """Losses, gradients, weights, buffers and optimizer state in fp32."""
    options = PipelineOptions(k=k, k_prime=k_prime, debug=k_prime == 2)
    assert_exact(CASES[name], options, Plan.of(CASES[name], sanity=sanity))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.autocast])
def test_zoo_is_exact_under_autocast(name: str) -> None:
    """Streaming weights that are already cast gives autocast's own numbers, with its cache or without (Lightning)."""
    has_cache = list(CASES).index(name) % 2 == 0
    options = PipelineOptions(k=3, k_prime=2, debug=True) if has_cache else PipelineOptions(k=1, debug=True)
    assert_exact(CASES[name], options, Plan.of(CASES[name], autocast=True, cast_cache=has_cache, sanity=has_cache))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.lightning])
def test_zoo_is_exact_under_lightning(name: str) -> None:
    """The Trainer with our strategy against the Trainer with its own: sanity check, accumulation, clipping and all."""
    precision = "bf16-mixed" if name in MIXED else "32-true"
    expected = lightning_run(CASES[name], SingleDeviceStrategy(device="cpu"), precision)
    actual = lightning_run(CASES[name], SuperpipelineStrategy(k=2, k_prime=1, debug=True), precision)
    assert_same_trace(expected, actual)
