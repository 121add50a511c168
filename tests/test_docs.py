"""The documents hold what they say: their code runs, their commands are CI's, their links lead somewhere."""

from __future__ import annotations

import ast
import os
import re
from copy import deepcopy
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from torch import nn
from torch.optim import AdamW

import sp_lightning
from sp_lightning import optim, superpipeline
from sp_lightning.pipeline import PipelineOptions

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = [
    README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md",
    *sorted((ROOT / "examples").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "tools").glob("*.md")),
]  # fmt: skip
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: Path, language: str) -> list[str]:
    text = document.read_text(encoding="utf-8")
    return [match[2] for match in FENCE.finditer(text) if match[1] == language]


def commands(text: str) -> list[str]:
    """The commands of a shell text, one by one, without comments."""
    lines = [line.split("  #")[0].strip() for line in text.splitlines()]
    return [part.strip() for line in lines if line and not line.startswith("#") for part in line.split("&&")]


def python_blocks() -> list[object]:
    return [
        pytest.param(document, code, id=f"{document.name}-{number}")
        for document in DOCUMENTS
        for number, code in enumerate(blocks(document, "python"))
    ]


@pytest.mark.parametrize(("document", "code"), python_blocks())
def test_python_runs(document, code):
    """Each block alone, as a reader would paste it into a new session."""
    if "from trl" in code:
        pytest.importorskip("trl", reason="the block needs it: pip install -e '.[trl]'")
    if "torchao" in code:
        pytest.importorskip("torchao", reason="the block needs it: pip install -e '.[fp8]'")
    with patch.dict(os.environ):  # transformers 4.57 sets variables for accelerate
        exec(compile(code, str(document), "exec"), {"__name__": "__main__"})


def test_the_toy_streams():
    """The sixty lines have the numbers of plain training and of superpipeline, in two slots."""
    (code,) = blocks(ROOT / "docs" / "how_it_works.md", "python")
    names: dict[str, Any] = {}
    exec(code, names)
    torch.manual_seed(0)
    plain = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(5)]
    toy = names["Toy"](deepcopy(plain), partial(AdamW, lr=0.01), "cpu")
    real = nn.Sequential(*deepcopy(plain))
    slots = []
    with superpipeline(real, "cpu", k=2):
        for model in (toy, nn.Sequential(*plain), real):
            optimizer = None if model is toy else AdamW(model.parameters(), lr=0.01)
            for batch in torch.arange(4 * 24.0).div(96).view(4, 3, 8):
                model(batch).square().mean().backward()
                slots.append(len(toy.present))
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
    expected = torch.nn.utils.parameters_to_vector(nn.Sequential(*plain).parameters())
    for model in (toy.blocks, real):
        assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), expected)
    assert max(slots) <= 2


def test_the_reference_has_all_options_with_their_defaults():
    rows = re.findall(
        r"^\| `(\w+)` \| `(.*?)` \|", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [(name, ast.literal_eval(default)) for name, default in rows] == [
        (field.name, field.default) for field in fields(PipelineOptions)
    ]


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 155


def test_yaml_is_that_of_the_example():
    config = yaml.safe_load((ROOT / "examples" / "configs" / "finetune_lm.yaml").read_text(encoding="utf-8"))
    (text, *_) = blocks(ROOT / "docs" / "cli.md", "yaml")
    assert yaml.safe_load(text)["trainer"]["strategy"] == config["trainer"]["strategy"]


def test_ci_runs_the_commands_for_contributors():
    """In its own order, with a budget and a list of what took longest."""
    listed = [command for text in blocks(ROOT / "CONTRIBUTING.md", "bash") for command in commands(text)]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").partition("CONTRIBUTING.md.\n")[2]
    run = [command.partition(" --budget")[0] for command in commands(script) if command != "keep_compiled"]
    assert run[0] == 'pip install -e ".[dev]"'
    assert run[-1] == "pytest -n auto --all"
    assert not [command for command in run if command not in listed]
    # The README's line for the tests is installing and testing, in this order and nothing between.
    assert 'pip install -e ".[dev]" && pytest -n auto\n' in README.read_text(encoding="utf-8")


def test_public_names_are_in_the_reference():
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = {*sp_lightning.__all__, *optim.__all__} - {"__version__"}
    assert not [name for name in names if not re.search(rf"(\.|heading: ){name}$", reference, re.MULTILINE)]


def test_scripts_in_commands_exist():
    commands = "\n".join(text for document in DOCUMENTS for text in blocks(document, "bash"))
    scripts = set(re.findall(r"\b(?:examples|tools)/[\w/]+\.(?:py|sh|yaml)\b", commands))
    recipes = re.findall(r"\bsp-lightning ([a-z]+-[a-z-]+)", commands)
    scripts |= {f"examples/{recipe.replace('-', '_')}.py" for recipe in recipes}
    assert len(scripts) > 5
    assert not [script for script in scripts if not (ROOT / script).is_file()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue  # the network is not asked
        if target.startswith("../../actions/"):
            continue  # beside the files, on GitHub
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_quoted_messages_exist():
    """Users search for the message that they got."""
    tables = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8").partition("## Errors")[2]
    quoted = re.findall(r"(?:^\| |an error: |a warning: )`([^`]+)`(?: \||, and)", tables, re.MULTILINE)
    assert len(quoted) > 15
    package = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "sp_lightning").rglob("*.py")))
    package = re.sub(r'"\s*f?"', "", package)  # messages are written in several lines
    package = re.sub(r"`?\{[^}]*\}`?", "", package)
    assert not [message for message in quoted if message not in package]
