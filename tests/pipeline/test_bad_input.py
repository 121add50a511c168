"""What cannot be made right raises a ValueError that names it, and leaves the module exactly as it was."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import superpipeline
from sp_lightning.pipeline import Pipeline, PipelineOptions

from ..helpers import CAPTURES
from ..zoo.blocks import WIDTH, Block, chain


def snapshot(module: nn.Module) -> dict[str, Any]:
    """All of a module that an attachment touches."""
    seen: dict[str, Any] = {}
    for name, inner in module.named_modules():
        seen[f"class {name}"] = type(inner)
        seen[f"attributes {name}"] = {key: id(value) for key, value in vars(inner).items()}
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(inner, kind).items():
                seen[f"{kind} {name}.{key}"] = None if tensor is None else (id(tensor), type(tensor), address(tensor))
    return seen


def address(tensor: Tensor) -> tuple[int, int, tuple[int, ...]] | None:
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return None
    return tensor.data_ptr(), tensor.untyped_storage().nbytes(), tensor.stride()


@contextmanager
def unchanged(module: nn.Module) -> Any:
    """The module is what it was, and no thread has been started."""
    before, threads = snapshot(module), set(threading.enumerate())
    yield
    assert snapshot(module) == before
    assert set(threading.enumerate()) == threads


def model() -> nn.Module:
    """Blocks, a head, and a buffer."""
    made = chain(6, 16, 64)
    made.head = nn.Linear(16, 8)
    made.norm = nn.BatchNorm1d(16)
    return made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"units": "NoSuchBlock"}, "`units='NoSuchBlock'` matches no module"),
        ({"resident": ["nowhere"]}, "`resident` names 'nowhere'"),
        ({"resident": ["blocks.0", "blocks.0.up.weights"]}, "`resident` names 'blocks.0.up.weights'"),
        ({"memory_budget": 1}, "`memory_budget=1` is one byte. For all of the GPU.s memory, write 1.0"),
        ({"memory_budget": 20}, "(?s)`memory_budget=20` is too small.*Text has a unit, such as '20GB'"),
        ({"memory_budget": "1kB", "k": 3, "units": Block}, "`memory_budget='1kB'` is too small with `k=3`"),
        ({"k": 0}, "`k=0` must be"),
        ({"units": nn.Tanh()}, "`units=` was given an instance of `Tanh`. Give its class"),
        ({"units": [nn.Tanh()]}, "`units=` was given an instance of `Tanh`. Give its class"),
        ({"optimizer_on": "device"}, "`optimizer_on='device'` must be one of 'auto', 'host'"),
    ],
    ids=lambda value: re.sub(" at 0x\\w+", "", str(value)),
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    """From the front door on: nothing is attached, the argument and its value are in the message."""
    module = model()
    with unchanged(module), pytest.raises(ValueError, match=message):
        superpipeline(module, "cpu", **options)
    superpipeline(module, "cpu").detach()


@pytest.mark.parametrize("device", ["foo", "hip", "cuda:99", 1.5])
def test_devices_that_are_not_there(device: Any) -> None:
    with pytest.raises(ValueError, match=f"`device='{device}'` is not a device that this torch can use. .+"):
        superpipeline(model(), device)


@pytest.mark.parametrize(
    ("module", "message"),
    [([Block()], "This is a `list`. Put several modules into one"), (Block, "This is the class `Block`. Build it")],
)
def test_what_is_no_module(module: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        superpipeline(module, "cpu")


def test_more_together_than_there_are_warns() -> None:
    """It works: all move together."""
    with pytest.warns(UserWarning, match="`k_prime=9` is above the number of units, 6. All units move together"):
        superpipeline(model(), "cpu", units=Block, k_prime=9).detach()


def put(make: Callable[[], nn.Module]) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module.blocks[2], "up", make())


def with_other_gradients(module: nn.Module) -> None:
    if not hasattr(Tensor, "grad_dtype"):
        pytest.skip("torch 2.9 has gradients in the dtype of their weights")
    module.blocks[2].up.weight.grad_dtype = torch.float64


def without_parameters(module: nn.Module) -> None:
    for name in list(module._modules):
        delattr(module, name)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (put(lambda: nn.Linear(16, 64, device="meta")), "'blocks.2.up.weight' is on the meta device.*to_empty"),
        (put(lambda: nn.LazyLinear(64)), "'blocks.2.up.weight' has no shape yet.*one forward"),
        (
            put(torch.inference_mode()(lambda: nn.Linear(16, 64))),
            "'blocks.2.up.weight' was made in inference mode.*Build the model outside",
        ),
        (with_other_gradients, "'blocks.2.up.weight' is torch.float32, and its `grad_dtype` torch.float64"),
        (without_parameters, "`Chain` has no parameters"),
    ],
)
def test_modules_that_cannot_stream(spoil: Callable[[nn.Module], None], message: str) -> None:
    """A parameter's full name, and what to do about it."""
    module = model()
    spoil(module)
    with unchanged(module), pytest.raises(ValueError, match=message):
        Pipeline(module, "cpu")


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("options", [{"units": Block}, {}, {"units": Block, "resident": ["head"]}], ids=str)
def test_the_least_budget_that_works(options: dict[str, Any], k: int) -> None:
    """The message names it in bytes; with k=1 it works, and with one byte less it does not."""
    module = model()
    with unchanged(module), pytest.raises(ValueError, match=r"at least \d+ bytes .*with k=1") as caught:
        superpipeline(module, "cpu", k=k, memory_budget=2, **options)
    least = int(str(caught.value).split("at least ")[-1].split(" bytes")[0])
    with pytest.raises(ValueError, match="`memory_budget="):
        superpipeline(module, "cpu", k=1, memory_budget=least - 1, **options)

    pipeline = superpipeline(module, "cpu", k=1, memory_budget=least, **options)
    run_a_step(pipeline)
    summary = pipeline.summary()
    assert summary.device_bytes + summary.gradient_bytes <= least
    pipeline.detach()


