"""Random programs in two processes: each number that a process sees is that of `DDPStrategy`, in every step."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F

from sp_lightning import optim
from sp_lightning.pipeline.engine import Engine, Planner
from sp_lightning.pipeline.window.places import WindowPlan
from sp_lightning.planning import AutoPlanner

from .helpers import Trace, assert_close_trace, assert_same_trace
from .lightning_modules import WIDTH, Average, Base, Block, loader, run, streamed
from .planning.parts import Fixed, Wanders
from .processes import in_processes

BLOCKS = 5
STEPS = 9  # of each process, in three epochs
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "ours": partial(optim.AdamW, lr=0.01),
}
CALLBACKS: dict[str, Callable[[], L.Callback]] = {
    "none": L.Callback,
    "swa": partial(callbacks.StochasticWeightAveraging, 0.01, swa_epoch_start=1, device=torch.device("cpu")),
}
if hasattr(callbacks, "EMAWeightAveraging"):  # not in Lightning 2.5
    CALLBACKS["ema"] = partial(callbacks.EMAWeightAveraging, decay=0.5, update_every_n_steps=1)


class Clamps(L.Callback):
    """A user's own, which writes to weights after each batch, in all processes."""

    @torch.no_grad()
    def on_train_batch_end(self, _: L.Trainer, module: L.LightningModule, *__: Any) -> None:
        for weight in module.parameters():
            weight.mul_(0.99).clamp_(-0.3, 0.3)


WRITES: dict[str, Callable[[], L.Callback]] = {"nothing": L.Callback, "clamps": Clamps, "an average": Average}
LOOKS = ["a hook", "a hook of one", "a later hook", "after backward", "before the step"]
# what the first process has from its own point of view, or an average that it alone keeps
OF_THE_FIRST = re.compile(r"optimizer \d+ / \d+ / |end / buffer")


