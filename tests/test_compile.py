"""Compiled units: bit-equal to the same blocks compiled and trained plainly, from no more graphs, whatever moves."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sp_lightning import PipelineOptions, SuperpipelineStrategy

from .helpers import Run, assert_same_trace, attached, lightning_run
from .zoo import CASES
from .zoo.blocks import WIDTH, Block, Chain, chain

if TYPE_CHECKING:
    from torch._dynamo.testing import CompileCounterWithBackend


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts what is compiled, with a backend that is quick; what other tests compiled is forgotten."""
    from torch._dynamo.testing import CompileCounterWithBackend  # which takes a second

    # pytest would collect a record of each compilation, which takes longer than to compile
    monkeypatch.setattr(torch._logging._internal, "trace_log", logging.Logger("nobody listens"))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with torch.compiler.set_stance("default", force_backend=counter):
        yield counter
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------- ways to compile a model


def each(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile()
    return model


def wrapped(model: nn.Module) -> nn.Module:
    model.blocks = nn.ModuleList(torch.compile(block) for block in model.blocks)
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile=True": each,  # what the plain model does; the streamed one has the option
    "block.compile()": each,
    "torch.compile(block)": wrapped,
    "torch.compile(model)": torch.compile,
    "nothing": lambda model: model,
}

Story = Callable[[Run], None]


def compare(
    way: str, build: Callable[[], nn.Module], story: Story, graphs: CompileCounterWithBackend, **options: Any
) -> tuple[int, int]:
    """Tell a story with compiled blocks, plain and streamed; the numbers of graphs."""
    runs, counts = [], []
    for streamed in (False, True):
        torch._dynamo.reset()
        graphs.frame_count = 0
        torch.manual_seed(0)
        by_option = streamed and way == "compile=True"
        run = Run(build() if by_option else WAYS[way](build()))
        torch.manual_seed(1)
        if streamed:
            with attached(run.model, **{"compile": by_option, "debug": True, **options}) as run.pipe:
                story(run)
            assert run.pipe.stats.loads > 0, "nothing was streamed"
        else:
            story(run)
        runs.append(run)
        counts.append(graphs.frame_count)
    assert_same_trace(runs[0].trace, runs[1].trace)
    return counts[0], counts[1]


def train(run: Run, steps: int = 2, autocast: bool = False, cache: bool = False, evaluate: bool = True) -> None:
    """Train and evaluate in turns."""
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=cache):
            run.normal_step(f"step {step}", optimizer, step)
            if evaluate:
                run.model.eval()
                run.evaluate(f"evaluation {step}", step)
                run.model.train()


# ---------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize(
    ("way", "evaluate", "graphs_plain", "graphs_streamed"),
    [
        ("compile=True", True, 3, 3),  # the first block's input needs no gradient, and there is evaluation
        ("torch.compile(block)", False, 2, 2),
        ("torch.compile(model)", False, 1, 2),  # plain, it is one graph
    ],
)
def test_training_is_exact(
    way: str, evaluate: bool, graphs_plain: int, graphs_streamed: int, graphs: CompileCounterWithBackend
) -> None:
    def story(run: Run) -> None:
        train(run, 3, evaluate=evaluate)

    assert compare(way, lambda: chain(4, dropout=0.2), story, graphs) == (graphs_plain, graphs_streamed)


class Normed(Block):
    """Buffers that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch_norm(super().forward(x))


class Limited(Block):
    """A weight that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table(torch.arange(5)))


class Inside(Block):
    """Checkpoints a part of itself, in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: self.down(torch.tanh(self.up(y))), self.norm(x), use_reentrant=False)


class Peeking(Block):
    """Reads a weight of the block before it, which nothing has brought to the device."""

    before: tuple[Block, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.up.weight.mean() for block in self.before)


class Checkpointed(Chain):
    """Checkpoints its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(torch.is_grad_enabled())
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def peeking() -> Chain:
    model = Chain(Peeking() for _ in range(4))
    model.blocks[2].before = (model.blocks[0],)
    return model


class CompiledFunction(Block):
    """Uses a layer's weight in a compiled function as well, and nothing else of it is compiled."""

    def __init__(self, fullgraph: bool = False) -> None:
        super().__init__()
        self.function = torch.compile(lambda x, weight: x * weight.norm(), backend="eager", fullgraph=fullgraph)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward(x), self.up.weight)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "buffers-and-weights-change": lambda: Chain([Normed(), Limited(), Normed(), Limited()]),
    "checkpoint-inside": lambda: Chain(Inside() for _ in range(3)),
    "checkpoint-around": lambda: Checkpointed(Block(dropout=0.2) for _ in range(3)),
    "weights-of-others": peeking,
    "dropout": lambda: chain(3, dropout=0.2),
    "functions-of-weights": lambda: Chain(CompiledFunction() for _ in range(3)),
}


