"""FP8 by torchao: linear layers that it has converted train with plain torchao's bits, wherever their unit is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import finetune_chat
import finetune_diffusion
import finetune_preferences
import float8
import lightning as L
import lora_lm
import pretrain
import pytest
import recipe as shared
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from sp_lightning import Assumptions, optim, plan
from sp_lightning.pipeline.activations import offload
from sp_lightning.planning import known
from sp_lightning.planning.known import named_model, rates_of, rates_of_gpu
from sp_lightning.planning.report import Report
from sp_lightning.planning.work import Workload

from .helpers import Run, Trace, assert_same_trace, attached, frozen, note_state, why_no_attention_in_bf16
from .lightning_modules import Placed, fit_placed, plain, streamed, trainer
from .planning.parts import Fixed, estimate
from .processes import in_processes
from .zoo.blocks import WIDTH, Chain, Gated, LoRALinear

pytest.importorskip("torchao", reason="torchao is not installed")

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
OURS = partial(optim.AdamW, lr=1e-2)
FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)


def in_fp8(model: nn.Module, recipe: str) -> nn.Module:
    """Convert all linear layers; emulated, FP8 has the rounding of a GPU."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # which takes seconds

    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)  # it is frozen
    with mock.patch("torchao.float8._inductor_patch._PATCHED", True):  # or it imports Triton's code generator
        return convert_to_float8_training(model, config=config)


def number_of_layers(model: nn.Module) -> int:
    return sum(type(layer).__name__ == "Float8Linear" for layer in model.modules())


class InFP8(Placed):
    """Six blocks with converted layers, in BF16 or mixed precision."""

    recipe = RECIPES[0]

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(make)
        in_fp8(self.model, self.recipe)
        assert number_of_layers(self.model) == 12


class Adapted(InFP8):
    """With adapters on a frozen base."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(make)
        for block in self.model.blocks:
            block.up, block.down = LoRALinear(block.up), LoRALinear(block.down)


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(InFP8, "recipe", request.param)
    return request.param


def train_placed(window: tuple[Any, ...], precision: str, clip: float | None, module: type[Placed] = InFP8) -> Any:
    """Train plainly, and with a window from the second step on; return the planner and the counts of the latter."""
    expected, _ = fit_placed(OURS, None, precision, clip, accumulate=2, module=module)
    planner = Fixed((2,), window)
    actual, stats = fit_placed(OURS, planner, precision, clip, accumulate=2, module=module)
    assert_same_trace(expected, actual)
    assert stats.loads > 0
    return planner, stats


def test_streamed(recipe: str) -> None:
    # under a CPU's autocast, torchao multiplies numbers of two dtypes with the last recipe, which torch refuses
    train_placed((2,), "32-true" if recipe == RECIPES[-1] else "bf16-mixed", clip=0.01)


def test_staying(recipe: str) -> None:
    planner, _ = train_placed((2, (0, 3)), "bf16-true", clip=None)
    assert max(on_device for *_, on_device in planner.seen) == 14


def test_visiting(recipe: str) -> None:
    _, stats = train_placed((2, (), (1, 4)), "bf16-true", clip=0.01)
    assert stats.visits == 10


def test_adapters_on_a_frozen_base(recipe: str) -> None:
    _, stats = train_placed((2, (0,), (1, 4)), "32-true", clip=0.01, module=Adapted)
    assert stats.visits == 10


def compare(recipe: str, story: Callable[[Run], None], **options: Any) -> Run:
    """Tell a story with a plain model and with an attached one; return the latter."""
    for is_streamed in (False, True):
        torch.manual_seed(0)
        run = Run(in_fp8(Chain(Gated() for _ in range(4)), recipe))
        if not is_streamed:
            expected = run
            if options.get("compile"):
                for block in run.model.blocks:
                    block.compile()
            story(run)
            continue
        with attached(run.model, **options) as run.pipe:
            story(run)
    assert_same_trace(expected.trace, run.trace)
    assert run.pipe.stats.loads > 0
    return run


def steps(run: Run) -> None:
    optimizer = FUSED(run.model.parameters())
    for number in range(3):
        run.normal_step(f"step {number}", optimizer, number)


def test_offloaded(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_OFFLOAD_BYTES", 1)
    assert compare(recipe, steps, activations="offload").pipe.stats.offloaded_bytes > 0


def test_recomputed(recipe: str) -> None:
    assert compare(recipe, steps, activations="recompute").pipe.stats.recomputed > 0


def test_compiled_blocks(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside plain compiled ones."""
    from torch._dynamo.testing import CompileCounterWithBackend  # which takes a second

    monkeypatch.setattr(torch._logging._internal, "trace_log", logging.Logger("nobody listens"))
    counts = []

    def counted(run: Run) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        with torch.compiler.set_stance("default", force_backend=counter):
            steps(run)
        counts.append(counter.frame_count)

    compare(recipe, counted, compile=True)
    torch._dynamo.reset()
    assert counts[0] == counts[1] > 0


