"""`sp_lightning.plan(module)`: whether a model can be trained on a machine, how fast, and with which arguments.

`offers` has the best way to train models of several kinds and sizes on one machine, for `sp-lightning plan` without a
model. The ways of a model are tried from the one that trains most to the one that needs least: all weights with
torch's AdamW, then with compact ones, then adapters (LoRA), then adapters on a base of 4 bits (QLoRA). Only what a
recipe of examples/ trains is offered.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from sp_lightning.pipeline.engine import SHARE_OF_FREE_MEMORY
from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.planning.assumptions import COMPACT, Assumptions, as_sold, ladder
from sp_lightning.planning.choose import TooLittleMemory, choose
from sp_lightning.planning.clock import predict
from sp_lightning.planning.estimate import assumed_machine, divide, estimate_work
from sp_lightning.planning.known import batch_of, known, named_model, rates_of, recipe
from sp_lightning.planning.memory import first_choice, first_host_bytes
from sp_lightning.planning.work import Prediction

UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
# from how many seconds on, how many one has, and its name
_LONG_TIMES = (
    (172_800, 86_400, "days"),
    (5_400, 3_600, "hours"),
    (90, 60, "minutes"),
    (0.1, 1, "seconds"),
    (0, 1e-3, "milliseconds"),
)
_HEAD = f"{'':<34}{'GPU memory':>11}{'RAM':>11}{'step':>11}  bottleneck"
_PLACES = {"device": "GPU memory", "host": "RAM"}
_WIDTH = 110
_PAYS = 1.05  # times as fast as in 16 bits, from which FP8 is worth its rounding
RANK = 16
"""Rank of the adapters that are planned if training all weights does not fit."""

_GIB = 2**30
_RUN = 10_000_000  # tokens of the run for which the plan shows the wear of the drive
_DRIVE = "PCIe 4"  # the drive that is planned if RAM does not suffice
_NANOSECOND = 1e-9
_FEWER = 4  # where a batch does not fit, a step has as many smaller ones
_BOTTLENECKS = {
    Lane.COMPUTE: "computing on the GPU",
    Lane.TO_DEVICE: "copies to the GPU",
    Lane.TO_HOST: "copies to the CPU",
    Lane.HOST: "the optimizer on the CPU",
    Lane.TO_DRIVE: "the drive",
}
# arguments of the strategy and of the Trainer, and the field that has each
_OF_STRATEGY = {name: name for name in ("activations", "units", "resident", "optimizer_on")}
_OF_TRAINER = {
    "gradient_clip_val": "gradient_clip_val",
    "accumulate_grad_batches": "accumulate",
    "devices": "devices",
}


@dataclass(frozen=True)
class Row:
    """One way to train, and the fastest step with it."""

    given: Assumptions
    # the fastest step, with the host memory of the step that takes most; None if nothing fits
    step: Prediction | None
    # the same for a device that reaches its best speed; None if that is not known
    at_best: Prediction | None = None
    error: TooLittleMemory | None = None  # why nothing fits
    units: int = 0  # number of units of the model
    has_logits: bool = False  # whether it makes logits, over a vocabulary
    checkpoint_bytes: int = 0  # trained weights and optimizer state on disk

    def __str__(self) -> str:
        given, step = self.given, self.step
        label = f"{given.optimizer_words}, {given.precision}"
        if step is None:
            return f"{label:<34} does not fit: {self.missing()}"
        return (
            f"{label:<34}{readable_bytes(step.device_bytes):>11}{readable_bytes(step.host_bytes):>11}"
            f"{readable_seconds(step.seconds):>11}  {step.bottleneck.value}"
        )

    @property
    def fastest(self) -> Prediction:
        """The fastest step of a row that fits."""
        assert self.step is not None
        return self.step

    @property
    def lack(self) -> TooLittleMemory:
        """The memory that is missing where nothing fits."""
        assert self.error is not None
        return self.error

    def missing(self, reason: str = "") -> str:
        """Return the missing memory of a row that does not fit as a sentence, with a reason for the need."""
        place = self.lack.place
        there = self.given.host_bytes if place == "host" else self.given.device_bytes
        needed = readable_bytes(self.needed_bytes)
        return f"it needs {needed} of {_PLACES[place]}{reason}, and there are {readable_bytes(there)}"

    @property
    def needed_bytes(self) -> int:
        """Bytes that are needed of the memory that is too small, with its part that stays free.

        In whole GiB, if it is at least one.
        """
        given, needed = self.given, self.lack.needed
        if self.lack.place == "host":
            needed = as_sold(needed + given.bytes_of_system)
        else:
            needed = math.ceil(needed / SHARE_OF_FREE_MEMORY) + given.bytes_of_others
        return needed if needed < _GIB else -(-needed // _GIB) * _GIB

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """The lowest and the highest number of tokens in a second, as the device reaches its speed."""
        # a model without a matrix computes nothing that is counted
        slow, fast = (max(step.seconds, _NANOSECOND) for step in (self.fastest, self.at_best or self.fastest))
        return self.given.tokens_in_step / slow, self.given.tokens_in_step / fast

    @property
    def speed(self) -> str:
        """Tokens in a second, as a range if there is one."""
        return number_range(*self.tokens_per_second)

    @property
    def memory(self) -> str:
        """The GPU memory and CPU memory that a step needs."""
        given, step = self.given, self.fastest
        return (
            f"{readable_bytes(step.device_bytes)} of {readable_bytes(given.device_bytes)} of GPU memory, "
            f"{readable_bytes(step.host_bytes)} of {readable_bytes(given.host_bytes)} of RAM"
        )

    @property
    def living(self) -> int:
        """The number of units that stay on the device, without the resident one."""
        return sum(number < self.units for number in self.fastest.choice.living)

    def wear(self) -> str:
        """Return what a step and a run write to the drive, as a line; nothing if it is not needed."""
        in_step = self.fastest.bytes_to_drive
        if not in_step:
            return ""
        slow, fast = self.tokens_per_second
        written = in_step / 1e12 * _RUN / self.given.tokens_in_step
        part = ""
        if (endurance := self.given.nvme_endurance) is not None:
            part = f", {written / endurance:.1%} of the {endurance:,.0f} TB that its maker warrants"
        return (
            f"\nA step writes {in_step / 1e9:.1f} GB to the drive. A run of {_RUN:,} tokens takes "
            f"{readable_hours(_RUN / fast, _RUN / slow)} and writes {written:.1f} TB{part}."
        )

    def choice(self) -> str:
        """Return the planner's choice as a phrase."""
        step = self.fastest
        policies = Counter(way.policy for way in step.choice.ways)
        ways = ", ".join(f"{count} {policy}" for policy, count in policies.items())
        staying, streamed, visiting = self.living, self.units - self.living, len(step.choice.visiting)
        places = []
        if staying:
            places.append(f"the GPU keeps {staying} with optimizer state")
        if streamed:
            places.append(f"{'it' if staying else 'the GPU'} streams {streamed} through k={step.choice.k} places")
        if visiting:
            places.append(f"it updates {visiting} of these while their state passes through")
        if visiting < streamed:
            places.append(f"the CPU updates {'the other ' if visiting else ''}{streamed - visiting}")
        if step.choice.on_drive:
            places.append(f"the optimizer state of {len(step.choice.on_drive)} is on the drive")
        return f"Of {self.units} units, {', '.join(places)}. Activations: {ways}."

    def code(self) -> str:
        """Return the code in Python, with only those arguments that are not the default."""
        given = self.given
        of_strategy = _typed(given, _OF_STRATEGY) + ["compile=True"] * given.fp8
        if given.nvme_read is not None:
            of_strategy.append("nvme_path='FOLDER'")
        strategy = f"SuperpipelineStrategy({', '.join(of_strategy)})" if of_strategy else "'superpipeline'"
        of_trainer = [f"strategy={strategy}", f"precision={given.precision!r}", *_typed(given, _OF_TRAINER)]
        optimizer = f"torch.optim.{given.optimizer}(model.parameters())"
        if given.moments is not None:
            optimizer = f"sp_lightning.optim.{given.optimizer}(model.parameters(), moments={given.moments!r})"
        lines = [optimizer, f"Trainer({', '.join(of_trainer)})"]
        if self.has_logits and given.loss == "chunked":
            lines.insert(0, "sp_lightning.loss_in_slices(model)")
        if given.fp8:
            lines.insert(0, "torchao.float8.convert_to_float8_training(blocks)  # of the model")
        return "\n".join(f"    {line}" for line in lines)


