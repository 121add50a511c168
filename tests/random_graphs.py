"""Random module graphs, with sizes of the window, policies and ways of training, for hypothesis to draw."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sp_lightning.pipeline.options import ActivationPolicy

from .class_shapes import WITH_ARGUMENTS, shaped
from .helpers import Plan, autocast_forgets_gradients, torchs_defaults, why_no_lstm_in_bf16
from .zoo import Case
from .zoo.blocks import WIDTH, Block, LoRALinear, Stashing, rows
from .zoo.case import sum_of_squares
from .zoo.quantized import Int8Linear

AUTOCAST_FORGETS_GRADIENTS = autocast_forgets_gradients()

Tree = tuple[Any, ...]  # the name of a node and its arguments, trees among them


ADAPTED: dict[str, Callable[[nn.Linear], nn.Linear]] = {"adapter": lambda layer: layer, "int8": Int8Linear}
"""Frozen layers, some of them quantized, that have adapters beside them."""


class Adapted(LoRALinear):
    """Uses its weights themselves: of views of them (`self.b.T`), autocast's cache has no casts, so sums differ."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class Leaf(nn.Module):
    """A layer of some kind: views as outputs, buffers, weights on ``ctx``, adapters, state that changes."""

    KINDS = (
        "block", "dropout", "linear", "batchnorm", "stash", "scale", "lstm", "view", "norm", "counts", "chance",
        "average", "hook", *ADAPTED,
    )  # fmt: skip

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "block":
            self.inner: nn.Module = Block()
        elif kind == "dropout":
            self.inner = Block(dropout=0.3)
        elif kind == "linear":
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        elif kind == "batchnorm":
            self.inner = nn.BatchNorm1d(WIDTH)
        elif kind == "stash":
            self.inner = Stashing(inplace=True)
        elif kind == "lstm":
            self.inner = nn.LSTM(WIDTH, WIDTH)
        elif kind in ("view", "norm", "hook"):
            self.inner = nn.Linear(WIDTH, WIDTH)
        elif kind in ADAPTED:
            self.inner = Adapted(ADAPTED[kind](nn.Linear(WIDTH, WIDTH)))
        else:
            self.inner = nn.Identity()
        self.scale = nn.Parameter(torch.randn(WIDTH)) if kind in ("scale", "counts", "chance") else None
        # held past the module, and written to in its call
        self.average = nn.Parameter(torch.zeros(WIDTH), requires_grad=False) if kind == "average" else None
        self.held = [self.average]
        self.calls: list[int] = []
        self.chance = random.Random(0) if kind == "chance" else None

    def forward(self, x: Any) -> Tensor:
        x, *changed = x if isinstance(x, tuple) else (x,)
        for calls in [*changed, self.calls] if self.kind == "counts" else changed:
            calls.append(len(calls))
            x = x * (1 + 0.1 * calls[-1])
        if self.chance is not None:
            x = x * self.chance.random()
        if self.kind == "lstm":
            return self.inner(x)[0]
        if self.kind == "view":
            return self.inner(x[:, None])[:, 0]
        if self.kind == "norm":
            self.__dict__["kept"] = self.inner.weight
            return self.inner(x) / (1 + self.inner.weight.norm())
        if self.kind == "average":
            with torch.no_grad():
                self.held[0].mul_(0.5).add_(x.mean(0))
            return x + self.average.clone()
        if self.kind == "hook":
            y = self.inner(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient / (1 + self.inner.weight.detach().norm().item()))
            return y
        if self.kind == "stash":
            self.__dict__["output"] = self.inner(x)
            return self.output
        return self.inner(x) if self.scale is None else x * self.scale


class Node(nn.Module):
    """A module with children; ``call`` says what it does with them."""

    def __init__(self, children: list[nn.Module], call: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.parts, x)


def run_chain(parts: nn.ModuleList, x: Tensor) -> Tensor:
    for part in parts:
        x = part(x)
    return x


def run_branches(parts: nn.ModuleList, x: Tensor) -> Tensor:
    return sum(part(x) for part in parts) / len(parts)


def run_given(parts: nn.ModuleList, x: Tensor) -> Tensor:
    """Each leaf is given what all of them change."""
    calls: list[int] = []
    for part in parts:
        x = part((x, calls) if isinstance(part, Leaf) else x)
    return x


def run_twice(parts: nn.ModuleList, x: Tensor) -> Tensor:
    return run_chain(parts, run_chain(parts, x).tanh())


def run_kept(parts: nn.ModuleList, x: Tensor) -> Tensor:
    """Weights that leaves had in their calls are used after these."""
    x = run_chain(parts, x)
    for part in parts:
        if isinstance(part, Leaf) and part.kind == "norm":
            x = x / (1 + part.kept.norm())
    return x


def run_aside(parts: nn.ModuleList, x: Tensor) -> Tensor:
    """What a leaf has computed is found on it, and not in what it returns."""
    for part in parts:
        y = part(x)
        x = part.__dict__.pop("output", y)
    return x


def run_inplace_residual(parts: nn.ModuleList, x: Tensor) -> Tensor:
    """The last part is a leaf of kind "view", whose output may be changed in place."""
    y = run_chain(parts, x)
    y += x
    return y


def run_some(parts: nn.ModuleList, x: Tensor) -> Tensor:
    for part in parts:
        if torch.rand((), dtype=torch.float32) < 0.6:  # in whatever dtype a forward runs, and its repetition
            x = part(x)
    return x


