"""Optimizer state on a drive: the same bits, no RAM, and an error that explains whatever can fail."""

from __future__ import annotations

import copy
import errno
import fcntl
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from sp_lightning import optim, superpipeline
from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.lanes.lanes import Kind
from sp_lightning.pipeline.optimizer import state_file, state_ring

from ...helpers import ram_is_full
from ...planning.parts import Fixed, Make, Wanders, train_placed
from ...zoo.blocks import chain
from .parts import X, everything, same
from .parts import chain as linears

INT8 = partial(optim.AdamW, lr=1e-2, moments="int8")
OPTIMIZERS: dict[str, Make] = {
    "int8": INT8,
    "fp32": partial(optim.AdamW, lr=1e-2),
    "fused": partial(AdamW, lr=1e-2, fused=True),
    "lion": partial(optim.Lion, lr=1e-2, moments="int8"),
}


@pytest.fixture(autouse=True)
def no_ram(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """RAM has no room for state, and a wide block takes several pieces."""
    monkeypatch.setattr(state_ring, "BUFFER", 3 << 19)
    monkeypatch.setattr(state_ring, "BUFFERS", 3)
    with ram_is_full():
        yield


def on_drive(make: Make, **options: Any) -> tuple[dict[str, Any], Any]:
    return train_placed(make, Fixed((2,)), nvme_path=".", debug=True, **options)


WAYS = [(clip, early, micro) for clip, early in [(None, False), (None, True), (0.01, False)] for micro in (1, 3)]
SOME = [(0.01, False, 1), (None, True, 3)]
FP32, BF16 = torch.float32, torch.bfloat16
CASES = [("int8", BF16, WAYS), ("fused", FP32, WAYS), ("int8", FP32, SOME), ("fp32", BF16, SOME), ("lion", BF16, SOME)]


@pytest.mark.parametrize(
    ("name", "dtype", "clip", "in_backward", "accumulate"),
    [(name, dtype, *way) for name, dtype, ways in CASES for way in ways],
)
def test_no_bit_changes(name: str, dtype: torch.dtype, clip: Any, in_backward: bool, accumulate: int) -> None:
    arguments: dict[str, Any] = {"clip": clip, "in_backward": in_backward, "accumulate": accumulate, "dtype": dtype}
    arguments["steps"] = 4
    expected, _ = train_placed(OPTIMIZERS[name], None, **arguments)
    actual, stats = on_drive(OPTIMIZERS[name], **arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert stats.bytes_to_drive > 0
    assert not os.listdir(), "the file has no name"


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
def test_weights_in_several_pieces(autocast: bool, in_backward: bool) -> None:
    """More pieces than buffers, which end within weights."""
    arguments: dict[str, Any] = {
        "steps": 3, "hidden": (60000, 32, 60000), "autocast": autocast, "in_backward": in_backward
    }  # fmt: skip
    expected, _ = train_placed(INT8, None, **arguments)
    actual, stats = on_drive(INT8, backend=HostBackend(poison=True, max_delay=0.02), **arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert stats.bytes_to_drive > 3 * 3 * state_ring.BUFFER


@contextmanager
def attached(nvme_path: str | None = ".", blocks: int = 4, **options: Any) -> Iterator[tuple[nn.Module, Pipeline]]:
    model = linears(blocks)
    chosen = PipelineOptions(k=2, units=nn.Linear, debug=True, nvme_path=nvme_path, **options)
    with Pipeline(model, "cpu", options=chosen) as pipeline:
        yield model, pipeline


def take_steps(model: nn.Module, optimizer: Optimizer, steps: int = 1, begin: int = 0) -> None:
    for step in range(begin, begin + steps):
        model(X * (1 + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["int8", "fused"])
def test_training_resumes_with_and_without_a_drive(name: str) -> None:
    ends = []
    for first, then in [(None, None), (None, "."), (".", None), (".", ".")]:
        with attached(first) as (model, _):
            optimizer = OPTIMIZERS[name](model.parameters())
            take_steps(model, optimizer, 3)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with attached(then) as (model, pipeline):
            model.load_state_dict(saved[0])
            optimizer = OPTIMIZERS[name](model.parameters())
            optimizer.load_state_dict(saved[1])
            take_steps(model, optimizer, 3, begin=3)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it is known by now
            take_steps(model, optimizer, 1, begin=6)
            ends.append(everything(model, optimizer))
            assert (pipeline.stats.bytes_to_drive > 0) == (then is not None)
    assert all(same(ends[0], end) for end in ends[1:])


def test_as_little_as_possible_is_on_the_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second unit, if RAM has room for half of the state; state in RAM is updated as without a drive."""
    of_unit = 2 * 5 * state_file.PAGE  # the count of steps, codes and scales, of weight and bias
    monkeypatch.setattr(state_file, "available_host_memory", lambda: 2 * of_unit / state_file.SHARE_OF_FREE_RAM)
    ends = []
    for path in (None, "."):
        with attached(path) as (model, pipeline):
            optimizer = INT8(model.parameters())
            take_steps(model, optimizer, 3)
            ends.append(everything(model, optimizer))
            if path is not None:
                units, nbytes = pipeline.summary().on_drive
                assert (units, nbytes) == (2, 2 * 2 * 4 * state_file.PAGE)
                assert pipeline.stats.bytes_to_drive == 3 * nbytes
                assert f"state of {units} of 4 units is on the drive" in str(pipeline.summary())
    assert same(*ends)


@pytest.mark.parametrize(
    ("sizes", "room", "expected"),
    [
        ([1] * 4, 4, ""), ([1] * 4, 2, "cd"), ([1] * 4, 0, "abcd"), ([1] * 4, 3, "d"), ([1] * 6, 2, "bcef"),
        ([8, 1, 1, 1], 3, "a"), ([1] * 6, 1, "bcdef"), ([], 0, ""),
    ],
)  # fmt: skip
def test_two_of_three_units_from_the_end_are_on_the_drive(sizes: list[int], room: float, expected: str) -> None:
    chosen = state_file.without_room(dict(zip("abcdef", sizes, strict=False)), room)
    assert "".join(sorted(chosen)) == expected


def test_what_users_do_between_steps() -> None:
    """Groups, a scheduler, weights that thaw, state that is dropped, a user's own gradients, copies of optimizers."""
    ends = []
    for path in (None, "."):
        with attached(path, blocks=5) as (model, _):
            model[0].requires_grad_(False)
            model[3].bias.requires_grad_(False)
            groups = [{"params": [*model[:2].parameters()], "lr": 0.1}, {"params": [*model[2:4].parameters()]}]
            optimizer: Any = INT8(groups)
            scheduler = StepLR(optimizer, 1, 0.5)
            take_steps(model, optimizer, 2)
            scheduler.step()
            model.requires_grad_(True)
            take_steps(model, optimizer, 2)
            optimizer.add_param_group({"params": [*model[4].parameters()]})
            take_steps(model, optimizer, 2)
            state = optimizer.state
            del state[model[1].weight]
            take_steps(model, optimizer, 2)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter.t(), 0.1).t()
            optimizer.step()
            optimizer.zero_grad()
            copied = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
            assert same(everything(model, optimizer), everything(model, copied))
            take_steps(model, optimizer)
            ends.append(everything(model, optimizer))
    assert same(*ends)


def test_two_optimizers_over_one_unit() -> None:
    ends = []
    for path in (None, "."):
        with attached(path, blocks=2) as (model, _):
            optimizers = [INT8([layer.weight for layer in model]), INT8([layer.bias for layer in model])]
            for step in range(3):
                model(X * (1 + step)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            ends.append(everything(model, *optimizers))
    assert same(*ends)


def test_a_recording_has_what_the_drive_does() -> None:
    with attached() as (model, pipeline):
        optimizer = INT8(model.parameters())
        take_steps(model, optimizer)
        with pipeline.record() as recording:
            take_steps(model, optimizer)
        for kind in (Kind.READ, Kind.WRITE):
            spans = [span for span in recording.spans if span.kind is kind]
            assert sum(span.nbytes for span in spans) == pipeline.summary().on_drive[1]
            assert {span.name for span in spans} == set(pipeline.summary().unit_names)


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partial(SGD, lr=0.1, momentum=0.9), "SGD with these options makes more than one pass"),
        (partial(Adagrad, lr=0.1), "Adagrad with these options makes more than one pass"),
        (partial(AdamW, amsgrad=True, fused=True), "AdamW with these options makes more than one pass"),
        (partial(AdamW, capturable=True, foreach=False), "AdamW has capturable=True"),
    ],
)
def test_optimizers_that_make_several_passes(make: Make, reason: str) -> None:
    with attached() as (model, _), pytest.raises(ValueError, match=rf"`nvme_path='.'`: {reason}.*AdamW and Adam with"):
        take_steps(model, make(model.parameters()))


def failing(number: int, message: str = "the drive's words") -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, message)

    return fail


