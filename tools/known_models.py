"""Write the shapes of the models that `sp-lightning plan` knows by name, from the classes of their libraries.

    python tools/known_models.py              # say which are not as they are written
    python tools/known_models.py --write

So a plan needs neither these libraries nor the seconds that importing them takes. Needs transformers and diffusers; a
model whose library is not there stays as it is written.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sp_lightning.planning.known import known, of_transformers

# what a plan reads of a mixture of experts: how many there are, and how many of them a token passes
_OF_MIXTURES = ("num_experts", "top_k")
FILE = Path(__file__).resolve().parents[1] / "sp_lightning" / "planning" / "known" / "shapes.json"


def from_library(entry: dict[str, Any]) -> nn.Module:
    """Build a model by the class and the arguments that are known of it."""
    library, _, name = entry["class"].partition(".")
    cls = getattr(import_module(library), name)
    with torch.device("meta"):
        made = cls(**entry["arguments"])
        if isinstance(made, nn.Module):
            return made
        has = {*vars(cls()), *cls.attribute_map, "head_dim"}  # some models read that without declaring it
        assert set(entry["arguments"]) <= has, f"{name} has them all, but takes others, too"
        return of_transformers(made)


def shapes_of(model: nn.Module) -> dict[str, Any]:
    """Describe a model: its layers, and which of its weights are another one's."""
    assert all(weight.requires_grad and weight.dtype is torch.float32 for weight in model.parameters())
    first: dict[int, str] = {}
    tied = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(weight), name) != name:
            tied[name] = first[id(weight)]
    return {**_layer(model), "tied": tied}


def _layer(layer: nn.Module) -> dict[str, Any]:
    described: dict[str, Any] = {"class": type(layer).__name__}
    base = next(cls for cls in type(layer).__mro__ if getattr(nn, cls.__name__, None) is cls)
    if base is not type(layer):
        described["base"] = base.__name__
    names = [*getattr(base, "__constants__", ()), *_OF_MIXTURES]
    sizes = {name: getattr(layer, name, None) for name in names}
    described["sizes"] = {name: size for name, size in sizes.items() if isinstance(size, int)}
    described["weights"] = {name: list(weight.shape) for name, weight in layer.named_parameters(recurse=False)}
    runs: list[list[Any]] = []  # name of the first part, how many follow that are alike, what they are
    for name, child in layer.named_children():
        part = _layer(child)
        if runs and name.isdecimal() and runs[-1][2] == part:
            runs[-1][1] += 1
        else:
            runs.append([name, 1, part])
    described["parts"] = runs
    return {key: value for key, value in described.items() if value}


def main() -> None:
    """Compare what is written with the libraries' models, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    written: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    found = {}
    for name, entry in known("models").items():
        library = entry["class"].partition(".")[0]
        if find_spec(library) is None:
            print(f"{name}: {library} is not there")
            found[name] = written.get(name)
            continue
        found[name] = shapes_of(from_library(entry))
        if found[name] != written.get(name):
            print(f"{name}: {'written' if arguments.write else 'not as it is written'}")
    if arguments.write:
        lines = [f"  {json.dumps(name)}: {json.dumps(shapes)}" for name, shapes in found.items()]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