@dataclass(frozen=True)
class Report:
    """Whether a model can be trained, and the predicted cost of that. The first lines of `str()` are the answer."""

    title: str  # the model's name, and the machine's
    sizes: str
    rows: Sequence[Row]  # the requested row, then those with more compact moments
    # if nothing fits, changes with which training fits: each has been planned
    remedies: Sequence[tuple[str, Row]] = ()
    in_16_bits: Row | None = None  # the best row without FP8, if that was asked for

    @property
    def best(self) -> Row:
        """The first row that fits without a drive, or else that which writes least to it, or else the last one."""
        fitting = [row for row in self.rows if row.step is not None]
        return min(fitting, key=lambda row: row.fastest.bytes_to_drive, default=self.rows[-1])

    def __str__(self) -> str:
        table = [_HEAD, *map(str, self.rows)]
        assumed = textwrap.fill(f"Assumed: {self.rows[0].given}", _WIDTH)
        parts = [self.answer(), f"{self.sizes}\n{assumed}", "\n".join(table)]
        if self.best.step is not None:
            disk = f"A checkpoint takes {readable_bytes(self.best.checkpoint_bytes)} of disk space"
            parts.append(
                f"{textwrap.fill(self.best.choice(), _WIDTH)}\n{disk}, and there are two while one is written."
                f"\n\nType:\n{self.best.code()}"
            )
        return "\n\n".join(parts)

    def answer(self) -> str:
        """Return the answer in one sentence, then the speed, or the remedies."""
        best, step = self.best, self.best.step
        if step is None:
            helps = [
                f"It fits {change}, with {row.given.optimizer_words} in {row.given.precision}: {row.memory}; "
                f"{row.speed} tokens/s."
                for change, row in self.remedies
            ]
            missing = best.missing(f", mostly for {best.lack.most}")
            return "\n".join([f"{self.title} does not fit: {missing}.", *helps])
        given = best.given
        slow, fast = best.tokens_per_second
        precision = given.precision + " that multiplies in FP8" * given.fp8
        advice = ""
        if (other := self.in_16_bits) is not None:
            verdict = "FP8 does not pay here, so leave out `--fp8`"
            if slow > _PAYS * other.tokens_per_second[0]:
                verdict = "FP8 rounds, so its numbers are not exact"
            advice = f"\n{verdict}. Without FP8: {other.speed} tokens/s."
        return (
            f"{self.title} fits with {given.optimizer_words} in {precision}, including the first steps: "
            f"{best.memory}.\n"
            f"Estimated speed: {best.speed} tokens/s ({readable_hours(1e6 / fast, 1e6 / slow)} per million); a step of "
            f"{given.tokens_in_step:,} tokens takes {readable_seconds(step.seconds)}"
            f"{' at most' if best.at_best else ''}, limited by {_BOTTLENECKS[step.bottleneck]}."
            f"{best.wear()}{advice}"
        )


