"""Models to plan for, small and of four families; planners; a device on virtual clocks that computes real models."""

from __future__ import annotations

import gc
import mmap
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import transformers as hf
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from sp_lightning.pipeline import Engine, HostBackend, Pipeline, PipelineOptions, Planner, Stats, Summary, WindowPlan
from sp_lightning.pipeline.weights import buffers
from sp_lightning.planning.assumptions import Assumptions
from sp_lightning.planning.estimate import assumed_machine, divide, estimate_work
from sp_lightning.planning.measure import measured_work
from sp_lightning.planning.work import Machine, UnitWork, Workload

from .. import simulated
from ..helpers import is_block, made_once
from ..simulated import STEP_BYTES, UNIT_BYTES, WIDTH, Lane, SimulatedBackend, TimedBlock
from ..zoo.blocks import Chain, Gated
from ..zoo.case import Batch, call_with_batch
from ..zoo.vision import CLASSES, resnet50

WORDS = 64


def estimate(module: nn.Module, given: Assumptions) -> tuple[Workload, Machine]:
    """Estimate the workload of a model, and the assumed machine."""
    return estimate_work(divide(module, given), given), assumed_machine(given)


_SMALL = {"hidden_size": 32, "num_hidden_layers": 10, "num_attention_heads": 4, "intermediate_size": 64}
_SMALL_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 5, "num_heads": 4, "decoder_start_token_id": 0}


def decoder() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(vocab_size=WORDS, max_position_embeddings=32, use_cache=False, **_SMALL)
    ).train()


def vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=4, num_labels=CLASSES, **_SMALL)).train()


def encoder_decoder() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=WORDS, dropout_rate=0.0, pad_token_id=0, **_SMALL_T5)
    ).train()


def _words(count: int) -> Batch:
    tokens = torch.randint(1, WORDS, (count, 24))
    return {"input_ids": tokens, "labels": tokens}


def _pictures(count: int) -> Batch:
    return {"pixel_values": torch.randn(count, 3, 16, 16), "labels": torch.randint(CLASSES, (count,))}


def _plain_pictures(count: int) -> Batch:
    return (torch.randn(count, 3, 64, 64),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "decoder": (decoder, _words),
    "ViT": (vit, _pictures),
    "ResNet": (resnet50, _plain_pictures),
    "encoder-decoder": (encoder_decoder, _words),
}


@dataclass
class Trained:
    """What came of some steps: their seconds, and the most device memory for weights, gradients and activations."""

    seconds: list[float]
    counted: int
    summary: Summary
    stats: Stats
    busy: dict[Lane, float] = field(default_factory=dict)  # seconds of each lane in the last step


def finish(pipeline: Pipeline, seconds: list[float]) -> Trained:
    """What came of the steps of a pipeline, which is detached."""
    summary = pipeline.summary()
    counted = summary.device_bytes + summary.gradient_bytes + pipeline.stats.activation_peak_bytes
    pipeline.detach()
    return Trained(seconds, counted, summary, pipeline.stats)


class Fixed(Planner):
    """Wants one window after the other, a step each, and from the last one on always that.

    Args:
        windows: k, the numbers of units that live on the device, of those that visit, and of those whose gradients wait
            there; resident weights come last.
        defers_visits: Whether units visit as the next forward loads them, though they could in backward.
    """

    def __init__(self, *windows: tuple[Any, ...], defers_visits: bool = False) -> None:
        self._windows = list(windows)
        self._defers_visits = defers_visits
        self.seen: list[tuple[int, int]] = []
        self.lives: set[tuple[int, ...]] = set()  # what there was as steps began
        self.host_bytes = 0  # for weights, when the last step began

    @override
    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        arrangement = engine.arrangement
        self.seen.append((arrangement.layout.window.k, len(arrangement.parameters_on_device)))
        self.lives.add(made_once(engine))
        self.host_bytes = sum(segment.memory.nbytes for segment in arrangement.segments)
        k, *chosen = self._windows.pop(0) if len(self._windows) > 1 else self._windows[0]
        units = arrangement.units
        everything = [*units, arrangement.resident] if arrangement.resident.every_weight else units
        numbers = [*chosen, (), (), ()][:3]
        placed = [[everything[n] for n in some if n < len(everything)] for some in numbers]
        on_device, visiting, waiting = [tuple(unit.name for unit in some) for some in placed]
        plan = WindowPlan(k, on_device, visiting=visiting, waiting=waiting, defers_visits=self._defers_visits)
        return replace(plan, on_device_bytes=sum(measured_work(engine, unit).bytes_on_device for unit in placed[0]))