@pytest.mark.parametrize(
    ("model", "autocast", "activations"),
    [
        ("buffers-and-weights-change", False, "auto"),
        ("checkpoint-inside", False, "auto"),
        ("checkpoint-around", True, "auto"),  # which compares what was saved: both runs are compiled, or both are not
        ("weights-of-others", False, "auto"),
        ("dropout", True, "recompute"),
        ("dropout", False, "offload"),
        ("functions-of-weights", True, "auto"),  # which get them as they are
    ],
)
def test_models_are_exact(model: str, autocast: bool, activations: str, graphs: CompileCounterWithBackend) -> None:
    def story(run: Run) -> None:
        train(run, 3, autocast, evaluate=False)

    way = "nothing" if model == "functions-of-weights" else "compile=True"
    plain, streamed = compare(way, MODELS[model], story, graphs, k=1, activations=activations)
    assert streamed > 0 or model == "functions-of-weights", "nothing was compiled"
    assert streamed == plain or model in ("weights-of-others", "functions-of-weights")


def test_a_whole_graph_of_such_a_function_is_refused() -> None:
    with (
        attached(Chain(CompiledFunction(fullgraph=True) for _ in range(3)), debug=False) as pipe,
        pytest.raises(torch._dynamo.exc.Unsupported, match="superpipeline has to see how weights are used"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        pipe.module(Run.rows(0))


@pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0), reason="Python 3.13.0 does not tell dynamo of a module's changed attribute"
)
def test_an_exception_in_a_compiled_block(graphs: CompileCounterWithBackend) -> None:
    """The next step is right, and needs no other graph."""

    class Failing(Block):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("on purpose")
            return super().forward(x)

    def story(run: Run) -> None:
        run.normal_step("before", None)
        run.model.blocks[2].fails = True
        with pytest.raises(ValueError, match="on purpose"), run.step():
            run.model(run.rows(0))
        run.model.blocks[2].fails = False
        run.model.zero_grad()
        run.normal_step("after", None)

    plain, streamed = compare("block.compile()", lambda: Chain(Failing() for _ in range(4)), story, graphs)
    assert plain == streamed


def test_inductor_is_exact() -> None:
    """With torch's own backend, which fuses: the same kernels give the same bits."""
    results = []
    for streamed in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        run = Run(chain(3) if streamed else each(chain(3)))
        # one graph for all blocks, each of which takes seconds to compile
        run.model.register_forward_pre_hook(lambda _, args: (args[0].requires_grad_(),))
        if streamed:
            with attached(run.model, compile=True, debug=True) as run.pipe:
                train(run, evaluate=False)
        else:
            with torch.compiler.set_stance("force_eager"):
                eager = run.model(run.rows(0)).square().mean()
            train(run, evaluate=False)
            compiled = run.trace["step 0 / loss"]
            if not torch.allclose(compiled, eager):  # where `ATEN_CPU_CAPABILITY` hides what the CPU has
                pytest.skip(f"plain torch's inductor computes {compiled} in place of {eager} on this CPU")
        results.append(run.trace)
    assert_same_trace(*results)


def test_lightning(graphs: CompileCounterWithBackend) -> None:
    """Through the Trainer, against its strategy for one device with the same blocks compiled."""
    case = CASES["chain"]
    expected = lightning_run(replace(case, build=lambda: each(case.build())), SingleDeviceStrategy(device="cpu"))
    plain = graphs.frame_count
    actual = lightning_run(case, SuperpipelineStrategy(k=2, units="Block", compile=True))
    assert_same_trace(expected, actual)
    assert graphs.frame_count == 2 * plain > 0