def plan(module: nn.Module, assumptions: Assumptions | None = None, title: str = "") -> Report:
    """Estimate whether a model can be trained, in how much memory and how fast, before it is trained.

    Nothing is computed and no weights are needed, so the module may be on the meta device. The numbers are estimates,
    from shapes and from the assumptions; during training the planner measures instead.

    Args:
        module: The model. It is neither changed nor called.
        assumptions: About the GPU, the CPU memory, the precision, the optimizer, and the size of a step.
        title: Name of the model in the answer; by default, the name of its class.

    Raises:
        ValueError: If the model has no parameters, some without a shape, or convolutions over images; or if `units` or
            `resident` do not fit it.

    Examples:
        >>> print(plan(model, Assumptions(device_memory="24GB", tokens=8 * 2048)))
    """
    given = assumptions or Assumptions()
    title = title or type(module).__name__
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Parameter {name!r} of {title} has no shape yet (a lazy module). Run one forward on example data "
                "before the model is planned."
            )
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if not parameters:
        raise ValueError(f"{title} has no parameters, so there is nothing to plan.")
    for name, layer in module.named_modules():
        # some only cut into patches; models that are built in have no strides, and no such layer
        is_convolution = isinstance(layer, nn.Conv2d | nn.Conv3d) and "stride" in vars(layer)
        if is_convolution and layer.kernel_size != layer.stride:
            raise ValueError(
                f"{title} has convolutions ({name!r}): their activations grow with the images, so GPU memory and speed "
                f"are not planned. {parameters:,} parameters need {readable_bytes(16 * parameters)} of RAM in FP32 "
                "with AdamW. `sp-lightning check cuda --model CLASS --data CLASS` trains six steps of it on your GPU."
            )
    rows = [plan_row(module, way) for way in ladder(given)]
    fits = any(row.step is not None for row in rows)
    remedies = () if fits else tuple(_remedies(module, rows[0], rows[-1]))
    report = Report(title, f"{parameters:,} parameters in {rows[0].units} units.", rows, remedies)
    if given.fp8 and fits:
        report = replace(report, in_16_bits=plan_row(module, replace(report.best.given, fp8=False)))
    return report