class Wanders(Planner):
    """Wants units to live, or to visit, at random places from the second step on, other ones every few steps."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._plan: WindowPlan | None = None
        self._steps = 0

    @override
    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        arrangement = engine.arrangement
        self._steps += 1
        if self._steps > 1 and self._random.random() < 0.5:
            units = [unit.name for unit in arrangement.units]
            living = self._draw([*units, arrangement.resident.name])
            visiting = self._draw(units)
            waiting = self._draw([*units, arrangement.resident.name])
            k, defers = self._random.randint(1, 3), self._random.random() < 0.5
            self._plan = WindowPlan(k, on_device=living, visiting=visiting, waiting=waiting, defers_visits=defers)
        return self._plan

    def _draw(self, names: Sequence[str]) -> tuple[str, ...]:
        share = self._random.choice([0.0, 0.3, 0.7, 1.0])
        return tuple(name for name in names if self._random.random() < share)


BLOCKS = 6
Make = Callable[[Any], Optimizer]


def train_placed(
    make: Make,
    planner: Planner | None,
    device: torch.device | str = "cpu",
    *,
    steps: int = 7,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    clip: float | None = None,
    in_backward: bool = False,
    accumulate: int = 1,
    between: Callable[[int, nn.Module, Optimizer], None] = lambda step, model, optimizer: None,
    before_batch: Callable[[int, nn.Module], None] = lambda micro, model: None,
    hidden: Sequence[int] = (48,) * BLOCKS,
    backend: HostBackend | None = None,
    **options: Any,
) -> tuple[dict[str, Any], Stats]:
    """Train six blocks, placed as the planner wants, or plainly without one; losses, weights and state on the host."""
    torch.manual_seed(0)
    model, pipeline = Chain(Gated(16, width, dropout=0.1) for width in hidden).to(dtype), None
    if planner is None:
        model.to(device)
    else:
        if device == "cpu":
            backend = backend or HostBackend(poison=True, max_delay=0.002)
        chosen = PipelineOptions(units=is_block, **options)
        pipeline = Pipeline(model, device, options=chosen, backend=backend, planner=planner)
    optimizer = make(model.parameters())
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            before_batch(micro, model)
            torch.manual_seed(10 * step + micro)
            inputs = torch.randn(8, 16).to(device, dtype)
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = model(inputs).float().square().mean()
            scope: Any = nullcontext()
            if pipeline is not None and clip is not None:
                scope = pipeline.optimizers.clipping.measuring_norms()
            elif pipeline is not None and in_backward and micro == accumulate - 1:
                scope = pipeline.optimizers.stepping_in_backward(optimizer)
            with scope:
                loss.backward()
            losses.append(loss.detach().cpu())
        if clip is not None and pipeline is not None:
            pipeline.optimizers.clipping.clip_grad_norm(model.parameters(), clip)
        elif clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        between(step, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    stats = Stats() if pipeline is None else pipeline.stats
    if pipeline is not None:
        pipeline.detach()
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return {"losses": losses, "weights": weights, "state": optimizer.state_dict()["state"]}, stats


def take_steps(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    """Steps of a plain loop, also after one that has failed."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def timed_steps(
    pipeline: Pipeline,
    backend: SimulatedBackend,
    optimizer: Optimizer | None,
    loss_of_batch: Callable[[], Tensor],
    steps: int,
    in_backward: bool = True,
    accumulate: int = 1,
    clip: bool = False,
) -> list[float]:
    """Virtual seconds of each step; Lightning runs the last backward of one alone within the optimizer's step."""
    seconds = []
    for _ in range(steps):
        begin = backend.now
        for micro in range(accumulate):
            loss, is_last = loss_of_batch(), micro == accumulate - 1
            with ExitStack() as scopes:
                if is_last and in_backward and optimizer is not None:
                    scopes.enter_context(pipeline.optimizers.stepping_in_backward(optimizer))
                if is_last and clip:
                    scopes.enter_context(pipeline.optimizers.clipping.measuring_norms())
                loss.backward()
        if clip:
            pipeline.optimizers.clipping.clip_grad_norm(pipeline.module.parameters(), 1e9)
            # steps wait for the norm, which is on the device when backward has ended
            backend.main = backend.now
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(backend.now - begin)
    return seconds


