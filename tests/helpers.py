"""The exactness harness: train the same thing twice, write down all a user can see, compare bit by bit.

A *trace* is an ordered dict from a readable label (``step 2 / grad / blocks.0.up.weight``) to what was seen there.
The reference trace comes from a plain PyTorch loop, or from Lightning's single-device strategy.
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from sp_lightning.pipeline import Backend, Engine, Pipeline, PipelineOptions, Planner
from sp_lightning.pipeline.lanes.backend import DeviceMemory
from sp_lightning.pipeline.lanes.lanes import Job
from sp_lightning.pipeline.optimizer import state_file

from .zoo import CASES, Batch, Case
from .zoo.blocks import WIDTH, Block, Chain

PATIENCE = 60.0
"""Seconds in which whatever does not hang is done, also where other programs use all cores of the machine."""

Trace = dict[str, Any]
Scope = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Plan:
    """How to train: what both runs have in common."""

    steps: int = 3
    accumulate: int = 2
    clip: float | None = None
    autocast: bool = False
    cast_cache: bool = True  # Lightning's autocast has none from 2.5.5 on: each use is cast, gradients add up in fp32
    sanity: bool = False  # an evaluation under inference_mode comes first, as under Lightning

    @staticmethod
    def of(case: Case, **changes: Any) -> Plan:
        """The plan that a zoo entry asks for."""
        return replace(Plan(accumulate=case.accumulate, clip=case.clip), **changes)


def autocast_forgets_gradients() -> bool:
    """Whether autocast's cache gives a graph what was cast where none was built (up to torch 2.10).

    The cast's weight then gets no gradient from that graph in plain training, and with superpipeline gets its own.
    """
    layer, x = nn.Linear(1, 1), torch.ones(1)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(x)
        return not layer(x).requires_grad


@functools.cache
def why_no_lstm_in_bf16() -> str | None:
    """Why plain torch cannot run an LSTM in bf16 on this CPU, as without AVX-512; None if it can."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(1, 1)(torch.ones(1, 1))
    except RuntimeError as error:
        return f"plain torch has no LSTM in bf16 on this CPU: {error}"
    return None


@functools.cache
def why_no_attention_in_bf16() -> str | None:
    """Why plain torch cannot run attention in bf16 on this CPU, as if AVX-512 is there and not used; None if it can."""
    try:
        queries = torch.ones(1, 1, 64, 16, dtype=torch.bfloat16)
        nn.functional.scaled_dot_product_attention(queries, queries, queries)
    except RuntimeError as error:
        return f"plain torch has no attention in bf16 on this CPU: {error}"
    return None


def skip_what_plain_cannot(case: Case, autocast: bool) -> None:
    if autocast and case.name == "lstm" and (reason := why_no_lstm_in_bf16()) is not None:
        pytest.skip(reason)


@contextmanager
def ram_is_full(free: float = 0) -> Iterator[None]:
    """Optimizer state has this much room in RAM, and every folder counts as one on a drive of its own."""
    with (
        patch.object(state_file, "available_host_memory", lambda: free),
        patch.object(state_file, "_type_of_file_system", lambda device: "ext4"),
    ):
        yield


def overwrite(path: Path) -> None:
    """Write zeros into a file, in place: who has mapped it reads them."""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


# --------------------------------------------------------------------------------------------------------------- traces


def frozen(value: Any) -> Any:
    """What a tensor looks like now, safe from later changes."""
    if not isinstance(value, Tensor):
        return copy.copy(value)
    with torch.inference_mode(False), torch.no_grad():
        return value.detach().to("cpu", copy=True)


def same(expected: Any, actual: Any) -> bool:
    """Bitwise equality in which NaN equals NaN, and a missing gradient is not a zero one."""
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return type(expected) is type(actual) and expected == actual
    if expected.dtype != actual.dtype or expected.shape != actual.shape or expected.layout != actual.layout:
        return False
    if expected.layout != torch.strided:
        expected, actual = expected.coalesce(), actual.coalesce()
        return same(expected.indices(), actual.indices()) and same(expected.values(), actual.values())
    if torch.equal(expected, actual):
        return True
    return bool(((expected == actual) | (expected.isnan() & actual.isnan())).all())


