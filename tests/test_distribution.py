"""What is published: the sdist and the wheel have what they need, nothing else, and run outside of the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEFT_BY_RUNS = ("examples/lightning_logs/metrics.csv", "tests/__pycache__/x.pyc", "build/lib/old.py", "a.ckpt")


def python(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=environment or None, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("an sdist is not built of an sdist")
    # whoever owns the checkout, as in a container
    listing = ["git", "-c", "safe.directory=*", "ls-files"]
    listed = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tracked: set[str]) -> Path:
    """A folder with the sdist and the wheel that is made of it, from a copy of the repository where things were run."""
    copy, built = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for name in LEFT_BY_RUNS:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).touch()
    python("-m", "build", "--no-isolation", "--outdir", built, cwd=copy)
    return built


def test_the_sdist_has_what_the_tests_need(built, tracked):
    with tarfile.open(*built.glob("*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames() if sdist.getmember(name).isfile()}
    made = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    of_the_forge = {name for name in tracked if name.startswith((".git", ".pre-commit"))}
    assert names - made == tracked - of_the_forge


def test_the_wheel_has_the_package_and_the_recipes(built, tracked):
    with ZipFile(*built.glob("*.whl")) as wheel:
        names = set(wheel.namelist())
    about = {name for name in names if ".dist-info/" in name}
    recipes = {name for name in tracked if re.fullmatch(r"examples/\w+\.py", name)}
    assert names - about == {name for name in tracked if name.startswith("sp_lightning/")} | {
        f"sp_lightning/recipes/{Path(name).name}" for name in recipes
    }
    assert {"sp_lightning/py.typed", "sp_lightning/timeline/page.html"} <= names
    assert {"LICENSE", "entry_points.txt"} <= {Path(name).name for name in about}


def test_the_wheel_runs_outside_of_the_repository(built, tmp_path):
    """The plain loop of the documents, a recipe, and one that lacks a package."""
    site = tmp_path / "site"
    python("-m", "pip", "install", "--no-deps", "--no-index", "--target", site, *built.glob("*.whl"), cwd=tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "fabric.md").read_text(encoding="utf-8"), re.M | re.S
    )
    (loop,) = [block for block in blocks if "pipeline.detach()" in block]
    say_where = "\nimport sp_lightning\nprint(sp_lightning.__file__)\n"
    output = python("-c", loop + say_where, cwd=tmp_path, PYTHONPATH=str(site))
    assert output.splitlines()[-1] == str(site / "sp_lightning" / "__init__.py")
    assert "loss" in python("-m", "sp_lightning", "plain-loop", cwd=tmp_path, PYTHONPATH=str(site))
    lacks = "import lightning, runpy, sys; sys.modules['transformers'] = None; "
    lacks += "runpy.run_module('sp_lightning', run_name='__main__')"
    command = [sys.executable, "-c", lacks, "finetune-chat"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(site)}, capture_output=True)
    assert done.stderr.decode() == "error: recipes need transformers: pip install 'sp-lightning[recipes]'\n"
