"""Steps with optimizer state on a drive, on virtual clocks: how long they take, against the plan."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.optim import AdamW
from sp_lightning.pipeline import Pipeline, PipelineOptions
from sp_lightning.pipeline.optimizer import state_ring
from sp_lightning.pipeline.optimizer.state_file import PAGE, SHARE_OF_FREE_RAM, without_room
from sp_lightning.planning.clock import predict
from sp_lightning.planning.work import Choice, Machine, UnitWork, Workload

from ..helpers import ram_is_full
from ..selection import parts
from ..simulated import TimedBlock
from ..simulated_drive import BackendWithDrive
from ..zoo.blocks import Chain
from .parts import Fixed, Trained, finish, timed_steps

WIDTH = 512
NUMBERS = WIDTH * WIDTH  # of a unit
# bytes of a unit in fp32: its weights, and as many of gradients; its state on the drive; what its step reads and writes
SENT, STATE, STEPPED = 4 * NUMBERS, 8 * NUMBERS, 28 * NUMBERS
SAID = 12 * NUMBERS  # what its step is said to move: all but state
NEW_STATE = STATE + PAGE  # with the count of steps
# state on the drive has many times as many pieces as there are buffers, as in training
PIECES, BUFFERS = 100, 4
LEAST_PIECE = 1024  # numbers whose moments have whole pages


@dataclass(frozen=True)
class Blocks:
    """Equal units on a machine with a drive, and the seconds that each of them takes.

    `read` and `write` are of a unit's state, and `both` of it in one direction while it is moved in both.
    """

    units: int
    k: int
    on_drive: int  # how many units have their state there
    forward: float
    up: float
    down: float
    step: float
    read: float
    write: float
    both: float

    @classmethod
    def drawn(cls, draw: random.Random, speed: float, share: float) -> Blocks:
        """Units whose share of state keeps a drive busy for `speed` times as long as all of them compute."""
        units, forward = draw.randint(6, 14), draw.uniform(0.5, 1.5)
        on_drive = round(units * share)
        drive = speed * 3 * forward * units / on_drive
        reading, writing, both = draw.choice([(0.5, 1.0, 0.0), (0.9, 1.0, 0.0), (0.4, 0.7, 0.5), (1.0, 0.7, 0.0)])
        return cls(
            units,
            draw.randint(1, 4),
            on_drive,
            forward,
            up=draw.uniform(0.2, 1.0),
            down=draw.uniform(0.2, 1.0),
            step=10 ** draw.uniform(-1.0, 0.6),
            read=reading * drive,
            write=writing * drive,
            both=both * drive,
        )

    @property
    def room(self) -> int:
        """The room for state in RAM."""
        return (self.units - self.on_drive) * NEW_STATE

    @property
    def machine(self) -> Machine:
        passing = STATE / max(self.read, self.write, 2 * self.both)
        return Machine(SENT / self.up, SENT / self.down, STEPPED / self.step, drive=passing)

    def plan(self, clips: bool) -> float:
        """Return the predicted seconds of a step."""
        seconds = self.forward, 2 * self.forward
        sizes = {"bytes_after_step": SENT, "host_bytes": SENT + STATE, "state_bytes": STATE}
        units = (UnitWork("", SENT, SENT, STEPPED, *seconds, **sizes),) * self.units
        work = Workload(units, stepping="after backward" if clips else "in backward", has_drive=True)
        on_drive = without_room(dict.fromkeys(range(self.units), NEW_STATE), self.room)
        return predict(work, self.machine, Choice(self.k, on_drive=tuple(on_drive))).seconds

    @contextmanager
    def backend(self) -> Iterator[BackendWithDrive]:
        """The machine, while state is cut and placed."""
        piece = NUMBERS * self.on_drive // PIECES // LEAST_PIECE * LEAST_PIECE
        backend = BackendWithDrive(
            SENT / self.up,
            SENT / self.down,
            STEPPED / self.step,
            STATE / self.read,
            STATE / self.write,
            STATE / self.both if self.both else math.inf,
            per_byte=STEPPED / SAID,
            piece=STEPPED / NUMBERS * piece,
        )
        most = STATE // NUMBERS * piece + 8 * PAGE  # each field of `Memory` may be padded
        with (
            ram_is_full(self.room / SHARE_OF_FREE_RAM),
            patch.object(state_ring, "CUT", piece),
            patch.object(state_ring, "BUFFER", most),
            patch.object(state_ring, "BUFFERS", BUFFERS),
            backend.running(),
        ):
            yield backend

    def model(self, backend: BackendWithDrive) -> nn.Module:
        torch.manual_seed(0)
        return Chain(TimedBlock(WIDTH, backend, self.forward, 2 * self.forward) for _ in range(self.units))

    def train(self, clips: bool, steps: int = 3) -> tuple[Trained, list[Tensor]]:
        """Train them; return also their weights."""
        with self.backend() as backend:
            model = self.model(backend)
            options = PipelineOptions(units=[TimedBlock], activations="keep", nvme_path=".")
            pipeline = Pipeline(model, "cpu", options=options, backend=backend, planner=Fixed((self.k,)))
            optimizer = AdamW(model.parameters(), lr=1e-3)
            how = {"in_backward": not clips, "clip": clips}
            seconds = timed_steps(pipeline, backend, optimizer, lambda: loss_of(model), steps, **how)
            trained = finish(pipeline, seconds)
        assert trained.summary.on_drive == (self.on_drive, self.on_drive * STATE)
        assert trained.stats.bytes_to_drive == steps * self.on_drive * STATE
        return trained, [parameter.detach() for parameter in model.parameters()]


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(1, WIDTH, requires_grad=True)).square().sum()


CASES = [(3.0, 0.3), (2.0, 1.0), (1.2, 0.6), (1.0, 0.3), (0.3, 0.6), (0.3, 1.0)]


@pytest.mark.parametrize("part", parts(4))
@pytest.mark.parametrize("clips", [True, False], ids=["clipped", "not clipped"])
@pytest.mark.parametrize(("speed", "share"), CASES, ids=str)
def test_a_step_takes_as_long_as_planned(speed: float, share: float, clips: bool, part: int) -> None:
    """On drives that are slower than computing, about as fast, and faster; within 7 %."""
    blocks = Blocks.drawn(random.Random(f"{part} {speed} {share} {clips}"), speed, share)
    trained, _ = blocks.train(clips)
    planned = blocks.plan(clips)
    print(f"\n{blocks}: planned {planned:.4g}, takes {trained.seconds[-1]:.4g}")
    assert planned == pytest.approx(trained.seconds[-1], rel=0.07)


def test_virtual_time_changes_no_number() -> None:
    """State was really written and read between two steps, by updates in the order of virtual time."""
    blocks = Blocks.drawn(random.Random(0), 1.2, 0.6)
    _, weights = blocks.train(clips=False)
    with blocks.backend() as backend:
        model = blocks.model(backend)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, weights, model.parameters()))
