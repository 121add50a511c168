"""Whatever fails in a step: all weights have taken it, or none has, or a warning says that it may be half a step."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adamax, AdamW, Optimizer

from sp_lightning import optim
from sp_lightning.optim.passes import compiled_kernels
from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.optimizer import unit_steps
from sp_lightning.pipeline.weights import buffers

from ...helpers import is_block
from ...planning.parts import Fixed
from ...zoo.blocks import chain

STEPS, FAILING = 4, 1  # the step that fails finds state, and is the first one with units that visit, stay or wait
BLOCKS = 4
HALF = "Some weights may have taken"


@dataclass(frozen=True)
class Training:
    """A way to train, and the planner that has units stay, visit or wait."""

    make: partial[Optimizer] = partial(AdamW, lr=1e-2, fused=True)
    windows: tuple[tuple[Any, ...], ...] = ((2,),)
    clip: bool = False
    in_backward: bool = False
    accumulate: int = 1
    autocast: bool = False


OURS = partial(optim.AdamW, lr=1e-2, moments="int8")
VISITS: Any = (2,), (2, (), (0, 1, 3))
TRAININGS = {
    "host": Training(),
    "host, ours": Training(OURS, autocast=True),
    "host, torch's code": Training(partial(Adamax, lr=1e-2, foreach=False)),
    "host, momentum": Training(partial(SGD, lr=0.1, momentum=0.9), accumulate=2),
    "clipped": Training(clip=True, autocast=True),
    "in backward": Training(in_backward=True),
    "in backward, accumulated": Training(OURS, in_backward=True, accumulate=2),
    "visits": Training(windows=VISITS),
    "visits, clipped": Training(OURS, windows=VISITS, clip=True),
    "visits in backward": Training(windows=VISITS, in_backward=True, autocast=True),
    "units that stay": Training(windows=((2,), (2, (1, 2)))),
    "gradients that wait": Training(windows=((2,), (2, (), (1,), (0, 2, 3))), clip=True),
    "gradients that wait, accumulated": Training(OURS, windows=((2,), (2, (), (), range(4))), accumulate=2, clip=True),
}

# the owners and names of functions, and the errors that they raise; None stands for the module of kernels
FAILURES: dict[str, tuple[object, str, BaseException]] = {
    "memory of the host": (buffers, "_map_pages", MemoryError("injected")),
    "memory of the device": (HostBackend, "allocate", torch.OutOfMemoryError("injected")),
    "a copy to the device": (HostBackend, "upload", RuntimeError("injected")),
    "a copy to the host": (HostBackend, "download", RuntimeError("injected")),
    "work on the device": (HostBackend, "submit_to_lane", RuntimeError("injected")),
    "a hand-over": (HostBackend, "work", RuntimeError("injected")),
    "a kernel": (None, "step_ranges", MemoryError("injected")),
    "a compilation": (None, "kernel_of", OSError(28, "injected: no space left to keep it")),
    "torch's code": (unit_steps, "_update", RuntimeError("injected")),
}


@dataclass
class Injection:
    """Counts what may fail, and lets one of it fail."""

    kind: str
    number: int = -1  # of the one that fails, from 0 on
    is_on: bool = False
    seen: int = 0
    raised: BaseException | None = None

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Watch in this scope."""
        owner, name, error = FAILURES[self.kind]
        if owner is None:
            owner = compiled_kernels()
            name = "compile_loop" if hasattr(owner, "compile_loop") and name == "kernel_of" else name
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                self.seen += 1
                if self.seen == self.number + 1:
                    self.raised = error.with_traceback(None)
                    raise self.raised
            return original(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, watched)
            yield


