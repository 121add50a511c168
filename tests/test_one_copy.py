"""The processes of a machine have one copy of masters, sums of gradients and optimizer state; one of them steps."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import ASGD, Optimizer
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.pipeline import Pipeline, PipelineOptions, Processes, Progress
from sp_lightning.pipeline.optimizer.kinds import BY_ELEMENT, BY_WEIGHT, OURS
from sp_lightning.trainer.host_memory import materialize

from .helpers import PATIENCE
from .lightning_modules import Base, fit, streamed, trainer
from .planning.parts import Fixed
from .processes import in_processes, new_process

MIB = 2**20
WIDTH = 1024
LIBC = ctypes.CDLL(None)
M_MMAP_THRESHOLD = -3  # of malloc.h


def pss() -> int:
    """This process's part of the memory that it has, not of libraries: of what several have, each has its share."""
    gc.collect()
    LIBC.malloc_trim(0)
    dist.barrier()
    return 1024 * sum(map(int, re.findall(r"Pss_(?:Anon|Shmem):\s+(\d+)", Path("/proc/self/smaps_rollup").read_text())))


def train(shared: bool) -> tuple[int, int]:
    """Train a model of 32 MiB, and return what it takes of this process's memory, and how often it stepped a unit."""
    x, before = torch.randn(2, WIDTH), pss()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])
    processes = Processes(dist.get_world_size()) if shared else None
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(k=1), processes=processes)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        pipeline.meet_processes()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    float(model[0].weight.sum())  # waits for the step
    summary = pipeline.summary()
    of_the_device = summary.device_bytes + summary.gradient_bytes  # which here is the host
    taken = pss() - before - of_the_device - pipeline._engine.stream.routes.landing.nbytes()
    with mock.patch("sp_lightning.pipeline.placing.places.available_host_memory", return_value=0):
        pipeline._engine.place_weights()  # all that it needs is there already
    dist.barrier()
    pipeline.detach()
    return taken, pipeline.stats.overlapped_steps


