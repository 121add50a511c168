"""The optimizers of sp_lightning.optim against torch's fused CPU kernels, bit for bit; their bytes and checkpoints."""

from __future__ import annotations

import copy
import math
import pickle
import re
from functools import partial

import pytest
import torch

from sp_lightning import optim
from sp_lightning.optim import on_device, passes
from sp_lightning.optim.layout import GROUP, moment_in

from ..helpers import torchs_defaults
from ..processes import run_python
from .parts import needs_numba

SIZES = ((3,), (13,), (70, 33), (5, 64))
pytestmark = needs_numba


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
        ("AdamW", torch.float32, 5, {"weight_decay": 0.0, "betas": (0.4, 0.99)}),
        ("Adam", torch.float32, 5, {"weight_decay": 0.1}),
        ("Adam", torch.float32, 5, {}),
        ("AdamW", torch.bfloat16, 200, {}),
    ],
)
def test_masters_and_moments_have_the_bits_of_torch_over_fp32_weights(name, dtype, steps, options):
    """With gradients that are scaled before, and a scheduler."""
    plain, ours = pair(dtype, (*SIZES, (300, 257)))
    own = getattr(optim, name)(ours, lr=1e-2, **options)
    theirs = getattr(torch.optim, name)(plain, 1e-2, fused=True, **options)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, steps) for each in (theirs, own)]
    for step in range(steps):
        give_gradients(plain, ours, factor=1 / (1 + step % 3))
        for each in (theirs, own, *schedules):
            each.step()
    for p, q in zip(plain, ours, strict=True):
        assert torch.equal(bits(p), bits(own.master(q)))
        assert torch.equal(p.to(dtype), q.detach())
        second, _ = moment_in(own.state[q], "exp_avg_sq")
        assert torch.equal(theirs.state[p]["exp_avg"], own.state[q]["exp_avg"])
        assert torch.equal(theirs.state[p]["exp_avg_sq"], second.abs())  # its sign is that of a tie


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_small_updates_do_not_vanish(moments):
    """As they would in bf16 weights alone."""
    p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    own = optim.AdamW([p], lr=1e-6, weight_decay=0, moments=moments)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        own.step()
    assert (1 - own.master(p)).mean().item() == pytest.approx(1e-4, rel=0.02)


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_resuming_is_exact(moments):
    """Also twice, and after a copy."""

    def steps(own, params, seeds):
        for seed in seeds:
            torch.manual_seed(seed)
            for p in params:
                p.grad = torch.randn(p.shape).to(p.dtype)
            own.step()

    _, params = pair(torch.bfloat16)
    own = optim.AdamW(params, moments=moments)
    steps(own, params, range(3))
    saved = copy.deepcopy(own.state_dict())
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = optim.AdamW(twins, moments=moments)
    for _ in range(2):
        other.load_state_dict(saved)
    steps(own, params, range(3, 6))
    steps(other, twins, range(3, 6))
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(own.state[p][key], other.state[q][key]) for key in own.state[p])
    copy.deepcopy(other).load_state_dict(saved)


def test_torch_continues_and_is_continued():
    """Over fp32 weights, whose state is torch's own."""
    plain, ours = pair(torch.float32)
    theirs, own = torch.optim.AdamW(plain, fused=True), optim.AdamW(ours)
    for _ in range(2):
        give_gradients(plain, ours)
        theirs.step()
        own.step()
        saved = copy.deepcopy((theirs.state_dict(), own.state_dict()))
        own.load_state_dict(saved[0])
        theirs.load_state_dict(saved[1])
        theirs.param_groups[0]["fused"] = True  # ours have no such option
    for p, q in zip(plain, ours, strict=True):
        assert torch.equal(bits(p), bits(q))


