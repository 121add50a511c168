"""What real modules do that a streaming engine must survive: odd outputs, odd weights, weights used from outside."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from .blocks import WIDTH, Block, Chain, Stashing, StashOnContext, chain, rows
from .case import Batch, Case, adamw_loop

# ---------------------------------------------------------------------------------------------- outputs and activations


class InplaceResidual(Chain):
    """``y += x`` on a view output drops hooks that sit on the output, silently (pytorch#181832)."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 3, -1)
        for block in self.blocks:
            y = block(x)  # three dimensions and a bias: a view
            y += x
            x = y.tanh()
        return x


class InplaceOnInput(nn.Module):
    """Changes its input in place, which is the block before's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x + F.relu_(self.linear(x))


class StashingChain(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y.tanh()
        return x


class ReturnsView(StashOnContext):
    """As a fused kernel that flattens its batch: its result is a view of what it has computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return StashOnContext.forward(ctx, x, weight).view(x.shape)


class Fused(Stashing):
    """A layer over ReturnsView."""

    def __init__(self) -> None:
        super().__init__(inplace=False)

    def forward(self, x: Tensor) -> Tensor:
        return ReturnsView.apply(x, self.weight)


@dataclass
class Packed:
    """A dataclass output that holds tensors at several depths."""

    value: Tensor
    extra: dict[str, Tensor]
    note: str = "kept"


class DataclassBlock(Block):
    def forward(self, packed: Packed) -> Packed:
        return Packed(super().forward(packed.value), {"half": packed.value / 2, **packed.extra})


class DictBlock(Block):
    def forward(self, *, state: dict[str, Any]) -> dict[str, Any]:
        return {"x": super().forward(state["x"]), "nested": [state["x"], (state["x"] * 2, None, 3)]}


class TupleBlock(Block):
    def forward(self, x: Tensor, previous: tuple[Tensor, ...] = ()) -> tuple[Tensor, tuple[Tensor, ...]]:
        return super().forward(x), (*previous, x)


class Structured(nn.Module):
    """Blocks that take and give dataclasses, dicts of keywords, and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.ModuleList(DataclassBlock() for _ in range(2))
        self.dicts = nn.ModuleDict({"a": DictBlock(), "b": DictBlock()})
        self.tuples = nn.ModuleList(TupleBlock() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        packed = Packed(x, {})
        for block in self.packed:
            packed = block(packed)
        state: dict[str, Any] = {"x": packed.value + packed.extra["half"]}
        for block in self.dicts.values():
            state = block(state=state)
        x, previous = state["x"] + state["nested"][1][0], ()
        for block in self.tuples:
            x, previous = block(x, previous=previous)
        return {"out": x, "sum": torch.stack(previous).sum(0)}


class Prompt(nn.Module):
    """Gives back its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self) -> Tensor:
        return self.tokens


class Prompted(nn.Module):
    """Prompts that modules return are used long after, when other units have taken the slots."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList(Prompt() for _ in range(3))
        self.body = chain(4)

    def forward(self, x: Tensor) -> Tensor:
        given = [prompt() for prompt in self.prompts]
        return torch.cat([self.body(x), *given]) @ given[0].T


# ----------------------------------------------------------------------------------- weights used outside of their unit


class TiedByUse(nn.Module):
    """The head uses the embedding's weight without owning it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.body = chain(3)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.body(self.embedding(ids)), self.embedding.weight)


class ParentReads(Chain):
    """The parent reads a child's weight before the child runs, and another one's after."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.blocks[1].up.weight.norm()
        for block in self.blocks:
            x = block(x)
        return x * scale + self.blocks[0].down.bias


class CallsForward(Chain):
    """``block.forward(x)`` goes past ``__call__`` and whatever hooks into it."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


def maml(model: nn.Module, batch: Batch) -> list[Tensor]:
    """One inner step of MAML: gradients of gradients through functional_call on the whole model."""
    weights = dict(model.named_parameters())
    inner = functional_call(model, weights, batch).square().mean()
    gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
    outer = functional_call(model, fast, batch).square().mean()
    outer.backward()
    return [inner, outer]


# ---------------------------------------------------------------------------------------------------------- odd weights


def weight_norm(old: bool) -> nn.Module:
    """The old weight_norm writes ``module.weight`` in a pre-hook, the new one is a parametrization."""
    layers: list[nn.Module] = []
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            wrap = nn.utils.weight_norm if old else parametrizations.weight_norm
            layers.append(nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh()))
    return Chain(layers)


def spectral_norm(old: bool) -> nn.Module:
    """Power iteration changes buffers in every training forward."""
    wrap = nn.utils.spectral_norm if old else parametrizations.spectral_norm
    return Chain(nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(4))


class MaxNorm(nn.Module):
    """``max_norm`` rescales rows of the weight in place, in forward: a change that must not be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, WIDTH, max_norm=1.0)
        self.body = chain(4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.embedding(ids))


class ComplexBlock(nn.Module):
    """A complex filter between two transforms, and a float64 gain."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.irfft(torch.fft.rfft(self.linear(x)) * self.filter, n=WIDTH)
        return (x.double() * self.gain).float().tanh()


def complex_chain() -> nn.Module:
    return Chain(ComplexBlock() for _ in range(4))


class Listed(nn.Module):
    """ParameterList, ParameterDict, an integer and an empty parameter, a scalar, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(4))
        self.named = nn.ParameterDict({"bias": torch.randn(WIDTH), "scale": torch.tensor(0.5)})
        self.index = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for matrix in self.matrices:
            x = (x @ matrix).tanh()[:, self.index]
        return torch.cat([x * self.named["scale"] + self.named["bias"], self.nothing])


def strided() -> nn.Module:
    """Weights that are not contiguous: kernels (and their rounding) depend on strides."""
    model = Chain([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    model.blocks[1].weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    model.blocks[2].weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
    return model


class SharedAcross(nn.Module):
    """One weight in several blocks, one block in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.blocks[4].down = self.blocks[1].down
        self.again = self.blocks[2]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.again(x)