def describe_difference(expected: Any, actual: Any) -> str:
    """What differs, in one line."""
    tensors = isinstance(expected, Tensor) and isinstance(actual, Tensor)
    if not tensors or (expected.shape, expected.dtype, expected.layout) != (actual.shape, actual.dtype, actual.layout):
        return f"expected {summarise(expected)}, got {summarise(actual)}"
    expected, actual = (t.coalesce().values() if t.layout != torch.strided else t for t in (expected, actual))
    if expected.shape != actual.shape:
        return f"{len(expected)} sparse rows expected, got {len(actual)}"
    wrong = ~((expected == actual) | (expected.isnan() & actual.isnan()))
    gap = (expected[wrong].cdouble() - actual[wrong].cdouble()).abs()
    nans = int(actual[wrong].isnan().sum())
    text = f"{int(wrong.sum())} of {wrong.numel()} elements of {tuple(wrong.shape)} differ, by up to {gap.max():.3g}"
    return text + (f", {nans} of them NaN where plain has numbers" if nans else "")


def summarise(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return repr(value)[:80]


def assert_same_trace(expected: Trace, actual: Trace, shown: int = 8) -> None:
    """Fail with the first labels that differ, in the order in which they were seen."""
    problems = [f"{label}: never seen" for label in expected if label not in actual]
    problems += [f"{label}: only seen in the streamed run" for label in actual if label not in expected]
    problems += [
        f"{label}: {describe_difference(value, actual[label])}"
        for label, value in expected.items()
        if label in actual and not same(value, actual[label])
    ]
    if problems:
        more = f"\n  ... and {len(problems) - shown} more" if len(problems) > shown else ""
        raise AssertionError("not bit-equal to plain training:\n  " + "\n  ".join(problems[:shown]) + more)


def assert_close_trace(expected: Trace, actual: Trace, atol: float = 1e-5) -> None:
    """The same, to rounding."""
    assert list(expected) == list(actual)
    for label, value in expected.items():
        if isinstance(value, Tensor):
            close = torch.allclose(actual[label].double(), value.double(), rtol=1e-4, atol=atol)
            assert close, f"{label}: {describe_difference(value, actual[label])}"


def note_outputs(trace: Trace, label: str, outputs: Any) -> None:
    """Write down every tensor in a structure of outputs."""
    for index, value in enumerate(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)):
        trace[f"{label} / output {index}"] = frozen(value)