FOLDERS: dict[str, tuple[Any, str, Any, str]] = {
    "read-only": (tempfile, "TemporaryFile", failing(errno.EROFS, "read-only"), "no file can be made there: read-only"),
    "tmpfs": (state_file, "_type_of_file_system", lambda _: "tmpfs", "is on tmpfs, which is no drive of this machine"),
    "network": (state_file, "_type_of_file_system", lambda _: "nfs4", "is on nfs4, which is no drive of this machine"),
    "other system": (state_file.os, "O_DIRECT", None, "needs Linux"),
}


@pytest.mark.parametrize("case", [*FOLDERS, "missing", "a file"])
def test_folders_that_cannot_have_state(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = {"missing": "nowhere", "a file": __file__}.get(case, ".")
    message = {"missing": "No such file", "a file": "Not a directory"}.get(case, "")
    if case in FOLDERS:
        owner, name, value, message = FOLDERS[case]
        if value is None:
            monkeypatch.delattr(owner, name)
        else:
            monkeypatch.setattr(owner, name, value)
    model = chain(2)
    with pytest.raises(ValueError, match=f"`nvme_path={path!r}`.*{message}"):
        superpipeline(model, "cpu", nvme_path=path)
    superpipeline(model, "cpu").detach()


@pytest.mark.parametrize("case", ["full", "quota"])
def test_a_drive_without_room(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known before a weight is stepped."""
    if case == "full":
        monkeypatch.setattr(state_file.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    else:
        monkeypatch.setattr(os, "posix_fallocate", failing(errno.EDQUOT, "Quota exceeded"))
    reason = {"full": "4.0 KiB are free", "quota": "Quota exceeded"}[case]
    with attached() as (model, _):
        before = copy.deepcopy(model.state_dict())
        optimizer = INT8(model.parameters())
        message = rf"`nvme_path='.'` has no room for [\d.]+ KiB of optimizer state: {reason}"
        with pytest.warns(UserWarning, match="has failed"), pytest.raises(ValueError, match=message):
            take_steps(model, optimizer)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("case", ["no O_DIRECT", "short transfers"])
def test_file_systems_that_do_less(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "no O_DIRECT":
        monkeypatch.setattr(fcntl, "fcntl", failing(errno.EINVAL))
    else:
        for name in ("preadv", "pwritev"):
            whole = getattr(os, name)
            monkeypatch.setattr(os, name, lambda fd, memory, offset, whole=whole: whole(fd, [memory[0][:512]], offset))
    expected, _ = train_placed(INT8, None)
    warns = pytest.warns(UserWarning, match="`nvme_path='.'`.*cannot bypass") if case == "no O_DIRECT" else None
    with warns or pytest.MonkeyPatch.context():
        actual, _ = on_drive(INT8)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_the_drive_of_the_system() -> None:
    with pytest.warns(UserWarning, match="`nvme_path='/'` is on the drive of the system"):
        state_file.check_folder("/")


# ------------------------------------------------------------------------------------------------------ what fails


FAILURES = {
    "read": ("preadv", failing(errno.EIO, "Input/output error"), "could not read .*: Input/output error"),
    "write": ("pwritev", failing(errno.EIO, "Input/output error"), "could not write .*: Input/output error"),
    "full": ("pwritev", failing(errno.ENOSPC, "No space left"), "could not write .*: No space left"),
    "end": ("preadv", lambda *_: 0, "could not read .*: the file has ended"),
    "kernel": ("run", failing(0), "the drive's words"),
}


@pytest.mark.parametrize("number", [0, 5, 17])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_lasting(case: str, in_backward: bool, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the run: no step, and no state that could be saved, comes after it."""
    name, fail, reason = FAILURES[case]
    owner = state_ring if name == "run" else os
    calls, whole = count(), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: (fail if next(calls) == number else whole)(*args))
    with attached() as (model, pipeline):
        optimizer = INT8(model.parameters())

        def train() -> None:
            for _ in range(8):
                optimizer.zero_grad()
                loss = model(X).square().mean()
                if in_backward:
                    with pipeline.optimizers.stepping_in_backward(optimizer):
                        loss.backward()
                else:
                    loss.backward()
                optimizer.step()

        with pytest.raises((RuntimeError, OSError), match=reason):
            train()
        pipeline.reset()
        for again in (train, optimizer.state_dict, model.state_dict, pipeline.detach):
            with pytest.raises(RuntimeError, match=f"`nvme_path='.'` has failed: .*{reason}.*last checkpoint"):
                again()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("clip", "in_backward"), [(0.01, False), (None, True)])
@pytest.mark.parametrize("seed", [0, 1])
def test_units_that_come_and_go(seed: int, clip: float | None, in_backward: bool, accumulate: int) -> None:
    """To the GPU, where they stay or are updated for some steps, and back: their state comes along."""
    arguments: dict[str, Any] = {"clip": clip, "in_backward": in_backward, "accumulate": accumulate, "steps": 9}
    expected, _ = train_placed(INT8, None, dtype=BF16, **arguments)
    actual, stats = train_placed(INT8, Wanders(seed), nvme_path=".", debug=True, dtype=BF16, **arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert stats.bytes_to_drive > 0
    assert stats.arrangements > 2, "units have moved"
