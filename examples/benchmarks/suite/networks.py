"""The networks of the workloads: shapes of well-known models, called the way their libraries intend.

Each takes a batch as keyword arguments and returns the value it is trained on, or compared by in inference: a loss, or
the mean of the generated tokens. Dropout and stochastic depth are off, so that all systems compute the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lora_lm import add_adapters
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from sp_lightning import chunked_cross_entropy


class Network(nn.Module, ABC):
    """A model that names its blocks, for systems that need to be told what to shard, group or move."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """Return the repeated blocks, in the order of forward; the rest of the model lies outside of them."""

    def checkpoint_blocks(self) -> None:
        """Enable non-reentrant activation checkpointing for each block."""
        for block in self.blocks():
            block.forward = _Checkpointed(block.forward)  # type: ignore[method-assign]

    @abstractmethod
    def forward(self, **batch: Tensor) -> Tensor:
        """Compute the loss, or the value that inference is compared by."""

    def multiply(self, **batch: Tensor) -> None:
        """Run the multiplications of forward, but nothing that needs values, so that fake tensors can count them."""
        self(**batch)


class _Checkpointed:
    """A forward that saves only its inputs."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)


class LossHead(nn.Module):
    """A language model's head that computes the loss itself, without all logits in memory.

    Because it is a module with its own weight, every system streams, shards or gathers it like any other.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    @override
    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden, self.weight, tokens, shift=True)


class CausalLM(Network):
    """A transformers decoder that is trained to predict the next token.

    Args:
        config: The decoder's configuration, which also says whether its embedding and head are tied.
        adapters: Rank of the adapters that are trained instead of all weights; zero for none.
    """

    def __init__(self, config: Any, adapters: int = 0) -> None:
        super().__init__()
        from transformers import AutoModel

        self.body = AutoModel.from_config(config)
        self.head = LossHead(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.head.weight = self.body.get_input_embeddings().weight
        if adapters:
            with default_dtype(torch.float32):  # also if the base is in bf16
                add_adapters(self, self.head, rank=adapters, alpha=2 * adapters)

    @override
    def blocks(self) -> list[nn.Module]:
        return _largest_list(self.body)

    @override
    def forward(self, **batch: Tensor) -> Tensor:
        hidden = self.body(**batch, use_cache=False).last_hidden_state
        return self.head(hidden, batch["input_ids"])

    @override
    def multiply(self, **batch: Tensor) -> None:
        F.linear(self.body(**batch, use_cache=False).last_hidden_state, self.head.weight)


class Generator(Network):
    """A transformers causal language model that continues its prompts, greedily.

    Args:
        config: The model's configuration.
        new_tokens: Number of tokens to generate for each prompt.
    """

    def __init__(self, config: Any, new_tokens: int) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_config(config)
        # No token ends a text, because with random weights some texts would end before others.
        self._new_tokens = new_tokens
        self.model.generation_config.update(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )

    @override
    def blocks(self) -> list[nn.Module]:
        return _largest_list(self.model)

    @override
    def forward(self, **batch: Tensor) -> Tensor:
        prompt = batch["input_ids"]
        tokens = self.model.generate(prompt, attention_mask=torch.ones_like(prompt))
        return tokens[:, prompt.shape[1] :].float().mean()

    @override
    def multiply(self, **batch: Tensor) -> None:
        prompt = batch["input_ids"]
        for tokens in (prompt, *[prompt[:, :1]] * (self._new_tokens - 1)):
            self.model(tokens, use_cache=False, logits_to_keep=1)


class OwnLoss(Network):
    """A transformers model that computes its loss from the batch: vision, CLIP, LLaVA.

    Args:
        build: Builds the model.
        options: Arguments of its forward in addition to the batch.
    """

    def __init__(self, build: Callable[[], nn.Module], **options: Any) -> None:
        super().__init__()
        self.model = build()
        self._options = options

    @override
    def blocks(self) -> list[nn.Module]:
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        return [block for each in lists for block in each]

    @override
    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch, **self._options).loss


class Llava(OwnLoss):
    """A transformers LLaVA."""

    @override
    def multiply(self, **batch: Tensor) -> None:
        body = self.model.model
        body.vision_tower(batch["pixel_values"])
        hidden = body.language_model(batch["input_ids"], use_cache=False).last_hidden_state
        self.model.lm_head(hidden)


class Classifier(Network):
    """A torchvision convolutional network that is trained to classify.

    Args:
        build: Builds the network.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = build()

    @override
    def blocks(self) -> list[nn.Module]:
        from torchvision.models.convnext import CNBlock
        from torchvision.models.resnet import BasicBlock, Bottleneck

        return [module for module in self.model.modules() if isinstance(module, (BasicBlock, Bottleneck, CNBlock))]

    @override
    def forward(self, **batch: Tensor) -> Tensor:
        return F.cross_entropy(self.model(batch["pixel_values"]).float(), batch["labels"])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default floating-point dtype within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _largest_list(module: nn.Module) -> list[nn.Module]:
    return list(max((each for each in module.modules() if isinstance(each, nn.ModuleList)), key=len))
