"""The models, GPUs and hosts that `sp-lightning plan` knows by name, from the data files in `known/`.

Models have the arguments of a class of their library, as they are published. They have the shapes of its layers, so
that the library is not needed, and the command to train them, or adapters, with a recipe of `examples/`. Hosts have
rates to assume, and some have a desktop. Drives have rates that they keep for hours, and the TB that may be written to
one of 1 TB. GPUs have about the memory that torch shows, the peak that their maker states, their generation and lanes
of PCIe and, by class, the share of the peak that training reaches (their *reach*), and the host that they are in if
none is named. Each entry has its source.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from sp_lightning.planning.assumptions import Assumptions

Kind: TypeAlias = Literal["models", "shapes", "gpus", "reaches", "fp8", "hosts", "drives", "recipes"]
Entry: TypeAlias = dict[str, Any]
# pixels of a side of the images that the recipe for diffusion takes by default, and of a token's patch
_SIDE, _PIXELS = 512, 16
# options of recipes, and the field that has each
_OPTIONS = {
    "accumulate": "accumulate",
    "clip": "gradient_clip_val",
    "activations": "activations",
    "optimizer-on": "optimizer_on",
    "devices": "devices",
}
# words that people leave out of a card's name, or put before it
_ON_HUB = re.compile(r"\w[\w.-]*/[\w.-]*[\w-](?<!\.json)")
_MAKER = re.compile(r"nvidia|geforce|rtx|tesla|[\s-]")


def known(kind: Kind) -> dict[str, Entry]:
    """Return all known entries of a kind, by name."""
    file = files("sp_lightning.planning").joinpath("known", f"{kind}.json")
    entries: dict[str, Entry] = json.loads(file.read_text(encoding="utf-8"))
    return entries


def find(kind: Kind, name: str) -> Entry | None:
    """Return the entry of a name, in upper or lower case; a model may have its organization before it."""
    name = name.rpartition("/")[2].casefold()
    return next((entry for each, entry in known(kind).items() if each.casefold() == name), None)


def gpu_named(name: str) -> str | None:
    """Return the full name of a card; the argument may lack its maker and series: "4090", "rtx4090"."""
    return next((gpu for gpu in known("gpus") if _short(gpu) == _short(name)), None)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the names most like one that is not known: first those that begin like it."""
    key = _short(name)
    likeness = {each: SequenceMatcher(None, key, _short(each)).ratio() + _short(each).startswith(key) for each in names}
    return ", ".join(sorted(likeness, key=likeness.__getitem__, reverse=True)[:3])


def _short(name: str) -> str:
    return _MAKER.sub("", name.casefold())


def rates_of_gpu(name: str, lanes: int | None = None, devices: int = 1) -> Entry:
    """Return the assumptions about a card: its memory, link and speed, FP8's gains, and the host that it is in.

    A slot may have fewer PCIe `lanes` than the card, and has where several devices share those of a desktop.
    """
    gpu = gpu_named(name)
    if gpu is None:
        raise ValueError(
            f"`--gpu`: {name!r} is not a card that is built in. The nearest ones: {nearest(name, known('gpus'))}. "
            "Describe another one by `--device-memory`, `--link` and `--compute`."
        )
    entry = known("gpus")[gpu]
    reach = known("reaches")[entry["reach"]]
    lanes = lanes or (reach["lanes_of_several"] if devices > 1 else entry["lanes"])
    gains: Entry = next((each for each in known("fp8").values() if gpu in each["cards"]), {})
    return {
        **(rates_of("hosts", reach["host"]) if "host" in reach else {}),
        "device_memory": entry["device_memory"],
        "link": entry["link"] * min(1, lanes / entry["lanes"]),
        "device_bandwidth": entry["memory_bandwidth"],
        "compute": entry["peak"] * reach["low"],
        "compute_at_best": entry["peak"] * reach["high"],
        "fp8_gain": gains.get("low"),
        "fp8_gain_at_best": gains.get("high"),
    }


