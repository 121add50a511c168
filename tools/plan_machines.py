"""Plan what the pages say about memory and speed, and write it into them: all planned figures are from one run.

    python tools/plan_machines.py             # plan everything in 17 minutes; write planned.json, and pages
    python tools/plan_machines.py --pages     # write pages from planned.json as it is

A figure of a page lies between `<!-- planned: NAME -->` and `<!-- end -->`; its name is that of a function below.
Nothing here is measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import replay
from replay import first_that_fits
from torch import nn

from sp_lightning import Assumptions, plan
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.planning.known import batch_of, find, named_model, of_shapes, rates_of, rates_of_gpu, recipe
from sp_lightning.planning.report import Row, number_range, offers, plan_row, readable_hours, readable_seconds

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_name("planned.json")
PAGES = [*(ROOT / folder / "README.md" for folder in ("", "examples", "tools")), *sorted((ROOT / "docs").glob("*.md"))]
PLACE = re.compile(r"(<!-- planned: (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)
MACHINES = [  # a GPU, a host and its memory
    ("RTX 3060", "desktop DDR4", "32GiB"),
    ("RTX 3090", "desktop DDR4", "64GiB"),
    ("RTX 4090", "desktop DDR5", "64GiB"),
    ("RTX 4090", "desktop DDR5", "128GiB"),
    ("RTX 5090", "desktop DDR5", "192GiB"),
    ("L40S", "server DDR5", "256GiB"),
    ("A100", "server DDR4", "512GiB"),
    ("H100", "server DDR5", "256GiB"),
    ("H200", "server DDR5", "512GiB"),
]
MODELS = [  # and the rank of adapters; None trains all weights
    ("Qwen3-1.7B", None),
    ("Qwen3-4B", None),
    ("Llama-3.1-8B", None),
    ("Qwen3-14B", None),
    ("Qwen3-32B", None),
    ("Llama-3.1-70B", None),
    ("Llama-3.1-8B", 16),
    ("Qwen3-32B", 16),
]
CLIPPED: dict[str, Any] = {"gradient_clip_val": 1.0}
IN_EIGHT_BITS: dict[str, Any] = {"precision": "bf16-true", "moments": "int8"}
ON_DRIVE: dict[str, Any] = {"gradient_clip_val": None, "nvme": "PCIe 4"}  # clipped, gradients would need RAM
USERS: list[tuple[str, str, tuple[str, str, str], dict[str, Any]]] = [
    ("an 8B on chats, all weights", "Qwen3-8B", ("RTX 4090", "desktop DDR5", "64GiB"), {"tokens": 8192}),
    (
        "the same in [FP8](../docs/configure.md#fp8), 8 batches in a step",
        "Qwen3-8B",
        ("RTX 4090", "desktop DDR5", "64GiB"),
        {"tokens": 8192, "accumulate": 8, "fp8": True},
    ),
    ("a mixture of 30B, all weights", "Qwen3-30B-A3B", ("RTX 4090", "server DDR5", "256GiB"), {"tokens": 8192}),
    ("this mixture with LoRA", "Qwen3-30B-A3B", ("RTX 4090", "desktop DDR5", "128GiB"), {"tokens": 8192, "lora": 16}),
    ("FLUX.1 with LoRA", "FLUX.1-dev", ("RTX 3060", "desktop DDR4", "64GiB"), {"lora": 16}),
    (
        "an 8B, all weights, with state on a [drive](../docs/drive.md#what-it-reaches), not clipped",
        "Qwen3-8B",
        ("RTX 4090", "desktop DDR5", "32GiB"),
        {**ON_DRIVE, "tokens": 16384},
    ),
]
MORE: list[tuple[str, str, tuple[str, str, str], dict[str, Any]]] = [  # not on the first page
    ("a mixture of 20B, all weights", "gpt-oss-20b", ("RTX 4090", "desktop DDR5", "192GiB"), {"tokens": 8192}),
    (
        "a 70B with LoRA",
        "Llama-3.1-70B",
        ("RTX 4090", "workstation DDR5", "192GiB"),
        {"tokens": 4096, "accumulate": 2, "lora": 16},
    ),
    ("Qwen-Image with LoRA", "Qwen-Image", ("RTX 4090", "desktop DDR5", "64GiB"), {"lora": 16}),
    ("Qwen-Image, all weights", "Qwen-Image", ("RTX 4090", "desktop DDR5", "192GiB"), {}),
    ("FLUX.1, all weights", "FLUX.1-dev", ("RTX 4090", "desktop DDR5", "128GiB"), {}),
]
WITH_DRIVE: list[tuple[str, str, dict[str, Any]]] = [  # a model, the RAM beside an RTX 4090, and batches
    ("Qwen3-8B", "32GiB", {"tokens": 8192}),
    ("Qwen3-8B", "32GiB", {"tokens": 16384}),
    ("Qwen3-8B", "32GiB", {"tokens": 24576}),
    ("Qwen3-8B", "32GiB", {"tokens": 8192, "accumulate": 4}),
    ("Qwen3-8B", "48GiB", {"tokens": 16384}),
    ("Qwen3-14B", "64GiB", {"tokens": 16384}),
    ("Qwen3-30B-A3B", "128GiB", {"tokens": 32768}),
]
RUN = 10_000_000  # tokens of a run that writes to a drive
OFFERED = [("RTX 3060", "32GiB"), ("RTX 5060 Ti", "64GiB"), ("RTX 4090", "64GiB")]  # a GPU, in a desktop, and RAM
FIRST_OFFERS = (
    *("Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Llama-3.3-70B-Instruct"),
    *("Qwen2.5-VL-3B-Instruct", "FLUX.1-dev"),
)
LONGEST = [  # decoders whose longest row is planned: a name, and the rank of adapters
    ("Llama-3.1-8B", None),
    ("Llama-3.1-8B", 16),
]
CARDS: dict[str, dict[str, Any]] = {
    "24 GB": {"device_memory": "23.6GiB", "desktop": True},
    "80 GB": {"device_memory": "79.1GiB"},
}
HOSTS = ("32GiB", "64GiB", "128GiB")
WAYS: list[dict[str, Any]] = [
    {},
    {"precision": "bf16-true", "moments": "fp32"},
    IN_EIGHT_BITS,
    {**IN_EIGHT_BITS, **rates_of("drives", ON_DRIVE["nvme"])},
]
# ------------------------------------------------------------------------------------------------- what is planned


def machine(gpu: str, host: str, memory: str) -> dict[str, Any]:
    """Return what to assume of a machine."""
    return {"host_memory": memory, **rates_of_gpu(gpu), **rates_of("hosts", host)}


def in_words(memory: str) -> str:
    """Return how a page writes an amount of memory."""
    return memory.replace("GiB", " GiB")


def plain(row: Row) -> dict[str, Any]:
    """Return what a row says, as the file has it."""
    if row.step is None:
        assert row.error is not None
        return {"fits": False, "place": row.error.place, "needs": readable_bytes(row.needed_bytes)}
    return {
        "fits": True,
        "moments": row.given.moments,
        "clipped": row.given.gradient_clip_val is not None,
        "device": readable_bytes(row.step.device_bytes),
        "host": readable_bytes(row.step.host_bytes),
        "seconds": readable_seconds(row.step.seconds),
        "tokens": row.given.tokens_in_step,
        "speed": row.speed,
        **writing(row),
    }


def writing(row: Row) -> dict[str, Any]:
    """Return what a step and a run write to a drive; nothing if it is not needed."""
    written = row.fastest.bytes_to_drive
    if not written:
        return {}
    slow, fast = row.tokens_per_second
    return {
        "written": f"{written / 1e9:.1f} GB",
        "run": readable_hours(RUN / fast, RUN / slow),
        "written in run": f"{written / 1e12 * RUN / row.given.tokens_in_step:.1f} TB",
    }


def plan_machine(number: int, models: Sequence[tuple[str, int | None]] = tuple(MODELS)) -> list[dict[str, Any]]:
    """Plan models on a machine, each clipped by norm, in steps of 8,192 tokens."""
    assumed = machine(*MACHINES[number])
    given = [(name, Assumptions(tokens=8192, lora=lora, **CLIPPED, **assumed)) for name, lora in models]
    return [plain(first_that_fits(named_model(name), each)) for name, each in given]


def plan_user(user: tuple[str, str, tuple[str, str, str], dict[str, Any]]) -> dict[str, Any]:
    """Plan what a user wants, clipped by norm by default, with the commands that print this, and that train it."""
    what, name, (gpu, host, memory), wanted = user
    options = {option: value for option, value in {**wanted, **CLIPPED, **wanted}.items() if value is not None}
    typed = " ".join(as_typed(option, value) for option, value in options.items())
    drive = options.pop("nvme", None)
    rates = machine(gpu, host, memory) | ({} if drive is None else rates_of("drives", drive))
    row = plan(named_model(name), Assumptions(**rates, **{**batch_of(name), **options})).best
    return {
        "what": what,
        "on": f"{gpu}, {in_words(memory)} of RAM{'' if drive is None else ', NVMe'}",
        **plain(row),
        "plan": f'plan {name} --gpu "{gpu}" --host "{host}" --host-memory {memory} {typed}',
        "command": recipe(name, row.given),
    }


def as_typed(option: str, value: float | str) -> str:
    """Return an option of `sp-lightning plan` as one types it."""
    option = f"--{option.replace('_', '-')}"
    if value is True:
        return option
    return f'{option} "{value}"' if isinstance(value, str) else f"{option} {value:g}"


def plan_with_drive(name: str, memory: str, batches: dict[str, Any]) -> dict[str, Any]:
    """Plan a model with optimizer state on a drive."""
    place = ("RTX 4090", "desktop DDR5", memory)
    return plan_user((f"{name}, {in_words(memory)}", name, place, {**ON_DRIVE, **batches}))


def plan_offers(gpu: str, memory: str, count: int | None = None) -> dict[str, dict[str, Any]]:
    """Plan the best way to train all or some models that are offered, as `sp-lightning plan` does without a model."""
    given = Assumptions(**rates_of_gpu(gpu), host_memory=memory, tokens=8192, **CLIPPED)
    some = islice(offers(given), count)
    return {offer.model: {"trained": trained(offer.row.given), **plain(offer.row)} for offer in some}


def trained(given: Assumptions) -> str:
    """Return words for the trained weights, and for compact moments."""
    if given.lora is not None:
        return "LoRA" if given.bits == 16 else "QLoRA"
    return f"all weights, {given.moments} moments" if given.moments else "all weights"


def plan_longest(name: str, lora: int | None, card: dict[str, Any]) -> int:
    """Return the longest row of tokens, in multiples of 1,024, that fits a GPU, whatever RAM it takes up to 256 GiB."""
    given: dict[str, Any] = {"host_memory": "256GiB", "lora": lora, **card, **CLIPPED}
    if lora is None:
        given |= IN_EIGHT_BITS
    model = named_model(name)
    fits, too_long = 1, 4096
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if plan_row(model, Assumptions(tokens=1024 * middle, length=1024 * middle, **given)).step is None:
            too_long = middle
        else:
            fits = middle
    return 1024 * fits


def plan_size(memory: str, way: dict[str, Any]) -> float:
    """Return the billions of parameters of the largest decoder that fits, with layers as Qwen3-4B's."""
    given = Assumptions(host_memory=memory, **CARDS["24 GB"], **CLIPPED, **way)
    fits, too_many = 1, 4 * int(given.host_bytes / 7e8)
    while too_many - fits > 1:
        layers = (fits + too_many) // 2
        if plan_row(decoder(layers), given).step is None:
            too_many = layers
        else:
            fits = layers
    return round(sum(weight.numel() for weight in decoder(fits).parameters()) / 1e9, 1)


