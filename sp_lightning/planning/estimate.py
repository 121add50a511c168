"""Estimates the work of a step from a model's shapes and from assumptions, without a machine to measure on.

The engine's own rules find the units, on a copy of the model on the meta device. Each weight matrix multiplies and adds
once for each token, an expert's once for each token that passes it, and attention once for each pair of tokens of a
row. A matrix saves a constant part of the bytes that it reads and writes: that of decoders with fused attention, for
rows of any length (docs/cli.md).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from sp_lightning.optim.on_device import bytes_of_step
from sp_lightning.pipeline.activations.offload import Footprint
from sp_lightning.pipeline.lanes.accelerator import KERNEL_SECONDS, REACHED_OF_MEMORY
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.units.finder import find_units
from sp_lightning.pipeline.units.unit import Division, Unit
from sp_lightning.pipeline.weights.autocast import weights_of_cast_layers
from sp_lightning.pipeline.weights.segment import STAGING_BUFFERS, STAGING_OF_SEVERAL
from sp_lightning.planning.assumptions import COMPACT, Assumptions
from sp_lightning.planning.measure import work_of
from sp_lightning.planning.memory import ways_of
from sp_lightning.planning.work import Machine, Stepping, UnitWork, Workload

_HALF = {
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
# bytes that a unit saves for each one that its matrices read or write, with autocast and without
_SAVED_MIXED, _SAVED = 1.5, 1.28
_WORKING = 1.4  # bytes that a unit takes as it computes, for each one that it saves
# logits in fp32, their gradients, and results of the loss, for each byte of the first
_OF_LOGITS = 3.0
_OF_CHUNKED_LOSS = 2.0  # bytes that a loss without all logits takes, for each byte of its weight
# layers that make queries, of all heads together, and the side of their weights that has this width
_QUERIES = {"q_proj": 0, "to_q": 0, "query": 0, "q": 0, "qkv": 1, "qkv_proj": 1, "c_attn": 0}
# layers of diffusers' models that few tokens pass: modulation, and the text's half of blocks that also have the image's
_NOT_EACH = re.compile(r"norm\w*\.linear$|\b(ff_context|add_[qkv]_proj|to_add_out)\b")
# the backward of fused attention, which multiplies once more for the scores, by its forward
_ATTENTION_BACK = 2.5
# a mixture's experts that are modules of their own
_EXPERT = re.compile(r"\bexperts\.(\d+)\b")
# for each byte of weights of 4 bits, the share of their scales, and the bytes of GPU memory that using them moves
_SCALES, _UNPACKED = 1 / 32, 9
# bytes of GPU memory that a compiled cast to FP8 reads and writes for a number, looking for the largest one first; and
# one that also changes the layout, as gradients of weights are products over tokens
_OF_CAST, _OF_CAST_BACK = 5, 7
_BOTH_WAYS = 1.7  # the rate that copies in both directions reach together, by that of one of them
# the rate of host memory if cores and copies use it at once, by the rate that the optimizer alone reaches
_MEMORY_FOR_ALL = 1.5


class DividedModel(NamedTuple):
    """The units of a model as it is trained, of a copy without memory, and facts that decide on their work."""

    division: Division
    vocabulary: frozenset[int]  # sizes of its tables
    chosen_experts: int | None  # number of a mixture's experts that each token passes


def divide(module: nn.Module, given: Assumptions) -> DividedModel:
    """Copy a model as it would be trained, and find its units; the machine's speed does not matter here."""
    dtype, is_mixed = _HALF.get(given.precision), given.precision.endswith("mixed")
    # to the meta device, where it takes no memory; shared tensors stay shared
    copies: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    for weight in module.parameters():
        copies[id(weight)] = nn.Parameter(weight.to("meta"), weight.requires_grad)
    module = copy.deepcopy(module, copies).to(dtype=None if is_mixed and given.lora is None else dtype)
    vocabulary = frozenset(table.num_embeddings for table in module.modules() if isinstance(table, nn.Embedding))
    # transformers' routers call the number by this name
    chosen = (getattr(part, "top_k", None) for part in module.modules())
    chosen_experts = next((number for number in chosen if isinstance(number, int)), None)
    if given.lora is not None:
        # freeze it, and add the numbers of an adapter to each of its linear layers but the head
        module.requires_grad_(False)
        for layer in module.modules():
            if isinstance(layer, nn.Linear) and layer.out_features not in vocabulary:
                size = given.lora, layer.in_features + layer.out_features
                numbers = torch.empty(size, device="meta", dtype=None if is_mixed else dtype)
                layer.adapter = nn.Parameter(numbers)
                if given.bits == 4:
                    layer.weight = nn.Parameter(layer.weight.to(torch.uint8), requires_grad=False)
    division = find_units(module, given.units, given.resident, given.device_bytes)
    cast = weights_of_cast_layers(module) if is_mixed else set()
    # torchao's own casts need them as they are
    for part in module.modules():
        if _in_fp8(part, given, vocabulary):
            cast -= set(map(id, part.parameters()))
    for sent in [weight for unit in division.units for weight in unit.weights]:
        if sent.dtype is torch.uint8:  # two numbers share a byte
            sent.layout = sent.layout.flatten()[::2]
        elif dtype is not None and id(sent.master) in cast:
            sent.compute_dtype = dtype
    return DividedModel(division, vocabulary, chosen_experts)