def note_gradients(trace: Trace, label: str, parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        trace[f"{label} / grad / {name}"] = frozen(parameter.grad)


def note_state(trace: Trace, label: str, model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Weights, buffers, optimizer state, and where the random generators are."""
    for name, parameter in model.named_parameters():
        trace[f"{label} / weight / {name}"] = frozen(parameter)
    for name, buffer in model.named_buffers():
        trace[f"{label} / buffer / {name}"] = frozen(buffer)
    for index, optimizer in enumerate(optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                trace[f"{label} / optimizer {index} / parameter {number} / {key}"] = frozen(value)
    trace[f"{label} / torch's random state"] = torch.get_rng_state()
    trace[f"{label} / Python's random state"] = random.getstate()


# ------------------------------------------------------------------------------------------------------------- training


def train(case: Case, plan: Plan, model: nn.Module, trace: Trace, scope: Scope, detach: Callable[[], None]) -> None:
    """Train, evaluate, detach, and train one more step as a plain module; write everything down."""
    parameters = dict(model.named_parameters())
    optimizers = case.optimizers(model)
    batches = iter(case.batches((plan.steps + 1) * plan.accumulate))
    torch.manual_seed(7)
    random.seed(7)

    def one_step(label: str, scope: Scope) -> None:
        """One optimizer step over ``plan.accumulate`` micro-batches."""
        cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=plan.autocast, cache_enabled=plan.cast_cache)
        if case.train_step is not None:
            with scope(), cast:
                note_outputs(trace, label, list(case.train_step(model, next(batches), optimizers)))
            note_state(trace, label, model, optimizers)
            return
        for micro in range(plan.accumulate):
            here = f"{label} / micro-batch {micro}"
            with scope():
                losses = case.forward_backward(model, next(batches), cast)
                note_outputs(trace, f"{here} / loss", losses)
                note_gradients(trace, here, parameters)  # complete when backward returns, still inside of the step
        if plan.clip is not None:
            trace[f"{label} / norm"] = frozen(nn.utils.clip_grad_norm_(model.parameters(), plan.clip))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        note_state(trace, label, model, optimizers)

    if plan.sanity:
        evaluate(case, model, trace, "sanity check", scope, torch.inference_mode)
    for step in range(plan.steps):
        one_step(f"step {step}", scope)
        if step == 0:
            evaluate(case, model, trace, "validation after step 0", scope, torch.inference_mode)
    for mode in (torch.no_grad, torch.inference_mode):
        evaluate(case, model, trace, f"eval under {mode.__name__}", scope, mode)
    detach()
    note_state(trace, "after detach", model, optimizers)
    one_step("a plain step after detach", nullcontext)
    if case.seen is not None:
        note_outputs(trace, "seen by user hooks", case.seen(model))


def evaluate(
    case: Case, model: nn.Module, trace: Trace, label: str, scope: Scope, mode: Callable[[], AbstractContextManager]
) -> None:
    """The outputs in eval mode; the model is back in its own modes afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    with mode(), scope():
        note_outputs(trace, label, case.call(model, case.batches(1)[0]))
    for module, flag in training.items():
        module.training = flag


def facts_of(model: nn.Module) -> Trace:
    """Classes, attributes, hooks and tensors of a plain module, as a detached one must have them, too."""
    facts: Trace = {}
    for name, module in model.named_modules():
        facts[f"class of {name!r}"] = f"{type(module).__module__}.{type(module).__qualname__}"
        facts[f"attributes of {name!r}"] = sorted(module.__dict__)
        facts[f"hooks of {name!r}"] = {k: len(v) for k, v in module.__dict__.items() if k.endswith("_hooks") and v}
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        facts[f"parameters of {name!r}"] = [key for key, _ in own]
    for name, parameter in model.named_parameters():
        facts[f"parameter {name!r}"] = (
            type(parameter), parameter.device, parameter.dtype, parameter.stride(), parameter.requires_grad,
            sorted(parameter.__dict__), len(parameter._backward_hooks or ()),
            len(parameter._post_accumulate_grad_hooks or ()),
        )  # fmt: skip
    for name, buffer in model.named_buffers():
        facts[f"buffer {name!r}"] = (type(buffer), buffer.device, buffer.dtype)
    facts["pickles"] = can(lambda: pickle.loads(pickle.dumps(model)))
    facts["deepcopies"] = can(lambda: copy.deepcopy(model))
    return facts


def can(action: Callable[[], object]) -> bool:
    """Whether an action works; some plain modules cannot be pickled, and need not be afterwards."""
    try:
        action()
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return False
    return True


@functools.cache
def plain_run(name: str, plan: Plan) -> tuple[Trace, Trace]:
    """The reference, once per process: a plain PyTorch loop."""
    return reference_of(CASES[name], plan)


def reference_of(case: Case, plan: Plan) -> tuple[Trace, Trace]:
    """What is seen of a plain training, and the facts of its module."""
    model, trace = case.model(), Trace()
    train(case, plan, model, trace, nullcontext, lambda: None)
    return trace, facts_of(model)


def assert_exact(
    case: Case,
    options: PipelineOptions,
    plan: Plan,
    reference: tuple[Trace, Trace] | None = None,
    planner: Planner | None = None,
) -> None:
    """Train through a Pipeline and through a plain loop: everything is bit-equal, and the module is given back."""
    skip_what_plain_cannot(case, plan.autocast)
    expected, plain = reference or plain_run(case.name, plan)
    model, actual = case.model(), Trace()
    before, threads = dict(model.named_parameters()), set(threading.enumerate())
    classes = {module: type(module) for module in model.modules()}

    with Pipeline(model, "cpu", options=replace(options, units=case.units), planner=planner) as pipe:
        assert same_objects(before, dict(model.named_parameters())), "attaching replaced a Parameter object"
        train(case, plan, model, actual, pipe.step, pipe.detach)
    assert_same_trace(expected, actual)

    assert pipe.stats.resets == 0, "nothing went wrong, yet the pipeline was reset"
    if case.streams and isinstance(options.k, int) and options.k < len(pipe.arrangement.units):
        assert pipe.stats.loads > plan.steps * plan.accumulate, "nothing was streamed"
    assert same_objects(before, dict(model.named_parameters())), "detaching replaced a Parameter object"
    # not `==`, as a gate's class equals the plain one
    assert all(type(module) is classes[module] for module in model.modules()), "a class was not given back"
    assert_same_trace(plain, facts_of(model))
    assert set(threading.enumerate()) <= threads, "a worker thread outlived detach()"


def made_once(engine: Engine) -> tuple[int, ...]:
    """The identities of what is made at attach, and never again for the same module tree."""
    units = sorted(engine.arrangement.all_units, key=attrgetter("name"))
    twins = [weight.twin.parameter for unit in units for weight in unit.every_weight]
    members = [part for member in engine.arrangement.members for part in (member, type(member.module))]
    return tuple(map(id, [engine.window, engine.stream, engine.guard, *units, *twins, *members]))


@dataclass
class Run:
    """One telling of a story: the model, the scope of a step, and what was seen; ``pipe`` is None in the plain one."""

    model: nn.Module
    trace: Trace = field(default_factory=dict)
    pipe: Pipeline | None = None

    def step(self) -> AbstractContextManager[None]:
        """The scope that a training or evaluation step runs in."""
        return nullcontext() if self.pipe is None else self.pipe.step()

    def rebuild(self) -> None:
        """Have the engine arrange units anew."""
        if self.pipe is not None:
            self.pipe._engine.rearrange()

    def note(self, label: str, value: Any) -> None:
        """Write down one tensor."""
        self.trace[label] = frozen(value)

    def normal_step(self, label: str, optimizer: Optimizer | None, seed: int = 0) -> None:
        """Forward, backward, and an optimizer step if there is one, all written down."""
        x = self.rows(seed)
        with self.step():
            loss = self.model(x).square().mean()
            loss.backward()
        self.note(f"{label} / loss", loss)
        note_gradients(self.trace, label, dict(self.model.named_parameters()))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
            note_state(self.trace, label, self.model, [optimizer])

    def evaluate(self, label: str, seed: int = 0) -> None:
        """The output without gradients."""
        with torch.no_grad(), self.step():
            self.note(label, self.model(self.rows(seed)))

    @staticmethod
    def rows(seed: int) -> Tensor:
        """A batch for chains of blocks, the same for the same seed."""
        return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


@contextmanager
def attached(model: nn.Module, planner: Planner | None = None, **options: Any) -> Iterator[Pipeline]:
    """A pipeline over a model of Blocks, each of them a unit, with delays and poison; always detached."""
    defaults = {"k": 2, "k_prime": 1, "units": is_block, "debug": True}
    with Pipeline(model, "cpu", options=PipelineOptions(**{**defaults, **options}), planner=planner) as pipe:
        yield pipe


def train_story(
    run: Run,
    loss_of: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x).float().square().mean(),
    autocast: bool = False,
    cast_cache: bool = True,
    evaluates: bool = False,
) -> None:
    """Four steps whose backwards have a scope of their own, and an evaluation; nobody looks at gradients."""
    optimizer = SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=cast_cache):
            if evaluates and number == 2:
                run.evaluate("evaluation")
            with run.step():
                loss = loss_of(run.model, run.rows(number))
        with run.step():
            loss.backward()
        run.note(f"loss {number}", loss)
        optimizer.step()
        optimizer.zero_grad()
        note_state(run.trace, f"step {number}", run.model, [optimizer])