@dataclass(frozen=True)
class Program:
    """All that is random in one training.

    Attributes:
        uses: Which blocks are used: all, those that a process draws in each step ("branches"), some always and one of
            the others ("experts"), more with every step ("late"); or by a "gan" whose critic begins late.
        twice: Whether the last block is called twice.
        mixes: Whether blocks are mixtures, each of which asks some of its experts, as its gate says.
        frozen: The steps in which weights are frozen, those of half of the blocks or `some` of all.
        looks: Who looks at gradients, and when.
        placed: Whether units stream, stay on the device from the third step on, or come and go ("wander").
        every: After how many batches it validates; None at the end of an epoch.
    """

    number: int
    uses: str
    twice: bool
    mixes: bool
    frozen: tuple[int, int]
    some: bool
    looks: str
    callback: str
    optimizer: str
    precision: str
    clip: str | None
    accumulate: int
    validates: bool
    activations: str
    k: int
    k_prime: int
    writes: str
    placed: str
    every: int | None

    @staticmethod
    def draw(number: int) -> Program:
        """The same program for the same number."""
        random = Random(number)
        begin = random.randint(0, STEPS)
        program = Program(
            number,
            uses=random.choice(["all", "branches", "experts", "late", "gan"]),
            twice=random.random() < 0.3,
            mixes=random.random() < 0.4,
            frozen=random.choice([(0, 0), (begin, begin + random.randint(1, 4))]),
            some=random.random() < 0.5,
            looks=random.choice(["nobody", "nobody", *LOOKS]),
            callback=random.choice(sorted(CALLBACKS)),
            optimizer=random.choice(sorted(OPTIMIZERS)),
            precision=random.choice(["32-true", "bf16-mixed"]),
            clip=random.choice([None, "norm", "value"]),
            accumulate=random.choice([1, 1, 2]),
            validates=random.random() < 0.5,
            activations=random.choice(["keep", "recompute", "offload"]),
            k=random.randint(1, 3),
            k_prime=random.choice([1, 1, 2, 3]),
            writes=random.choice(["nothing", *WRITES]),
            placed=random.choice(["stream", "stream", "stay", "wander"]),
            every=random.choice([None, 2]),
        )
        changes: dict[str, Any] = {}
        if program.uses == "gan":  # manual optimization
            changes |= {"callback": "none", "clip": None, "accumulate": 1}
        elif program.accumulate > 1:
            # sums are rounded in another order: an optimizer that does not blow that up; and between the batches of a
            # step a gradient is that of all processes already
            changes |= {"optimizer": "sgd", "looks": program.looks.replace("after backward", "before the step")}
        if program.callback == "swa" and program.clip == "value":
            changes["validates"] = False  # which zeroes gradients, and then torch itself refuses to clip
        return dataclasses.replace(program, **changes)

    def arguments(self) -> dict[str, Any]:
        """Those of the Trainer."""
        made: dict[str, Any] = {"devices": 2, "max_epochs": 3, "precision": self.precision}
        made |= {"accumulate_grad_batches": self.accumulate, "val_check_interval": self.every}
        made["callbacks"] = [CALLBACKS[self.callback](), WRITES[self.writes]()]
        if self.clip is not None:
            made |= {"gradient_clip_val": 0.01, "gradient_clip_algorithm": self.clip}
        return made

    def options(self) -> dict[str, Any]:
        """Those of the strategy."""
        k = self.k * self.k_prime if self.placed == "stream" else "auto"
        return {"activations": self.activations, "k_prime": self.k_prime, "k": k}

    def path(self, rank: int, step: int) -> list[int]:
        """The blocks that a process uses in a step, in order."""
        random = Random(f"{self.number} {rank} {step}")
        path = list(range(BLOCKS))
        if self.uses == "branches":
            path = [block for block in path if random.random() < 0.6]
            random.shuffle(path)
        elif self.uses == "experts":
            path = random.sample(path, 3)
        elif self.uses == "late":
            path = path[: 1 + (step + rank) // 2]
        return [*path, *path[-1:]] if self.twice else path


class ComesAndGoes(Wanders):
    """Wants units to stay, but not to visit the device, which those of several processes never do."""

    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        plan = super().before_step(engine, builds_graph)
        return plan and dataclasses.replace(plan, visiting=(), waiting=())


PLANNERS: dict[str, Callable[[int], Planner]] = {
    "stream": lambda number: AutoPlanner(),
    "stay": lambda number: Fixed((2,), (2,), (2, range(9))),
    "wander": ComesAndGoes,
}


class Mixture(nn.Module):
    """A gate, and experts of which the batch decides which ones are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        best = shares.mean(0).topk(2).indices.tolist()
        return x + sum(shares[:, [number]] * self.experts[number](x) for number in best)


def read(weight: nn.Parameter) -> None:
    weight.grad.sum().item()


class Module(Base):
    """Trains as its program says."""

    def __init__(self, program: Program) -> None:
        super().__init__(BLOCKS)
        if program.mixes:
            self.blocks = nn.ModuleList(Mixture() for _ in range(BLOCKS))
        self.program = program
        self.batches = 0
        self.critic = nn.Sequential()
        if program.uses == "gan":
            self.automatic_optimization = False
            self.critic = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))
            for block in self.modules():
                if isinstance(block, Block):
                    block.norm = nn.LayerNorm(2 * WIDTH)  # DDP shares buffers in automatic optimization alone

    def on_fit_start(self) -> None:
        looks = self.program.looks
        for weight in self.blocks[:2].parameters():
            if looks == "a hook" or (looks == "a hook of one" and self.global_rank == 0):
                weight.register_hook(lambda gradient: None)
            if looks == "a later hook":
                weight.register_post_accumulate_grad_hook(read)

    def on_train_batch_start(self, *_: Any) -> None:
        begin, end = self.program.frozen
        # not between the batches of a step: DDP does not average what is frozen in the last of them
        step = self.global_step if self.automatic_optimization else self.batches
        weights = [*self.blocks.parameters()]
        for weight in weights[::3] if self.program.some else weights[: len(weights) // 2]:
            weight.requires_grad_(not begin <= step < end)

    def path(self) -> list[nn.Module]:
        path = self.program.path(self.global_rank, self.batches) if self.training else range(BLOCKS)
        return [self.blocks[number] for number in path]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) if self.automatic_optimization else self.play(*batch)
        self.batches += 1
        return loss

    def play(self, x: Tensor, y: Tensor) -> None:
        """A generator's step, and from the third batch on a critic's before, who calls it twice in one graph."""
        generate, judge = self.optimizers()
        made = torch.cat([self(x)] * (WIDTH // 2), 1)
        losses: list[tuple[Any, Callable[[], Tensor]]] = []
        if self.batches > 1:
            losses.append((judge, lambda: self.critic(x).mean() - self.critic(made.detach()).mean()))
            losses.append((generate, lambda: self.critic(made).square().mean()))
        else:
            losses.append((generate, lambda: F.cross_entropy(made[:, :2], y)))
        for optimizer, make in losses:
            self.toggle_optimizer(optimizer)
            loss = make()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.note("loss", loss)

    def note_gradients(self, when: str) -> None:
        """Of weights that are trained now: others have what an earlier step has left, or nothing."""
        if self.program.looks == when:
            self.note("gradients", [weight.grad for weight in self.parameters() if weight.requires_grad])

    def on_after_backward(self) -> None:
        self.note_gradients("after backward")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.note_gradients("before the step")

    def configure_optimizers(self) -> Any:
        make = OPTIMIZERS[self.program.optimizer]
        ours = [*self.blocks.parameters(), *self.head.parameters()]
        return [make(ours), make(self.critic.parameters())] if len(self.critic) else make(ours)


class Unseen(Module):
    """Nobody looks at gradients, so units may be stepped in backward."""

    on_after_backward = L.LightningModule.on_after_backward
    on_before_optimizer_step = L.LightningModule.on_before_optimizer_step


def drive(program: Program, trainer: L.Trainer, module: Module) -> None:
    trainer.fit(module, loader(), loader(2) if program.validates else None)


def train(program: Program) -> tuple[Trace, Trace]:
    """What this process sees under DDP, and streamed."""
    fit = partial(drive, program)
    make = partial(Unseen if program.looks == "nobody" else Module, program)
    expected = run(DDPStrategy(find_unused_parameters=True), make, fit, program.arguments)
    planner = PLANNERS[program.placed](program.number)
    with mock.patch("sp_lightning.strategy.AutoPlanner", return_value=planner):
        actual = run(streamed(**program.options()), make, fit, program.arguments)
    assert any("loss" in label for label in expected), "nothing was compared"
    if dist.get_rank():
        expected, actual = ({k: v for k, v in t.items() if not OF_THE_FIRST.search(k)} for t in (expected, actual))
    return expected, actual


def programs() -> None:
    """As many as run in half a minute; other numbers draw others. In two, one process alone placed weights anew."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for number in (*range(10), 33, 43, 53, 164):
        check(number)


@pytest.mark.usefixtures("server")
def test_random_programs_are_exact() -> None:
    in_processes([programs])


def check(number: int) -> None:
    """Bit-equality; where gradients of several batches add up, these are rounded in another order."""
    program = Program.draw(number)
    compare = assert_same_trace if program.accumulate == 1 else assert_close_trace
    try:
        compare(*train(program))
    except BaseException as error:
        raise AssertionError(f"{program}\n{error}") from error
