"""Which weights are sent in autocast's dtype: layers that are known, uses that are watched, and what stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import SGD

from sp_lightning.pipeline import Summary
from sp_lightning.pipeline.options import Policy

from ...helpers import attached, made_once, unit_bytes
from ...zoo.blocks import Product


def assert_same_results(story: Callable[[nn.Module], list[Tensor]], model: nn.Module, **options: Any) -> Summary:
    """What a story returns is the same of a plain model as of an attached one; returns how that was arranged."""
    expected = story(copy.deepcopy(model))
    with attached(model, **{"k": 1, "debug": False, **options}) as pipeline:
        actual = story(model)
        assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]
        assert all(map(torch.equal, actual, expected))
        return pipeline.summary()


class Raw(nn.Module):
    """A layer that torch does not know."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.w)


class Picture(Tensor):
    """As torchvision's: it leaves operations to others that have classes it does not know."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs)


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "linear": (lambda x, w: F.linear(x, w), True),
    "matmul": (lambda x, w: x @ w, True),
    "with-another-class": (lambda x, w: F.linear(x.as_subclass(Picture), w).as_subclass(Tensor), True),
    "transposed": (lambda x, w: x @ w.t(), False),
    "twice": (lambda x, w: F.linear(F.linear(x, w), w), True),  # if there is a cache
    "converted": (lambda x, w: F.linear(x.bfloat16(), w.to(torch.bfloat16)), False),
    "in-parts": (lambda x, w: torch.cat([F.linear(x, w[:3]), F.linear(x, w[3:])], 1), False),
    "multiplied": (lambda x, w: x * w.sum(), False),
    "both": (lambda x, w: F.linear(x, w) * w.mean(), False),
    "norm": (lambda x, w: F.layer_norm(x, (8,), w[0]), False),
    "embedding": (lambda x, w: x + F.embedding(torch.tensor([0]), w), False),
    "custom-function": (Product.apply, False),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cache", [True, False])
def test_a_pipeline_learns_what_to_lower(name: str, cache: bool) -> None:
    """From the second step on, and outputs are those of plain autocast in every step."""
    use, lowered = CASES[name]

    def story(model: nn.Module) -> list[Tensor]:
        results = []
        for step in range(3):
            torch.manual_seed(step)
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                loss = model(torch.randn(2, 8)).float().square().mean()
            loss.backward()
            results += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        return results

    summary = assert_same_results(story, nn.Sequential(*[Raw(use) for _ in range(3)]), units=Raw, debug=True)
    assert summary.lowered == (3 if lowered and (cache or name != "twice") else 0)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("regions", [1, 2])
@pytest.mark.parametrize("in_step", [True, False])
def test_units_called_twice_in_one_region_of_autocast_or_in_two(in_step: bool, regions: int, policy: Policy) -> None:
    """Each region casts weights anew, and gradients of two casts add up in fp32; those of one in bf16."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)])
    plain = copy.deepcopy(model)
    x = torch.randn(4, 16)
    with attached(model, k=1, units=None, activations=policy) as pipeline:
        for step in range(4):
            for runner in (plain, model):
                with pipeline.step() if in_step else nullcontext():
                    with torch.autocast("cpu", torch.bfloat16):
                        with torch.autocast("cpu", torch.bfloat16):  # its end is not one of a region
                            first = runner(x)
                        second = runner(first) if step and regions == 1 else x  # in one, once at first
                    if regions == 2:
                        with torch.autocast("cpu", torch.bfloat16):
                            second = runner(first) - runner(x)
                (first.float() - second.float()).square().mean().backward()
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
        assert pipeline.summary().lowered == (12 if regions == 1 else 0)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_a_fast_path_that_wants_weights_as_they_are(cache: bool, first: str) -> None:
    """In evaluation under a CPU's autocast, `nn.TransformerEncoderLayer` is one operation."""
    plain = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3)])
    model = copy.deepcopy(plain)
    x = torch.randn(2, 3, 8)
    with attached(model, k=1, units=nn.TransformerEncoderLayer) as pipeline:
        for step in range(4):
            training = (step % 2 == 0) is (first == "training")
            results = []
            for runner in (plain, model):
                runner.train(training).zero_grad()
                cast = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)
                with torch.set_grad_enabled(training), nullcontext() if runner is plain else pipeline.step(), cast:
                    loss = runner(x).float().square().mean()
                if training:
                    loss.backward()
                results.append([loss.detach(), *(p.grad for p in runner.parameters() if p.grad is not None)])
            assert all(map(torch.equal, *results))


@pytest.mark.parametrize("units", [None, nn.Linear])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["layer", "encoder", "attention"])
def test_what_may_be_a_single_operation_is_not_divided(kind: str, masked: bool, autocast: bool, units: Any) -> None:
    """Where all of the model is one such layer, or where a user names the layers in it."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x, mask = torch.randn(2, 3, 8), torch.tensor([[False, False, False], [False, True, True]]) if masked else None
    inputs: dict[str, Any] = {"src": x, "src_key_padding_mask": mask}
    if kind == "encoder":  # torch refuses nested tensors under a CPU's autocast
        model = nn.TransformerEncoder(model, 1, enable_nested_tensor=not autocast).eval()
    elif kind == "attention":
        model, inputs = model.self_attn, {**dict.fromkeys(("query", "key", "value"), x), "key_padding_mask": mask}
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(**inputs)
        with attached(model, k=1, units=units) as pipeline:
            for _ in range(2):
                with pipeline.step():
                    torch.testing.assert_close(model(**inputs), expected, rtol=0, atol=0, equal_nan=True)
            assert pipeline.summary().units == 1


class Normed(nn.Module):
    """As peft's DoRA: it reads the weight of one of its layers besides calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.magnitude = nn.Linear(8, 8, bias=False), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * (self.magnitude / self.base.weight.float().norm(dim=1))


