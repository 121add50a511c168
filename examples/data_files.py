"""Files of training data: lines of JSON, or one list. What cannot be used is skipped and counted, and ends no run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lightning.pytorch.utilities import rank_zero_only

SHOWN = 3  # reasons, of all that there are
Made = TypeVar("Made")


class Skipped:
    """Counts what of a data file cannot be used, with the reasons."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def attempt(self, make: Callable[..., Made], *arguments: Any) -> Made | None:
        """Call a function; if it raises a ValueError, note that and return None."""
        try:
            return make(*arguments)
        except ValueError as error:
            self.reasons.append(str(error))
            return None

    def __str__(self) -> str:
        """Return how many were skipped, with the first reasons, to be put in a sentence; nothing if none were."""
        if not self.reasons:
            return ""
        more = "; ..." if len(self.reasons) > SHOWN else ""
        return f" ({len(self.reasons)} skipped: {'; '.join(self.reasons[:SHOWN])}{more})"

    def report(self, path: str | None, used: int) -> None:
        """Say what was skipped, if anything was."""
        if self.reasons:
            rank_zero_only(print)(f"{path}: {used} used{self}")


def read_lines(path: str, skipped: Skipped) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, or of a list in JSON, each with its place."""
    with open(path, "rb") as lines:
        is_list = lines.read(1) == b"["
        lines.seek(0)
        if is_list:
            for number, entry in enumerate(parsed(path, 1, lines.read()), 1):
                place = f"{path}, entry {number}"
                checked = skipped.attempt(checked_object, place, entry)
                if checked is not None:
                    yield place, checked
            return
        for number, line in enumerate(lines, 1):
            checked = skipped.attempt(object_in_line, path, number, line) if line.strip() else None
            if checked is not None:
                yield f"{path}, line {number}", checked


def object_in_line(path: str, number: int, line: bytes) -> dict[str, Any]:
    """Return the object that a line of a file describes."""
    return checked_object(f"{path}, line {number}", parsed(path, number, line.strip()))


def checked_object(place: str, entry: Any) -> dict[str, Any]:
    """Return an entry of a file, if it is an object."""
    if not isinstance(entry, dict):
        raise ValueError(f"{place}: not a JSON object")
    return entry


def parsed(path: str, line: int, text: bytes) -> Any:
    """Return what a text in JSON says that begins in this line of a file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {line + error.lineno - 1}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {line}: not JSON: not in UTF-8: {error}") from None