def estimate_work(model: DividedModel, given: Assumptions) -> Workload:
    """Estimate the workload of a model that was divided."""
    division = model.division
    policies: list[Policy] = ["keep", "recompute", "offload"]
    if given.activations != "auto":
        policies = [given.activations]
    # backward begins with the last one's activations
    keeping = [*division.units[-1:], division.resident]
    *units, resident = [
        _work(unit, given, model, ["keep"] if unit in keeping else policies)
        for unit in (*division.units, division.resident)
    ]
    masters = sum(unit.sum_bytes for unit in (*units, resident))
    stepping: Stepping | None = None
    if masters:
        # a loss scaler looks at all gradients, too
        waits = given.gradient_clip_val is not None or given.precision == "16-mixed"
        stepping = "after backward" if waits else "in backward"
    heads = [
        shape
        for unit in division.all_units()
        for _, shape, _ in _matrices(unit, given, model)
        if shape[0] in model.vocabulary
    ]
    turn = sum(_OF_LOGITS * 4 * given.tokens * shape[0] for shape in heads)
    if given.loss == "chunked":
        width = 2 if given.precision in _HALF else 4
        turn = sum(_OF_CHUNKED_LOSS * width * shape.numel() for shape in heads)
    return Workload(
        units=tuple(units),
        resident=resident,
        stepping=stepping,
        adds_up=given.devices * given.accumulate > 1,
        may_wait=given.devices == 1 and given.steps_by_weight,
        may_stay=given.devices == 1,
        has_drive=given.nvme_read is not None,
        micro_steps=given.accumulate,
        staging_buffers=STAGING_BUFFERS if given.devices == 1 else STAGING_OF_SEVERAL,
        # sums are read and written, and gradients read
        add_seconds=(given.accumulate > 1) * 3 * masters / (given.host_bandwidth * 1e9),
        # the resident unit saves all the time, and the clock lets it compute only in forward
        rest_seconds=resident.backward_seconds,
        # the scales of rounded weights do not stream
        outside_bytes=resident.ways[0].held + int(_SCALES * sum(map(_rounded, division.all_units()))),
        turn_bytes=int(turn),
    )


def assumed_machine(given: Assumptions) -> Machine:
    """Return the machine as one of its devices sees it; all devices share the bandwidth of its memory."""
    host = given.host_bandwidth * 1e9
    share = host / given.devices
    link = min(given.link * 1e9, share)
    both = _BOTH_WAYS * link
    memory = 1e9 * (given.memory_bandwidth or _MEMORY_FOR_ALL * given.host_bandwidth)
    if given.devices > 1:  # copies have their share
        both, memory = min(both, share), math.inf
    return Machine(
        to_device=link,
        to_host=link,
        host=host,
        both=both,
        host_memory=memory,
        device_memory=REACHED_OF_MEMORY * given.device_bandwidth * 1e9,
        kernel_seconds=KERNEL_SECONDS,
        drive=given.drive_rate,
    )


def _in_fp8(layer: nn.Module, given: Assumptions, vocabulary: Collection[int]) -> bool:
    """Tell whether torchao converts a layer: a linear one but the head, with sizes that are multiples of 16."""
    return (
        given.fp8
        and type(layer) is nn.Linear
        and layer.out_features not in vocabulary
        and layer.in_features % 16 == layer.out_features % 16 == 0
    )


def _matrices(unit: Unit, given: Assumptions, model: DividedModel) -> Iterator[tuple[str, torch.Size, bool]]:
    """Yield the shapes of all weights that a unit multiplies tokens with, the names of their layers, whether in FP8.

    Tables are looked up, diffusion models' modulation is computed once for an image, their tokens pass one of two
    halves of a block, and adapters are next to nothing. A mixture has as many experts here as a token passes.
    """
    chosen = model.chosen_experts
    modules = [found for member in unit.members for found in member.module.named_modules(prefix=member.name)]
    for name, module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or _NOT_EACH.search(name):
            continue
        expert = _EXPERT.search(name)
        if expert is not None and chosen is not None and int(expert[1]) >= chosen:
            continue
        experts = getattr(module, "num_experts", None)
        for weight in module.parameters(recurse=False):
            if chosen is not None and weight.dim() == 3 and weight.shape[0] == experts:
                yield from [(name, weight.shape[1:], False)] * chosen
            elif weight.dim() > 1 and min(weight.shape[:2]) > (given.lora or 0):
                yield name.rpartition(".")[2], weight.shape, _in_fp8(module, given, model.vocabulary)