CAPTURES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jit.trace": lambda module, x: torch.jit.trace(module, x, check_trace=False),
    "fx": lambda module, x: torch.fx.symbolic_trace(module),
    "make_fx": lambda module, x: make_fx(module)(x),
    "export": lambda module, x: torch.export.export(module, (x,), strict=False),
}
"""Ways to capture a module as a graph."""


@contextmanager
def torchs_defaults(dtype: torch.dtype | None, device: str = "cpu") -> Iterator[None]:
    """What torch makes where nobody says which dtype, if that is another one, and device it is to have."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with nullcontext() if device == "cpu" else torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def never_waiting(device: torch.device, for_thread: bool = False) -> Iterator[None]:
    """Raise where the host would wait for the device, or, but `for_thread`, the engine's own, if that can be told."""
    if device.type != "cuda":
        yield
        return
    # CUDA itself tells of copies and of streams, not of events
    event = torch.cuda.Event
    events = patch.object(event, "synchronize", _refusing(event.synchronize, event.query))
    jobs = nullcontext() if for_thread else patch.object(Job, "join", _refusing(Job.join, attrgetter("done")))
    torch.cuda.set_sync_debug_mode("error")
    try:
        with events, jobs:
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _refusing(wait: Callable[[Any], None], is_done: Callable[[Any], bool]) -> Callable[[Any], None]:
    """The wait, for the engine's own thread and for what is done."""

    def refuse(what: Any) -> None:
        if threading.current_thread().name != "superpipeline-host" and not is_done(what):
            raise AssertionError(f"the host waits for {what}")
        wait(what)

    return refuse


def is_block(name: str, module: nn.Module) -> bool:
    """The unit policy for models of Blocks."""
    return isinstance(module, Block)


@contextmanager
def slow_host(seconds: float = 0.02) -> Iterator[None]:
    """Every job on the host takes this long: an optimizer's step is still under way when the next forward begins."""
    work = Backend.work

    def slow(self: Backend, job: Job) -> Any:
        action = job.action

        @functools.wraps(action)
        def later() -> None:
            time.sleep(seconds)
            action()

        job.action = later
        return work(self, job)

    with patch.object(Backend, "work", slow):
        yield