def trained(strategy: Any, epochs: int, resume: Path | None = None) -> tuple[L.Trainer, Trace]:
    torch.manual_seed(1)
    module = InFP8(OURS)
    ours = trainer(strategy, max_epochs=epochs, precision="bf16-true")
    batches = [torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    ours.fit(module, DataLoader(batches, batch_size=None), ckpt_path=resume)
    trace = Trace()
    note_state(trace, "end", module, ours.optimizers)
    del trace["end / torch's random state"]  # a run in two parts has drawn two seeds for its loaders
    return ours, trace


def test_checkpoints_in_both_directions(recipe: str, tmp_path: Path) -> None:
    _, expected = trained(plain(), epochs=2)
    for first, second in ((plain, streamed), (streamed, plain)):
        half, _ = trained(first(), epochs=1)
        half.save_checkpoint(tmp_path / "half.ckpt")
        _, actual = trained(second(), epochs=2, resume=tmp_path / "half.ckpt")
        assert_same_trace(expected, actual)
        state = torch.load(tmp_path / "half.ckpt")["state_dict"]
        assert {(type(value), value.dtype) for value in state.values()} == {(Tensor, torch.bfloat16)}
        Placed(OURS).load_state_dict(state)  # a plain model takes it


def as_ddp() -> None:
    """Two processes, which see batches of their own."""
    for InFP8.recipe in RECIPES:
        traces = []
        for strategy in (DDPStrategy(), streamed()):
            torch.manual_seed(1)
            module = InFP8(OURS)
            ours = trainer(strategy, max_epochs=1, devices=2, gradient_clip_val=0.1, use_distributed_sampler=False)
            torch.manual_seed(dist.get_rank())
            ours.fit(module, DataLoader([torch.randn(5, WIDTH) for _ in range(4)], batch_size=None))
            traces.append(module.trace | {name: frozen(weight) for name, weight in module.named_parameters()})
        assert_same_trace(*traces)


def test_two_processes() -> None:
    in_processes([as_ddp])


# ------------------------------------------------------------------------------------------------------------- recipes


def test_what_a_recipe_converts_and_what_not() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(Gated(16, 32) for _ in range(4))
    model.blocks[0].down = nn.Linear(32, 12)
    model.blocks[1].up = lora_lm.Adapted(model.blocks[1].up, rank=16, alpha=1)
    model.blocks[2].up.weight = model.blocks[3].up.weight
    model.blocks[3].norm1 = nn.Module()
    model.blocks[3].norm1.linear = nn.Linear(16, 16)
    model.blocks[3].down.__class__ = type("Other", (nn.Linear,), {})
    model.head = nn.Linear(16, 16)
    said = float8.convert(model, emulate=True)
    assert number_of_layers(model) == 4
    assert said == (
        "FP8 by torchao: 4 linear layers multiply in 8 bits; not 1 of a size that is no multiple of 16, 2 of adapters, "
        "2 with a weight of two names, 1 of another class, 1 beside norms, 1 outside of blocks"
    )


SMALL = ["--accelerator=cpu", "--fp8", "--epochs=1"]
MAINS: dict[str, tuple[Any, list[str]]] = {
    "chat": (finetune_chat.main, [*SMALL, "--layers=1", "--hidden=32", "--length=128", "--train=lora"]),
    "preferences": (finetune_preferences.main, [*SMALL, "--layers=1", "--hidden=32", "--batch-size=64"]),
    "diffusion": (finetune_diffusion.main, [*SMALL, "--batch-size=512", "--rows=1", "--denoising=1"]),
    "pretrain": (pretrain.main, ["--accelerator=cpu", "--fp8", "--steps=1"]),
}


@pytest.mark.parametrize("name", MAINS)
def test_a_recipe_says_what_it_converts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main, arguments = MAINS[name]
    assert main(arguments) == 0
    first = capsys.readouterr().out.splitlines()[:8]  # those on the chats come first
    assert [line for line in first if "linear layers multiply in 8 bits; not " in line]
    assert [line for line in first if "FP8 is emulated" in line]


def test_the_result_is_a_plain_model(capsys: pytest.CaptureFixture[str]) -> None:
    if (reason := why_no_attention_in_bf16()) is not None:
        pytest.skip(reason)
    arguments = ["--layers=1", "--hidden=32", "--length=128", "--precision=bf16-true", "--save=mine"]
    assert finetune_chat.main([*SMALL, *arguments]) == 0
    saved = AutoModelForCausalLM.from_pretrained("mine")
    assert {weight.dtype for weight in saved.parameters()} == {torch.bfloat16}
    assert number_of_layers(saved) == 0
    assert "quantization" not in Path("mine/config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "capability", "message"),
    [
        ([], (8, 6), "--fp8 needs a GPU of compute capability 8.9 (RTX 40, L40S, H100) or newer: RTX 3090 has 8.6"),
        (["--train=qlora"], (8, 9), "--fp8 multiplies by weights of 16 or 32 bits, not of 4: take --train lora"),
    ],
)
def test_what_cannot_be_is_an_error(
    options: list[str], capability: tuple[int, int], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch("torch.cuda.get_device_name", return_value="RTX 3090"),
        pytest.raises(SystemExit),
    ):
        finetune_chat.parse(["--fp8", *options])
    assert message in capsys.readouterr().err


def test_a_gpu_compiles_the_casts() -> None:
    options = SimpleNamespace(
        **dict.fromkeys(("k", "k_prime", "memory_budget", "activations", "optimizer_on", "nvme_path"))
    )
    options.fp8, options.accelerator = True, "auto"
    with mock.patch("torch.cuda.is_available", return_value=True):
        assert shared.streaming(options)["compile"] is True
        options.fp8 = False
        assert "compile" not in shared.streaming(options)


# ------------------------------------------------------------------------------------------------------------ the plan


def planned(gpu: str, **given: Any) -> Report:
    assumed = {"fp8": True, "precision": "bf16-true", "moments": "int8", "host_memory": "64GiB", **given}
    return plan(
        named_model("Qwen3-8B"), Assumptions(**{**rates_of_gpu(gpu), **rates_of("hosts", "desktop DDR5"), **assumed})
    )


def test_plans_say_whether_fp8_pays() -> None:
    many, few = (planned("4090", tokens=tokens, gradient_clip_val=1.0) for tokens in (8192, 1024))
    assert many.in_16_bits.tokens_per_second < many.best.tokens_per_second
    assert f"its numbers are not exact. Without FP8: {many.in_16_bits.speed} tokens/s" in str(many)
    assert "convert_to_float8_training" in str(many)
    assert "SuperpipelineStrategy(compile=True)" in str(many)
    assert "FP8 does not pay here, so leave out `--fp8`" in str(few)
    assert known.recipe("Qwen3-8B", many.best.given).endswith("--fp8")
    assert not known.recipe("Llama-3.1-8B", many.best.given)


def test_plans_price_casts() -> None:
    """As torchao's own run on H100s does, which is 1.25 times as fast with FP8."""

    def work(name: str = "Llama-3.1-8B", **given: Any) -> Workload:
        assumed = {**rates_of_gpu("H100"), "tokens": 8192, "precision": "bf16-true", "fp8": True, **given}
        return estimate(named_model(name), Assumptions(**assumed))[0]

    def seconds(workload: Workload) -> float:
        return sum(unit.forward_seconds + unit.backward_seconds for unit in workload.everything)

    assert 1.2 < seconds(work(fp8=False)) / seconds(work()) < 1.25
    assert seconds(work(fp8=False)) < seconds(work(fp8_gain=1.0))
    kept, in_fp8 = (work(fp8=fp8).units[3].way("keep") for fp8 in (False, True))
    assert (kept.held, kept.working) < (in_fp8.held, in_fp8.working)
    mixed = [work(fp8=fp8, precision="bf16-mixed").units[3].weight_bytes for fp8 in (False, True)]
    assert mixed[1] == pytest.approx(2 * mixed[0], rel=0.01), "autocast casts no weights that torchao casts"


def test_gains_have_sources_and_cards() -> None:
    gains = known.known("fp8").values()
    cards = [card for entry in gains for card in entry["cards"]]
    assert len(set(cards)) == len(cards)
    assert set(cards) == known.known("gpus").keys() - {
        "RTX 3060",
        "RTX 3080",
        "RTX 3090",
        "RTX A6000",
        "T4",
        "A10",
        "A100",
    }
    assert all("https://" in entry["source"] and 1 < entry["low"] <= entry["high"] < 2 for entry in gains)
    with pytest.raises(ValueError, match="`fp8` needs a GPU of compute capability 8.9 or newer"):
        planned("3090")