def test_arguments_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach `torch.compile` for each unit; those that would record CUDA graphs are refused."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda call, **arguments: seen.append(arguments) or call)
    arguments = {"mode": "max-autotune-no-cudagraphs", "dynamic": False}
    with attached(chain(3), compile=arguments, debug=False) as pipe:
        pipe.module(Run.rows(0)).sum().backward()
    assert seen == [arguments] * 3
    for refused in ({"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}, {"backend": "cudagraphs"}):
        with pytest.raises(ValueError, match="records CUDA graphs"):
            PipelineOptions(compile=refused)


# ------------------------------------------------------------------------------------------------------ few graphs


@pytest.mark.parametrize("way", ["compile=True", "block.compile()", "torch.compile(block)"])
def test_one_graph_for_all_alike(way: str, graphs: CompileCounterWithBackend) -> None:
    """However many blocks, wherever they lie, and however the arrangement changes; another one for evaluation."""
    model = chain(30)
    if way != "compile=True":
        model = WAYS[way](model)
    x = torch.randn(5, WIDTH, requires_grad=True)
    with attached(model, compile=way == "compile=True", debug=False, k=3) as pipe:
        for step in range(3):
            with pipe.step():
                loss = model(x).sum()
                if step == 1:  # a weight outside of its unit: a new arrangement
                    loss = loss + model.blocks[7].up.weight.sum()
                loss.backward()
        assert pipe.stats.arrangements > 1
        assert graphs.frame_count == 1
        for _ in range(2):
            with torch.no_grad():
                model(x.detach())
        assert graphs.frame_count == 2


def test_flipping_requires_grad_and_batch_sizes(graphs: CompileCounterWithBackend) -> None:
    """As many graphs as torch needs: in torch 2.11 those of plain blocks do not know that a weight was frozen."""

    def story(run: Run) -> None:
        for step in range(6):
            run.model.blocks[1].requires_grad_(step % 2 == 0)
            x = torch.randn(4 + step // 2, WIDTH, requires_grad=True)
            with run.step():
                loss = run.model(x).square().mean()
                loss.backward()
            run.note(f"{step} / input", x.grad)
            run.note(f"{step} / loss", loss)
            run.model.zero_grad()

    plain, streamed = compare("compile=True", lambda: chain(3), story, graphs)
    assert streamed == 4  # trained and frozen, of one size and of any
    assert plain in (2, 4)


@pytest.mark.parametrize(("way", "cache"), [("compile=True", True), ("torch.compile(model)", False)])
def test_under_autocast(way: str, cache: bool, graphs: CompileCounterWithBackend) -> None:
    """Blocks are compiled once, and get weights in fp32, as nobody sees how they use them."""
    lowered, seen = [], []

    def story(run: Run) -> None:
        train(run, steps=1, autocast=True, cache=cache)
        seen.append(graphs.frame_count)
        train(run, steps=3, autocast=True, cache=cache)
        lowered.append(0 if run.pipe is None else run.pipe.summary().lowered)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, streamed = compare(way, lambda: chain(3, dropout=0.2), story, graphs)
    assert not about_compiling(told)
    assert (seen[1], streamed, lowered[1]) == (3, 3, 0)


# --------------------------------------------------------------------------------------------------- what users have


@pytest.mark.parametrize("option", [False, True])
def test_modules_compiled_by_the_user_stay_compiled(option: bool, graphs: CompileCounterWithBackend) -> None:
    """Before, during and after: their call, their graphs."""
    model = each(chain(3))
    calls = [block._compiled_call_impl for block in model.blocks]
    with attached(model, compile=option, debug=False) as pipe:
        assert calls == [block._compiled_call_impl for block in model.blocks]
        assert all(member.compiled is None for member in pipe.arrangement.members) is not option
        model(Run.rows(0)).sum().backward()
        plain = copy.deepcopy(model)
    assert graphs.frame_count == 2
    assert calls == [block._compiled_call_impl for block in model.blocks]
    assert [type(block) for block in model.blocks] == [Block] * 3
    assert torch.equal(plain(Run.rows(0)), model(Run.rows(0)))


def test_the_option_leaves_no_trace(graphs: CompileCounterWithBackend) -> None:
    """Not on the modules, not in their copies, and nothing keeps the device's memory."""
    model = chain(3)
    before = [dict(vars(module)) for module in model.modules()]
    with attached(model, compile=True, debug=False) as pipe:
        output = model(Run.rows(0))
        output.sum().backward()
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert all(vars(module).keys() == keys.keys() for module, keys in zip(model.modules(), before, strict=True))
    assert graphs.frame_count > 0
    assert all(torch.equal(other(Run.rows(0)), output) for other in [model, *copies])
    count = graphs.frame_count
    for block in model.blocks:
        assert type(block) is Block
        block(Run.rows(0))
    assert graphs.frame_count == count, "a block is still compiled"
    del output
    twins = [torch.utils.weak.WeakTensorKeyDictionary({twin.parameter: 0}) for twin in pipe.arrangement.twins.values()]
    del pipe
    gc.collect()
    assert not any(map(len, twins))


def about_compiling(told: list[warnings.WarningMessage]) -> list[str]:
    """What was warned of that a user would blame on the engine."""
    words = ("Dynamo", "torch.compile", "graph break", "superpipeline")
    return [text for warning in told if any(word in (text := str(warning.message)) for word in words)]


def test_a_whole_graph_of_the_model_is_refused() -> None:
    """With an error that says where; of a block it works."""
    torch._dynamo.reset()
    model = chain(3)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="eager")
    with attached(model, debug=False):
        model(Run.rows(0)).sum().backward()
        whole = torch.compile(model.forward, fullgraph=True, backend="eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="superpipeline|sp_lightning"):
            whole(Run.rows(0))
