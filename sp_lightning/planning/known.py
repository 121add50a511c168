"""What `sp-lightning plan` knows by name: models, GPUs and hosts, from the data files in `known/`.

Models have the arguments of a class of their library, as they are published, and what to type to train them with a
recipe of `examples/`, all of them or adapters; GPUs and hosts have rates to assume, each with where it is from.
"""

from __future__ import annotations

import json
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from sp_lightning.planning.estimate import Assumptions

Kind: TypeAlias = Literal["models", "gpus", "hosts", "recipes"]


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
    entry = None if Path(name).exists() else find("models", name)
    library, _, cls = ("transformers" if entry is None else str(entry["class"])).partition(".")
    if find_spec(library) is None:
        raise ValueError(f"model: {name!r} needs {library}: pip install {library}")
    # takes seconds, and models of other libraries do not need it
    made_by: Any = import_module(library)
    with torch.device("meta"):
        if entry is not None:
            made = getattr(made_by, cls)(**entry["arguments"])
            return made if isinstance(made, nn.Module) else _of_transformers(made_by, made)
        try:
            return _of_transformers(made_by, made_by.AutoConfig.from_pretrained(name))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"model: {name!r} is neither a class, nor built in (see `plan --help`), nor a "
                f"configuration of transformers: {error}"
            ) from error


def _of_transformers(transformers: Any, config: Any) -> nn.Module:
    auto = transformers.AutoModel
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = transformers.AutoModelForCausalLM
    elif type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = transformers.AutoModelForImageTextToText
    module: nn.Module = auto.from_config(config).float()
    return module
