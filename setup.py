"""What pyproject.toml cannot say: the repository's address in the README's links, and the recipes in the wheel.

PyPI shows the README far from the files that it links to, so relative links become absolute ones there. All of it comes
from one line, `repository` in pyproject.toml. A clone has the recipes in examples/, an installed package in
sp_lightning/recipes, where `sp-lightning finetune-chat` finds them.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(\]\()((?!https?:|#)[^)\s]+)(\))")
BADGES = re.compile(r"\[!\[[^\]]*\]\([^)]*\)\]\([^)]*\) ?")


def readme(address: str) -> str:
    """Return the README with links that lead somewhere from anywhere, as far as the address is known."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not address:
        return BADGES.sub("", text)

    def absolute(link: re.Match[str]) -> str:
        opening, target, closing = link.groups()
        if target.startswith("../../"):  # beside the files, as GitHub's badges are
            return f"{opening}{address}/{target.removeprefix('../../')}{closing}"
        kind = "raw" if target.endswith(".svg") else "blob"
        return f"{opening}{address}/{kind}/HEAD/{target}{closing}"

    return LINK.sub(absolute, text)


def urls(address: str) -> dict[str, str]:
    """Return the links in the sidebar of PyPI's page."""
    if not address:
        return {}
    files = f"{address}/blob/HEAD"
    return {
        "Repository": address,
        "Documentation": f"{files}/README.md#more",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


class BuildWithRecipes(build_py):
    """Copies the recipes beside the package's own modules, but not for an editable install."""

    def run(self) -> None:
        """Build the package, and copy the recipes."""
        super().run()
        if not self.editable_mode:
            recipes = Path(self.build_lib, "sp_lightning", "recipes")
            self.mkpath(str(recipes))
            examples = ROOT / "examples"
            for script in sorted([*examples.glob("*.py"), *examples.glob("benchmarks/*_speed.py")]):
                self.copy_file(str(script), str(recipes / script.name))


if __name__ == "__main__":
    (repository,) = re.findall(r'(?m)^repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    setup(
        long_description=readme(repository),
        long_description_content_type="text/markdown",
        project_urls=urls(repository),
        cmdclass={"build_py": BuildWithRecipes},
    )