def decoder(layers: int) -> nn.Module:
    """Build a Qwen3-4B with another number of layers."""
    shapes = copy.deepcopy(find("shapes", "Qwen3-4B"))
    assert shapes is not None
    blocks = next(part for part in shapes["parts"][0][2]["parts"] if part[0] == "layers")
    blocks[2]["parts"][0][1] = layers
    return of_shapes(shapes)


def plan_everything() -> dict[str, Any]:
    """Plan all figures."""
    return {
        "machines": [plan_machine(number) for number in range(len(MACHINES))],
        "users": [plan_user(user) for user in USERS],
        "more": [plan_user(user) for user in MORE],
        "drives": [plan_with_drive(*each) for each in WITH_DRIVE],
        "offers": [plan_offers(*each) for each in OFFERED],
        "longest": [[plan_longest(*model, card) for card in CARDS.values()] for model in LONGEST],
        "sizes": [[plan_size(memory, way) for way in WAYS] for memory in HOSTS],
        "replay": [list(map(round, replay.predicted(run))) for run in replay.RUNS],
    }


# ------------------------------------------------------------------------------------------- how the pages say it


def machines(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the table of models on machines."""
    titles = [name if lora is None else f"{name}, LoRA" for name, lora in MODELS]
    yield f"| machine | {' | '.join(titles)} |"
    yield "|" + " --- |" * (1 + len(MODELS))
    for (gpu, host, memory), cells in zip(MACHINES, figures["machines"], strict=True):
        said = [
            f"{cell['speed']} {cell['moments'] or ''}".rstrip() if cell["fits"] else place_of(cell) for cell in cells
        ]
        yield f"| {gpu}, {host}, {in_words(memory)} | {' | '.join(said)} |"


def place_of(cell: dict[str, Any]) -> str:
    """Return whose memory is too small."""
    return {"host": "RAM", "device": "GPU"}[cell["place"]]


def users(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the table of what people do, with the commands that plan it."""
    yield from planned_table(figures["users"])


def first_commands(figures: dict[str, Any]) -> Iterator[str]:
    """Yield what one types first: what a machine can train, a model on it, and the training of that."""
    (gpu, memory), first = OFFERED[-1], figures["users"][0]
    yield "```bash"
    yield f'sp-lightning plan --gpu "{gpu}" --host-memory {memory}'
    yield f"sp-lightning {first['plan']}"
    yield f"sp-lightning {first['command']}"
    yield "```"


def some_offers(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the rows of the first page in the table of what machines can train."""
    rows = list(all_offers(figures))
    yield from rows[:2]
    yield from (row for row in rows if row.split(" | ")[0][2:] in FIRST_OFFERS)


def all_offers(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the table of what machines can train."""
    heads = [f"{gpu}, {in_words(memory)}" for gpu, memory in OFFERED]
    yield f"| tokens/s | {' | '.join(heads)} |"
    yield "|" + " --- |" * (1 + len(OFFERED))
    for model in figures["offers"][0]:
        cells = [machine[model] for machine in figures["offers"]]
        said = [f"{cell['trained']}: {cell['speed']}" if cell["fits"] else place_of(cell) for cell in cells]
        yield f"| {model} | {' | '.join(said)} |"


def more(figures: dict[str, Any]) -> Iterator[str]:
    """Yield more of what people do, each with the command that plans it."""
    yield from planned_table(figures["more"])


def planned_table(cells: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of what people do, and the commands that plan it."""
    yield from table(cells)
    yield from commands(cells)


def commands(cells: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the commands that plan what people do, below its table."""
    yield ""
    yield "```bash"
    yield from (f"sp-lightning {cell['plan']}" for cell in cells)
    yield "```"


def table(cells: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of what people do."""
    yield "| you fine-tune | on | GPU memory | RAM | tokens/s | tokens in a step |"
    yield "|" + " --- |" * 6
    for cell in cells:
        yield (
            f"| {cell['what']} | {cell['on']} | {cell['device']} | {cell['host']} | {cell['speed']} "
            f"| {cell['tokens']:,} |"
        )


def mixture(figures: dict[str, Any]) -> str:
    """Return how fast a mixture of experts trains, all of it."""
    return f"{figures['users'][2]['speed']} tokens/s"


def longest(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the longest rows."""
    yield f"| tokens in a row | {' | '.join(f'a card of {memory}' for memory in CARDS)} |"
    yield "|" + " --- |" * (1 + len(CARDS))
    for (name, lora), tokens in zip(LONGEST, figures["longest"], strict=True):
        what = "all weights, int8 moments" if lora is None else "LoRA"
        yield f"| {name}, {what} | {' | '.join(f'{each:,}' for each in tokens)} |"


def first_user(figures: dict[str, Any]) -> str:
    """Return how fast the first of these trains."""
    cell = figures["users"][0]
    return f"{cell['speed']} tokens/s"


def user_of_fp8(figures: dict[str, Any]) -> str:
    """Return how fast this one trains in FP8."""
    cell = figures["users"][1]
    return f"{cell['speed']} tokens/s"


def user_of_drive(figures: dict[str, Any]) -> str:
    """Return how fast the one with a drive trains, and what a step writes."""
    cell = figures["users"][-1]
    return f"{cell['speed']} tokens/s in steps of {cell['tokens']:,} tokens, each of which writes {cell['written']}"


def drives(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the table of models with state on a drive, with the commands that plan it."""
    heads = ("tokens in a step", "tokens/s", "a step takes at most", "it writes", "10 million tokens take", "and write")
    yield f"| model, RAM | {' | '.join(heads)} |"
    yield "|" + " --- |" * (1 + len(heads))
    for cell, (_, _, batches) in zip(figures["drives"], WITH_DRIVE, strict=True):
        tokens = f"{cell['tokens']:,}" + (f", {batches['accumulate']} batches" if "accumulate" in batches else "")
        said = (cell["speed"], cell["seconds"], cell["written"], cell["run"], cell["written in run"])
        yield f"| {cell['what']} | {tokens} | {' | '.join(said)} |"
    yield from commands(figures["drives"])


def sizes(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the largest models."""
    compact = "[`sp_lightning.optim`](../docs/optimizers.md#compact-optimizers)"
    yield f"| RAM | AdamW, FP32 or `bf16-mixed` | {compact}, exact | with 8-bit moments | 8-bit moments and a drive |"
    yield "|" + " --- |" * (1 + len(WAYS))
    for memory, row in zip(HOSTS, figures["sizes"], strict=True):
        yield f"| {in_words(memory)} | {' | '.join(f'{size:g} B' for size in row)} |"


def bytes_per_parameter(figures: dict[str, Any]) -> str:
    """Return what a parameter needs of CPU memory in each way without a drive, by the largest models with 64 GiB."""
    room = Assumptions(host_memory="64GiB", desktop=True).host_room
    each = [f"{room / 1e9 / size:.1f}" for size in figures["sizes"][HOSTS.index("64GiB")][:-1]]
    return f"{', '.join(each[:-1])} and {each[-1]}"


def runs(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the table of published runs, and where they are published."""
    yield "| published run | of | tokens in a step | tokens/s | planned |"
    yield "|" + " --- |" * 5
    system = None
    for run, (low, high) in zip(replay.RUNS, figures["replay"], strict=True):
        yield (
            f"| {run.system if run.system != system else ''} | {run.model}, {run.card} | {run.tokens:,} "
            f"| {run.published:,.0f} | {number_range(low, high)} |"
        )
        system = run.system
    yield ""
    sources = {run.system: f"{run.system}: {run.source}, {run.when}" for run in replay.RUNS}
    yield f"Sources: {'; '.join(sources.values())}."


FIGURES: dict[str, Callable[[dict[str, Any]], str | Iterator[str]]] = {
    each.__name__: each
    for each in (
        machines,
        users,
        more,
        some_offers,
        all_offers,
        first_commands,
        longest,
        first_user,
        user_of_fp8,
        user_of_drive,
        drives,
        mixture,
        sizes,
        bytes_per_parameter,
        runs,
    )
}


def with_figures(text: str, figures: dict[str, Any]) -> str:
    """Return a page with all figures as they are planned: tables in lines of their own, all else within a line."""

    def replaced(place: re.Match[str]) -> str:
        said = FIGURES[place[2]](figures)
        if not isinstance(said, str):
            said = "\n\n" + "\n".join(said) + "\n\n"
        return place[1] + said + place[4]

    return PLACE.sub(replaced, text)


def main() -> None:
    """Plan, unless only pages are to be written; then write pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="plan nothing, and write pages from planned.json")
    if not parser.parse_args().pages:
        FILE.write_text(json.dumps(plan_everything(), indent=1) + "\n", encoding="utf-8")
    figures = json.loads(FILE.read_text(encoding="utf-8"))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := with_figures(text, figures)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()
