"""The shape of the package: which way its imports point, what lies where, and what a reader finds in each file."""

from __future__ import annotations

import ast
import importlib.metadata
import io
import re
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import sp_lightning
from sp_lightning import optim

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sp_lightning"
EXAMPLES = ROOT / "examples"
TOOLS = ROOT / "tools"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]

# The rooms, from the lowest up: a room imports from itself and from rooms before it in this list.
ROOMS = ["optim", "pipeline", "planning", "timeline", "trainer", "entrance"]

# The same within the engine: what all may use, the engine's rooms, and what brings them together.
ENGINE = [
    "basics", "lanes", "processes", "weights", "units", "window", "placing", "activations", "gradients", "averages",
    "stream", "optimizer", "calls", "whole", "story",
]  # fmt: skip
BASICS = {"options", "stats", "host_memory", "torch_private", "operations", "graphs", "tensors_in"}


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    """The dotted name of a module of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Imports in the engine that lead back, for types alone: where two objects really know each other.
BACK_FOR_TYPES = {"weights.weight": {"units.unit.Unit"}}


def leads_back(path: Path) -> set[str]:
    """What a file may import for types alone."""
    engine = "sp_lightning.pipeline."
    return {engine + name for name in BACK_FOR_TYPES.get(name_of(path).removeprefix(engine), ())}


@cache
def parsed(path: Path) -> list[ast.AST]:
    """The nodes of a file's code, the module first."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


@cache
def imported(path: Path, for_types_alone: bool = False) -> set[str]:
    """Every module that a file imports, at any depth of its code, by its absolute name."""
    names = set()
    nodes = parsed(path)
    blocks = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for node in (part for block in blocks for part in ast.walk(block)) if for_types_alone else nodes:
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


def test_imports_point_one_way():
    for path in modules(PACKAGE):
        mine = ROOMS.index(room_of(name_of(path)))
        ours = {name for name in imported(path) if name.split(".")[0] == "sp_lightning"}
        assert not {name for name in ours if ROOMS.index(room_of(name)) > mine}, path


def engine_room_of(module: str) -> str:
    parts = module.split(".")
    if len(parts) > 2 and parts[2] in BASICS:
        return "basics"
    if module.endswith(
        ("pipeline.pipeline", "placing.placement", "calls.story", "calls.calls")
    ):  # above all that they tell
        return "story"
    own = {"averages": "averages", "sums": "averages", "stream": "stream"}  # the stream has averages, these gradients
    room = own.get(parts[-1]) or ("whole" if len(parts) < 3 else parts[2])
    return room if room in ENGINE else "whole"


def test_imports_point_one_way_within_the_engine():
    for path in modules(PACKAGE / "pipeline"):
        mine = ENGINE.index(engine_room_of(name_of(path)))
        ours = {name for name in imported(path) - leads_back(path) if name.startswith("sp_lightning.pipeline.")}
        assert not {name for name in ours if ENGINE.index(engine_room_of(name)) > mine}, path
        assert imported(path, for_types_alone=True) == leads_back(path), "for types alone, they are few and known"


# The package may weigh 3 % more than its targets (141,500 tokens, 83,000 of them in the engine, 116 files), so that a
# contribution passes. A token is one of code: docstrings and comments are free, and a long name costs as much as a
# short one. `python -m tests.test_layout` prints today's numbers, those of the rooms too.
AT_MOST = {
    "code lines of more than 100 columns, per mille": 36,
    "files": 119,
    "imports that lead back": 1,
    "tokens": 145_745,
    "tokens of the engine": 85_490,
}


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines on which a docstring begins."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    return {node.body[0].lineno for node in nodes if ast.get_docstring(node, clean=False) is not None}


