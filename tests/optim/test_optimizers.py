"""The optimizers of sp_lightning.optim against torch's fused CPU kernels, bit for bit; their bytes and checkpoints."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from sp_lightning import optim
from sp_lightning.optim import compact, passes

from ..helpers import torchs_defaults

SIZES = ((3,), (13,), (70, 33), (5, 64))
pytest.importorskip("numba")


def bits(tensor):
    return tensor.detach().contiguous().view(torch.int32)


def pair(dtype, sizes=SIZES):
    """fp32 weights, and the same as parameters of a dtype."""
    torch.manual_seed(0)
    plain = [torch.nn.Parameter(torch.randn(size).bfloat16().float()) for size in sizes]
    return plain, [torch.nn.Parameter(p.detach().to(dtype, copy=True)) for p in plain]


def give_gradients(plain, ours, factor=1.0):
    for p, own in zip(plain, ours, strict=True):
        own.grad = torch.randn(p.shape).mul(1e-2).to(own.dtype)
        own.grad.view(-1)[1] = -0.0  # a first momentum has its sign
        p.grad = own.grad.float().clone()
        if factor != 1:  # as clip_grad_norm_ does, to a gradient in fp32
            p.grad.mul_(factor)
            own.grad = p.grad.bfloat16() if own.dtype == torch.bfloat16 else p.grad.clone()
            p.grad = own.grad.float().clone()


@pytest.mark.parametrize(
    ("name", "dtype", "steps", "options"),
    [
        ("AdamW", torch.float32, 5, {"weight_decay": 0.1}),
        ("AdamW", torch.float32, 5, {"weight_decay": 0.0, "betas": (0.4, 0.99), "maximize": True}),
        ("Adam", torch.float32, 5, {"weight_decay": 0.1}),
        ("Adam", torch.float32, 5, {}),
        ("SGD", torch.float32, 5, {"weight_decay": 0.1}),
        ("SGD", torch.float32, 5, {"momentum": 0.9, "dampening": 0.3}),
        ("SGD", torch.float32, 5, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("AdamW", torch.bfloat16, 200, {"master": "auto"}),
        ("AdamW", torch.bfloat16, 200, {"master": "fp32"}),
        ("SGD", torch.bfloat16, 20, {"momentum": 0.9, "master": "split"}),
        ("Lion", torch.bfloat16, 20, {"master": "split"}),
    ],
)
def test_masters_and_moments_have_the_bits_of_torch_over_fp32_weights(name, dtype, steps, options):
    """With gradients that are scaled before, and a scheduler."""
    plain, ours = pair(dtype, (*SIZES, (300, 257)))
    own = getattr(optim, name)(ours, lr=1e-2, **options)
    options = {key: value for key, value in options.items() if key != "master"}
    theirs = (
        optim.Lion(plain, lr=1e-2) if name == "Lion" else getattr(torch.optim, name)(plain, 1e-2, fused=True, **options)
    )
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, steps) for each in (theirs, own)]
    for step in range(steps):
        give_gradients(plain, ours, factor=1 / (1 + step % 3))
        for each in (theirs, own, *schedules):
            each.step()
    for p, (q, master, state) in zip(plain, own.export(), strict=True):
        assert torch.equal(bits(p), bits(master))
        if dtype == torch.bfloat16 and name == "AdamW":  # others have no sign for a tie
            assert torch.equal(p.bfloat16().view(torch.int16), q.detach().view(torch.int16))
        assert all(torch.equal(bits(theirs.state[p][key]), bits(state[key])) for key in state if key != "step")


@pytest.mark.parametrize(("master", "moments"), [("split", "int8"), ("split24", "bf16")])
def test_small_moments_learn_as_well(master, moments):
    def loss_of(make, dtype):
        torch.manual_seed(1)
        x, target = torch.randn(256, 32), torch.randn(32, 8)
        p = torch.nn.Parameter(torch.zeros(32, 8, dtype=dtype))
        own = make([p])
        for _ in range(300):
            loss = ((x @ p.float() - x @ target) ** 2).mean()
            loss.backward()
            own.step()
            own.zero_grad()
        return loss.item()

    exact = loss_of(lambda params: torch.optim.AdamW(params, lr=1e-2), torch.float32)
    near = loss_of(lambda params: optim.AdamW(params, lr=1e-2, master=master, moments=moments), torch.bfloat16)
    assert near < exact * 1.1 + 0.05


def test_small_updates_vanish_without_a_master_only():
    def moved(master, moments="fp32"):
        p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        own = optim.AdamW([p], lr=1e-6, weight_decay=0, master=master, moments=moments)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            own.step()
        return (1 - own.master(p)).mean().item()

    assert moved(None) == 0
    assert moved("split") == pytest.approx(1e-4, rel=0.02)
    assert moved("split24", "bf16") == pytest.approx(1e-4, rel=0.1)


@pytest.mark.parametrize(("master", "moments"), [("auto", "fp32"), ("split", "int8"), ("split24", "bf16")])
def test_resuming_is_exact(master, moments):
    def steps(own, params, seeds):
        for seed in seeds:
            torch.manual_seed(seed)
            for p in params:
                p.grad = torch.randn(p.shape).to(p.dtype)
            own.step()

    _, params = pair(torch.bfloat16)
    own = optim.AdamW(params, master=master, moments=moments)
    steps(own, params, range(3))
    saved = copy.deepcopy(own.state_dict())
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other, twins = copy.deepcopy((optim.AdamW(twins, master=master, moments=moments), twins))
    for _ in range(2):
        other.load_state_dict(saved)
    steps(own, params, range(3, 6))
    steps(other, twins, range(3, 6))
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(own.state[p][key], other.state[q][key]) for key in own.state[p])


def test_torch_continues_and_is_continued():
    plain, ours = pair(torch.bfloat16)
    own = optim.AdamW(ours)
    reference = torch.optim.AdamW(plain, fused=True)
    for _ in range(3):
        give_gradients(plain, ours)
        reference.step()
        own.step()
    exported = [(torch.nn.Parameter(weight), state) for _, weight, state in own.export()]
    twins = [p for p, _ in exported]
    theirs = torch.optim.AdamW(twins, fused=True)
    for p, state in exported:
        theirs.state[p] = state
    back = [torch.nn.Parameter(p.detach().clone()) for p in twins]
    again = optim.AdamW(back)
    again.load_state_dict(copy.deepcopy(theirs.state_dict()))
    give_gradients(plain, twins)
    for p, q in zip(twins, back, strict=True):
        q.grad = p.grad
    for each in (reference, theirs, again):
        each.step()
    for p, q, r in zip(plain, twins, back, strict=True):
        assert torch.equal(bits(p), bits(q))
        assert torch.equal(bits(p), bits(r))


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_threads_do_not_matter(moments):
    def result(threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(passes._LEAST + 77).bfloat16())
        own = optim.AdamW([p], master="split24", moments=moments)
        p.grad = torch.randn(p.shape).bfloat16()
        own.step()
        torch.set_num_threads(before)
        return own.master(p)

    assert torch.equal(result(1), result(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optim.AdamW([weight(torch.half)]),
            "parameter 0 of its group is torch.float16 on cpu, but .* fp32 and",
        ),
        (lambda: optim.AdamW([weight(torch.half)], master="split"), "parameter 0 of its group is torch.float16"),
        (lambda: optim.Lion([weight(torch.double)]), "torch.float64 on cpu"),
        (lambda: optim.SGD([weight(torch.float, device="meta")]), "torch.float32 on meta, but .* or an accelerator"),
        (lambda: optim.AdamW([weight(torch.float)], master="split"), 'master="split" is for bf16 parameters'),
        (
            lambda: optim.AdamW([("tail", weight(torch.bfloat16)), ("head", weight(torch.float))], master="split24"),
            'master="split24" is for bf16 parameters, but head is torch.float32: leave master="auto", or put',
        ),
        (lambda: optim.AdamW([torch.nn.Parameter(torch.zeros(4, 8)[:, ::2])]), "parameter 0 .* has gaps in memory"),
        (lambda: optim.SGD([weight(torch.float)], moments="int4"), "moments='int4': expected one of"),
        (lambda: optim.SGD([{"params": [weight(torch.float)], "master": "fp64"}]), "master='fp64': expected one of"),
        (lambda: optim.AdamW([weight(torch.float)], amsgrad=True), r"amsgrad=True: use torch.optim.AdamW"),
        (lambda: optim.SGD([weight(torch.float)], momentum=float("nan")), "Invalid momentum value: nan"),
        (lambda: optim.SGD([weight(torch.float)], lr=float("nan")), "Invalid lr value: nan"),
        (lambda: optim.Lion([weight(torch.float)], betas=(0.9, 1.0)), "Invalid beta parameter at index 1: 1.0"),
    ],
)
def test_what_cannot_be_stepped_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            ("AdamW", {name: value})
            for name in ("lr", "eps", "weight_decay")
            for value in (-1.0, float("nan"), "1e-3", None)
        ),
        *(("SGD", {name: value}) for name in ("lr", "momentum", "weight_decay") for value in (-1.0, "1e-3")),
        *(("Adam", {"betas": value}) for value in ((0.9, 1.0), (float("nan"), 0.9), (0, 0.9), 0.9, (0.9,))),
        ("Adam", {"lr": torch.zeros(2)}),
        ("SGD", {"nesterov": True}),
        ("SGD", {"foreach": True, "fused": True}),
        ("AdamW", {"foreach": True, "fused": True, "maximize": True}),
    ],
)
def test_arguments_are_checked_in_torchs_words(name, options):
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        getattr(torch.optim, name)([weight(torch.float)], **options)
    with pytest.raises(theirs.type, match=f"^{re.escape(str(theirs.value))}$"):
        getattr(optim, name)([weight(torch.float)], **options)


def weight(dtype, **options):
    return torch.nn.Parameter(torch.zeros(3, dtype=dtype, **options))


def test_what_is_refused_leaves_the_optimizer_as_it_was():
    own = optim.AdamW([torch.nn.Parameter(torch.zeros(4, 8).t())])  # in another order, but without gaps
    with pytest.raises(ValueError, match="torch.float16"):
        own.add_param_group({"params": [weight(torch.half)]})
    assert len(own.param_groups) == 1
    first, second = weight(torch.float), weight(torch.float)
    own = optim.AdamW([first, second])
    first.grad, second.grad = torch.ones(3), torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match=r"a gradient is sparse: use Embedding\(sparse=False\)"):
        own.step()
    assert not own.state


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        ((optim.AdamW, {"moments": "int8"}), (optim.AdamW, {}), "master='auto', moments='int8', but this optimizer"),
        # codes without their scales
        ((optim.AdamW, {"moments": "int8"}),) * 2
        + ("has step, low, exp_avg_codes, exp_avg_sq_codes, exp_avg_sq_scale, but AdamW",),
        ((torch.optim.AdamW, {"amsgrad": True}), (optim.AdamW, {}), "amsgrad=True: continue it with torch's"),
        ((torch.optim.SGD, {"momentum": 0.9}), (optim.AdamW, {}), "has momentum_buffer, but AdamW .* keeps step, low"),
        ((torch.optim.AdamW, {}), (optim.Lion, {}), "has step, exp_avg, exp_avg_sq, but Lion"),
        (
            (optim.Adam, {}),
            (optim.Adam, {"dtype": torch.float}),
            "has step, low, .* Adam over torch.float32 keeps step",
        ),
        ((torch.optim.AdamW, {"size": 5}), (optim.AdamW, {}), r"exp_avg has \(5,\), the parameter's \(3,\)"),
    ],
)
def test_a_checkpoint_of_another_layout_is_refused(saved, own, message):
    def make(cls, size=3, dtype=torch.bfloat16, **options):
        p = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
        p.grad = torch.ones_like(p)
        return cls([p], **options)

    other, own = (make(cls, **options) for cls, options in (saved, own))
    other.step()
    saved = other.state_dict()
    saved["state"][0].pop("exp_avg_scale", None)
    with pytest.raises(ValueError, match=message):
        own.load_state_dict(saved)


def stepped(cls, dtype, **options):
    p = weight(dtype, device="cpu")
    p.grad = torch.ones_like(p)
    own = cls([p], **options)
    own.step()
    return p, own


@pytest.mark.parametrize(
    ("own", "theirs", "options", "dtype"),
    [
        (optim.AdamW, torch.optim.AdamW, {"master": "fp32"}, torch.bfloat16),
        (optim.Adam, torch.optim.Adam, {"moments": "int8"}, torch.float),
        (optim.SGD, torch.optim.SGD, {}, torch.bfloat16),
        (optim.Lion, torch.optim.SGD, {"moments": "int8"}, torch.float),
    ],
)
def test_torch_refuses_what_it_would_misread(own, theirs, options, dtype):
    p, compact = stepped(own, dtype, **options)
    with pytest.raises(ValueError, match="loaded state dict has a different number of parameter groups"):
        theirs([p]).load_state_dict(compact.state_dict())
    own([p], **options).load_state_dict(compact.state_dict())


@pytest.mark.parametrize("master", ["fp32", "split24"])
def test_torchs_default_dtype_and_device_are_not_those_of_state(master):
    """Lightning sets the dtype around a training step, in which manual optimization steps."""

    def state():
        p, own = stepped(optim.AdamW, torch.bfloat16, master=master, moments="int8")
        assert own.state_bytes(own.param_groups[0]) == sum(value.nbytes for value in own.state[p].values())
        return own.state[p]

    expected = state()
    with torchs_defaults(torch.bfloat16, "meta"):
        found = state()
    assert [value.dtype for value in found.values()] == [value.dtype for value in expected.values()]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_weight_that_was_laid_out_anew_is_said():
    p = torch.nn.Parameter(torch.zeros(4, 8))
    own = optim.AdamW([p])
    for match in (None, "in another order than its optimizer state"):
        p.grad = torch.ones_like(p)
        with nullcontext() if match is None else pytest.raises(RuntimeError, match=match):
            own.step()
        p.data = p.data.t().contiguous().t()


def test_compiling_a_kernel_is_said_once(tmp_path):
    """In a process with an empty cache; one with a full cache has nothing to wait for. Neither sees other threads."""
    code = (
        "import os, torch, numba, sp_lightning.optim as optim\n"
        "torch.set_num_threads(1)\n"
        "if other := os.fork():\n"
        "    assert os.waitpid(other, 0)[1] == 0, 'the one before has failed'\n"
        "for _ in range(2):\n"
        "    p = torch.nn.Parameter(torch.zeros(3)); p.grad = torch.ones(3); optim.SGD([p]).step()\n"
        "assert torch.get_num_threads() == 1, 'sums would have other bits'\n"
        "assert numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    both = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert both.stderr.count("has compiled a kernel") == 1


def test_without_numba(monkeypatch):
    monkeypatch.setattr(compact, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="AdamW needs numba on the CPU: pip install"):
        optim.AdamW([weight(torch.float)])


def test_a_weight_without_elements():
    weight = torch.nn.Parameter(torch.empty(0, 3))
    weight.grad = torch.empty(0, 3)
    optimizer = optim.AdamW([weight])
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1