def rates_of(kind: Literal["hosts", "drives"], name: str) -> Entry:
    """Return the assumptions about a host, with the bandwidth of its memory and its desktop, or about a drive."""
    entry = find(kind, name)
    if entry is None:
        option = {"hosts": "host", "drives": "nvme"}[kind]
        raise ValueError(f"`--{option}`: {name!r} is not one of {', '.join(known(kind))}")
    return {rate: value for rate, value in entry.items() if rate != "source"}


def batch_of(name: str) -> Entry:
    """Return the tokens of a batch, and of a row, that a model's recipe takes by default; nothing if any will do."""
    entry = find("models", name) or {}
    if "text_tokens" not in entry:
        return {}
    tokens = (_SIDE // _PIXELS) ** 2 + entry["text_tokens"]
    return {"tokens": tokens, "length": tokens}


def recipe(name: str, given: Assumptions) -> str:
    """Return the command that trains a model as it was planned; nothing if no recipe does just that."""
    entry = find("models", name) or {}
    script = find("recipes", entry.get("recipe", "")) or {}
    trained = "full" if given.lora is None else "lora" if given.bits == 16 else "qlora"
    length = min(given.tokens, given.length)
    takes_whole_rows = given.tokens % length == 0
    # recipes have no options for these
    is_usual = given.optimizer == "AdamW" and given.units is None and not given.resident
    if trained not in script or not is_usual or not takes_whole_rows:
        return ""
    text = entry.get("text_tokens", 0)
    side = _PIXELS * math.isqrt(max(0, length - text))
    if "{side}" in script["size"]:
        if (side // _PIXELS) ** 2 + text != length:
            return ""  # no image has that many
    elif given.loss == "whole":
        return ""
    options = {
        "precision": given.precision,
        "optimizer": {None: "adamw", "fp32": "split", "int8": "int8"}[given.moments],
        "batch-size": given.tokens // length,
        **given.typed(_OPTIONS),
    }
    if given.nvme_read is not None:
        options["nvme-path"] = "FOLDER"
    if given.fp8:
        if "has_fp8" not in script:
            return ""
        options["fp8"] = ""
    typed = (f"--{option} {value}".rstrip() for option, value in options.items())
    command: str = " ".join(filter(None, [script[trained], script["size"], *typed]))
    return command.format(hub=entry["hub"], lora=given.lora, length=length, side=side)


def named_model(name: str) -> nn.Module:
    """Build a model with a known name, or with a configuration of transformers, on the meta device."""
    is_file = Path(name).exists()
    shapes = None if is_file else find("shapes", name)
    with torch.device("meta"):
        if shapes is not None:
            return of_shapes(shapes)
        try:
            if not is_file and not _ON_HUB.fullmatch(name):
                raise ValueError("A model of the hub has its organization before its name.")
            return of_transformers(import_module("transformers").AutoConfig.from_pretrained(name))
        except (ImportError, OSError, ValueError) as error:
            near = nearest(name.rpartition("/")[2], known("models"))
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"model: {name!r} is neither a class, nor built in (see `plan --help`), nor a configuration of "
                f"transformers (a file, folder or name on the hub). Nearest names that are built in: {near}. {reason}"
            ) from error


def of_transformers(config: Any) -> nn.Module:
    """Build the model of a configuration of transformers, for language if it has one for that."""
    # this import takes seconds, and known models do not need it
    transformers: Any = import_module("transformers")
    auto = transformers.AutoModel
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = transformers.AutoModelForCausalLM
    elif type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = transformers.AutoModelForImageTextToText
    module: nn.Module = auto.from_config(config).float()
    return module


def of_shapes(shapes: Entry) -> nn.Module:
    """Build a model that only holds weights, from the description by `tools/known_models.py`."""
    model = _layer(shapes)
    for name, other in shapes["tied"].items():
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, model.get_parameter(other))
    return model


def _layer(shapes: Entry) -> nn.Module:
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