def test_threads_do_not_matter():
    def result(threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(passes._RANGE + 77).bfloat16())
        own = optim.AdamW([p], moments="int8")
        p.grad = torch.randn(p.shape).bfloat16()
        own.step()
        torch.set_num_threads(before)
        return own.state[p]["exp_avg_sq_codes"]

    assert torch.equal(result(1), result(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.AdamW([weight(torch.half)]), "parameter 0 of its group is torch.float16 on cpu, but .* FP32"),
        (lambda: optim.Adam([weight(torch.double)]), "torch.float64 on cpu"),
        (lambda: optim.AdamW([weight(torch.float, device="meta")]), "torch.float32 on meta, but .* or an accelerator"),
        (lambda: optim.AdamW([("head", weight(torch.half))]), "head is torch.float16"),
        (lambda: optim.AdamW([torch.nn.Parameter(torch.zeros(4, 8)[:, ::2])]), "parameter 0 .* is not contiguous"),
        (lambda: optim.Adam([weight(torch.float)], moments="int4"), "`moments='int4'` must be 'fp32' or 'int8'"),
        (lambda: optim.AdamW([{"params": [weight(torch.float)], "moments": "bf16"}]), "`moments='bf16'` must be"),
        (lambda: optim.AdamW([weight(torch.float)], lr=float("nan")), "Invalid learning rate: nan"),
    ],
)
def test_what_cannot_be_stepped_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("AdamW", {name: each}) for name in ("lr", "eps", "weight_decay") for each in (-1.0, math.nan, "1e-3", None)),
        *(("Adam", {"betas": value}) for value in ((0.9, 1.0), (math.nan, 0.9), (0, 0.9), 0.9, (0.9,))),
        ("Adam", {"lr": torch.zeros(2)}),
    ],
)
def test_arguments_are_checked_in_torchs_words(name, options):
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        getattr(torch.optim, name)([weight(torch.float)], **options)
    with pytest.raises(theirs.type, match=f"^{re.escape(str(theirs.value))}$"):
        getattr(optim, name)([weight(torch.float)], **options)


def weight(dtype, **options):
    return torch.nn.Parameter(torch.zeros(3, dtype=dtype, **options))


@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.float32, 4), (torch.bfloat16, 6)])
@pytest.mark.parametrize(("moments", "less"), [("fp32", 0), ("int8", 3 - 4 / GROUP)])
def test_lion(dtype, nbytes, moments, less):
    """Its master weights and its moment are those of its paper; a step of a wrong sign would be seen."""
    start = torch.randn(GROUP * 8).to(dtype)
    p = torch.nn.Parameter(start.clone())
    own = optim.Lion([p], lr=1e-3, weight_decay=0.1, moments=moments)
    master, moment = start.float(), torch.zeros(GROUP * 8)
    for _ in range(5):
        p.grad = torch.randn_like(p)
        gradient = p.grad.float()
        own.step()
        direction = (0.9 * moment + 0.1 * gradient).sign()
        master = master * (1 - 1e-4) - 1e-3 * direction
        moment = 0.99 * moment + 0.01 * gradient
    apart = (own.master(p) - master).abs()
    assert (apart < 1e-5).float().mean() > (0.999 if moments == "fp32" else 0.97)
    state = own.state[p]
    assert sum(value.nbytes for name, value in state.items() if name != "step") == p.numel() * (nbytes - less)
    with pytest.raises((ValueError, KeyError)):
        torch.optim.AdamW([p]).load_state_dict(own.state_dict())
    other = optim.Lion([torch.nn.Parameter(p.detach().clone())], moments=moments)
    other.load_state_dict(own.state_dict())
    with pytest.raises(ValueError, match="this optimizer keeps"):
        optim.AdamW([p], moments=moments).load_state_dict(own.state_dict())


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lion"])
def test_an_argument_of_torchs_is_answered_with_ours(name):
    with pytest.raises(TypeError, match=f"`sp_lightning.optim.{name}` has no argument `fused`, because its step"):
        getattr(optim, name)([weight(torch.float)], fused=True)


@pytest.mark.parametrize(
    "option", [{"maximize": True}, {"amsgrad": True}, {"fused": True}, {"momentum": 0.9}, {"rate": 1e-3}]
)
def test_an_option_of_a_group_that_would_be_ignored_is_refused(option):
    own = optim.AdamW([weight(torch.float)])
    (name,) = option
    for add in (lambda group: optim.AdamW([group]), own.add_param_group):
        with pytest.raises(TypeError, match=f"`sp_lightning.optim.AdamW` has no argument `{name}`"):
            add({"params": [weight(torch.float)], **option})
    assert len(own.param_groups) == 1