def memory_with(free: int | None) -> DeviceMemory | None:
    """The memory of a device that has so much to spare, and tells nothing else; None if it does not tell that."""
    return None if free is None else DeviceMemory(1 << 40, free, 0, 0, 0, 0)


def assert_same_story(story: Callable[[Run], None], build: Callable[[], nn.Module], **options: Any) -> None:
    """Tell a story with a plain module and with an attached one: all that was written down is bit-equal."""
    runs = []
    for streamed in (False, True):
        torch.manual_seed(0)
        run = Run(build())
        runs.append(run)
        torch.manual_seed(1)
        if not streamed:
            story(run)
            continue
        with attached(run.model, **options) as run.pipe:
            story(run)
        assert run.pipe.stats.loads > 0, "nothing was streamed"
    assert_same_trace(runs[0].trace, runs[1].trace)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def same_objects(left: dict[str, nn.Parameter], right: dict[str, nn.Parameter]) -> bool:
    return left.keys() == right.keys() and all(left[name] is right[name] for name in left)


# ----------------------------------------------------------------------------------------------------------- exceptions


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: type[BaseException]) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise ctx.error("on purpose")


class Bomb(Block):
    """A block that can be told to fail in the middle of its forward or of its backward."""

    error: type[BaseException] | None = None
    where = "forward"

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        if self.error is not None and self.where == "forward":
            raise self.error("on purpose")
        if self.error is not None:
            hidden = RaiseInBackward.apply(hidden, self.error)
        return x + self.down(hidden)


def bombs() -> nn.Module:
    return Chain([Block(), Block(), Bomb(), Block(), Block()])


def fail(run: Run, error: type[BaseException], where: str) -> None:
    """One step that fails."""
    bomb = run.model.blocks[2]
    bomb.error, bomb.where = error, where
    with pytest.raises(error, match="on purpose"), run.step():
        run.model(run.rows(9)).square().mean().backward()
    bomb.error = None
    run.model.zero_grad()


# ---------------------------------------------------------------------------------------------------------- Lightning


QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
"""Arguments of a Trainer that says and saves nothing."""


class ZooModule(L.LightningModule):
    """A zoo entry as a LightningModule that writes down what happens to it."""

    def __init__(self, case: Case, trace: Trace) -> None:
        super().__init__()
        self.model = case.model()
        self.case, self.trace = case, trace
        self.automatic_optimization = case.train_step is None

    def training_step(self, batch: Batch, index: int) -> Tensor | None:
        """Automatic optimization, or the zoo entry's own manual step."""
        here = f"step {self.global_step} / batch {index}"
        if self.case.train_step is not None:
            optimizers = [optimizer.optimizer for optimizer in self.optimizers()]
            note_outputs(self.trace, here, list(self.case.train_step(self.model, batch, optimizers)))
            return None
        loss = self.case.step(self.model, batch)
        note_outputs(self.trace, f"{here} / loss", loss)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """The outputs in evaluation, the sanity check's among them."""
        note_outputs(self.trace, f"validation after {self.global_step} steps", self.case.call(self.model, batch))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Gradients as callbacks see them: complete, on the CPU, before clipping."""
        note_gradients(self.trace, f"step {self.global_step}", dict(self.model.named_parameters()))

    def configure_optimizers(self) -> list[Optimizer]:
        """The zoo entry's own."""
        return self.case.optimizers(self.model)


def lightning_run(case: Case, strategy: Any, precision: str = "32-true", accelerator: str = "cpu") -> Trace:
    """Fit for three optimizer steps with validation, then write down the state."""
    skip_what_plain_cannot(case, precision == "bf16-mixed")
    trace: Trace = {}
    torch.manual_seed(7)
    module = ZooModule(case, trace)
    automatic = case.train_step is None
    how = {"accumulate_grad_batches": case.accumulate, "gradient_clip_val": case.clip} if automatic else {}
    where = {"accelerator": accelerator, "devices": 1, "strategy": strategy, "precision": precision}
    trainer = L.Trainer(**where, **how, **QUIET, max_epochs=1, val_check_interval=2 * case.accumulate)
    train, validate = ([*case.batches(count)] for count in (3 * case.accumulate, 1))
    torch.manual_seed(7)
    trainer.fit(module, DataLoader(train, batch_size=None), DataLoader(validate, batch_size=None))
    note_state(trace, "after fit", module.model, trainer.optimizers)
    return trace


def unit_bytes(pipeline: Pipeline) -> list[int]:
    """What is sent for each unit."""
    units = pipeline._engine.arrangement.units
    return [sum(weight.compute_bytes for weight in unit.every_weight) for unit in units]