def test_a_share_of_unknown_memory_warns() -> None:
    with pytest.warns(UserWarning, match=r"`memory_budget=0.5` is a share .*cpu does not tell.* There is no budget"):
        superpipeline(model(), "cpu", memory_budget=0.5).detach()


@pytest.mark.parametrize("free", [None, 1 << 40, 20_000])
def test_host_memory_that_suffices_or_not(free: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is needed and how much there is; frozen weights need less."""
    monkeypatch.setattr("sp_lightning.pipeline.placing.places.available_host_memory", lambda: free)
    module = model()
    if free == 20_000:
        with unchanged(module), pytest.raises(ValueError, match=r"CPU memory is too small: .* needed.*19.5 KiB are"):
            Pipeline(module, "cpu")
        module.requires_grad_(False)
    Pipeline(module, "cpu", options=PipelineOptions(units=Block)).detach()


def test_gradients_may_take_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device has a limit, what the host has no room for may wait there."""
    monkeypatch.setattr("sp_lightning.pipeline.placing.places.available_host_memory", lambda: 20_000)
    with superpipeline(model(), "cpu", units=Block, memory_budget="1MB") as pipeline:
        assert 0 < pipeline.waiting.host_bytes < 20_000


@pytest.mark.parametrize("units", [Block, nn.Linear])
@pytest.mark.parametrize(
    "part",
    [lambda module: module, lambda module: module.blocks[0], lambda module: module.blocks[0].up, nn.Sequential],
    ids=["itself", "a-unit", "inside-of-a-unit", "around"],
)
def test_a_module_attached_twice(part: Callable[[nn.Module], nn.Module], units: Any) -> None:
    """The second pipeline is refused before it touches anything, and the first goes on."""
    module = model()
    first = superpipeline(module, "cpu", units=Block, debug=True)
    attached = [first]
    try:
        run_a_step(first)
        first._engine.settle()  # or the first look at a weight would, and change what is compared
        again = part(module)
        options = {} if isinstance(again, nn.Linear) else {"units": units}
        with unchanged(again), pytest.raises(ValueError, match="already belongs to a pipeline.*(?i:detach)"):
            attached.append(superpipeline(again, "cpu", **options))
        run_a_step(first)
    finally:
        for pipeline in reversed(attached):
            pipeline.detach()
    superpipeline(again, "cpu").detach()


def run_a_step(pipeline: Pipeline) -> None:
    """Forward and backward through blocks and head."""
    with pipeline.step():
        x = pipeline.module(torch.randn(3, 16))
        pipeline.module.head(x).square().mean().backward()


@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
def test_capturing_a_module_as_a_graph(capture: Callable[[nn.Module, Tensor], Any]) -> None:
    module, x = chain(3), torch.ones(2, WIDTH)
    pipeline = superpipeline(module, "cpu", units=Block)
    expected = module(x)
    with pytest.raises(RuntimeError, match=r"captured as a graph.*`copy\.deepcopy\(module\)\.cpu\(\)`"):
        capture(module, x)
    copied = copy.deepcopy(module).cpu()
    captured = capture(copied, x)
    assert torch.equal((captured.module() if hasattr(captured, "module") else captured)(x), expected)
    pipeline.detach()