def run_checkpointed(parts: nn.ModuleList, x: Tensor, reentrant: bool) -> Tensor:
    if not torch.is_grad_enabled():
        return run_chain(parts, x)
    if not x.requires_grad:
        x = x.clone().requires_grad_()
    return checkpoint(run_chain, parts, x, use_reentrant=reentrant)


NODES: dict[str, Callable[[nn.ModuleList, Tensor], Tensor]] = {
    "chain": run_chain,
    "branches": run_branches,
    "given": run_given,
    "twice": run_twice,
    "kept": run_kept,
    "aside": run_aside,
    "inplace": run_inplace_residual,
    "some": run_some,
    "checkpoint": partial(run_checkpointed, reentrant=False),
    "reentrant": partial(run_checkpointed, reentrant=True),
}


def run_under(dtype: torch.dtype | None, parts: nn.ModuleList, x: Tensor) -> Tensor:
    """While torch's default dtype is another one, as Lightning has it around a step in half precision."""
    with torchs_defaults(dtype):
        return run_chain(parts, x)


def build(tree: Tree, pool: list[nn.Module], shape: str | None = None) -> nn.Module:
    """The module that a tree describes; ``pool`` holds the leaves so far, from which some are used again."""
    leaf = Leaf if shape is None else shaped(Leaf, shape)
    name, *arguments = tree
    if name == "leaf":
        pool.append(leaf(arguments[0]))
        return pool[-1]
    if name == "again":
        return pool[arguments[0] % len(pool)] if pool else nn.Identity()
    if name == "frozen":
        return build(arguments[0], pool, shape).requires_grad_(False)
    parts = [build(child, pool, shape) for child in arguments[0]]
    return Node([*parts, leaf("view")] if name == "inplace" else parts, NODES[name])


def trees() -> st.SearchStrategy[Tree]:
    leaves = st.one_of(
        st.tuples(st.just("leaf"), st.sampled_from(Leaf.KINDS)), st.tuples(st.just("again"), st.integers(0, 5))
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(sorted(NODES)), st.lists(inner, min_size=1, max_size=3)),
            st.tuples(st.just("frozen"), inner),
        ),
        max_leaves=8,
    )


def units_are_leaves(name: str, module: nn.Module) -> bool:
    return isinstance(module, Leaf)


def units_are_nodes(name: str, module: nn.Module) -> bool:
    return isinstance(module, Leaf) or (name.count(".") == 1 and isinstance(module, Node))


def forest(trees: list[Tree], shape: str | None, dtype_in_forward: torch.dtype | None) -> nn.Module:
    """A model of trees one after the other."""
    pool: list[nn.Module] = []
    head = nn.Linear(WIDTH, WIDTH)  # never frozen: something always has a gradient
    first = build(("leaf", "block"), [], shape)
    return Node([first, *(build(tree, pool, shape) for tree in trees), head], partial(run_under, dtype_in_forward))


SHAPE = st.sampled_from([None, *WITH_ARGUMENTS])
DTYPE_IN_FORWARD = st.sampled_from([None, torch.bfloat16, torch.float64])


@dataclass(frozen=True)
class Example:
    """All that is random in one example."""

    trees: list[Tree]
    k: int
    k_prime: int
    units: Any
    activations: str
    room: int | None  # for activations, on a device that tells how much memory is free
    mixed: bool  # each call draws a policy of its own
    lag: float  # seconds that each job on the host takes longer
    plan: Plan
    shape: str | None = None  # of the leaves' classes
    dtype: torch.dtype | None = None  # torch's default dtype, all the time
    dtype_in_forward: torch.dtype | None = None

    def case(self) -> Case:
        return Case("random", self.model, rows, loss=of_some_magnitude, units=self.units, streams=False)

    def model(self) -> nn.Module:
        return forest(self.trees, self.shape, self.dtype_in_forward)


def of_some_magnitude(output: Tensor, batch: tuple[Tensor]) -> Tensor:
    """Gradients in bf16 that are as large as each other add up without rounding, which would hide their order."""
    digit = int(1000 * batch[0].abs().sum()) % 5
    return sum_of_squares(output, batch) / 10**digit


@st.composite
def examples(draw: st.DrawFn) -> Example:
    k = draw(st.integers(1, 4))
    plan = Plan(
        steps=draw(st.integers(1, 3)),
        accumulate=draw(st.integers(1, 3)),
        clip=draw(st.sampled_from([None, 0.1])),
        autocast=draw(st.booleans()),
        cast_cache=draw(st.booleans()),
        sanity=draw(st.booleans()),
    )
    policy = draw(st.sampled_from([None, units_are_leaves, units_are_nodes]))
    activations = draw(st.sampled_from(get_args(ActivationPolicy)))
    room = draw(st.sampled_from([None, 0, 4_000, 20_000]))
    drawn = draw(st.lists(trees(), min_size=1, max_size=4))
    if "reentrant" in str(drawn) and AUTOCAST_FORGETS_GRADIENTS:
        plan = replace(plan, cast_cache=False)
    if "lstm" in str(drawn) and why_no_lstm_in_bf16() is not None:
        plan = replace(plan, autocast=False)
    k_prime, mixed, lag = draw(st.integers(1, k)), draw(st.booleans()), draw(st.sampled_from([0, 0.01]))
    surroundings = draw(SHAPE), draw(st.sampled_from([None, torch.float64])), draw(DTYPE_IN_FORWARD)
    return Example(drawn, k, k_prime, policy, activations, room, mixed, lag, plan, *surroundings)
