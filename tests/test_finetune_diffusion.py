"""finetune_diffusion.py: digits become readable, images are encoded once, the numbers are those of plain training."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import recipe
import torch
import transformers
from diffusion_models import SIDE, family_of
from finetune_diffusion import DiffusionModel, Flow, Noise, main, parse, save_adapters
from offline import WrittenNumbers
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torchvision.transforms.functional import to_tensor


@pytest.fixture
def run(capsys, monkeypatch) -> Callable[..., tuple[bool, list[float], bytes]]:
    def run(*arguments: str) -> tuple[bool, list[float], bytes]:
        """Whether images were encoded, all losses, and the last picture."""
        losses = recipe.Losses()
        monkeypatch.setattr(recipe, "Losses", lambda: losses)
        assert not main(["--accelerator=cpu", *arguments])
        picture = max(Path("samples").glob("*.png")).read_bytes()
        return "Encoding" in capsys.readouterr().out, losses.values, picture

    return run


def pixels(digits: WrittenNumbers) -> tuple[torch.Tensor, torch.Tensor]:
    images, texts = zip(*digits, strict=True)
    return torch.stack([to_tensor(image.convert("L")) for image in images]), torch.tensor([int(text) for text in texts])


def reader() -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(1), nn.Linear(SIDE**2, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    images, digits = pixels(WrittenNumbers(2048, side=SIDE))
    for rows in torch.randint(2048, (800, 64)):
        nn.functional.cross_entropy(network(images[rows]), digits[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    images, digits = pixels(WrittenNumbers(100, side=SIDE, first=2048))
    assert (network(images).argmax(1) == digits).float().mean() > 0.9
    return network


def right(network: nn.Module, picture: str) -> float:
    """The share of drawn digits, in a column for each, that are read as what was asked for."""
    image, size = to_tensor(Image.open(picture).convert("L"))[0], 4 * SIDE
    cells = image[2:, 2:].unfold(0, size, size + 2).unfold(1, size, size + 2)[..., ::4, ::4]
    return (network(cells.flatten(0, 1)).argmax(1).view(4, 10) == torch.arange(10)).float().mean().item()


def test_digits_become_readable(run):
    _, losses, _ = run("--epochs=4", "--denoising=10")
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
    network = reader()
    assert right(network, "samples/epoch_01.png") < 0.5
    assert right(network, "samples/epoch_04.png") > 0.75


@pytest.fixture
def images() -> str:
    """A folder of images with captions, in both forms."""
    Path("images").mkdir()
    with Path("images/metadata.jsonl").open("w", encoding="utf-8") as table:
        for number, (image, text) in enumerate(WrittenNumbers(6)):
            image.save(f"images/{number}.png")
            Path(f"images/{number}.txt").write_text(text, encoding="utf-8")
            print(json.dumps({"file_name": f"{number}.png", "text": text}), file=table)
    return "--images=images"


def truncated() -> str:
    """An image that ends too early, as text whose bytes it is."""
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, "PNG")
    return whole.getvalue()[:200].decode(errors="surrogateescape")


SMALL = ["--epochs=2", "--batch-size=2", "--denoising=3", "--rows=2", "--prompts", "3", "7"]


@pytest.mark.parametrize(
    "how", ["--objective=flow", "--objective=noise", "--train=lora", "--train=qlora", "--guidance=1"]
)
def test_the_numbers_are_those_of_plain_training(run, images, how):
    if how == "--train=qlora":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    _, *streamed = run(images, *SMALL, how, "--k=1", "--optimizer-on=host")
    Path("images/metadata.jsonl").unlink()
    assert run(images, *SMALL, how, "--strategy=auto") == (False, *streamed)
    Path("images/0.txt").write_text("another", encoding="utf-8")
    assert run(images, *SMALL, how)[0]


def test_diffusers_loads_the_adapters():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    pytest.importorskip("peft", reason="diffusers loads adapters with peft, which is not installed")
    sizes = {"in_channels": 16, "attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 4, 8)}
    layers = {"num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 16, "pooled_projection_dim": 16}
    flux = diffusers.FluxTransformer2DModel(**sizes, **layers)
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), latent_channels=4, norm_num_groups=4)
    without = dict.fromkeys(["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"])
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    diffusers.FluxPipeline(scheduler, vae, transformer=flux, **without).save_pretrained("flux")
    module = DiffusionModel("flux", train="lora", alpha=24).eval()
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    Path("mine").mkdir()
    save_adapters(module, "mine")
    pipeline = diffusers.FluxPipeline.from_pretrained("flux", **without)
    pipeline.load_lora_weights("mine")
    told = {"encoder_hidden_states": torch.randn(2, 5, 16), "pooled_projections": torch.randn(2, 16)}
    models = [module.transformer, pipeline.transformer]
    image, time = torch.randn(2, 4, 8, 8), torch.rand(2)
    with torch.no_grad():
        ours, theirs = (module.family.predict(model, image, time, told) for model in models)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def qwen_image() -> str:
    """A folder with a tiny Qwen-Image, which has a language model for captions."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    text = {"vocab_size": 384, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    rope = {"rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2]}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen2_5_VLConfig(text_config={**text, **heads, **rope}, vision_config=vision)
    sizes = {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    scale = {"latents_mean": [0.1] * 4, "latents_std": [2.0] * 4}
    diffusers.QwenImagePipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(),
        diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **scale),
        transformers.Qwen2_5_VLForConditionalGeneration(config),
        transformers.ByT5Tokenizer(extra_ids=0),
        diffusers.QwenImageTransformer2DModel(**sizes, joint_attention_dim=16, axes_dims_rope=(4, 6, 6)),
    ).save_pretrained("qwen")
    return "--model=qwen"


