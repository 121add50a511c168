"""Every model of the zoo trains bit-equal to plain PyTorch, on the emulated device with delays and poisoned slots."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils._python_dispatch import TorchDispatchMode

from sp_lightning import SuperpipelineStrategy
from sp_lightning.pipeline import Engine, PipelineOptions
from sp_lightning.pipeline.activations import offload

from .access_check import AccessCheck, changes_kernels
from .helpers import (
    Plan,
    Trace,
    assert_exact,
    assert_same_trace,
    lightning_run,
    plain_run,
    skip_what_plain_cannot,
    train,
)
from .zoo import CASES

WINDOWS = [(1, 1), (3, 2), (10_000, 1)]  # the last one has more slots than any model here has units

# One way or another, it is special to run these twice, or to move what they save: views, masks, buffers, several
# graphs, changes in place, checkpoints.
SPECIAL = {
    "recompute": {
        "gpt2-tied", "t5", "mixtral", "lstm", "swin", "resnet50", "llava", "gpt2-checkpoint-reentrant",
        "checkpoint-inside-plain", "checkpoint-inside-reentrant", "nested-checkpoint-plain",
        "nested-checkpoint-reentrant", "siamese", "stochastic-depth", "half-frozen", "input-gradient-penalty",
        "two-losses", "two-graphs", "gan", "structured-outputs", "inplace-residual-on-view", "weight-on-ctx", "maml",
        "spectral-norm-old", "spectral-norm-parametrization", "module-hooks", "layer-mixture", "embedding-max-norm",
    },
    "offload": {
        "gpt2-tied", "t5", "lstm", "nn-transformer-encoder", "gpt2-checkpoint-plain", "swin", "resnet50",
        "channels-last", "siamese", "input-gradient-penalty", "stochastic-depth", "frozen-encoder",
        "checkpoint-inside-reentrant", "two-graphs", "two-losses", "gan", "inplace-residual-on-view",
        "inplace-on-input", "weight-on-ctx-and-inplace-view", "structured-outputs", "maml",
        "spectral-norm-parametrization", "embedding-max-norm", "complex-and-float64",
    },
}  # fmt: skip

# Under Lightning's Trainer, with sanity check, accumulation, clipping and all.
IN_LIGHTNING = {
    "bf16-mixed": [
        "gpt2-tied", "gpt2-checkpoint-plain", "llava", "unet", "siamese", "albert", "gan", "lstm",
        "multihead-attention",
    ],
    "32-true": ["llama-untied", "momentum-encoder", "structured-outputs", "weight-on-ctx", "int8 weights"],
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning",  # reentrant checkpoints in evaluation
    "ignore:The PyTorch API of nested tensors:UserWarning",
)


def trainings() -> list[tuple[str, str, int, int]]:
    """For each model its policies for activations, each with another window.

    All keep activations, unless they do so under autocast. Models that are quick and only do that have two windows.
    """
    chosen = []
    for number, (name, case) in enumerate(CASES.items()):
        policies = [policy for policy, names in SPECIAL.items() if name in names]
        if not policies:
            policies = ["keep"] if case.heavy or case.autocast else ["keep", "keep"]
        elif not case.autocast:
            policies.append("keep")
        chosen += [(name, policy, *WINDOWS[(number + place) % 3]) for place, policy in enumerate(policies)]
    return chosen


@pytest.mark.parametrize(("name", "activations", "k", "k_prime"), trainings())
def test_zoo_is_exact(name: str, activations: str, k: int, k_prime: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients, weights, buffers, optimizer state, random states and what hooks have seen, in fp32."""
    monkeypatch.setattr(offload, "MIN_OFFLOAD_BYTES", 1)
    begins_with_check = list(CASES).index(name) % 2 == 0
    is_checked = activations != "keep" or k_prime == 2
    options = PipelineOptions(k=k, k_prime=k_prime, activations=activations, debug=is_checked)  # type: ignore[arg-type]
    assert_exact(CASES[name], options, Plan.of(CASES[name], sanity=begins_with_check))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.autocast])
def test_zoo_is_exact_under_autocast(name: str) -> None:
    """Streaming weights that are already cast gives autocast's own numbers, with its cache or without (Lightning)."""
    has_cache = list(CASES).index(name) % 2 == 0
    options = PipelineOptions(k=3, k_prime=2, debug=True) if has_cache else PipelineOptions(k=1, debug=True)
    assert_exact(CASES[name], options, Plan.of(CASES[name], autocast=True, cast_cache=has_cache, sanity=has_cache))


@pytest.mark.parametrize(
    ("name", "precision"), [(name, precision) for precision, names in IN_LIGHTNING.items() for name in names]
)
def test_zoo_is_exact_under_lightning(name: str, precision: str) -> None:
    expected = lightning_run(CASES[name], SingleDeviceStrategy(device="cpu"), precision)
    actual = lightning_run(CASES[name], SuperpipelineStrategy(k=2, k_prime=1, debug=True), precision)
    assert_same_trace(expected, actual)


class ChecksNothing(AccessCheck):
    """The mode alone, for plain training."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._engine = cast(Engine, SimpleNamespace(is_arranged=False))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.heavy])
def test_the_check_of_accesses_changes_no_number(name: str) -> None:
    """The same kernels run while it watches, on any CPU: otherwise a difference above would not be the engine's."""
    case, trace = CASES[name], Trace()
    autocast = case.autocast and list(CASES).index(name) % 2 == 0
    skip_what_plain_cannot(case, autocast)
    plan = Plan.of(case, autocast=autocast, sanity=True, accumulate=1)
    model = case.model()

    def watched() -> AbstractContextManager[Any]:
        return nullcontext() if changes_kernels(model) else ChecksNothing()

    train(case, plan, model, trace, watched, lambda: None)
    assert_same_trace(plain_run(name, plan)[0], trace)
