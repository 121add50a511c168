"""Which names are registered where, what an import costs, and that the two namespaces do not mix."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import lightning.pytorch
import pytest
import pytorch_lightning
import torch

import sp_lightning
import sp_lightning.fabric
import sp_lightning.lightning_fabric
import sp_lightning.pytorch_lightning as twin

from .processes import forks, run_python

Python = Callable[[str], str]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Python]:
    """Run code in a process that has imported torch, and return what it printed."""
    with forks("import torch, torchmetrics", tmp_path_factory.mktemp("forks")) as fork:

        def python(code: str) -> str:
            status, printed, said = fork(textwrap.dedent(code))
            assert status == 0, said
            return printed.strip()

        yield python


@pytest.mark.parametrize("name", ["superpipeline", "SuperPipeline"])
def test_the_trainer_finds_it(name):
    ours = lightning.pytorch.Trainer(strategy=name, accelerator="cpu", logger=False, enable_checkpointing=False)
    assert type(ours.strategy) is sp_lightning.SuperpipelineStrategy


REGISTERED = """
import sys
for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
    module = sys.modules.get(name + ".strategies")
    registry = getattr(module, "StrategyRegistry" if "pytorch" in name else "STRATEGY_REGISTRY", ())
    if "superpipeline" in registry:
        print(name)
print(sp_lightning.SuperpipelineStrategy.__module__)
"""


@pytest.mark.parametrize("first", ["fabric", "lightning", "strategy"])
def test_any_module_may_be_the_first_import(first, python):
    printed = python(
        f"import sp_lightning.{first}" + REGISTERED + "import lightning.pytorch, lightning.fabric" + REGISTERED
    )
    assert {"lightning.pytorch", "lightning.fabric"} <= set(printed.split())


def test_names_are_registered_in_what_is_imported_later(python):
    """By whatever finds them; nobody sees who has loaded them, and the first one's classes are those of the package."""
    code = """
        import inspect, sys
        before = {name.split(".")[0] for name in sys.modules}
        import sp_lightning
        assert {name.split(".")[0] for name in sys.modules} - before - sys.stdlib_module_names == {"sp_lightning"}
        import lightning, pytorch_lightning
        assert inspect.getsource(lightning) and type(lightning.__loader__) is type(inspect.__loader__)
    """
    *names, module = python(textwrap.dedent(code) + REGISTERED).splitlines()
    assert set(names) == {"lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"}
    assert module == "sp_lightning.lightning"


def test_a_plan_imports_nothing_that_takes_seconds():
    code = """
import sys
from sp_lightning.cli import main
sys.argv = ["sp-lightning", "plan", "--model", "Llama-3.2-1B", "--device_memory", "24GiB"]
slow = {"lightning", "pytorch_lightning", "transformers", "torchvision", "torch._dynamo", "torch.distributed.fsdp"}
print(main(), slow & sys.modules.keys())
"""
    printed, _ = run_python("-c", code)  # not in the process of the other tests, which has imported some of these
    assert printed.splitlines()[-1] == "0 set()"


def test_the_engine_works_without_lightning(python):
    code = """
        import sys
        sys.modules.update(lightning=None, pytorch_lightning=None)
        import torch, sp_lightning
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        pipeline = sp_lightning.superpipeline(module, "cpu")
        module(torch.ones(1, 2)).sum().backward()
        pipeline.detach()
        try:
            sp_lightning.SuperpipelineStrategy
        except ImportError as error:
            print(error)
    """
    assert "pip install -U lightning" in python(code)


def test_pytorch_lightning_trains(python):
    """Names are registered in the namespace that was loaded."""
    code = """
        import pytorch_lightning as pl, sp_lightning
        from pytorch_lightning.demos.boring_classes import BoringModel
        from sp_lightning.pytorch_lightning import SuperpipelineCallback
        trainer = pl.Trainer(
            strategy="superpipeline", accelerator="cpu", max_steps=3, logger=False, callbacks=SuperpipelineCallback(),
            enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(BoringModel())
        trainer.test(BoringModel(), verbose=False)
        print(type(trainer.strategy).__module__, trainer.global_step, "lightning" in __import__("sys").modules)
    """
    *_, trained, first, second, module = python(textwrap.dedent(code) + REGISTERED).splitlines()
    assert trained == "sp_lightning.pytorch_lightning 3 False"
    assert {first, second} == {"pytorch_lightning", "lightning_fabric"}
    assert module == "sp_lightning.pytorch_lightning"