SCHEDULES = {
    "one cycle": lambda own: torch.optim.lr_scheduler.OneCycleLR(own, max_lr=0.1, total_steps=9),
    "cycles": lambda own: torch.optim.lr_scheduler.CyclicLR(own, base_lr=0.1, max_lr=0.2),
    "averages": lambda own: torch.optim.swa_utils.SWALR(own, swa_lr=0.1),
    "cosine": lambda own: torch.optim.lr_scheduler.CosineAnnealingLR(own, 9),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_may_have_what_others_add(schedule):
    """Labels, options of torch's that are off, and what schedulers leave: such groups are given again."""
    labels = {"name": "head", "maximize": False, "foreach": None, "lr": 0.1, "lr_scale": 0.5}
    own = optim.AdamW([{"params": [("weight", weight(torch.float))], **labels}])
    SCHEDULES[schedule](own)
    again = optim.AdamW(own.param_groups)
    assert again.param_groups[0]["name"] == "head"
    assert "initial_lr" in again.param_groups[0]


def test_what_is_refused_leaves_the_optimizer_as_it_was():
    own = optim.AdamW([torch.nn.Parameter(torch.zeros(4, 8).t())])  # in another order, but without gaps
    with pytest.raises(ValueError, match="torch.float16"):
        own.add_param_group({"params": [weight(torch.half)]})
    assert len(own.param_groups) == 1
    first, second = weight(torch.float), weight(torch.float)
    own = optim.AdamW([first, second])
    first.grad, second.grad = torch.ones(3), torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match=r"A gradient is sparse. Use `Embedding\(sparse=False\)`"):
        own.step()
    assert not own.state


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        ((optim.AdamW, {"moments": "int8"}), (optim.AdamW, {}), "'int8', but this optimizer has moments='fp32'"),
        (
            *[(optim.AdamW, {"moments": "int8"})] * 2,
            "exp_avg_codes, exp_avg_sq_codes, exp_avg_sq_scale, but",
        ),  # no scales
        ((torch.optim.AdamW, {"amsgrad": True}), (optim.AdamW, {}), "has step, exp_avg, .*, max_exp_avg_sq, but"),
        ((torch.optim.AdamW, {}), (optim.Adam, {}), "decoupled weight decay, but sp_lightning.optim.Adam has none"),
        ((torch.optim.AdamW, {"maximize": True}), (optim.AdamW, {}), "that sp_lightning.optim no longer supports"),
        ((torch.optim.AdamW, {}), (optim.AdamW, {}), "has step, exp_avg, exp_avg_sq, but this optimizer keeps step"),
        ((optim.AdamW, {"size": 5}), (optim.AdamW, {}), r"low has the shape \(5,\), but the parameter has \(3,\)"),
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


@pytest.mark.parametrize("change", ["plain pickle", "uint16", "step as an int"])
def test_state_in_other_forms_is_loaded(change):
    """It is pickled, or what earlier versions of torch or of this package have saved."""
    p, own = stepped(optim.AdamW, torch.bfloat16)
    saved = copy.deepcopy(own.state_dict())
    state = saved["state"][0]
    if change == "plain pickle":
        saved = pickle.loads(pickle.dumps(saved))
    elif change == "uint16":
        state["low"] = state["low"].view(torch.uint16)
    else:
        state["step"] = 1
    q = torch.nn.Parameter(p.detach().clone())
    other = optim.AdamW([q])
    other.load_state_dict(saved)
    assert other.state[q].keys() == own.state[p].keys()
    for name, value in own.state[p].items():
        assert other.state[q][name].dtype == value.dtype
        assert torch.equal(other.state[q][name], value)


def stepped(cls, dtype, **options):
    p = weight(dtype, device="cpu")
    p.grad = torch.ones_like(p)
    own = cls([p], **options)
    own.step()
    return p, own


@pytest.mark.parametrize(
    "old", [{"master": "fp32"}, {"master": "split24", "moments": "int8"}, {"moments": "bf16"}, {"master": None}]
)
def test_a_checkpoint_of_formats_that_are_gone_names_the_version_that_has_them(old):
    p, own = stepped(optim.AdamW, torch.bfloat16)
    saved = own.state_dict()
    saved["param_groups"][0].update({"master": "auto", "maximize": False})
    optim.AdamW([p]).load_state_dict(copy.deepcopy(saved))  # the exact one is what it was
    saved["param_groups"][0].update(old)
    with pytest.raises(
        ValueError, match=r"no longer supports .* Load it with sp_lightning 0\.1\.0, whose `optimizer.export\(\)`"
    ):
        own.load_state_dict(saved)


