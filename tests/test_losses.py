"""chunked_cross_entropy: the numbers of F.cross_entropy, under the engine as without it (its memory: tests/gpu)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

from sp_lightning import chunked_cross_entropy, loss_in_slices, superpipeline

from .drawing import random_programs
from .helpers import Run, assert_same_story
from .zoo.blocks import WIDTH, Block, Chain

IGNORED = -100


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    shift: bool = False,
    **choices: Any,
) -> Tensor:
    """The textbook form, all logits at once."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    loss = F.cross_entropy(logits.reshape(-1, len(weight)), labels.reshape(-1), **choices)
    return loss.view(labels.shape) if loss.dim() else loss


def inputs(
    shape: tuple[int, ...], width: int = 8, vocabulary: int = 50, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a head with a bias, and labels of which a third is ignored."""
    hidden = torch.randn(*shape, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocabulary, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocabulary, shape)
    return hidden, weight, bias, labels.masked_fill(torch.rand(shape) < 1 / 3, IGNORED)


def gradients(loss: Tensor, wanted: list[Tensor], outer: Tensor | float = 1.0) -> list[Tensor]:
    """Gradients of a loss that is multiplied with something, as a GradScaler does."""
    return list(torch.autograd.grad((loss * outer).sum(), wanted))


def distance(actual: Tensor, truth: Tensor) -> float:
    """The largest error, relative to the largest element."""
    return float((actual.detach().double() - truth).abs().max() / truth.abs().max())


@random_programs(
    4,
    of=25,
    shape=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    vocabulary=st.integers(1, 40),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    softcap=st.sampled_from([None, 3.0]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@example((2, 3), 32, "mean", 3.0, True, 0)
@example((7,), 33, "sum", None, False, 0)
@example((0,), 33, "mean", None, False, 0)
def test_loss_and_gradients(shape, vocabulary, reduction, softcap, with_bias, seed):
    torch.manual_seed(seed)
    hidden, weight, bias, labels = inputs(shape, vocabulary=vocabulary)
    wanted = [hidden, weight, bias] if with_bias else [hidden, weight]
    choices = {"reduction": reduction, "softcap": softcap}
    choices["bias"] = bias if with_bias else None
    expected = plain(hidden, weight, labels, **choices)
    actual = chunked_cross_entropy(hidden, weight, labels, **choices)
    assert actual.shape == expected.shape
    outer = torch.randn(expected.shape, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    for ours, theirs in zip(gradients(actual, wanted, outer), gradients(expected, wanted, outer), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize(
    ("stored", "autocast"),
    [
        (torch.float32, None), (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
        (torch.bfloat16, None), (torch.float16, None),
    ],
    ids=["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"],
)  # fmt: skip
def test_as_exact_as_the_textbook_form(stored, autocast, scale):
    """Rounding and nothing else: against fp64, errors are of the size that computing with all logits has."""
    hidden, weight, bias, labels = inputs((4, 64), 32, 700, stored)
    with torch.no_grad():
        weight /= math.sqrt(32) / scale**0.5  # logits of ordinary size, and large ones
    tensors = [hidden, weight, bias]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    loss_scale = 1024.0

    def run(loss: Callable[..., Tensor], hidden: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            value = loss(hidden, weight, labels, bias=bias)
        found = gradients(value, [hidden, weight, bias], loss_scale)
        return [value, *found]

    truth = run(plain, *exact)
    textbook = run(plain, *tensors)
    ours = run(chunked_cross_entropy, *tensors)
    for actual, expected, true in zip(ours, textbook, truth, strict=True):
        assert actual.dtype == expected.dtype
        assert distance(actual, true.detach()) <= 2 * distance(expected, true.detach()) + 1e-7


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_shift(reduction):
    hidden, weight, _, labels = inputs((3, 7))
    expected = plain(hidden, weight, labels, shift=True, reduction=reduction)
    actual = chunked_cross_entropy(hidden, weight, labels, shift=True, reduction=reduction)
    if reduction == "none":  # of the labels' own shape: the last position has no next one
        assert actual.shape == labels.shape
        assert not actual[:, -1].any()
        actual = actual[:, :-1]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


class Counts(TorchDispatchMode):
    """Of matrix products."""

    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_product = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.products += is_product and result.numel() > 0  # one of nothing tells the dtype
        return result


@pytest.mark.parametrize(
    ("trained", "products"), [("hidden weight", 4), ("hidden", 3), ("weight", 3), ("bias", 2), ("", 1)]
)
def test_only_what_is_needed_is_computed(trained, products):
    """A frozen head (LoRA) gets no gradient, a frozen model none either, and evaluation is the forward alone."""
    slices = 4  # of sixteen rows and less
    hidden, weight, bias, labels = inputs((6,), 8, 50)
    for name, tensor in {"hidden": hidden, "weight": weight, "bias": bias}.items():
        tensor.requires_grad_(name in trained.split())
    with Counts() as counts:
        loss = chunked_cross_entropy(hidden, weight, labels, bias=bias)
        assert loss.requires_grad == bool(trained)
        if trained:
            loss.backward()
    assert counts.products == products * slices
    for name, tensor in {"hidden": hidden, "weight": weight, "bias": bias}.items():
        assert (tensor.grad is not None) == (name in trained.split())


def test_second_derivatives_are_refused():
    hidden, weight, _, labels = inputs((6,))
    loss = chunked_cross_entropy(hidden, weight, labels)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated again.*F\.cross_entropy\(F\.linear"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(6, 7)}, r"`hidden` must have the shape \(\.\.\., width\).*got \(6, 7\) and \(50, 8\)"),
        ({"hidden": torch.zeros(())}, "`hidden` must have the shape"),
        ({"weight": torch.zeros(8)}, "`weight` \\(vocabulary, width\\)"),
        ({"labels": torch.zeros(5, dtype=torch.long)}, r"`labels` must have the shape .*\(6,\), got \(5,\)"),
        ({"reduction": "avg"}, "`reduction='avg'` must be 'mean', 'sum' or 'none'"),
    ],
)
def test_bad_input(changes, message):
    tensors = {"hidden": torch.zeros(6, 8), "weight": torch.zeros(50, 8), "labels": torch.zeros(6, dtype=torch.long)}
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**{**tensors, **changes})


@pytest.mark.parametrize("labels", [torch.zeros(6), torch.full((6,), 50), torch.full((6,), -1)])
def test_labels_that_are_no_indices(labels):
    with pytest.raises(RuntimeError, match="index"):
        chunked_cross_entropy(torch.zeros(6, 8), torch.zeros(50, 8), labels)


class Head(nn.Linear):
    """An ordinary unit, whose call has the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return chunked_cross_entropy(x, self.weight, torch.arange(len(x)), bias=self.bias)


class CallsForward(Chain):
    """Uses the weights of its head outside of the head's call."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        return self.blocks[-1].forward(x)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [Chain, CallsForward])
def test_streamed(kind, autocast):
    """With accumulation, and evaluation between steps."""

    def story(run: Run) -> None:
        optimizer = AdamW(run.model.parameters(), lr=1e-2)
        for step in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast, cache_enabled=False):
                run.normal_step(f"step {step} / first batch", None, 2 * step)
                run.normal_step(f"step {step} / second batch", optimizer, 2 * step + 1)
                run.evaluate(f"evaluation after step {step}", 2 * step)

    build = lambda: kind([*(Block() for _ in range(4)), Head(WIDTH, 40)])  # noqa: E731
    assert_same_story(story, build, k=1, units=[Block, Head])


SMALL = {
    "vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
CAUSAL = {
    "qwen3": Qwen3Config(**SMALL),
    "tied": LlamaConfig(tie_word_embeddings=True, **SMALL),
    "with a soft cap": Gemma2Config(final_logit_softcapping=2.0, **SMALL),
    "experts": MixtralConfig(output_router_logits=True, num_local_experts=4, **SMALL),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", CAUSAL)
def test_loss_in_slices(kind, streamed, autocast):
    """The model's own loss and gradients, of all tokens and of a micro-batch's, and no logits but the last ones."""
    plain_model = AutoModelForCausalLM.from_config(CAUSAL[kind])
    model = copy.deepcopy(plain_model)
    loss_in_slices(model)
    pipeline = superpipeline(model, "cpu") if streamed else nullcontext()
    tokens = torch.randint(1, 67, (2, 9))
    labels = tokens.masked_fill(torch.rand(2, 9) < 0.2, IGNORED)
    for items in ({}, {"num_items_in_batch": torch.tensor(20)}, {"shift_labels": labels.roll(-1, 1)}):
        found = []
        for each in (plain_model, model):
            each.zero_grad()
            with pipeline.step() if streamed and each is model else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    output = each(tokens, labels=labels, **items)
                output.loss.backward()
            grads = [parameter.grad.clone() for parameter in each.parameters() if parameter.grad is not None]
            found.append([output.loss.detach(), *grads])
        assert output.logits.shape == (2, 1, 67)
        if not autocast:
            torch.testing.assert_close(*found, rtol=2e-5, atol=1e-6)
        for expected, actual in zip(*found, strict=True):  # in bf16 the head's gradients are rounded elsewhere
            assert distance(actual, expected.double()) < 0.03
    assert model(tokens).logits.shape == (2, 9, 67), "without labels all of them"
    assert copy.deepcopy(model)(tokens, labels=labels).loss.isfinite()
    if streamed:
        pipeline.detach()


def test_loss_in_slices_of_any_call():
    """Labels by position, a second request, and an exception in the head, after which no graph stays."""
    plain = AutoModelForCausalLM.from_config(CAUSAL["qwen3"])
    model = copy.deepcopy(plain)
    for _ in range(2):
        loss_in_slices(model)
    assert len(model._forward_pre_hooks) == 1
    tokens = torch.randint(1, 67, (2, 9))
    by_position = (tokens, None, None, None, None, tokens)
    torch.testing.assert_close(model(*by_position).loss, plain(*by_position).loss, rtol=2e-5, atol=1e-6)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    failing = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(tokens, labels=tokens)
    failing.remove()
    assert model.loss_function._hidden is None
    assert copy.deepcopy(model)(tokens, labels=tokens).loss.isfinite()


def test_log_probabilities_of_tokens():
    """As GRPO and DPO need them, with their gradients."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    plain = copy.deepcopy(model)
    loss_in_slices(model)
    tokens, weights = torch.randint(1, 67, (2, 9)), torch.randn(2, 8)
    ours = -model(tokens, labels=tokens, reduction="none").loss
    theirs = plain(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(ours[:, :-1], theirs, rtol=2e-5, atol=1e-6)
    assert not ours[:, -1].any()
    for values in (ours[:, :-1], theirs):
        (values * weights).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-4, atol=1e-6)


def test_losses_that_cannot_be_sliced():
    with pytest.raises(ValueError, match="`Linear` has no loss of transformers' over the logits"):
        loss_in_slices(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="`BertModel` has no loss of transformers' over the logits of a linear layer"):
        loss_in_slices(BertModel(BertConfig(**{**SMALL, "num_attention_heads": 2})))
    scaled = AutoModelForCausalLM.from_config(GraniteConfig(logits_scaling=8.0, **SMALL))
    loss_in_slices(scaled)
    tokens = torch.randint(1, 67, (2, 9))
    with torch.no_grad():
        scaled.lm_head.weight.mul_(50)
    with pytest.raises(RuntimeError, match="`GraniteForCausalLM` does more to its logits"):
        scaled(tokens, labels=tokens)