@pytest.mark.parametrize(
    ("taker", "module", "owner"),
    [
        (lightning.pytorch.Trainer, twin, "Trainer of pytorch_lightning"),
        (pytorch_lightning.Trainer, sp_lightning, "Trainer of lightning.pytorch"),
        (lightning.pytorch.Trainer, sp_lightning.fabric, "Fabric of lightning.fabric"),
        (lightning.fabric.Fabric, sp_lightning, "Trainer of lightning.pytorch"),
    ],
)
def test_a_strategy_for_somebody_else_says_whose_it_is(taker, module, owner):
    says = f"invalid strategy name: .*for the {owner} alone; strategy='superpipeline' works everywhere"
    with pytest.raises(ValueError, match=says):
        taker(strategy=module.SuperpipelineStrategy(), accelerator="cpu")


def test_all_names_are_listed():
    names = {name for name in dir(sp_lightning) if not name.startswith("_")}
    assert set(sp_lightning.__all__) - {"__version__"} <= names
    assert not {"Any", "Sequence", "nn", "sys", "torch"} & names


def test_finders_of_the_old_protocol_are_passed_over(monkeypatch):
    """They have no `find_spec`, and Python's own import passes over them, too."""
    ours = next(finder for finder in sys.meta_path if isinstance(finder, sp_lightning._RegisteringFinder))
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_module=None), *sys.meta_path])
    assert ours.find_spec("lightning", None) is not None


@pytest.mark.parametrize(
    "twins",
    [(sp_lightning.lightning, twin), (sp_lightning.fabric, sp_lightning.lightning_fabric)],
    ids=["Trainer", "Fabric"],
)
def test_the_twins_are_the_same(twins):
    """Two files, one text: a change to one belongs into the other."""

    def text(module: object) -> str:
        source = inspect.getsource(module).replace("sp_lightning.lightning_fabric", "sp_lightning.fabric")
        for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
            source = source.replace(name, "NAMESPACE")
        lines = source.replace("  # type: ignore[misc]", "").splitlines()
        return "\n".join(sorted(line for line in lines if "twin" not in line))

    assert text(twins[0]) == text(twins[1])


@pytest.mark.parametrize(
    "taker", [sp_lightning.superpipeline, sp_lightning.SuperpipelineStrategy, sp_lightning.fabric.SuperpipelineStrategy]
)
def test_arguments_are_in_the_signature(taker):
    """By name, type and default, as an editor shows them; one that is not known is answered with those there are."""
    parameters = inspect.signature(taker).parameters
    for field in dataclasses.fields(sp_lightning.PipelineOptions):
        assert parameters[field.name].default == field.default
        assert parameters[field.name].annotation == field.type
    with pytest.raises(TypeError, match="no argument 'kk'. Its options are k, k_prime, memory_budget"):
        taker(*[torch.nn.Linear(2, 2)] * inspect.isfunction(taker), kk=2)
    with pytest.raises(TypeError, match="no argument 'memory_buget', but 'memory_budget'. Its options are k, k_prime"):
        taker(*[torch.nn.Linear(2, 2)] * inspect.isfunction(taker), memory_buget="4GB")
    with pytest.raises(
        TypeError, match="^(superpipeline|SuperpipelineStrategy.__init__)\\(\\) takes .* positional argument"
    ):
        taker(*[torch.nn.Linear(2, 2)] * 3)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("auto_wrap_policy", "`units` names the layers"),
        ("activation_checkpointing", "use `activations='recompute'`"),
        ("cpu_offload", "weights are always in CPU memory"),
        ("offload_optimizer", "see `optimizer_on`"),
        ("stage", "there are no stages"),
    ],
)
def test_arguments_of_others_are_answered_with_ours(argument, says):
    with pytest.raises(TypeError, match=f"SuperpipelineStrategy has no argument '{argument}': .*{says}"):
        sp_lightning.SuperpipelineStrategy(**{argument: 2})


def test_a_folder_with_the_name_of_a_namespace_is_found_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a user's own, where that package is not installed: nothing of it is run, so nothing is registered."""
    ours = sp_lightning._RegisteringFinder()
    folder = ModuleSpec("pytorch_lightning", loader=None, is_package=True)
    monkeypatch.setattr(sys, "meta_path", [ours, SimpleNamespace(find_spec=lambda *_: folder)])
    assert ours.find_spec("pytorch_lightning", None) is folder
