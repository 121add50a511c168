"""Language models: decoders, encoders, both, shared layers, experts, recurrent, PyTorch's own."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from .case import Batch, Case, own_loss

VOCABULARY, LENGTH = 61, 8
LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
SMALL = {**LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 16}


def tokens(rows: int = 2, length: int = LENGTH, vocabulary: int = VOCABULARY) -> Tensor:
    """Random token ids; the first few ids stay free for special tokens."""
    return torch.randint(5, vocabulary, (rows, length))


def causal_batch() -> Batch:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def masked_batch() -> Batch:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.roll(1, 1)}


def gpt2(tied: bool = True, layers: int = 4, checkpoint: bool | None = None) -> nn.Module:
    """GPT-2 with dropout; ``checkpoint`` turns on transformers' own checkpointing with that ``use_reentrant``."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": layers, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **ends, tie_word_embeddings=tied))
    if checkpoint is not None:
        with warnings.catch_warnings():  # newer transformers call it activation_checkpointing_enable
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoint})
    return model.train()


def llama() -> nn.Module:
    sizes = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, tie_word_embeddings=False, attention_dropout=0.1)).train()


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL)).train()


def albert() -> nn.Module:
    """One layer of weights, called three times."""
    return hf.AlbertForMaskedLM(hf.AlbertConfig(**SMALL, embedding_size=8, hidden_dropout_prob=0.1)).train()


def t5() -> nn.Module:
    """Tied embeddings in encoder, decoder and head; the first block's position bias is used by the others."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = hf.T5Config(**sizes, dropout_rate=0.1, decoder_start_token_id=0, pad_token_id=0)
    return hf.T5ForConditionalGeneration(config).train()


def mixtral() -> nn.Module:
    sizes = {**SMALL, "intermediate_size": 16, "num_key_value_heads": 1, "num_local_experts": 4}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, output_router_logits=True)).train()


class Experts(nn.Module):
    """Experts as modules of their own; those that no token is sent to are not called and get no gradient."""

    def __init__(self, width: int = 12, experts: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        out = x.clone()
        for index, expert in enumerate(self.experts):
            rows = choice == index
            if rows.any():
                out[rows] = out[rows] + weight[rows, None] * expert(x[rows])
        return out


class RecurrentLM(nn.Module):
    """An LSTM language model; nn.LSTM keeps a second list of its weights (``_flat_weights``)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.layers = nn.ModuleList(nn.LSTM(12, 12, batch_first=True) for _ in range(3))
        self.deep = nn.LSTM(12, 12, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True)
        self.gru = nn.GRU(24, 12, batch_first=True)
        self.cell = nn.LSTMCell(12, 12)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        x = self.gru(self.deep(x)[0])[0]
        state = None
        for moment in x.unbind(1):
            state = self.cell(moment, state)
        return self.head(x + state[0][:, None])


def next_token_loss(logits: Tensor, batch: Batch) -> Tensor:
    (ids,) = batch
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class EncoderLM(nn.Module):
    """nn.TransformerEncoder, whose eval fast path hands raw weights to one fused op."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=padding))


def encoder_batch() -> Batch:
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1, -3:] = True
    return tokens(), padding


def logits_loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[0].flatten())


def no_cache(model: nn.Module, batch: Batch) -> Any:
    """Training never uses the key/value cache; leaving it on only makes transformers warn under checkpointing."""
    return model(**batch, use_cache=False)


CACHELESS: dict[str, Any] = {"call": no_cache, "heavy": True}
CASES = [
    Case("gpt2-tied", gpt2, causal_batch, own_loss, autocast=True, heavy=True),
    Case("llama-untied", llama, masked_batch, own_loss, clip=0.5, heavy=True, autocast=True),
    Case("bert", bert, masked_batch, own_loss, autocast=True, heavy=True),
    Case("albert", albert, masked_batch, own_loss, heavy=True, autocast=True),
    Case("t5", t5, masked_batch, own_loss, heavy=True, autocast=True),
    Case("mixtral", mixtral, causal_batch, own_loss, heavy=True),
    Case(
        "experts-as-modules", lambda: nn.Sequential(Experts(), Experts()), lambda: (torch.randn(9, 12),), autocast=True
    ),
    Case("lstm", RecurrentLM, lambda: (tokens(),), next_token_loss, autocast=True),
    Case("nn-transformer-encoder", EncoderLM, encoder_batch, logits_loss, autocast=True),
    Case("gpt2-checkpoint-plain", partial(gpt2, checkpoint=False), causal_batch, own_loss, **CACHELESS, autocast=True),
    Case("gpt2-checkpoint-reentrant", partial(gpt2, checkpoint=True), causal_batch, own_loss, **CACHELESS),
]