def test_qwen_image(run, images, qwen_image):
    """With the numbers of plain training, and adapters by the names that diffusers and ComfyUI read."""
    how = ["--side=32", "--train=lora", "--epochs=1", "--denoising=2", "--prompts=3"]
    _, *streamed = run(images, qwen_image, *how, "--k=1", "--optimizer-on=host", "--save-adapters=mine")
    assert run(images, qwen_image, *how, "--strategy=auto", "--no-resume") == (False, *streamed)
    weights = load_file("mine/pytorch_lora_weights.safetensors")
    assert "transformer.transformer_blocks.0.attn.add_q_proj.lora_A.weight" in weights
    latents = torch.randn(2, 4, 8, 8)
    packed = sys.modules["diffusers"].QwenImagePipeline._pack_latents(latents, 2, 4, 8, 8)
    assert torch.equal(nn.functional.pixel_unshuffle(latents, 2).flatten(2).mT, packed)


def test_a_damaged_file_of_what_was_encoded_is_written_anew(run, images):
    assert run(images, *SMALL)[0]
    Path("samples/encoded.pt").write_bytes(b"damaged")
    assert run(images, *SMALL)[0]


def test_a_model_with_a_unet_is_refused_with_the_reason(monkeypatch):
    config = {"unet": ["diffusers", "UNet2DConditionModel"]}
    pipeline = SimpleNamespace(load_config=lambda name: config)
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(DiffusionPipeline=pipeline))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(ValueError, match="sdxl has a UNet, as SDXL and .*; this recipe trains FLUX"):
        family_of("sdxl")


def test_images_of_a_large_model_come_one_by_one():
    """As they are planned."""
    found = [parse(arguments) for arguments in ([], ["--model=flux", "--images=."], ["--batch-size=3", "--rows=2"])]
    assert [(options.batch_size, options.rows) for options in found] == [(64, 4), (1, 1), (3, 2)]


@pytest.mark.parametrize("objective", [Flow(1.0), Flow(3.0), Noise()])
def test_a_right_prediction_gives_image_and_noise(objective):
    image, noise = torch.randn(2, 50, 8, 8)
    time = objective.random(50).view(-1, 1, 1)
    split = objective.split(objective.mix(image, noise, time), objective.target(image, noise), time)
    torch.testing.assert_close(split, (image, noise), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        ({}, [], "no images with captions in this folder"),
        ({"a.png": ""}, [], "a.png has no caption: there is neither metadata.jsonl nor a.txt"),
        ({"a.png": "", "a.txt": "a"}, [], "cannot identify image file"),
        ({"metadata.jsonl": '{"file_name": "a.png", "text": "a"}'}, [], "metadata.jsonl, line 1: no image a.png"),
        ({"metadata.jsonl": '{"file_name": "a.png", "text": null}'}, [], 'line 1: "text" is null, not a text'),
        ({}, ["--model=of/mine"], "of/mine needs what is not installed: pip install diffusers accelerate"),
        ({}, ["--side=64"], "the tiny model knows images of 12 pixels, not 64"),
        ({}, ["--save=mine"], "--save writes a transformer of diffusers: add --model"),
        ({"a.png": truncated(), "a.txt": "a"}, [], "no image can be read (1 skipped: a.png: image file is truncated"),
        ({"a.png": truncated(), "a.txt": "\udce9"}, [], "a.txt: not a text in UTF-8"),
    ],
)
def test_what_is_refused(files, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(SystemExit) as stop:
        main(["--accelerator=cpu", "--images=.", *arguments])
    assert message in f"{stop.value}{capsys.readouterr().err}"