class Run:
    """A model in training."""

    def __init__(self, training: Training) -> None:
        self.training = training
        torch.manual_seed(0)
        self.model = chain(BLOCKS, 16, 48)
        backend = HostBackend(poison=True, max_delay=0.0005)
        options = PipelineOptions(units=is_block)
        planner = Fixed(*training.windows)
        self.pipe = Pipeline(self.model, "cpu", options=options, backend=backend, planner=planner)
        self.optimizer = training.make(self.model.parameters())

    def backward(self, number: int) -> Tensor:
        """The forwards and backwards of a step; in the last one units may be updated."""
        training = self.training
        self.optimizer.zero_grad()
        for micro in range(training.accumulate):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * number + micro))
            with torch.autocast("cpu", torch.bfloat16, enabled=training.autocast, cache_enabled=False):
                loss = self.model(x).float().square().mean()
            scope: Any = nullcontext()
            if training.clip:
                scope = self.pipe.optimizers.clipping.measuring_norms()
            elif training.in_backward and micro == training.accumulate - 1:
                scope = self.pipe.optimizers.stepping_in_backward(self.optimizer)
            with scope:
                loss.backward()
        return loss.detach()

    def step(self, number: int) -> Tensor:
        """A step, and a forward that brings its weights to the device."""
        loss = self.backward(number)
        if self.training.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.optimizer.step()
        with torch.no_grad():
            self.model(torch.ones(1, 16))
        self.state()
        return loss

    def state(self) -> list[Tensor]:
        """Weights and state, when all steps are over."""
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        states = self.optimizer.state_dict()["state"]
        return weights + [states[number][key].clone() for number in sorted(states) for key in sorted(states[number])]

    def save(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, saved: Any) -> None:
        """As from a checkpoint."""
        model, optimizer = copy.deepcopy(saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


@dataclass
class Expected:
    """What a training without failures shows."""

    losses: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)  # before each step, and after the last one
    saved: Any = None  # before the step that is to fail


@cache
def expected(name: str) -> Expected:
    found, run = Expected(), Run(TRAININGS[name])
    for number in range(STEPS):
        if number == FAILING:
            found.saved = run.save()
        found.states.append(run.state())
        found.losses.append(run.step(number))
    found.states.append(run.state())
    run.pipe.detach()
    return found


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def outcome(name: str, injection: Injection) -> str:
    """Train with a failure, and tell what became of its step; what follows must be right."""
    found, run = expected(name), Run(TRAININGS[name])
    try:
        for number in range(FAILING):
            run.step(number)
        with injection.patched(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            injection.is_on, errors = True, list[BaseException]()
            with contextlib.suppress(Exception):
                try:
                    run.step(FAILING)
                except Exception as error:
                    errors.append(error)
                    raise
            injection.is_on = False
            for _ in range(2 * BLOCKS):  # whoever looks hears of each failed unit
                try:
                    state = run.state()
                    break
                except Exception as error:
                    errors.append(error)
        said = [str(warning.message) for warning in warned]
        before, after = found.states[FAILING], found.states[FAILING + 1]
        if equal(state, after):
            result = "all"
        elif equal(state, before):
            result = "none"
        else:
            assert any(HALF in text or "have taken this step" in text for text in said), (errors, said)
            result = "half, named"
        if result != "all":
            run.load(found.saved)
        for number in range(FAILING + (result == "all"), STEPS):
            assert torch.equal(run.step(number), found.losses[number]), (result, number)
        assert equal(run.state(), found.states[STEPS])
        return result
    finally:
        run.pipe.detach()


def sample(count: int, most: int) -> list[int]:
    """Some numbers below the count: the last, and others at equal distances before it."""
    return sorted({(index + 1) * count // most - 1 for index in range(most)} - {-1})


def happens(name: str, kind: str) -> bool:
    """Whether steps of this training do anything of this kind."""
    training = TRAININGS[name]
    runs_torchs_code = training.make.func in (Adamax, SGD)
    if kind in ("a kernel", "a compilation", "torch's code"):
        return runs_torchs_code == (kind == "torch's code")
    places_weights = len(training.windows) > 1 or training.autocast
    return places_weights if "memory" in kind else kind != "work on the device" or len(training.windows) > 1


CASES = [(name, kind) for name in TRAININGS for kind in FAILURES if happens(name, kind)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_all_or_none(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Each allocation, copy, job and kernel of a step fails, one at a time: each night all, otherwise some."""
    counted = Injection(kind)
    assert outcome(name, counted) == "all"
    for number in sample(counted.seen, counted.seen if request.config.getoption("nightly") else 2):
        outcome(name, Injection(kind, number))
