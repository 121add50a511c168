"""Trainers of transformers and TRL with tiny models and data, and all that their runs leave."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from sp_lightning import PipelineOptions
from sp_lightning.transformers import SuperpipelineTrainerMixin

WORDS = 64


SIZES = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(**others: Any) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, **others}))


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_input_names=["input_ids", "attention_mask"], **names
    )


def tokens(seed: int, count: int) -> list[int]:
    return torch.randint(4, WORDS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def text(seed: int, count: int) -> str:
    return " ".join(f"w{token}" for token in tokens(seed, count))


def rows(labeled: bool = False) -> Any:
    from datasets import Dataset

    found = [{"input_ids": tokens(row, 6 + row % 3)} for row in range(12)]
    return Dataset.from_list([{**row, "labels": row["input_ids"]} if labeled else row for row in found])


def pairs() -> Any:
    from datasets import Dataset

    return Dataset.from_list(
        [{"prompt": text(i, 3), "chosen": text(i + 50, 4), "rejected": text(i + 99, 4)} for i in range(12)]
    )


def adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


def mean(prediction: Any) -> dict[str, float]:
    return {"mean": float(prediction.predictions.mean())}


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Trainer": ("Trainer", {"gradient_accumulation_steps": 1}, {}),
    "autocast": ("Trainer", {"bf16": True}, {}),
    "cosine": ("Trainer", {"lr_scheduler_type": "cosine", "max_grad_norm": 0.0}, {}),
    "the best model": ("Trainer", {**EVALUATED, **BEST}, {}),
    "early": ("Trainer", {**EVALUATED, **BEST, "max_steps": 9}, {"callbacks": lambda: [EarlyStoppingCallback(1)]}),
    "metrics": ("Trainer", EVALUATED, {"compute_metrics": lambda: mean}),
    "sequences": (
        "Seq2SeqTrainer",
        {**EVALUATED, "predict_with_generate": True, "generation_max_length": 4},
        {"model": t5},
    ),
    "SFT": ("SFTTrainer", {"activation_checkpointing": False}, {}),
    "SFT with checkpoints": ("SFTTrainer", {"activation_checkpointing": True}, {}),
    "SFT packed": ("SFTTrainer", {"packing": True, "max_length": 12, "padding_free": False}, {}),
    "SFT evaluated": ("SFTTrainer", EVALUATED, {}),
    "SFT LoRA": ("SFTTrainer", {}, {"peft_config": adapters}),
    "DPO": ("DPOTrainer", {}, {"ref_model": llama}),
    "DPO LoRA": ("DPOTrainer", {}, {"peft_config": adapters}),
}


def grpo_case(model: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A case of a Trainer that generates, with a reference that is loaded from a folder."""
    options = {"num_generations": 2, "max_completion_length": 3, "beta": 0.1, "max_steps": 2, "temperature": 1.0}
    given = {
        "model": lambda: LlamaForCausalLM.from_pretrained(model),
        "reward_funcs": lambda: lambda completions, **_: [float(len(words)) for words in completions],
    }
    return "GRPOTrainer", options, given


def build(case: str, folder: Path, streams: bool, trainer: Any = None, **others: Any) -> Any:
    name, options, given = CASES[case]
    of_trl = name not in ("Trainer", "Seq2SeqTrainer")
    kind = name.removesuffix("Trainer")
    library = import_module("trl" if of_trl else "transformers")
    trainer = trainer or getattr(library, name)
    arguments = getattr(library, f"{kind}Config" if of_trl else f"{kind}TrainingArguments")
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "save_strategy": "no"}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "use_cpu": True, "bf16": False}
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 0.01}
    options = {**settings, **quiet, **sizes, **options, **others}
    if options.pop("activation_checkpointing", False):
        options["gradient_checkpointing"] = True
    elif of_trl:
        options["gradient_checkpointing"] = False
    made = {"model": llama, "train_dataset": rows if name == "SFTTrainer" else pairs} | given
    given = {name: make() for name, make in made.items()}
    if not of_trl:
        given["train_dataset"] = rows(labeled=True)
        given["data_collator"] = transformers.DataCollatorForSeq2Seq(tokenizer(), pad_to_multiple_of=4)
    if "eval_strategy" in options:
        given["eval_dataset"] = given["train_dataset"]
    if streams:
        trainer = type("Streamed", (SuperpipelineTrainerMixin, trainer), {})
        given["streaming"] = PipelineOptions(k=2, memory_budget=None)
    given["processing_class"] = tokenizer()
    return trainer(args=arguments(str(folder), **options), **given)


def everything(trainer: Any, folder: Path) -> dict[str, Any]:
    """Losses, norms and metrics, weights, and all files but those that know the time or the folder."""
    timed = ("runtime", "per_second", "total_flos", "time")
    seen: dict[str, Any] = {
        f"log {number} {name}": value
        for number, line in enumerate(trainer.state.log_history)
        for name, value in line.items()
        if not any(part in name for part in timed)
    }
    seen |= {f"weight {name}": value.cpu().clone() for name, value in trainer.model.state_dict().items()}
    for path in sorted(folder.rglob("*.safetensors")):
        seen[f"file {path.relative_to(folder)}"] = path.read_bytes()
    for path in sorted(folder.rglob("optimizer.pt")):
        for number, state in torch.load(path)["state"].items():
            seen |= {f"file {path.relative_to(folder)} {number} {name}": value for name, value in state.items()}
    return seen
