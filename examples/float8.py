"""FP8 for the recipes: torchao multiplies in the linear layers of blocks in 8 bits; weights keep their precision.

Not converted: what lies outside of blocks (head, embeddings), experts and routers of mixtures, adapters, modulation by
norms, weights with two names, layers that are not exactly torch's own, and sizes that are no multiple of 16.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections import Counter

import recipe
import torch
from lora_lm import Adapted, is_of_experts
from torch import nn

CAPABILITY = (8, 9)  # of a GPU that multiplies in FP8, at least


def add_fp8(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    text = "multiply in 8 bits, on an RTX 40 or newer: `sp-lightning plan --fp8` says whether it pays"
    parser.add_argument("--fp8", action="store_true", help=text)


def check_fp8(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Report what FP8 lacks, before any work begins."""
    if not options.fp8:
        return
    if importlib.util.find_spec("torchao") is None:
        parser.error("--fp8 needs what is not installed: pip install torchao")
    if getattr(options, "train", "full") == "qlora":
        parser.error("--fp8 multiplies by weights of 16 or 32 bits, not of 4: take --train lora")
    if recipe.is_on_gpu(options) and (found := torch.cuda.get_device_capability()) < CAPABILITY:
        name, has = torch.cuda.get_device_name(), ".".join(map(str, found))
        parser.error(f"--fp8 needs a GPU of compute capability 8.9 (RTX 40, L40S, H100) or newer: {name} has {has}")


def prepare_fp8(options: argparse.Namespace, model: nn.Module) -> None:
    """Convert a model if `--fp8` asks for it, and say what is converted; without a GPU, FP8 is emulated."""
    if options.fp8:
        emulate = not recipe.is_on_gpu(options)
        recipe.say(convert(model, emulate=emulate))
        if emulate:
            recipe.say("FP8 is emulated without a GPU: rounded like there, and slower than BF16")


def convert(model: nn.Module, *, emulate: bool, name: str = "tensorwise") -> str:
    """Convert a model in place by one of torchao's recipes; return which layers were converted, and which were not."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    settings = vars(Float8LinearConfig.from_recipe_name(name))
    # a weight's gradient is a product over tokens, whose number need not be a multiple of 16
    config = Float8LinearConfig(**{**settings, "pad_inner_dim": True, "emulate": emulate})
    reasons = why_not(model)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, layer: not reasons[layer])
    others = Counter(filter(None, reasons.values()))
    left = ", ".join(f"{count} {reason}" for reason, count in others.items()) or "others"
    done = len(reasons) - others.total()
    return f"FP8 by torchao: {done} linear layers multiply in 8 bits; not {left}"


def why_not(model: nn.Module) -> dict[str, str]:
    """Return why a linear layer is not converted, by its name; nothing for one that is."""
    modules = dict(model.named_modules())
    lists = tuple(f"{name}." for name, module in modules.items() if isinstance(module, nn.ModuleList))
    thin = {
        id(layer) for module in modules.values() if isinstance(module, Adapted) for layer in (module.up, module.down)
    }
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    reasons = {}
    for name, layer in modules.items():
        if isinstance(layer, nn.Linear):
            tests = {
                "outside of blocks": not name.startswith(lists),
                "of experts": is_of_experts(model, name),
                "of adapters": id(layer) in thin,
                "beside norms": "norm" in name,
                "with a weight of two names": uses[id(layer.weight)] > 1,
                "of another class": type(layer) is not nn.Linear,
                "of a size that is no multiple of 16": layer.in_features % 16 or layer.out_features % 16,
            }
            reasons[name] = next((reason for reason, is_so in tests.items() if is_so), "")
    return reasons