class Parametrized(nn.Module):
    """As peft's `target_parameters`: it parametrizes its layer while it computes, which sets the weight anew."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.delta = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.base, "weight", Plus(self.delta))
        y = self.base(x)
        parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)
        return y


class Plus(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = (delta,)  # not a parameter of this module

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta[0]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("first", ["training", "evaluation"])
@pytest.mark.parametrize("kind", [Normed, Parametrized])
def test_units_that_use_or_replace_weights_of_their_layers_are_exact(
    kind: type[nn.Module], first: str, cache: bool
) -> None:
    """The first forward got a rounded weight, and a weight that was set anew with the same values was refused."""

    def run(model: nn.Module) -> list[Tensor]:
        optimizer, found = SGD(model.parameters(), 0.1), []
        for step in range(4):
            trains = (step % 2 == 0) == (first == "training")
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache), torch.set_grad_enabled(trains):
                found.append(model(torch.linspace(-1, 1, 32).view(4, 8)).float())
            if trains:
                found[-1].square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [output.detach() for output in found]

    assert_same_results(run, nn.Sequential(*[kind() for _ in range(3)]), k=2, units=kind, debug=True)


def test_lowered_units_travel_at_half_the_bytes() -> None:
    """In bf16; without autocast in fp32 again."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    with attached(model, k=2, units=nn.Linear, debug=False) as pipeline:
        life = made_once(pipeline._engine)
        for enabled, nbytes in [(True, 2 * 64 * 64), (False, 4 * 64 * 64), (True, 2 * 64 * 64)]:
            for step in range(3):
                if step == 2:  # by then all units are in the dtype of this kind of step
                    pipeline.stats.clear()
                with pipeline.step(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                    loss = model(torch.randn(2, 64)).sum()
                loss.backward()
            assert unit_bytes(pipeline) == [nbytes] * 4
            assert pipeline.stats.bytes_to_device == pipeline.stats.loads * nbytes > 0
        assert made_once(pipeline._engine) == life


class Mixed(nn.Module):
    """A stem in fp32, and blocks in autocast's dtype, of which one may share the stem's weight."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))
        if shared:
            self.blocks[2].weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Shrinking(nn.Linear):
    """Writes to its weight in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.99)
        return super().forward(x)


TRAIN, TRAIN_IN_FP32 = (True, True), (True, False)  # whether it trains, and whether autocast is on
PHASES = {
    "training": [TRAIN] * 8,
    "evaluation-too": [TRAIN, TRAIN, (False, True), (False, True)] * 2,
    "evaluation-in-fp32": [TRAIN, TRAIN, (False, False), (False, False)] * 3,
    "evaluation-first": [(False, False), (False, False), TRAIN, TRAIN] * 3,
    "training-in-fp32": [TRAIN, TRAIN, TRAIN_IN_FP32, TRAIN_IN_FP32] * 3,
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("attached_under", [False, True])
@pytest.mark.parametrize("name", PHASES)
def test_each_module_has_the_dtype_that_it_is_called_under(name: str, attached_under: bool, shared: bool) -> None:
    """One module without autocast had all weights sent as they are, for good."""

    def step(runner: nn.Module, training: bool, enabled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        optimizer = SGD(runner.parameters(), 0.1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.set_grad_enabled(training):
            loss = runner(torch.randn(2, 16)).float().square().mean()
        if training:
            loss.backward()
        gradients = [p.grad.clone() for p in runner.parameters() if training]
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), *gradients]

    plain = Mixed(shared)
    plain.stem.__class__ = nn.Linear if shared else Shrinking
    model = copy.deepcopy(plain)
    with ExitStack() as scopes:
        with torch.autocast("cpu", torch.bfloat16, enabled=attached_under):
            pipeline = scopes.enter_context(attached(model, k=2, units=(nn.Linear, Shrinking), debug=False))
        for number, (training, enabled) in enumerate(PHASES[name]):
            if number % 4 == 0:
                before = pipeline.stats.arrangements
            pipeline.stats.bytes_to_device = 0
            assert all(map(torch.equal, step(model, training, enabled), step(plain, training, enabled))), number
            if number % 2 == 0:
                device_bytes = pipeline.arrangement.layout.device_bytes
                continue
            # the second step of its kind
            assert pipeline.summary().lowered == (6 - shared if enabled else 0)
            assert training or pipeline.arrangement.layout.device_bytes == device_bytes, "nothing was kept"
            assert number < 4 or pipeline.stats.arrangements - before <= 2
            if training and not shared:  # at most, all are loaded in the forward, and all but the last two in backward
                stem, block = 4 * 16 * 16, (2 if enabled else 4) * 16 * 16
                assert unit_bytes(pipeline) == [stem, *[block] * 6]
                assert pipeline.stats.bytes_to_device <= 2 * stem + 10 * block
