"""What the recipes need beside the package: recipe.py imports this first, and a missing package is one line."""

from __future__ import annotations

import importlib.util
import sys

PACKAGES = {"PIL": "pillow", "jinja2": "jinja2", "torchvision": "torchvision", "transformers": "transformers"}

missing = [package for name, package in PACKAGES.items() if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: recipes need {', '.join(missing)}: pip install 'sp-lightning[recipes]'")
