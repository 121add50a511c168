"""The shape of the package: which way its imports point, what lies where, and what a reader finds in each file."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

import sp_lightning
from sp_lightning import optim

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sp_lightning"
EXAMPLES = ROOT / "examples"

# The rooms, from the lowest up: a room imports from itself and from rooms before it in this list.
ROOMS = ["optim", "pipeline", "planning", "timeline", "trainer", "entrance"]

# The same within the engine: what all may use, the engine's rooms, and what brings them together.
ENGINE = [
    "basics", "lanes", "processes", "weights", "units", "window", "activations", "gradients", "turns", "optimizer",
    "calls", "whole",
]  # fmt: skip
BASICS = {"options", "stats", "host_memory", "torch_private", "operands", "progress"}


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    """The dotted name of a module of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Imports in the engine that lead back, for types alone: where two objects really know each other.
BACK_FOR_TYPES = {
    "activations.saved": {"activations.recompute.UnitCall", "calls.backward.BackwardPass"},
    "calls.backward": {"engine.Engine"},
    "calls.calls": {"engine.Engine"},
    "calls.gates": {"calls.calls.Calls"},
    "calls.guard": {"engine.Engine"},
    "gradients.stream": {"optimizer.early_step.EarlyStep"},
    "optimizer.kinds": {"optimizer.optimizers.Optimizers"},
    "units.unit": {"optimizer.visit.Visit"},
    "weights.autocast": {"calls.graphs.Graphs"},
    "weights.leaf": {"weights.weight.Weight"},
    "weights.weight": {"calls.guard.Guard", "units.unit.Unit"},
}


def leads_back(path: Path) -> set[str]:
    """What a file may import for types alone."""
    engine = "sp_lightning.pipeline."
    return {engine + name for name in BACK_FOR_TYPES.get(name_of(path).removeprefix(engine), ())}


def imported(path: Path, for_types_alone: bool = False) -> set[str]:
    """Every module that a file imports, at any depth of its code, by its absolute name."""
    names = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for node in (part for block in blocks for part in ast.walk(block)) if for_types_alone else ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                # Relative to the folder of the file, one folder up for each further dot.
                folder = path.parent
                for _ in range(node.level - 1):
                    folder = folder.parent
                base = ".".join([*folder.relative_to(ROOT).parts, *filter(None, [base])])
            # `from package import x` may import a module x.
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "entrance"


@pytest.mark.parametrize("path", modules(PACKAGE), ids=name_of)
def test_imports_point_one_way(path):
    mine = ROOMS.index(room_of(name_of(path)))
    ours = {name for name in imported(path) if name.split(".")[0] == "sp_lightning"}
    assert not {name for name in ours if ROOMS.index(room_of(name)) > mine}


def engine_room_of(module: str) -> str:
    parts = module.split(".")
    if len(parts) > 2 and parts[2] in BASICS:
        return "basics"
    if parts[2:4] in (["processes", "turns"], ["processes", "sums"]):  # processes in turn bring gradients together
        return "turns"
    return parts[2] if len(parts) > 2 and parts[2] in ENGINE else "whole"


@pytest.mark.parametrize("path", modules(PACKAGE / "pipeline"), ids=name_of)
def test_imports_point_one_way_within_the_engine(path):
    mine = ENGINE.index(engine_room_of(name_of(path)))
    ours = {name for name in imported(path) - leads_back(path) if name.startswith("sp_lightning.pipeline.")}
    assert not {name for name in ours if ENGINE.index(engine_room_of(name)) > mine}


@pytest.mark.parametrize("path", modules(PACKAGE / "pipeline"), ids=name_of)
def test_imports_for_types_alone_are_few_and_known(path):
    assert imported(path, for_types_alone=True) == leads_back(path)


def test_no_type_is_hidden():
    """An alias to `Any` hides what it stands for from mypy, and from the reader."""
    hides = re.compile(r"(?m): TypeAlias = Any\b|^\w+ = Any\b")
    assert not [path for path in modules(PACKAGE) if hides.search(path.read_text(encoding="utf-8"))]