def one_copy() -> None:
    """All processes take as much as one, but for the buffers through which gradients come, and step as much."""
    LIBC.mallopt(M_MMAP_THRESHOLD, MIB // 16)  # the heaps of threads would keep tensors that were freed
    train(shared=False), train(shared=True)  # what the interpreter takes once is there from then on
    alone, together = torch.tensor(train(shared=False)), torch.tensor(train(shared=True))
    dist.all_reduce(alone, dist.ReduceOp.MAX)  # less was measured where something was freed late
    dist.all_reduce(together)
    print(f"{alone[0] / MIB:.1f} MiB alone, {together[0] / MIB:.1f} in {dist.get_world_size()} processes")
    assert 15.5 * 8 * MIB < alone[0] < 17 * 8 * MIB
    assert 0.9 * alone[0] < together[0] <= 1.05 * alone[0]
    assert together[1] == alone[1] == 2 * 8


def no_copy_of_a_model_from_the_meta_device() -> None:
    """The first process fills it, and the others take next to nothing for it."""
    with torch.device("meta"):
        model = nn.Linear(4 * WIDTH, 4 * WIDTH)  # so large that it has pages of its own
    before, follows = pss(), dist.get_rank() > 0
    materialize(model, follows, SuperpipelineStrategy.lightning, Progress())
    taken = pss() - before
    assert taken < 8 * MIB if follows else taken > 63 * MIB, f"{taken / MIB:.1f} MiB"


def wrapped_in_torchs_ddp() -> None:
    """It would average nothing."""
    model, refused = nn.Linear(4, 4), "`DistributedDataParallel` does not see the gradients"
    with pytest.raises(ValueError, match=refused):
        Pipeline(nn.Sequential(nn.parallel.DistributedDataParallel(model)), "cpu")
    with Pipeline(model, "cpu"):
        wrapper = nn.parallel.DistributedDataParallel(model)
        with torch.no_grad():
            wrapper(torch.ones(1, 4))
        with pytest.raises(RuntimeError, match=refused):
            wrapper(torch.ones(1, 4))


@pytest.mark.usefixtures("server")
def test_memory() -> None:
    in_processes([one_copy, no_copy_of_a_model_from_the_meta_device], count=3)


class ByHand(Optimizer):
    """An optimizer of a user's own, which reads each gradient."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in [parameter for parameter in group["params"] if parameter.grad is not None]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


class WithAliases(ByHand):
    """It writes through the aliases of weights that it was made with."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.aliases = [(parameter, parameter.data) for parameter in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter, alias in self.aliases:
            if parameter.grad is not None:
                alias.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


def hooked(parameters: Any, lr: float) -> Optimizer:
    optimizer = torch.optim.AdamW(parameters, lr)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def stepped(make: Any, overlaps: bool | str, processes: Processes | None) -> list[Tensor]:
    """Train a model, and look at nothing until the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    options = PipelineOptions(k=2, units=[nn.Linear], overlap_optimizer=overlaps)
    pipeline = None if processes is None else Pipeline(model, "cpu", options=options, processes=processes)
    optimizer = make(model.parameters(), lr=0.1)
    for step in range(3):
        if pipeline is not None:
            pipeline.meet_processes()
        model(torch.full((2, 4), 1.0 + step + dist.get_rank())).square().mean().backward()
        if pipeline is None:
            for parameter in model.parameters():  # as DDP does
                dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
        optimizer.step()
        optimizer.zero_grad()
    if pipeline is not None:
        pipeline.meet_processes()
        pipeline.detach()
    return [parameter.detach() for parameter in model.parameters()]


def optimizers() -> None:
    """Those that step unit by unit, and all others, which run their own code on all weights."""
    processes = Processes(dist.get_world_size())
    by_unit = [(make, "auto") for make in (*BY_ELEMENT, *BY_WEIGHT, *OURS)]
    by_own_code = [(make, overlaps) for make in (ASGD, ByHand, WithAliases, hooked) for overlaps in ("auto", False)]
    for case in (*by_unit, *by_own_code):
        assert all(map(torch.equal, stepped(*case, None), stepped(*case, processes))), case


def gradients_that_own_code_has_used() -> None:
    """They are gone in the other processes, where using them again is an error until they are zeroed."""
    model = nn.Linear(4, 4)
    with Pipeline(model, "cpu", processes=Processes(dist.get_world_size())) as pipeline:
        optimizer = ByHand(model.parameters(), lr=0.1)
        for shown in (False, True):
            pipeline.meet_processes()
            model(torch.ones(2, 4)).sum().backward()
            assert not shown or model.weight.grad is not None
            optimizer.step()
            with pytest.raises(RuntimeError, match="was used in an optimizer") if dist.get_rank() else nullcontext():
                float(model.weight.grad.sum())
            optimizer.zero_grad()
            assert model.weight.grad is None


@pytest.mark.usefixtures("server")
def test_optimizers() -> None:
    in_processes([optimizers, gradients_that_own_code_has_used, wrapped_in_torchs_ddp])


class Clamps(Base):
    """Writes to weights between steps, in one process."""

    writer = 0

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_rank == self.writer:
            with torch.no_grad():
                self.head.weight.fill_(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.note("what was computed with", self.head.weight * 1)
        return loss


def writes_by_the_owner() -> None:
    """All compute with what it has written, also on the device, where each process has a copy."""
    for units in ((), range(9)):
        module = Clamps()
        with mock.patch("sp_lightning.strategy.AutoPlanner", return_value=Fixed((2,), (2, units))):
            fit(trainer(streamed(k="auto"), devices=2), module)
        seen = [value for label, value in module.trace.items() if "what was computed with" in label]
        assert seen, "nothing was compared"
        assert all(bool((value == 0.5).all()) for value in seen)


def writes_by_others() -> None:
    module = Clamps()
    module.writer = 1
    with pytest.raises(RuntimeError, match=r"Weight 'head.weight' was written to in a process that shares it"):
        fit(trainer(streamed(), devices=2), module)


def writes_in_a_step() -> None:
    """They are refused where others own the weights. Nor may weights get memory that other processes do not have."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    pipeline = Pipeline(model, "cpu", processes=Processes(dist.get_world_size()))
    weight = model[0].weight
    for write in (lambda: weight.data.mul_(0.9), lambda: weight.detach().mul_(0.9)):
        pipeline.meet_processes()
        refused = pytest.raises(RuntimeError, match="Weight '0.weight' was written to in a process that shares it")
        with refused if dist.get_rank() else nullcontext(), pipeline.step():
            write()
    pipeline.meet_processes()
    weight.data = weight.data * 2
    pipeline.meet_processes()
    with pytest.raises(RuntimeError, match="Weight '0.weight' was given other memory"):
        model(torch.ones(1, 4))
    pipeline.detach()


def writes_between_steps() -> None:
    """Each process sees its own alone, whoever is first, and all go on with those of the owner."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    pipeline = Pipeline(model, "cpu", processes=Processes(dist.get_world_size()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, x = model[0].weight, torch.ones(1, 4)
    for write in (lambda: weight.detach().mul_(0.5), lambda: weight.data.mul_(0.5), lambda: optimizer_like(weight)):
        pipeline.meet_processes()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        alias, before = weight.data, weight.detach().clone()
        for rank in range(dist.get_world_size()):
            dist.barrier()
            if rank == dist.get_rank():
                assert torch.equal(weight, before), "another process's writes show"
                write()
                assert torch.equal(weight, before / 2)
        pipeline.meet_processes()
        assert torch.equal(weight, before / 2)
        assert alias.data_ptr() == weight.data_ptr()
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, model(x).tolist())
        assert all(value == values[0] for value in values), "processes compute with other weights"
    pipeline.detach()


def optimizer_like(weight: nn.Parameter) -> None:
    with torch.no_grad():
        torch._foreach_mul_([weight], 0.5)


def writes_after_the_end() -> None:
    """Each process has weights of its own."""
    module = Base()
    fit(trainer(streamed(), devices=2), module)
    expected = 2 * module.head.weight.detach()
    dist.barrier()
    module.head.weight.data.mul_(2)
    dist.barrier()
    assert torch.equal(module.head.weight, expected)


@pytest.mark.usefixtures("server")
def test_writes() -> None:
    checks = [writes_by_the_owner, writes_by_others, writes_in_a_step, writes_between_steps, writes_after_the_end]
    in_processes(checks)


class Ends(L.LightningModule):
    """Does in some moment what ends its process."""

    def __init__(self, moment: str, end: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        self.moment, self.end = moment, end

    def reach(self, moment: str, step: int = 3) -> Any:
        return self.end() if moment == self.moment and self.global_step == step else None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if self.reach("batch"):
            return None
        y = self.layers[:2](batch)
        self.reach("forward")
        y.register_hook(lambda _: self.reach("backward"))  # when some gradients have come
        return self.layers[2:](y).square().mean()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.reach("step")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.reach("save", 4)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters())


def fail() -> None:
    raise KeyError("broken on purpose")


WAYS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": fail,
    "hang": lambda: time.sleep(60),
    "leave out": lambda: True,
}


def train_to_the_end(moment: str, way: str | None, variables: dict[str, str], here: Path, seconds: float) -> None:
    """Train in this process; without a way to end, it does so when it notices that the other one has."""
    os.chdir(here)
    os.environ.update(variables)
    os.dup2(os.open(f"errors of {variables['LOCAL_RANK']}", os.O_CREAT | os.O_WRONLY), 2)
    strategy = SuperpipelineStrategy(k=2, timeout=timedelta(seconds=seconds))
    kept = ModelCheckpoint("kept", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=6, callbacks=[kept], logger=False)
    trainer.fit(Ends(moment, WAYS[way] if way else lambda: None), DataLoader(torch.randn(64, 64), batch_size=2))


@pytest.mark.parametrize(
    ("moment", "rank", "way"),
    [
        ("forward", 1, "kill"), ("backward", 0, "kill"), ("save", 0, "kill"), ("step", 1, "raise"),
        ("backward", 0, "raise"), ("backward", 1, "raise"), ("forward", 0, "hang"), ("batch", 1, "leave out"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("server")
def test_a_process_that_ends_is_an_error_in_the_others(moment: str, rank: int, way: str) -> None:
    """In time, with nothing left behind, and the last checkpoint whole."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    arguments = [(way if each == rank else None, {**variables, "LOCAL_RANK": str(each)}) for each in range(2)]
    is_late = way in ("hang", "leave out")
    seconds = 10 if is_late else 4 * PATIENCE
    processes = [new_process(train_to_the_end, moment, *each, Path.cwd(), seconds) for each in arguments]
    other = processes[1 - rank]
    try:
        if not is_late:
            processes[rank].join(2 * PATIENCE)
        began = time.monotonic()
        other.join(2 * PATIENCE)
    finally:
        for process in processes:
            process.kill()
    errors = Path(f"errors of {1 - rank}").read_text()
    assert other.exitcode not in (None, 0, -9), errors
    assert "Error" in errors
    assert is_late or time.monotonic() - began < PATIENCE
    for path in Path("kept").glob("*.ckpt"):
        assert torch.load(path, weights_only=False)["state_dict"], path
    assert Path("kept/step=2.ckpt").exists()
