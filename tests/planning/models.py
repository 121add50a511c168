"""Models to plan for, small and of four families; and a device on virtual clocks that takes time for every matrix."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from sp_lightning.pipeline import Pipeline, PipelineOptions, Planner, Stats, Summary
from tests.simulated import SimulatedBackend
from tests.zoo.case import Batch
from tests.zoo.vision import CLASSES, resnet50

WORDS = 64


def decoder() -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=10,
        num_attention_heads=4,
        max_position_embeddings=32,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config).train()


def vit() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=10,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=CLASSES,
    )
    return hf.ViTForImageClassification(config).train()


def encoder_decoder() -> nn.Module:
    config = hf.T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=5,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config).train()


def _words(count: int) -> Batch:
    tokens = torch.randint(1, WORDS, (count, 24))
    return {"input_ids": tokens, "labels": tokens}


def _pictures(count: int) -> Batch:
    return {"pixel_values": torch.randn(count, 3, 16, 16), "labels": torch.randint(CLASSES, (count,))}


def _plain_pictures(count: int) -> Batch:
    return (torch.randn(count, 3, 64, 64),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "decoder": (decoder, _words),
    "ViT": (vit, _pictures),
    "ResNet": (resnet50, _plain_pictures),
    "encoder-decoder": (encoder_decoder, _words),
}


class Computing(TorchDispatchMode):
    """Moves a device's virtual clock for all that counts as work in what runs inside."""

    def __init__(self, backend: SimulatedBackend, flops_per_second: float) -> None:
        super().__init__()
        self._backend = backend
        self._rate = flops_per_second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self._backend.compute(count(*args, **(kwargs or {}), out_val=result) / self._rate)
        return result


@dataclass
class Trained:
    """What came of some steps.

    Attributes:
        seconds: Of each step.
        counted: The most device memory for weights, gradients and activations in the last step.
    """

    seconds: list[float]
    counted: int
    summary: Summary
    stats: Stats


def train(
    model: nn.Module,
    batch: Batch,
    backend: SimulatedBackend,
    planner: Planner | None,
    *,
    steps: int,
    flops_per_second: float = 1e9,
    in_backward: bool = True,
    **options: Any,
) -> Trained:
    """Train on virtual clocks."""
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(**options), backend=backend, planner=planner)
    optimizer = SGD(model.parameters(), 1e-3)
    seconds = []
    for _ in range(steps):
        begin = backend.now
        pipeline.stats.activation_peak_bytes = 0
        with Computing(backend, flops_per_second):
            output = model(**batch) if isinstance(batch, dict) else model(*batch)
            loss = output.square().mean() if isinstance(output, Tensor) else output.loss
            with pipeline.stepping_in_backward(optimizer) if in_backward else nullcontext():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(backend.now - begin)
    summary = pipeline.summary()
    counted = summary.device_bytes + summary.gradient_bytes + pipeline.stats.activation_peak_bytes
    pipeline.detach()
    return Trained(seconds, counted, summary, pipeline.stats)