def tokens_of(path: Path) -> list[tokenize.TokenInfo]:
    """What a file says to Python, without its layout, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    docstrings = docstring_lines(ast.parse(text))
    layout = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
    return [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if tokenize.tok_name[token.type] not in layout
        and not (token.type == tokenize.STRING and token.start[0] in docstrings)
    ]


def sizes() -> Counter[str]:
    """What the package weighs now: what `AT_MOST` bounds, and each room for those who want to know."""
    found: Counter[str] = Counter()
    code_lines = wide_lines = 0
    for path in modules(PACKAGE):
        tokens = tokens_of(path)
        room = "/".join(path.relative_to(PACKAGE).parts[:-1]) or "the top"
        found[f"tokens of {room}"] += len(tokens)
        found["tokens"] += len(tokens)
        found["tokens of the engine"] += len(tokens) if room.startswith("pipeline") else 0
        found["files"] += 1
        lines = path.read_text(encoding="utf-8").splitlines()
        numbers = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
        code_lines += len(numbers)
        wide_lines += sum(len(lines[number - 1]) > 100 for number in numbers)
        found["imports that lead back"] += len(leads_back(path))
    found["code lines of more than 100 columns, per mille"] = round(1000 * wide_lines / code_lines)
    return found


def test_nothing_outgrows_its_budget():
    now = sizes()
    assert not {name: now[name] for name, bound in AT_MOST.items() if now[name] > bound}


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


def test_the_engine_knows_torch_alone():
    allowed = {"torch", "typing_extensions", "sp_lightning"} | sys.stdlib_module_names
    for path in modules(PACKAGE / "pipeline"):
        assert not {name for name in imported(path) if name.split(".")[0] not in allowed}, path


def test_examples_use_public_names_alone():
    """Only a benchmark may look at a part of the engine by itself."""
    public = {"sp_lightning", *(f"sp_lightning.{name}" for name in sp_lightning.__all__)}
    public |= {f"sp_lightning.optim.{name}" for name in optim.__all__}
    public |= {"sp_lightning.fabric", "sp_lightning.fabric.SuperpipelineStrategy"}
    public |= {"sp_lightning.transformers", "sp_lightning.transformers.SuperpipelineTrainerMixin"}
    parts = tuple(f"sp_lightning.{room}." for room in ("optim", "pipeline", "planning", "timeline", "trainer"))
    for path in modules(EXAMPLES):
        ours = {name for name in imported(path) if name.split(".")[0] == "sp_lightning"}
        if path.is_relative_to(EXAMPLES / "benchmarks"):
            ours = {name for name in ours if not name.startswith(parts) or "._" in name}
        assert not ours - public, path


def test_public_names_and_modules_have_docstrings():
    public = [name for name in sp_lightning.__all__ if not name.startswith("__")]
    assert not [name for name in public if not (getattr(sp_lightning, name).__doc__ or "").strip()]
    files = [path for folder in (PACKAGE, EXAMPLES, TOOLS) for path in modules(folder)]
    assert not [path for path in files if not ast.get_docstring(parsed(path)[0])]


def test_every_room_is_on_the_map():
    """The architecture page names each room of the package: a new one does not slip in beside the picture."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in modules(PACKAGE)}
    assert not [room for room in rooms if f"{room}/" not in text]


def test_top_level():
    allowed = {"docs", "examples", "sp_lightning", "tests", "tools"}
    caches = {"build", "dist", "runs", "samples", "site"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    assert {name for name in folders - caches if not name.endswith(".egg-info")} == allowed


def test_metadata():
    assert PROJECT["scripts"] == {"sp-lightning": "sp_lightning.cli:main"}
    assert (PACKAGE / "py.typed").is_file()
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"]["sp_lightning"]
    assert sp_lightning.__version__ == importlib.metadata.version("sp-lightning")
    assert f"\nversion: {sp_lightning.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_workflow_has_the_oldest_versions():
    job = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8").partition("  oldest:\n")[2]
    python = PROJECT["requires-python"].removeprefix(">=")
    assert f'python-version: "{python}"' in job
    extras = PROJECT["optional-dependencies"]
    lines = {*PROJECT["dependencies"], *extras["recipes"], *extras["trl"]}
    named = "torch|(pytorch-)?lightning|transformers|accelerate|peft|trl"
    promised = [line for line in lines if re.match(named, line) and ">=" in line]
    assert len(promised) == 7
    for line in promised:
        assert " " + line.split(",")[0].replace(">=", "==") in job


def test_declared_dependencies_are_those_imported():
    """What the package imports is declared, and nothing else is; what extras bring is imported where it is needed."""

    def names(lines: list[str]) -> set[str]:
        return {re.split(r"[\[>]", line)[0].replace("-", "_") for line in lines}

    optional = names([line for extra in ("cli", "fast", "recipes") for line in PROJECT["optional-dependencies"][extra]])
    found = {name.split(".")[0] for path in modules(PACKAGE) for name in imported(path)}
    found -= {*sys.stdlib_module_names, "sp_lightning", "lightning_fabric"}  # the last comes with pytorch-lightning
    assert found - optional == names(PROJECT["dependencies"])


def test_no_module_imports_the_command_line():
    """It needs an extra."""
    users = [name_of(path) for path in modules(PACKAGE) if any("sp_lightning.cli" in name for name in imported(path))]
    assert users == ["sp_lightning.__main__"]


if __name__ == "__main__":
    for name, size in sorted(sizes().items()):
        print(f'    "{name}": {size:_},')
