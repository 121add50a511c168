"""finetune_diffusion.py: digits become readable, images are encoded once, the numbers are those of plain training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import recipe
import torch
from diffusion_models import SIDE
from finetune_diffusion import Flow, Noise, main
from offline import WrittenNumbers
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torchvision.transforms.functional import to_tensor


class Run(NamedTuple):
    """What a run showed: whether it encoded images, all of its losses, and the last picture."""

    encoded: bool
    losses: list[float]
    picture: bytes


@pytest.fixture
def run(capsys, monkeypatch) -> Callable[..., Run]:
    def run(*arguments: str) -> Run:
        losses = recipe.Losses()
        monkeypatch.setattr(recipe, "Losses", lambda: losses)
        assert not main(["--accelerator=cpu", *arguments])
        picture = sorted(Path("samples").glob("*.png"))[-1].read_bytes()
        return Run("Encoding" in capsys.readouterr().out, losses.values, picture)

    return run


def reader() -> nn.Module:
    """A network that has learned to read the digits that the model learns to draw."""
    images, texts = zip(*WrittenNumbers(1024, side=SIDE), strict=True)
    seen = 2 * torch.stack([to_tensor(image.convert("L")) for image in images]) - 1
    digits = torch.tensor([int(text) for text in texts])
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 10),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for rows in torch.randint(1024, (150, 64)):
        F.cross_entropy(network(seen[rows]), digits[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return network


def right(network: nn.Module, picture: str) -> float:
    """The share of drawn digits, in a column for each, that are read as what was asked for."""
    image = to_tensor(Image.open(picture).convert("L"))[0]
    cells = image[2:, 2:].unfold(0, 4 * SIDE, 4 * SIDE + 2).unfold(1, 4 * SIDE, 4 * SIDE + 2)[..., ::4, ::4]
    assert cells.shape == (4, 10, SIDE, SIDE)
    found = network(2 * cells.reshape(-1, 1, SIDE, SIDE) - 1).argmax(1).view(4, 10)
    return (found == torch.arange(10)).float().mean().item()


def test_digits_become_readable(run):
    losses = run("--epochs=5", "--denoising=10").losses
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
    network = reader()
    shares = [right(network, f"samples/epoch_0{epoch}.png") for epoch in (1, 5)]
    assert shares[0] < 0.5
    assert shares[1] > 0.75, "chance is 0.1"


@pytest.fixture
def images():
    """A folder of images, as the hub has them."""
    Path("images").mkdir()
    lines = []
    for number, (image, text) in enumerate(WrittenNumbers(6)):
        image.save(f"images/{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": text}))
    Path("images/metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return "--images=images"


SMALL = ["--epochs=2", "--batch-size=2", "--denoising=3", "--rows=2", "--prompts", "3", "7"]


@pytest.mark.parametrize("how", ["--objective=flow", "--objective=noise", "--train=lora", "--guidance=1"])
def test_the_numbers_are_those_of_plain_training(run, images, how):
    streamed = run(images, *SMALL, how, "--k=1", "--optimizer-on=host")
    assert streamed.encoded
    assert len(streamed.losses) == 6
    assert run(images, *SMALL, how, "--strategy=auto") == streamed._replace(encoded=False), "only once"
    Path("images/metadata.jsonl").write_text('{"file_name": "0.png", "text": "another"}', encoding="utf-8")
    assert run(images, *SMALL, how).encoded


@pytest.mark.parametrize("objective", [Flow(1.0), Flow(3.0), Noise()])
def test_a_right_prediction_gives_image_and_noise(objective):
    image, noise = torch.randn(2, 50, 8, 8)
    time = objective.random(50).view(-1, 1, 1)
    split = objective.split(objective.mix(image, noise, time), objective.target(image, noise), time)
    assert ((time >= 0) & (time <= 1)).all()
    torch.testing.assert_close(split, (image, noise), rtol=1e-3, atol=1e-3)
    assert objective.way_back(10)[-1] == 0


GOOD = '{"file_name": "a.png", "text": "a"}'


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        ({}, ["--images=nowhere"], "nowhere: no such folder"),
        ({}, ["--images=."], ".: no images with captions in this folder"),
        ({"a.png": ""}, ["--images=."], "a.png has no caption: there is neither metadata.jsonl nor a.txt"),
        ({"a.png": "", "a.txt": "a"}, ["--images=."], "cannot identify image file"),
        ({"metadata.jsonl": GOOD}, ["--images=."], "metadata.jsonl, line 1: no image a.png"),
        ({"metadata.jsonl": "a.png"}, ["--images=."], 'line 1: not {"file_name": FILE, "text": CAPTION}'),
        ({"metadata.jsonl": GOOD.replace('"a"', "null")}, ["--images=."], 'line 1: "text" is null, not a text'),
        ({}, ["--model=of/mine"], "of/mine needs what is not installed: pip install diffusers accelerate"),
        ({}, ["--side=64"], "the tiny model knows images of 12 pixels, not 64"),
        ({}, ["--save=mine"], "--save writes a transformer of diffusers: add --model"),
    ],
)
def test_what_is_refused(files, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["--accelerator=cpu", *arguments])
    assert message in f"{stop.value}{capsys.readouterr().err}"
