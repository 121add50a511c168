"""What is published: the sdist and the wheel have what they need, nothing else, and run outside of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from transformers import AutoModelForCausalLM, ByT5Tokenizer, Qwen3Config, Qwen3ForCausalLM

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
def copied(tmp_path_factory: pytest.TempPathFactory, tracked: set[str]) -> Path:
    """A copy of the repository where things were run, in a folder of its own."""
    copy = tmp_path_factory.mktemp("home") / "sp_lightning"
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for name in LEFT_BY_RUNS:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).touch()
    return copy


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, copied: Path) -> Path:
    """A folder with the sdist and the wheel that is made of it."""
    built = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--outdir", built, cwd=copied)
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
    recipes = {name for name in tracked if re.fullmatch(r"examples/(\w+|benchmarks/\w+_speed)\.py", name)}
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


@pytest.fixture
def home(copied) -> Path:
    """The folder with the clone, a model of an architecture and data, all tiny, named as in the README."""
    home = copied.parent
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3Config(**sizes, head_dim=16, vocab_size=259, num_key_value_heads=2, pad_token_id=0)
    Qwen3ForCausalLM(config).save_pretrained(home / "Qwen" / "Qwen3-8B")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"
    tokenizer.save_pretrained(home / "Qwen" / "Qwen3-8B")
    says = [[{"role": "user", "content": "2?" * 80}, {"role": "assistant", "content": f"{n}."}] for n in range(300)]
    (home / "CHATS.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in says), encoding="utf-8")
    return home


def test_the_commands_of_the_readme(home, tmp_path):
    """Exactly as printed, outside of the clone, in an environment of their own, to which only what is installed here is
    added, so that nothing is downloaded; the run is killed, and the same command continues it."""
    for package in ("accelerate", "diffusers"):  # of the extra
        pytest.importorskip(package)
    python("-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    interpreter, pip = (tmp_path / "venv" / "bin" / name for name in ("python", "pip"))
    pip.write_text(f"#!{interpreter}\nfrom pip._internal.cli.main import main\nraise SystemExit(main())\n")
    pip.chmod(0o755)
    (site,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others), encoding="utf-8")
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    path = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **offline, "PATH": path}
    environment.pop("PYTHONPATH", None)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    *commands, train = [
        line.partition("  #")[0]
        for block in re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)[:2]
        for line in block.splitlines()
    ]
    assert [command.split()[0] for command in commands] == ["pip", *["sp-lightning"] * (len(commands) - 1)]
    assert " finetune-chat " in train

    def run(command: str) -> str:
        done = subprocess.run(command, shell=True, cwd=home, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    planned = [run(command) for command in commands]
    row = re.search(r"^\| Qwen3-8B \| .* \| (.*) \|$", text, re.M)  # the last machine is that of the commands
    assert row is not None
    way, figure = row[1].split(": ")
    *_, table, plan = planned
    assert re.search(rf"Qwen3-8B +{way} .* {figure}$", table, re.M)
    assert f"Estimated speed: {figure} tokens/s" in plan
    assert train in plan
    run(train)
    (home / "OUT").rename(home / "WHOLE")
    shutil.rmtree(home / "runs")
    killed = subprocess.Popen(train, shell=True, cwd=home, env=environment, start_new_session=True)
    while not (home / "runs" / "finetune_chat" / "checkpoints" / "last.ckpt").exists():
        assert killed.poll() is None, "it ended before it saved"
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not [*(home / "OUT").iterdir()]
    assert "Continuing from runs/finetune_chat/checkpoints/last.ckpt" in run(train)
    one, other = (AutoModelForCausalLM.from_pretrained(home / name).state_dict() for name in ("WHOLE", "OUT"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    start = AutoModelForCausalLM.from_pretrained(home / "Qwen" / "Qwen3-8B", dtype=torch.bfloat16).state_dict()
    assert not all(torch.equal(value, other[name]) for name, value in start.items())
