"""Hooks of mkdocs: pages from elsewhere in the repository, and links that hold on GitHub and here."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "index.md": "README.md",
    "examples.md": "examples/README.md",
    "bench.md": "examples/benchmarks/README.md",
    "on_a_gpu.md": "tools/on_a_gpu.md",
    "results.md": "examples/benchmarks/results/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "tests.md": "tests/README.md",
    "tools.md": "tools/README.md",
}
# They are beside the files on GitHub, and nowhere here.
BADGES = re.compile(r"\[!\[[^\]]*\]\([^)]*\)\]\([^)]*\) ?")
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from elsewhere."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links between files of the repository to pages of the site, or else to the repository."""
    source = Path(page.file.abs_src_path)
    on_site = {Path(file.abs_src_path): file.src_uri for file in files if file.abs_src_path}

    def lead(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        target = (source.parent / path).resolve()
        if target in on_site:
            return f"[{text}]({on_site[target]}{anchor})"
        if not target.exists():
            return link[0]  # mkdocs warns
        if not config.repo_url:
            return text
        return f"[{text}]({config.repo_url}/blob/HEAD/{target.relative_to(ROOT).as_posix()}{anchor})"

    return LINK.sub(lead, BADGES.sub("", markdown))
