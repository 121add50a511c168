"""Texts for users are in the words that users know: see words.py."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
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

from .words import AVOIDED, WITHOUT_SUBJECT

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "architecture.md"),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "tools").glob("*.md")),
]
SOURCES = sorted((ROOT / "sp_lightning").rglob("*.py"))
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
HEADING = re.compile(r"^#+ .*$|^\|.*$", re.MULTILINE)  # or a row of a table
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*[-*] )")
SENTENCE = re.compile(rf"(?:^(?:[-*] )?|(?<=[.:;!?] ))((?:{WITHOUT_SUBJECT})\b[^.?!]*[.?!]?)")
WORDS = {re.compile(rf"\b({pattern})\b", re.IGNORECASE): instead for pattern, instead in AVOIDED.items()}


def found_in(text: str) -> list[str]:
    """Return words that should be others, with a few words around them, and sentences without a subject."""
    prose = CODE.sub(" ", text)
    found = [
        f"{' '.join(prose[max(0, hit.start() - 30) : hit.end() + 30].split())!r}: write {instead!r}"
        for words, instead in WORDS.items()
        for hit in words.finditer(prose)
    ]
    return found + without_subject(text)


def without_subject(text: str) -> list[str]:
    """Return the sentences of a text that begin with a clause in place of their subject."""
    paragraphs = [" ".join(each.split()) for each in PARAGRAPH.split(HEADING.sub("\n", CODE.sub("code", text)))]
    sentences = [sentence for paragraph in paragraphs for sentence in SENTENCE.findall(paragraph)]
    return [f"{sentence!r}: name the subject first" for sentence in sentences if not sentence.endswith("?")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents(document):
    assert not found_in(document.read_text(encoding="utf-8"))


def docstrings(public: object) -> Iterator[str]:
    """Yield the docstrings of a name, and of its own methods and properties."""
    yield inspect.getdoc(public) or ""
    for name, value in vars(public).items() if inspect.isclass(public) else ():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield inspect.getdoc(value) or ""


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__qualname__)
def test_docstrings_of_public_names(public):
    assert not [found for text in docstrings(public) for found in found_in(text)]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts in a file that are no docstrings, with `{}` for values."""
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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "sp_lightning")))
def test_errors_warnings_and_lines(path):
    """A text of several words may be for users."""
    found = {line: found_in(text) for line, text in texts(path) if text.count(" ") > 1}
    assert not {line: hits for line, hits in found.items() if hits}


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments in a file; neighboring comments on lines of their own are one text."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    comments: dict[int, str] = {}
    first, last = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            is_next = line == last + 1 and token.line.lstrip().startswith("#")
            first, last = first if is_next else line, line
            comments[first] = f"{comments.get(first, '')} {token.string.lstrip('# ')}".strip()
    yield from comments.items()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "sp_lightning")))
def test_docstrings_and_comments_name_their_subjects(path):
    found = {line: without_subject(text) for line, text in prose(path)}
    assert not {line: hits for line, hits in found.items() if hits}


def test_architecture_names_its_subjects():
    assert not without_subject((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