def plan_row(module: nn.Module, given: Assumptions) -> Row:
    """Plan one way to train, at the device's lowest speed and, if that is known, at its best."""
    model = divide(module, given)
    workload, machine = estimate_work(model, given), assumed_machine(given)
    budget, host_budget = given.device_room, given.host_room
    row = Row(
        given,
        None,
        units=len(workload.units),
        has_logits=workload.turn_bytes > 0,
        checkpoint_bytes=sum(unit.sum_bytes + unit.state_bytes for unit in workload.everything),
    )
    try:
        step = choose(workload, machine, budget, host_budget=host_budget)
    except TooLittleMemory as error:
        return replace(row, error=error)
    at_best = None
    if given.compute_at_best is not None:
        gain = given.fp8_gain_at_best or given.fp8_gain
        faster = estimate_work(model, replace(given, compute=given.compute_at_best, fp8_gain=gain))
        # the search may miss the plan of the lower speed, which is there at the higher one, too
        ways = zip(faster.units, step.choice.ways, strict=True)
        same = replace(step.choice, ways=tuple(unit.way(way.policy) for unit, way in ways))
        found = choose(faster, machine, budget, host_budget=host_budget)
        at_best = min(found, predict(faster, machine, same), step, key=lambda each: each.seconds)
    first = first_host_bytes(workload, first_choice(workload, budget, host_budget))
    return replace(row, step=replace(step, host_bytes=max(step.host_bytes, first)), at_best=at_best)


def _remedies(module: nn.Module, first: Row, last: Row) -> Iterator[tuple[str, Row]]:
    """Yield a change of the request with which it fits, if there is one, and a machine on which it fits."""
    if last.lack.place == "host" and last.given.optimizer in COMPACT and last.given.nvme_read is None:
        row = plan_row(module, replace(last.given, **rates_of("drives", _DRIVE)))
        if row.step is not None:
            yield f'with optimizer state on a drive (`--nvme "{_DRIVE}"`)', row
    for change, given in _changes(first, last):
        row = plan_row(module, given)
        if row.step is not None:
            yield change, row
            break
    row, needed = last, last.given
    while row.error is not None:
        if row.error.place == "host":
            needed = replace(needed, host_memory=row.needed_bytes)
        else:
            needed = replace(needed, device_memory=row.needed_bytes)
        row = plan_row(module, needed)
    memory = f"{readable_bytes(needed.device_bytes)} of GPU memory and {readable_bytes(needed.host_bytes)} of RAM"
    yield f"on a machine with {memory}", row


