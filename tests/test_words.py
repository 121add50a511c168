"""Texts for users are in the words that users know: see words.py."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sp_lightning
from sp_lightning import optim
from sp_lightning.callback import CallbackMixin
from sp_lightning.fabric_strategy import FabricMixin
from sp_lightning.pipeline import Processes, Stats, Summary
from sp_lightning.planning.report import Report, Row
from sp_lightning.strategy import SuperpipelineMixin

from .words import AVOIDED

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "architecture.md"),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "tools").glob("*.md")),
]
PUBLIC = [
    *(getattr(sp_lightning, name) for name in sp_lightning.__all__ if name != "__version__"),
    *(getattr(optim, name) for name in optim.__all__),
    *(SuperpipelineMixin, FabricMixin, CallbackMixin, Processes, Summary, Stats, Report, Row),
]
CODE = re.compile(
    r"```.*?```|``[^`]*``|`[^`\n]*(?:\n[^`\n]+)?`|\]\([^)]*\)|<!--.*?-->"  # blocks, names, addresses, comments
    r"|^::: [^\n]*\n(?:    [^\n]*\n)*",  # what mkdocstrings is asked for
    re.DOTALL | re.MULTILINE,
)
WORDS = {re.compile(rf"\b({pattern})\b", re.IGNORECASE): instead for pattern, instead in AVOIDED.items()}


def found_in(text: str) -> list[str]:
    """What should be written otherwise, with a few words around it."""
    prose = CODE.sub(" ", text)
    return [
        f"{' '.join(prose[max(0, hit.start() - 30) : hit.end() + 30].split())!r}: write {instead!r}"
        for words, instead in WORDS.items()
        for hit in words.finditer(prose)
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents(document):
    assert not found_in(document.read_text(encoding="utf-8"))


def docstrings(public: object) -> Iterator[str]:
    """Of a name, and of what it has with a docstring of its own."""
    yield inspect.getdoc(public) or ""
    for name, value in vars(public).items() if inspect.isclass(public) else ():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield inspect.getdoc(value) or ""


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__qualname__)
def test_docstrings_of_public_names(public):
    assert not [found for text in docstrings(public) for found in found_in(text)]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The texts in a file that are no docstrings, with `{}` for what is put in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    in_others = {
        id(part)
        for node in ast.walk(tree)
        for part in (node.values if isinstance(node, ast.JoinedStr) else [getattr(node, "value", None)])
        if isinstance(node, (ast.JoinedStr, ast.Expr))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in in_others:
            yield node.lineno, node.value


@pytest.mark.parametrize(
    "path", sorted((ROOT / "sp_lightning").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT / "sp_lightning"))
)
def test_errors_warnings_and_lines(path):
    """Whatever has several words is a text that somebody may read."""
    found = {line: found_in(text) for line, text in texts(path) if text.count(" ") > 1}
    assert not {line: what for line, what in found.items() if what}