# ----------------------------------------------------------------------------------------------------------- user hooks


def with_parameter_hooks() -> nn.Module:
    """A gradient hook that returns something else, and post-accumulate hooks that read and edit ``.grad``."""
    model = chain(4)
    blocks = model.blocks
    logs: list[list[Tensor]] = [[], [], []]  # one per hook: which of them runs first is not promised

    def accumulated(log: list[Tensor], parameter: Tensor) -> None:
        log.append(parameter.grad.clone())
        parameter.grad.clamp_(-1e-2, 1e-2)

    blocks[1].up.weight.register_hook(lambda gradient: gradient * 0.5)
    blocks[3].down.bias.register_hook(lambda gradient: logs[0].append(gradient.clone()))
    blocks[2].norm.weight.register_post_accumulate_grad_hook(partial(accumulated, logs[1]))
    blocks[2].down.weight.register_post_accumulate_grad_hook(partial(accumulated, logs[2]))
    model.seen = logs
    return model


def with_module_hooks() -> nn.Module:
    """The user's own module hooks read weights and gradients and change inputs and outputs."""
    model = chain(4)
    model.seen = []

    def pre(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        model.seen.append(module.up.weight.detach().clone())
        return (args[0] * 1.1,)

    def post(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        model.seen.append(module.down.weight.detach().clone())
        return output * 0.9

    def backward(module: nn.Module, grad_input: tuple[Tensor], grad_output: tuple[Tensor]) -> None:
        model.seen.extend(g.clone() for g in (*grad_input, *grad_output))

    model.blocks[1].register_forward_pre_hook(pre)
    model.blocks[2].register_forward_pre_hook(pre)
    model.blocks[2].register_forward_hook(post)
    model.blocks[3].register_full_backward_hook(backward)
    model.blocks[1].register_full_backward_pre_hook(lambda module, grads: model.seen.extend(g.clone() for g in grads))
    return model


def seen(model: nn.Module) -> Any:
    return model.seen


class Attention(nn.Module):
    """nn.MultiheadAttention uses its child's weight without calling the child, and a fused op in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, 2, kdim=5, vdim=7, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.cross(x, x[..., :5], x[..., :7])[0]


class Mixture(nn.Module):
    """Layers that keep their weights for backward in other ways than Linear and Conv do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, padding=1, groups=1, padding_mode="circular")
        self.transposed = nn.ConvTranspose1d(4, 3, 3, padding=1)
        self.instance = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
        self.batch = nn.BatchNorm1d(3, momentum=None)
        self.group = nn.GroupNorm(3, 3)
        self.rms = nn.RMSNorm(WIDTH)
        self.prelu = nn.PReLU(3)
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.embedding = nn.Embedding(9, WIDTH, padding_idx=0, scale_grad_by_freq=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.prelu(self.batch(self.transposed(self.instance(F.gelu(self.conv(x))[:, :3]).repeat(1, 2, 1)[:, :4])))
        y = self.rms(self.group(y))
        positions = torch.arange(WIDTH, device=x.device).remainder(9)
        return self.bilinear(y, x) + torch.einsum("pw,bcw->bcp", self.embedding(positions), y)


def sequences() -> Batch:
    return (torch.randn(2, 5, WIDTH),)


CASES = [
    Case("inplace-residual-on-view", InplaceResidual, rows, autocast=True),
    Case("inplace-on-input", lambda: Chain([Block(), *(InplaceOnInput() for _ in range(3))]), rows),
    Case("weight-on-ctx", lambda: StashingChain(Stashing(inplace=False) for _ in range(5)), rows, autocast=True),
    Case("weight-on-ctx-and-view-returned", lambda: Chain(Fused() for _ in range(5)), rows),
    Case("weight-on-ctx-and-inplace-view", lambda: StashingChain(Stashing(inplace=True) for _ in range(5)), rows),
    Case("structured-outputs", Structured, rows, lambda out, batch: (out["out"] * out["sum"]).mean()),
    Case("returns-own-parameter", Prompted, rows),
    Case("tied-by-use", TiedByUse, lambda: (torch.randint(0, 40, (3, 4)),), autocast=True),
    Case("parent-reads-child", lambda: ParentReads(Block() for _ in range(4)), rows, autocast=True),
    Case("calls-forward", lambda: CallsForward(Block() for _ in range(4)), rows, streams=False),
    Case("maml", lambda: chain(3), rows, backward=maml, streams=False),
    *(
        Case(f"{name}-{'old' if old else 'parametrization'}", partial(wrap, old), rows)
        for name, wrap in {"weight-norm": weight_norm, "spectral-norm": spectral_norm}.items()
        for old in (True, False)
    ),
    Case("multihead-attention", lambda: Chain(Attention() for _ in range(3)), sequences, autocast=True),
    Case("layer-mixture", lambda: Chain(Mixture() for _ in range(3)), lambda: (torch.randn(4, 3, WIDTH),)),
    Case("embedding-max-norm", MaxNorm, lambda: (torch.randint(0, 30, (3, 4)),)),
    Case("complex-and-float64", complex_chain, rows, optimizers=adamw_loop, autocast=True),
    Case("parameter-lists", Listed, rows),
    Case("strided-weights", strided, rows, optimizers=adamw_loop),
    Case("shared-across-units", SharedAcross, rows, autocast=True),
    Case("parameter-hooks", with_parameter_hooks, rows, seen=seen),
    Case("module-hooks", with_module_hooks, rows, seen=seen),
]