def test_no_import_leads_back():
    """But those that are known, for types."""
    files = {name_of(path): path for path in modules(PACKAGE)}
    leads_to = {
        name: files.keys()
        & {part for found in imported(path) - leads_back(path) for part in (found, found.rpartition(".")[0])}
        for name, path in files.items()
    }
    for _ in range(len(files).bit_length()):  # each round reaches twice as far
        leads_to = {name: near.union(*(leads_to[other] for other in near)) for name, near in leads_to.items()}
    assert not [name for name, all_imports in leads_to.items() if name in all_imports]


@pytest.mark.parametrize("path", modules(PACKAGE / "pipeline"), ids=name_of)
def test_the_engine_knows_torch_alone(path):
    allowed = {"torch", "typing_extensions", "sp_lightning"} | sys.stdlib_module_names
    assert not {name for name in imported(path) if name.split(".")[0] not in allowed}


@pytest.mark.parametrize("path", modules(EXAMPLES), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_examples_use_public_names_alone(path):
    """Only a benchmark may look at a part of the engine by itself."""
    public = {"sp_lightning", *(f"sp_lightning.{name}" for name in sp_lightning.__all__)}
    public |= {f"sp_lightning.optim.{name}" for name in optim.__all__}
    public |= {"sp_lightning.fabric", "sp_lightning.fabric.SuperpipelineStrategy"}
    ours = {name for name in imported(path) if name.split(".")[0] == "sp_lightning"}
    if path.is_relative_to(EXAMPLES / "benchmarks"):
        parts = tuple(f"sp_lightning.{room}." for room in ("pipeline", "planning", "timeline", "trainer"))
        ours = {name for name in ours if not name.startswith(parts) or "._" in name}
    assert not ours - public


@pytest.mark.parametrize(
    "name", [name for name in sp_lightning.__all__ if not name.startswith("__")], ids=lambda name: name
)
def test_public_names_are_documented(name):
    assert (getattr(sp_lightning, name).__doc__ or "").strip()


@pytest.mark.parametrize("path", modules(PACKAGE) + modules(EXAMPLES), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_has_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_every_room_is_on_the_map():
    """The architecture page names each room of the package: a new one does not slip in beside the picture."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in modules(PACKAGE)}
    assert not [room for room in rooms if f"{room}/" not in text]


def test_top_level():
    allowed = {"docs", "examples", "sp_lightning", "tests"}
    caches = {"build", "dist", "site"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    assert {name for name in folders - caches if not name.endswith(".egg-info")} == allowed


def test_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert (PACKAGE / "py.typed").is_file()
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["sp_lightning"]
    assert sp_lightning.__version__ == importlib.metadata.version("sp-lightning")
    assert f"\nversion: {sp_lightning.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_workflow_has_the_oldest_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    job = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8").partition("  oldest:\n")[2]
    python = project["requires-python"].removeprefix(">=")
    assert f'python-version: "{python}"' in job
    lines = [*project["dependencies"], *project["optional-dependencies"]["examples"]]
    promised = [line for line in lines if re.match("torch|(pytorch-)?lightning|transformers", line) and ">=" in line]
    assert len(promised) == 4
    for line in promised:
        assert " " + line.split(",")[0].replace(">=", "==") in job


def test_declared_dependencies_are_those_imported():
    """What the package imports is declared, and nothing else is; what extras bring is imported where it is needed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(lines: list[str]) -> set[str]:
        return {re.split(r"[\[>]", line)[0].replace("-", "_") for line in lines}

    optional = names(
        [line for extra in ("cli", "examples", "fast") for line in project["optional-dependencies"][extra]]
    )
    found = {name.split(".")[0] for path in modules(PACKAGE) for name in imported(path)}
    found -= {*sys.stdlib_module_names, "sp_lightning", "lightning_fabric"}  # the last comes with pytorch-lightning
    assert found - optional == names(project["dependencies"])


def test_no_module_imports_the_command_line():
    """It needs an extra."""
    users = [name_of(path) for path in modules(PACKAGE) if any("sp_lightning.cli" in name for name in imported(path))]
    assert users == ["sp_lightning.__main__"]
