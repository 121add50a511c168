"""What `sp-lightning plan` knows by name: models, GPUs and hosts, from the data files in `known/`.

Models have the arguments of a class of their library, as they are published, the shapes of its layers, so that nobody
needs the library, and what to type to train them with a recipe of `examples/`, all of them or adapters; GPUs and hosts
have rates to assume, each with where it is from.
"""

from __future__ import annotations

import json
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from sp_lightning.planning.estimate import Assumptions

Kind: TypeAlias = Literal["models", "shapes", "gpus", "hosts", "recipes"]


def known(kind: Kind) -> dict[str, dict[str, Any]]:
    """Return all that is known of a kind, by name."""
    file = files("sp_lightning.planning").joinpath("known", f"{kind}.json")
    entries: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return entries


def find(kind: Kind, name: str) -> dict[str, Any] | None:
    """Return what is known by a name, in upper or lower case; a model may have its organization before it."""
    name = name.rpartition("/")[2].casefold()
    return next((entry for each, entry in known(kind).items() if each.casefold() == name), None)


def rates_of(kind: Kind, name: str | None) -> dict[str, Any]:
    """Return what to assume of a GPU or a host; nothing if none is named."""
    entry = {} if name is None else find(kind, name)
    if entry is None:
        raise ValueError(f"{kind[:-1]}: {name!r} is not one of {', '.join(known(kind))}")
    return {rate: value for rate, value in entry.items() if rate != "source"}


def recipe(name: str, given: Assumptions) -> str:
    """Return the command that trains a model; nothing if none is known for it, or for the optimizer."""
    entry = find("models", name) or {}
    script = find("recipes", entry.get("recipe", ""))
    if script is None or given.optimizer != "AdamW":
        return ""
    length = min(given.tokens, given.length)
    named = {None: "adamw", "fp32": "split", "int8": "int8"}[given.moments]
    options = vars(given) | {"optimizer": named, "hub": entry["hub"]}
    options |= {"length": length, "rows": given.tokens // length}
    command: str = script["full" if given.lora is None else "lora"].format(**options)
    clip = given.gradient_clip_val
    return command if clip is None else f"{command} --clip {clip}"


def named_model(name: str) -> nn.Module:
    """Build a model that is known by its name, or has a configuration of transformers, on the meta device."""
    shapes = None if Path(name).exists() else find("shapes", name)
    with torch.device("meta"):
        if shapes is not None:
            return _of_shapes(shapes)
        try:
            return of_transformers(import_module("transformers").AutoConfig.from_pretrained(name))
        except (ImportError, OSError, ValueError) as error:
            raise ValueError(
                f"model: {name!r} is neither a class, nor built in (see `plan --help`), nor a "
                f"configuration of transformers: {error}"
            ) from error


def of_transformers(config: Any) -> nn.Module:
    """Build the model of a configuration of transformers, for language if it has one for that."""
    # takes seconds, which models that are known do not need
    transformers: Any = import_module("transformers")
    auto = transformers.AutoModel
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = transformers.AutoModelForCausalLM
    elif type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = transformers.AutoModelForImageTextToText
    module: nn.Module = auto.from_config(config).float()
    return module


def _of_shapes(shapes: dict[str, Any]) -> nn.Module:
    """Build a model that only holds weights; `examples/benchmarks/known_models.py` has described it."""
    model = _layer(shapes)
    for name, other in shapes.get("tied", {}).items():
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, model.get_parameter(other))
    return model


def _layer(shapes: dict[str, Any]) -> nn.Module:
    name, base = shapes["class"], shapes.get("base")  # torch's own layers have none
    cls = getattr(nn, base or name)
    if base is not None:
        cls = type(name, (cls,), {"forward": nn.Identity.forward})
    layer: nn.Module = cls.__new__(cls)
    nn.Module.__init__(layer)
    vars(layer).update(shapes.get("sizes", {}))
    for name, size in shapes.get("weights", {}).items():
        layer.register_parameter(name, nn.Parameter(torch.empty(size)))
    for first, count, part in shapes.get("parts", ()):
        for number in range(count):
            layer.add_module(str(int(first) + number) if count > 1 else first, _layer(part))
    return layer
