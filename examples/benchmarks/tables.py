"""A table of a page of the documentation, which the script that is named above it prints and writes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path


def print_table(script: str, about: str | None, document: Path, lines: Iterable[str]) -> None:
    """Print the lines of a table, and write them into the document if that is asked for."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write it into {document.name}")
    arguments = parser.parse_args()
    table = []
    for line in lines:
        print(line, flush=True)
        table.append(line)
    if arguments.write:
        place = re.compile(rf"(<!-- {Path(script).name} -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
        text = document.read_text(encoding="utf-8")
        document.write_text(place.sub(lambda found: found[1] + "\n" + "\n".join(table) + "\n", text), encoding="utf-8")