def _changes(first: Row, last: Row) -> Iterator[tuple[str, Assumptions]]:
    """Yield changes that may make it fit, the smallest first."""
    given = last.given
    if last.lack.place == "device":
        if given.loss == "whole" and last.has_logits:
            yield "with `loss_in_slices(model)` (`--loss chunked`)", replace(given, loss="chunked")
        if given.activations != "auto":
            yield "with `activations='auto'`", replace(given, activations="auto")
    elif given.accumulate > 1:
        batch = given.tokens * given.accumulate
        yield (
            f"in one batch of {batch:,} tokens instead of {given.accumulate}",
            replace(given, tokens=batch, accumulate=1),
        )
    batch = given.tokens
    while batch % 2 == 0 and batch > given.length:
        batch //= 2
        many = given.accumulate * given.tokens // batch
        yield (
            f"in batches of {batch:,} tokens, {many} of them in a step (`--tokens {batch} --accumulate {many}`)",
            replace(given, tokens=batch, accumulate=many),
        )
    if last.lack.place == "host" and given.gradient_clip_val is not None:
        yield "without clipping", replace(given, gradient_clip_val=None)
    lora = replace(first.given, lora=given.lora or RANK)
    if given.lora is None:
        yield f"with LoRA on a frozen base (`--lora {RANK}`)", lora
    if given.bits != 4 and last.has_logits:  # recipes for images load a base before they round it
        yield f"with QLoRA, on a base of 4 bits (`--lora {lora.lora} --bits 4`)", replace(lora, bits=4)


# ------------------------------------------------------------------------------------------- what a machine can train


@dataclass(frozen=True)
class Offer:
    """The best way to train a model, or the last one that was tried, if none fits."""

    kind: str
    model: str
    row: Row
    command: str  # of a recipe

    def __str__(self) -> str:
        row, step, given = self.row, self.row.step, self.row.given
        trained = f"all weights, {given.moments} moments" if given.moments else "all weights"
        if given.lora is not None:
            trained = "LoRA" if given.bits == 16 else "QLoRA"
        label = f"{self.kind:<16}{self.model:<27}"
        if step is None:
            return f"{label}does not fit: {row.missing()}"
        memory = f"{readable_bytes(step.device_bytes):>10}{readable_bytes(step.host_bytes):>11}"
        return f"{label}{trained:<26}{memory}  {row.speed}"


HEAD_OF_OFFERS = f"{'':<43}{'trained':<26}{'GPU':>10}{'RAM':>11}  tokens/s"


def offers(given: Assumptions) -> Iterator[Offer]:
    """Yield the best way to train each model that is offered on a machine."""
    for name, entry in known("models").items():
        if "offered_as" in entry:
            module = named_model(name)
            for way in _ways(replace(given, **batch_of(name))):
                if command := recipe(name, way):
                    offer = Offer(entry["offered_as"], name, plan_row(module, way), command)
                    if offer.row.step is not None:
                        break
            yield offer


def _ways(given: Assumptions) -> Iterator[Assumptions]:
    """Yield the ways to train, each in one batch a step, and in several smaller ones."""
    lora = replace(given, lora=RANK)
    for way in (*ladder(given), lora, replace(lora, bits=4)):
        yield way
        if way.tokens >= _FEWER * way.length:
            yield replace(way, tokens=way.tokens // _FEWER, accumulate=_FEWER * way.accumulate)


# --------------------------------------------------------------------------------------------------------------- words


def _typed(given: Assumptions, arguments: Mapping[str, str]) -> list[str]:
    """Return the arguments with unusual values, as they are typed in Python."""
    return [f"{name}={value!r}" for name, value in given.typed(arguments).items()]


def number_range(low: float, high: float) -> str:
    """Format two numbers, or one where they look alike: whole ones with commas, small ones with two digits."""
    texts = [f"{value:,.0f}" if value >= 100 else f"{value:.2g}" for value in (low, high)]
    return " to ".join(dict.fromkeys(texts))


def readable_hours(low: float, high: float) -> str:
    """Format a range of seconds in the unit in which one thinks of them."""
    size, unit = next((size, unit) for least, size, unit in _LONG_TIMES if high >= least)
    texts = [f"{value / size:.{0 if high >= 10 * size else 1}f}" for value in (low, high)]
    return f"{' to '.join(dict.fromkeys(texts))} {unit}"


def readable_seconds(seconds: float) -> str:
    """Format a time with three digits and a unit."""
    if not seconds:
        return "0 s"
    size, unit = next((each for each in UNITS_OF_TIME if abs(seconds) >= 0.9995 * each[0]), UNITS_OF_TIME[-1])
    value = seconds / size
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"
