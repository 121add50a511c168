"""The workloads themselves, in named sets.

Batches consist of texts of 1024 tokens, so 8 samples are "8K tokens". Under `bf16-mixed`, AdamW keeps fp32 masters and
moments: 16 bytes for each parameter. For 8B parameters that is 128 GB, more than a machine with 128 GiB can provide on
top of everything else. 7B and 8B models therefore train under `bf16-true`: weights, gradients and moments in bf16, 8
bytes for each parameter, for every system that supports it. The set `masters` has fp32 masters at the largest sizes
that may fit; each of its workloads says so in its note, which goes into the report.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from suite import shapes
from suite.workloads import Window, Workload

GIB = 2**30
GB = 10**9  # GPUs are named by these, and limits of 24, 80 ... are multiples of them
_LENGTH = 1024
_BF16 = "AdamW in bf16 without fp32 masters (8 bytes a parameter), so that 128 GiB of host memory hold it"


def _windows(units: int) -> tuple[Window, ...]:
    """Return windows over k, with single and with larger transfers, because the paper varies both k and k'."""
    ks = [k for k in (1, 2, 4, 8, 16, 32) if k < units]
    return (*((k, 1) for k in ks), *((k, k // 2) for k in ks if k >= 4), (units, 1))


def _lm(name: str, shape: str, thousands: int, **more: object) -> Workload:
    """Return full fine-tuning with clipping, with the given thousands of tokens per step."""
    vocabulary = shapes.DECODERS[shape][1].get("vocab_size", 50_257)
    return Workload(
        name=name,
        kind="train",
        network=shapes.causal_lm(shape),
        batch=shapes.tokens(vocabulary, _LENGTH),
        samples=thousands,
        items="tokens",
        items_per_sample=_LENGTH,
        **{"clipping": 1.0, **more},
    )


def _unclipped(workload: Workload) -> Workload:
    return replace(workload, name=f"{workload.name}-noclip", clipping=None)


def _scoring(workload: Workload, name: str) -> Workload:
    """Return inference with the same forward, in bf16."""
    return replace(workload, name=name, kind="inference", precision="bf16-true", clipping=None)


def _paper() -> list[Workload]:
    """GPT-2 XL, ViT-bigG and CLIP as in the paper, and LLaVA; over k and k_prime."""
    gpt2 = _lm("gpt2-xl", "gpt2-xl", 8, windows=_windows(48))
    vit = Workload(
        name="vit-bigg",
        kind="train",
        network=shapes.vision_transformer(),
        batch=shapes.images(224),
        samples=64,
        items="images",
        items_per_sample=1,
        clipping=1.0,
        windows=_windows(48),
    )
    clip = replace(
        vit,
        name="clip-bigg",
        network=shapes.clip(),
        batch=shapes.pairs(49_408, 77, 224),
        windows=((1, 1), (2, 1), (4, 2), (16, 1), (80, 1)),
    )
    llava = replace(
        vit,
        name="llava-7b",
        network=shapes.llava(),
        batch=shapes.talks(32_064, 64, 336, patches=576),
        samples=12,
        precision="bf16-true",
        windows=((1, 1), (2, 1), (4, 2), (16, 1)),
        note=_BF16,
    )
    models = [gpt2, vit, clip, llava]
    return [*models, *(_scoring(workload, f"{workload.name}-inference") for workload in models)]


@cache
def _small() -> list[Workload]:
    """1.5B and 3B, where all rivals fit; with and without clipping."""
    clipped = [_lm(f"{shape}-8k", shape, 8) for shape in ("qwen2.5-1.5b", "qwen2.5-3b")]
    return [*clipped, *(_unclipped(workload) for workload in clipped)]


def _memory() -> list[Workload]:
    """1.5B with more and more device memory, for every system that can be told how much to take."""
    return [_lm("qwen2.5-1.5b-8k-memory", "qwen2.5-1.5b", 8, budgets=(10 * GIB, 20 * GIB, 40 * GIB, None))]


def _capped(shape: str, gigabytes: int, thousands: int) -> Workload:
    return _lm(
        f"{shape}-{gigabytes}g-{thousands}k",
        shape,
        thousands,
        precision="bf16-true",
        checkpointing=True,
        device_limit=gigabytes * GB,
        note=_BF16,
    )


@cache
def _large() -> list[Workload]:
    """7B and 8B on a device of 24 GB and of 80 GB; with and without clipping."""
    clipped = [_capped(shape, limit, 8) for shape in ("llama-3.1-8b", "qwen2.5-7b") for limit in (24, 80)]
    return [*clipped, *(_unclipped(workload) for workload in clipped)]


def _tokens() -> list[Workload]:
    """From 2K to 32K tokens in a step: 1.5B without a limit, 8B on 24 GB."""
    thousands = (2, 4, 16, 32)
    small = [_lm(f"qwen2.5-1.5b-{count}k", "qwen2.5-1.5b", count, checkpointing=count > 16) for count in thousands]
    large = [_capped("llama-3.1-8b", 24, count) for count in thousands]
    eight = [_small()[0], _large()[0]]
    return sorted([*small, *large, *eight], key=lambda workload: (workload.name.split("-")[0], workload.samples))


def _masters() -> list[Workload]:
    """fp32 masters at the largest sizes that 128 GiB of host memory may hold."""
    qwen = replace(
        _capped("qwen2.5-7b", 80, 8),
        name="qwen2.5-7b-80g-8k-masters",
        precision="bf16-mixed",
        note="fp32 masters: up to 122 GB of host memory, which may be too much",
    )
    llama = replace(
        _capped("llama-3.1-8b", 80, 8),
        name="llama-3.1-8b-24layers-80g-8k-masters",
        network=shapes.causal_lm("llama-3.1-8b", num_hidden_layers=24),
        precision="bf16-mixed",
        note="24 of the 32 layers (6.3B parameters), so that 128 GiB of host memory hold fp32 masters: 101 GB",
    )
    return [qwen, llama]


def _lora() -> list[Workload]:
    """Adapters on a frozen 8B in bf16, on a device of 12 GB."""
    full = _capped("llama-3.1-8b", 12, 8)
    return [
        replace(
            full,
            name="llama-3.1-8b-lora-12g-8k",
            network=shapes.lora_lm("llama-3.1-8b", rank=16),
            precision="bf16-mixed",
            note="the base is frozen in bf16; adapters of rank 16 on all linear layers are trained in fp32",
        )
    ]


def _vision() -> list[Workload]:
    """Convolutions over large images, where activations fill the device."""
    resnet = Workload(
        name="resnet152-1024px",
        kind="train",
        network=shapes.torchvision_classifier("resnet152"),
        batch=shapes.images(1024),
        samples=8,
        items="images",
        items_per_sample=1,
    )
    convnext = replace(
        resnet,
        name="convnext-l-1024px",
        network=shapes.torchvision_classifier("convnext_large", stochastic_depth_prob=0.0),
    )
    free = [resnet, convnext]
    capped = [replace(w, name=f"{w.name}-24g", device_limit=24 * GB, checkpointing=True) for w in free]
    return [*free, *capped]


def _generation() -> list[Workload]:
    """An 8B that continues prompts, on a device of 8 GB."""
    new_tokens = 8
    return [
        Workload(
            name="llama-3.1-8b-generation-8g",
            kind="inference",
            network=shapes.generator("llama-3.1-8b", new_tokens),
            batch=shapes.tokens(128_256, 128),
            samples=64,
            items="tokens",
            items_per_sample=new_tokens,
            precision="bf16-true",
            device_limit=8 * GB,
            passes=new_tokens,
            note=f"64 prompts of 128 tokens, {new_tokens} new tokens each; only the new ones are counted",
        )
    ]


def _batch() -> list[Workload]:
    """The largest batch in 40 GB: how many samples per second the same device memory allows."""
    gpt2 = _lm("gpt2-xl-40g-batch", "gpt2-xl", 4, device_limit=40 * GB, ladder=(4, 8, 16, 32, 64, 128))
    vit = replace(
        _paper()[1], name="vit-bigg-40g-batch", windows=(), device_limit=40 * GB, ladder=(32, 64, 128, 256, 512)
    )
    plain = [gpt2, vit]
    return [*plain, *(replace(w, name=f"{w.name}-checkpointing", checkpointing=True) for w in plain)]


def _toy() -> list[Workload]:
    """Every kind of workload, small enough for a laptop without a GPU."""
    lm = Workload(
        name="toy-lm",
        kind="train",
        network=shapes.causal_lm("toy"),
        batch=shapes.tokens(256, 16),
        samples=4,
        items="tokens",
        items_per_sample=16,
        precision="32-true",
        learning_rate=1e-3,
        clipping=1.0,
    )
    vit = replace(
        lm, name="toy-vit", network=shapes.vision_transformer(toy=True), batch=shapes.images(32, 10), items="images"
    )
    vit = replace(vit, items_per_sample=1)
    return [
        replace(lm, windows=((1, 1), (4, 2)), budgets=(250_000, 500_000, None)),
        _unclipped(lm),
        replace(lm, name="toy-lm-mixed", precision="bf16-mixed"),
        replace(lm, name="toy-lm-bf16", precision="bf16-true", checkpointing=True, note="bf16 without masters"),
        replace(lm, name="toy-lora", network=shapes.lora_lm("toy", 4), precision="bf16-mixed", device_limit=64 * 10**6),
        replace(lm, name="toy-batch", ladder=(2, 4)),
        vit,
        replace(vit, name="toy-clip", network=shapes.clip(toy=True), batch=shapes.pairs(49_408, 8, 32)),
        replace(vit, name="toy-llava", network=shapes.llava(toy=True), batch=shapes.talks(256, 8, 32, patches=16)),
        replace(vit, name="toy-resnet", network=shapes.torchvision_classifier("resnet18"), clipping=None),
        replace(lm, name="toy-lm-inference", kind="inference", clipping=None, windows=((2, 1),)),
        replace(vit, name="toy-vit-inference", kind="inference", clipping=None),
        replace(
            lm,
            name="toy-generation",
            kind="inference",
            network=shapes.generator("toy", 4),
            clipping=None,
            items_per_sample=4,
            passes=4,
        ),
    ]


_BUILDERS = (_toy, _paper, _small, _memory, _large, _tokens, _masters, _lora, _vision, _generation, _batch)
SETS: dict[str, list[Workload]] = {build.__name__.strip("_"): build() for build in _BUILDERS}
ABOUT: dict[str, str] = {build.__name__.strip("_"): str(build.__doc__) for build in _BUILDERS}
"""A description of each set, in one sentence."""
WORKLOADS: dict[str, Workload] = {workload.name: workload for each in SETS.values() for workload in each}
"""All workloads by name."""
