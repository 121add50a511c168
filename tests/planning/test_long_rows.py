"""The memory of long rows: what is predicted for decoders, against the tensors that are alive in a plain step.

Rows of 32,768 tokens without fused attention need terabytes, so they are counted on the meta device. There, attention
that is fused saves what a GPU's kernel saves: its inputs, its output and a number for each query.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock
from weakref import finalize

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from sp_lightning import Assumptions, chunked_cross_entropy
from sp_lightning.planning import AutoPlanner, Choice
from sp_lightning.planning.estimate import estimate
from sp_lightning.planning.memory import activation_bytes

from ..helpers import attached
from ..simulated import SimulatedBackend
from .parts import train

LENGTHS = (512, 2048, 8192, 32_768)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
LLAMA = LlamaForCausalLM, LlamaConfig, (1024, 4096, 14_336, 32, 8)
QWEN = Qwen2ForCausalLM, partial(Qwen2Config, tie_word_embeddings=True), (151_936, 1536, 8960, 12, 2)
SMALL = LlamaForCausalLM, LlamaConfig, (256, 128, 320, 4, 2)
TINY = LlamaForCausalLM, LlamaConfig, (64, 32, 64, 16, 4)  # 512 tokens are to it what 32,768 are to the first


class Chunked(nn.Module):
    """A language model whose loss does without all of its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=input_ids).last_hidden_state
        return chunked_cross_entropy(hidden, self.model.lm_head.weight, labels, shift=True)


def decoder(shape: Any, attention: str, device: str = "meta") -> nn.Module:
    kind, config, sizes = shape
    options = {"num_hidden_layers": 4, "use_cache": False, "attn_implementation": attention}
    with torch.device(device):
        return kind(config(**dict(zip(SIZES, sizes, strict=True)), **options)).train()


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, for as long as they are alive."""

    def __init__(self, there: list[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in there}
        self.nbytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.known:
                memory = tensor.untyped_storage()
                self.known.add(memory._cdata)
                self.nbytes += memory.nbytes()
                self.peak = max(self.peak, self.nbytes)
                finalize(memory, self.forget, memory._cdata, memory.nbytes())
        return result

    def forget(self, key: int, nbytes: int) -> None:
        self.known.remove(key)
        self.nbytes -= nbytes


def fused(*operands: Tensor, attn_mask: None, enable_gqa: bool = False, **options: Any) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(*operands, **options)[0]


def counted(model: nn.Module, text: Tensor, recomputes: bool) -> int:
    """The most bytes that are alive in a step, beside weights, whose gradients leave with their block."""
    blocks = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
    for block in blocks[:-1] if recomputes else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    in_blocks = {weight for block in blocks for weight in block.parameters()}
    for gathered in [*(list(block.parameters()) for block in blocks), *([w] for w in model.parameters())]:
        for weight in gathered if len(gathered) > 1 else set(gathered) - in_blocks:
            weight.register_post_accumulate_grad_hook(partial(let_go, gathered))
    kernel = mock.patch.object(F, "scaled_dot_product_attention", fused) if text.is_meta else nullcontext()
    alive = Alive([*model.parameters(), *model.buffers(), text])
    with alive, kernel:
        output = model(input_ids=text, labels=text)
        loss = output if isinstance(output, Tensor) else output.loss
        del output
        loss.backward()
    return alive.peak


def let_go(weights: list[Tensor], _: Tensor) -> None:
    if all(weight.grad is not None for weight in weights):
        for weight in weights:
            weight.grad = None


def predicted(model: nn.Module, tokens: int, **given: Any) -> int:
    workload, _ = estimate(model, Assumptions(tokens=tokens, device_memory="80GiB", **given))
    return activation_bytes(workload.placed(Choice(2)), [unit.ways[0] for unit in workload.units])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("shape", "activations", "kind"),
    [(LLAMA, "keep", None), (LLAMA, "recompute", None), (QWEN, "keep", Chunked), (QWEN, "recompute", None)],
    ids=["Llama", "Llama recomputes", "Qwen chunked", "Qwen recomputes"],
)
def test_the_estimate_over_lengths(shape, activations, kind, attention, length):
    model = decoder(shape, attention).bfloat16()
    model = model if kind is None else kind(model)
    expected = predicted(model, length, precision="bf16-true", activations=activations)
    text = torch.empty(1, length, dtype=torch.int64, device="meta")
    assert expected == pytest.approx(counted(model, text, activations == "recompute"), rel=0.05)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_estimate_of_rows_that_are_computed(precision, attention):
    """With the operations of the CPU, and its autocast; weights that it casts are cast already."""
    model = decoder(SMALL, attention, "cpu")
    expected = predicted(model, 1024, length=512, precision=precision, activations="keep")
    is_mixed = precision == "bf16-mixed"
    for module in model.modules():
        if is_mixed and isinstance(module, nn.Linear):
            module.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        assert expected == pytest.approx(counted(model, torch.randint(256, (2, 512)), False), rel=0.05)


@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_run_over_lengths(attention, length):
    """What is planned from the first steps, at a budget for half of what they would take."""
    text = torch.randint(64, (1, length))
    batch = {"input_ids": text, "labels": text}
    kept = train(decoder(TINY, attention, "cpu"), batch, SimulatedBackend(1e9, 1e9, 1e9), None, steps=2).counted
    budget, backend = int(0.6 * kept), SimulatedBackend(1e9, 1e9, 1e9)
    model = decoder(TINY, attention, "cpu")
    run = train(model, batch, backend, AutoPlanner(), steps=6, memory_budget=budget, optimizer_on="host")
    assert run.summary.plan is not None
    assert run.counted <= budget
    assert run.summary.plan.device_bytes == pytest.approx(run.counted, rel=0.05)


def test_the_plan_follows_longer_rows():
    """Also where the window stays as it is; what is planned for the new length is enough."""
    model = decoder(TINY, "eager", "cpu")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with attached(model, AutoPlanner(), units="LlamaDecoderLayer", memory_budget=16 << 20) as pipeline:
        pipeline._engine.meter.always = True
        for length in [64] * 5 + [128] * 5:
            pipeline.stats.activation_peak_bytes = 0
            text = torch.randint(64, (1, length))
            pipeline.module(input_ids=text, labels=text).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            plan = pipeline.summary().plan
            counted = pipeline.summary().device_bytes + pipeline.stats.activation_peak_bytes
    assert counted <= plan.device_bytes <= 1.3 * counted
