"""The optimizers of sp_lightning.optim against torch's fused CPU kernels, bit for bit; their bytes and checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch

from sp_lightning import optim
from sp_lightning.optim import host, passes
from sp_lightning.optim.layout import read_master

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
        p.grad = own.grad.float().clone()
        if factor != 1:  # as clip_grad_norm_ does, to a gradient in fp32
            p.grad.mul_(factor)
            own.grad = p.grad.bfloat16() if own.dtype == torch.bfloat16 else p.grad.clone()
            p.grad = own.grad.float().clone()


KINDS = {
    "AdamW": {"weight_decay": 0.1},
    "AdamW plain": {"weight_decay": 0.0, "betas": (0.4, 0.99)},
    "Adam": {"weight_decay": 0.1},
    "Adam plain": {},
    "SGD": {"weight_decay": 0.1, "lr": 0.01},
    "SGD momentum": {"momentum": 0.9, "dampening": 0.3, "lr": 0.01},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "lr": 0.01},
}


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_has_the_bits_of_torch(kind):
    name, options = kind.split()[0], KINDS[kind]
    plain, ours = pair(torch.float32)
    theirs = getattr(torch.optim, name)(plain, fused=True, **options)
    own = getattr(optim, name)(ours, **options)
    for _ in range(5):
        give_gradients(plain, ours)
        theirs.step()
        own.step()
    for p, q in zip(plain, ours, strict=True):
        assert torch.equal(bits(p), bits(q))
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if theirs.state[p].get(key) is not None:
                assert torch.equal(bits(theirs.state[p][key]), bits(own.state[q][key]))


@pytest.mark.parametrize("master", ["auto", "fp32"])
def test_bf16_is_an_fp32_master_for_200_steps(master):
    plain, ours = pair(torch.bfloat16, (*SIZES, (300, 257)))
    theirs = torch.optim.AdamW(plain, fused=True, lr=1e-2)
    own = optim.AdamW(ours, lr=1e-2, master=master)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 200) for each in (theirs, own)]
    for step in range(200):
        give_gradients(plain, ours, factor=1 / (1 + step % 3))
        for each in (theirs, own, *schedules):
            each.step()
    for p, q in zip(plain, ours, strict=True):
        assert torch.equal(bits(p), bits(own.master(q)))
        assert torch.equal(p.bfloat16().view(torch.int16), q.detach().view(torch.int16))
        assert torch.equal(bits(theirs.state[p]["exp_avg"]), bits(own.state[q]["exp_avg"]))
        assert torch.equal(bits(theirs.state[p]["exp_avg_sq"]), bits(own.state[q]["exp_avg_sq"].abs()))


@pytest.mark.parametrize("name", ["SGD", "Lion"])
def test_split_without_a_sign_keeps_the_master(name):
    plain, ours = pair(torch.bfloat16)
    options = {"momentum": 0.9} if name == "SGD" else {}
    exact, split = (getattr(optim, name)(each, lr=1e-3, **options) for each in (plain, ours))
    for _ in range(20):
        give_gradients(plain, ours)
        exact.step()
        split.step()
    for p, q in zip(plain, ours, strict=True):
        assert torch.equal(bits(p), bits(split.master(q)))


@pytest.mark.parametrize("has_sign", [True, False])
def test_split_codec_over_all_low_halves(has_sign):
    """A step with lr=0 reads and writes each master: what comes back has every bit, of NaN and infinities too."""
    import numpy as np

    from sp_lightning.optim.kernels import step_range
    from sp_lightning.optim.rules import AdamRule, Scaling

    group = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    rule, low = AdamRule.make(group, 1, True), torch.arange(65536, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([0, 1, 0x7F7F, 0x7F7E, 0x8000, 0x8001, 0xFF7F, 0x007F, 0x0080, 0x3F80])
    for high in torch.cat([edges, torch.randint(0, 0x7F80, (1500,), generator=generator)]).tolist():
        value = ((torch.full_like(low, high) << 16) | low).view(torch.float32)
        weight, lower = torch.empty(65536, dtype=torch.bfloat16), torch.zeros(65536, dtype=torch.uint16)
        second = torch.zeros(65536)
        # the store is tried with an fp32 master as the gradient of a step of SGD that makes the weight of it
        _store(value, weight, lower, second, has_sign)
        state = {"low": lower, **({"exp_avg_sq": second} if has_sign else {})}
        assert torch.equal(bits(read_master(weight, state)), bits(value))
        if has_sign:
            assert torch.equal(weight.view(torch.int16), value.bfloat16().view(torch.int16))
            first = np.zeros(65536, np.float32)
            zeros = np.zeros(65536, np.float32)
            memory = weight.view(torch.uint16).numpy(), lower.numpy()
            step_range(rule, *memory, zeros, first, second.numpy(), None, Scaling(), 1, 0)
            assert torch.equal(bits(read_master(weight, state)), bits(value))


def _store(value, weight, lower, second, has_sign):
    from sp_lightning.optim.kernels import store_masters

    sign = second.numpy() if has_sign else None
    store_masters(value.numpy(), weight.view(torch.uint16).numpy(), lower.numpy(), sign)


@pytest.mark.parametrize(
    ("master", "moments", "most"),
    [("auto", "fp32", 12.01), ("fp32", "fp32", 14.01), ("split", "int8", 6.15), ("split24", "int8", 5.15)],
)
def test_bytes_for_each_parameter(master, moments, most):
    p = torch.nn.Parameter(torch.zeros(1 << 16, dtype=torch.bfloat16))
    own = optim.AdamW([p], master=master, moments=moments)
    p.grad = torch.ones_like(p)
    own.step()
    assert (p.nbytes + sum(value.nbytes for value in own.state[p].values())) / p.numel() <= most


@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize("master", ["split", "split24"])
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
    def moved(master):
        p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        own = optim.AdamW([p], lr=1e-6, weight_decay=0, master=master)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            own.step()
        return (1 - own.master(p)).mean().item()

    assert moved(None) == 0
    assert moved("split") == pytest.approx(1e-4, rel=0.02)
    assert moved("split24") == pytest.approx(1e-4, rel=0.1)


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
    other = optim.AdamW(twins, master=master, moments=moments)
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


def test_threads_do_not_matter():
    def result(threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(passes._LEAST + 77).bfloat16())
        own = optim.AdamW([p], master="split24", moments="int8")
        p.grad = torch.randn(p.shape).bfloat16()
        own.step()
        torch.set_num_threads(before)
        return own.master(p)

    assert torch.equal(result(1), result(2))


def test_what_cannot_be_done_is_said(monkeypatch):
    half, single, low = (torch.nn.Parameter(torch.zeros(3, dtype=d)) for d in (torch.half, torch.float, torch.bfloat16))
    with pytest.raises(ValueError, match="parameter 0 of its group is torch.float16"):
        optim.AdamW([half])
    with pytest.raises(ValueError, match="parameter 0 of its group has gaps in memory"):
        optim.AdamW([torch.nn.Parameter(torch.zeros(4, 8)[:, ::2])])
    optim.AdamW([torch.nn.Parameter(torch.zeros(4, 8).t())])  # in another order, without gaps
    with pytest.raises(ValueError, match='master="split" is for bf16 parameters, but head is torch.float32'):
        optim.AdamW([("tail", low), ("head", single)], master="split")
    with pytest.raises(ValueError, match="moments='int4': expected one of"):
        optim.SGD([single], moments="int4")
    with pytest.raises(ValueError, match=r"amsgrad=True: use torch.optim.AdamW"):
        optim.AdamW([single], amsgrad=True)
    saved = optim.AdamW([low], moments="int8").state_dict()
    with pytest.raises(ValueError, match="the checkpoint has master='auto', moments='int8'"):
        optim.AdamW([low]).load_state_dict(saved)


def test_without_numba(monkeypatch):
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    plain, ours = pair(torch.float32)
    theirs, own = torch.optim.AdamW(plain, fused=True), optim.AdamW(ours)
    give_gradients(plain, ours)
    theirs.step()
    own.step()
    assert all(torch.equal(bits(p), bits(q)) for p, q in zip(plain, ours, strict=True))
    with pytest.raises(ImportError, match="needs numba: pip install"):
        optim.AdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))])
    with pytest.raises(ImportError, match="Lion over torch.float32"):
        optim.Lion(ours)