def _casts(shapes: Sequence[torch.Size], given: Assumptions, share: float) -> tuple[float, float, int]:
    """Return the seconds of casts to FP8 in forward and in backward, and the bytes that those of a layer take.

    A `share` of the weights of these shapes is trained. Tensors that are saved for backward have 16 bits, so backward
    casts them again.
    """
    rate = REACHED_OF_MEMORY * given.device_bandwidth * 1e9
    inputs, outputs = (given.tokens * sum(shape[side] for shape in shapes) for side in (1, 0))
    numbers = sum(shape.numel() for shape in shapes)
    back = _OF_CAST * numbers + _OF_CAST_BACK * (share * inputs + outputs)
    largest = max((shape.numel() + given.tokens * sum(shape) for shape in shapes), default=0)
    return _OF_CAST * (inputs + numbers) / rate, back / rate, largest


def _rounded(unit: Unit) -> int:
    """Return the bytes of a unit's weights of 4 bits."""
    return sum(weight.nbytes for weight in unit.weights if weight.dtype is torch.uint8)


def _work(unit: Unit, given: Assumptions, model: DividedModel, policies: Sequence[Policy]) -> UnitWork:
    """Return the work of a unit; a matrix with as many rows as there are words makes logits."""
    matrices = [*_matrices(unit, given, model)]
    shapes = [shape for _, shape, _ in matrices]
    trained = [weight for weight in unit.weights if weight.master.requires_grad]
    weights = sum(weight.master.nbytes for weight in unit.weights)
    masters = sum(weight.nbytes for weight in trained)
    # written to be sent
    lowered = sum(weight.compute_bytes for weight in trained if weight.lowered)
    gradients = sum(weight.compute_bytes for weight in trained)
    state = given.state_bytes(weight.master for weight in trained)
    # gradients are added up in the masters' dtype, those of several devices in one pass; the step reads the sums
    added = masters - gradients if given.devices * given.accumulate > 1 else 0
    if given.devices > 1:
        added += given.devices * gradients + masters
    rate = given.compute * 1e12
    gain = given.fp8_gain or 1
    multiplied = sum(shape.numel() / (gain if in_fp8 else 1) for _, shape, in_fp8 in matrices)
    forward = 2 * given.tokens * multiplied / rate
    # scores and sums by them; each token of a language model looks at those before it
    width = sum(shape[_QUERIES[layer]] for layer, shape, _ in matrices if layer in _QUERIES)
    pairs = given.tokens * min(given.tokens, given.length)
    attention = (2 if model.vocabulary else 4) * pairs * width / rate
    is_mixed = given.precision.endswith("mixed")
    nbytes = given.tokens * (4 if given.precision == "32-true" else 2)
    inputs = (2 if is_mixed else 1) * nbytes * shapes[0][-1] if shapes else 0
    moved = sum(shape[-1] + (0 if shape[0] in model.vocabulary else shape[-2]) for shape in shapes)
    saved = max(inputs, int((_SAVED_MIXED if is_mixed else _SAVED) * nbytes * moved))
    share = masters / max(1, weights)  # of the weights whose gradients are computed
    converted = [shape for _, shape, in_fp8 in matrices if in_fp8]
    casts, casts_back, cast = _casts(converted, given, share)
    if rounded := _rounded(unit):  # a matrix is made whole before it multiplies
        unpacking = _UNPACKED * rounded / (REACHED_OF_MEMORY * given.device_bandwidth * 1e9)
        casts, casts_back = casts + unpacking, casts_back + unpacking
        cast = 2 * max(shape.numel() for shape in shapes)
    call = Footprint(inputs, saved - inputs, saved, int(_WORKING * saved) + cast, repeatable=True)
    once = forward + attention + casts
    is_free = given.optimizer_on == "auto"
    work = work_of(
        unit,
        state,
        # torch's own steps take as much again as masters
        meanwhile=masters if given.moments is None else 0,
        lives=not trained or (is_free and given.steps_by_weight),
        # these are stepped by passes over pieces; several devices would have to agree
        visits=is_free and given.devices == 1 and given.optimizer in COMPACT,
    )
    return replace(
        work,
        forward_seconds=once,
        # it multiplies once for the input's gradient, and once more for the gradient of each trained weight
        backward_seconds=forward * (1 + share) + _ATTENTION_BACK * attention + casts_back,
        step_bytes=work.step_bytes + lowered + added,
        ways=ways_of([call], once, policies),
        piece_bytes=bytes_of_step(sum(weight.master.numel() for weight in trained)) if given.moments else 0,
    )