@pytest.mark.parametrize(("moments", "dtype"), [("fp32", torch.bfloat16), ("int8", torch.float)])
def test_torch_refuses_what_it_would_misread(moments, dtype):
    p, compact = stepped(optim.AdamW, dtype, moments=moments)
    with pytest.raises(ValueError, match="loaded state dict has a different number of parameter groups"):
        torch.optim.AdamW([p]).load_state_dict(compact.state_dict())
    optim.AdamW([p], moments=moments).load_state_dict(compact.state_dict())


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_torchs_default_dtype_and_device_are_not_those_of_state(moments):
    """Lightning sets the dtype around a training step, in which manual optimization steps."""

    def state():
        p, own = stepped(optim.AdamW, torch.bfloat16, moments=moments)
        assert own.state_bytes(own.param_groups[0]) == sum(value.nbytes for value in own.state[p].values())
        return own.state[p]

    expected = state()
    with torchs_defaults(torch.bfloat16, "meta"):
        found = state()
    assert [value.dtype for value in found.values()] == [value.dtype for value in expected.values()]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


CHANGES = {
    "longer": ((10,), lambda data: data.new_zeros(20)),
    "taller": ((5, 8), lambda data: data.new_zeros(9, 8)),
    "shorter": ((9, 8), lambda data: data.new_zeros(5, 8)),
    "in another order": ((4, 8), lambda data: data.t().contiguous().t()),
    "with gaps": ((4, 8), lambda data: data.new_zeros(4, 16)[:, ::2]),
    "in another dtype": ((4, 8), lambda data: data.to(torch.bfloat16 if data.itemsize == 4 else torch.float)),
    "in FP16": ((4, 8), lambda data: data.half()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_was_changed_is_said(change, moments, dtype):
    """Kernels would read and write beyond its state, or misread it. The step is not counted."""
    shape, make = CHANGES[change]
    p = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    own = optim.AdamW([p], moments=moments)
    p.grad = torch.ones_like(p)
    own.step()
    p.data, p.grad = make(p.data), None
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="has optimizer state or a gradient for another shape.*make a new optimizer"):
        own.step()
    assert own.state[p]["step"] == 1


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_state_and_gradients_of_other_shapes_are_refused_as_torch_refuses_them(name):
    for is_first in (True, False):
        for module in (torch.optim, optim):
            p = torch.nn.Parameter(torch.zeros(10))
            optimizer = getattr(module, name)([p])
            p.grad = torch.ones(10)
            if not is_first:
                optimizer.step()
            p.data = torch.zeros(20)  # the gradient is the one from before
            with pytest.raises(RuntimeError):
                optimizer.step()


def test_compiling_a_kernel_is_said_once(tmp_path):
    """In a process with an empty cache; one with a full cache has nothing to wait for. Neither sees other threads."""
    code = (
        "import logging, os, torch, numba, sp_lightning.optim as optim\n"
        "logging.basicConfig(level='INFO')\n"
        "torch.set_num_threads(1)\n"
        "if other := os.fork():\n"
        "    assert os.waitpid(other, 0)[1] == 0, 'the one before has failed'\n"
        "for _ in range(2):\n"
        "    p = torch.nn.Parameter(torch.zeros(3)); p.grad = torch.ones(3); optim.AdamW([p]).step()\n"
        "    p = torch.nn.Parameter(torch.zeros(3)); p.grad = torch.ones(3); optim.Adam([p], weight_decay=1).step()\n"
        "assert torch.get_num_threads() == 1, 'sums would have other bits'\n"
        "assert numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS\n"
    )
    _, said = run_python("-c", code, NUMBA_CACHE_DIR=str(tmp_path))
    assert said.count("INFO:sp_lightning.optim.kernels:superpipeline: numba compiles kernels") == 1


@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("by", ["kernels", "torch", "torch, together"])
def test_a_weight_without_elements(by, moments, monkeypatch):
    """Beside others, and beside another one."""
    if by != "kernels":
        chosen = on_device.together if by == "torch, together" else list
        by_torch = on_device.step_on_device
        monkeypatch.setattr(passes, "_calls_of", lambda steps: [partial(by_torch, step) for step in chosen(steps)])

    def trained(shapes):
        weights = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = optim.AdamW(weights, moments=moments)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert all(state["step"] == 1 for state in optimizer.state.values())
        return [weight.detach() for weight in weights]

    trained([(0, 3)])
    assert torch.equal(trained([(0,), (0,), (4, 5), (0, 3)])[2], *trained([(4, 5)]))
