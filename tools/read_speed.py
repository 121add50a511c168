"""Compares what plans expected with what machines of others measured: `python tools/read_speed.py FILE ...`.

Each file has lines that `sp-lightning check --speed` has printed; other lines are passed over.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(files: Sequence[str]) -> None:
    """Print planned over measured seconds of each streamed run."""
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            if not line.startswith("{"):
                continue
            found = json.loads(line)
            print(f"{found['gpu'] or 'CPU'}, sp_lightning {found['sp_lightning']}, torch {found['torch']}")
            for run in found["runs"]:
                planned, measured = run.get("planned_seconds"), run.get("step_seconds")
                words = run.get("error", f"{measured} s")
                if planned and measured:
                    words += f", planned / measured {planned / measured:.2f}, bottleneck {run['bottleneck']}"
                print(f"    {run['name']}: {words}")


if __name__ == "__main__":
    main(sys.argv[1:])