@dataclass(frozen=True)
class Blocks(simulated.Machine):
    """Equal units on virtual clocks, and the seconds that each of them takes."""

    units: int = 16

    def workload(self, **facts: Any) -> Workload:
        """What a step of them has to do."""
        computing = self.forward, self.backward
        unit = UnitWork("", UNIT_BYTES, UNIT_BYTES, STEP_BYTES, *computing, bytes_after_step=UNIT_BYTES)
        return Workload(tuple(replace(unit, name=f"blocks.{n}") for n in range(self.units)), **facts)

    @property
    def machine(self) -> Machine:
        """What they run on."""
        return Machine(UNIT_BYTES / self.up, UNIT_BYTES / self.down, STEP_BYTES / self.step)

    def train(
        self,
        planner: Planner | None = None,
        *,
        steps: int = 8,
        in_backward: bool = True,
        accumulate: int = 1,
        frozen: bool = False,
        clip: bool = False,
        **options: Any,
    ) -> Trained:
        """Train them; what is trained for has one step of the optimizer for every few backwards."""
        backend = SimulatedBackend(UNIT_BYTES / self.up, UNIT_BYTES / self.down, STEP_BYTES / self.step)
        model = Chain(TimedBlock(WIDTH, backend, self.forward, self.backward) for _ in range(self.units))
        options = {"units": [TimedBlock], "activations": "keep", **options}
        pipeline = Pipeline(model, "cpu", options=PipelineOptions(**options), backend=backend, planner=planner)
        optimizer = SGD(model.parameters(), 1e-3)
        if frozen:
            model.requires_grad_(False)
        how = {"in_backward": in_backward, "accumulate": accumulate, "clip": clip}
        x = torch.ones(1, WIDTH, requires_grad=True)
        seconds = timed_steps(pipeline, backend, None if frozen else optimizer, lambda: model(x).sum(), steps, **how)
        begin = backend.now - seconds[-1]
        busy = {lane: backend.busy(lane, begin, backend.now) for lane in Lane}
        return replace(finish(pipeline, seconds), busy=busy)


class Computing(TorchDispatchMode):
    """Moves a device's virtual clock for all that counts as work in what runs inside."""

    def __init__(self, backend: SimulatedBackend) -> None:
        super().__init__()
        self._backend = backend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self._backend.compute(count(*args, **(kwargs or {}), out_val=result) / 1e9)
        return result


def train(
    model: nn.Module, batch: Batch, backend: SimulatedBackend, planner: Planner | None, *, steps: int, **options: Any
) -> Trained:
    """Train on virtual clocks; the device computes 1e9 FLOPs a second."""
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(**options), backend=backend, planner=planner)
    pipeline._engine.meter.always = True
    optimizer = SGD(model.parameters(), 1e-3)

    def loss_of_batch() -> Tensor:
        pipeline.stats.activation_peak_bytes = 0
        output = call_with_batch(model, batch)
        return output.square().mean() if isinstance(output, Tensor) else output.loss

    with Computing(backend):
        return finish(pipeline, timed_steps(pipeline, backend, optimizer, loss_of_batch, steps))


class Mapped:
    """Counts the host memory of buffers, and the most so far."""

    def __init__(self) -> None:
        self.most = 0
        self._made: list[tuple[weakref.ref[mmap.mmap], int]] = []
        self._map_pages = buffers._map_pages

    def map_pages(self, nbytes: int) -> mmap.mmap:
        pages = self._map_pages(nbytes)
        self._made.append((weakref.ref(pages), nbytes))
        self.most = max(self.most, self.nbytes())
        return pages

    def nbytes(self) -> int:
        return sum(nbytes for pages, nbytes in self._made if pages() is not None)


@contextmanager
def mapped_without_collector() -> Iterator[Mapped]:
    """Count host memory while the garbage collector does not run."""
    mapped = Mapped()
    gc.disable()
    try:
        with mock.patch.object(buffers, "_map_pages", mapped.map_pages):
            yield mapped
    finally:
        gc.enable()
