"""The step over one unit: bit by bit what `optimizer.step()` does, in one pass over memory."""

from __future__ import annotations

import copy
import io
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, count, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from sp_lightning.pipeline.gradients.scaling import Scaling
from sp_lightning.pipeline.optimizer import stepping
from sp_lightning.pipeline.optimizer.runs import StepInputs
from sp_lightning.pipeline.optimizer.stepping import (
    BY_WEIGHT,
    UnitStep,
    fused_kernel_works,
    keeps_state,
    why_not_by_unit,
)
from sp_lightning.pipeline.torch_private import users_of_storage, without_torch_function
from sp_lightning.pipeline.weights import sections
from sp_lightning.pipeline.weights.buffers import lay_out, tensor_in

# Some fill whole vectors and lie side by side, some do not, some are no rows of numbers at all.
SHAPES = [(128,), (16, 32), (8, 16), (256,), (5,), (128,), (33, 7), (), (0, 3), (1,), (2, 64), (64, 9), (64,), (64, 2)]

RECIPES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Adam, {}),
    (Adam, {"amsgrad": True, "weight_decay": 0.1, "lr": 0.01}),
    (AdamW, {"maximize": True}),
    (AdamW, {"amsgrad": True, "betas": (0.5, 0.9)}),
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (RMSprop, {}),
    (RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    (NAdam, {"weight_decay": 0.1}),
    (NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}),
    (RAdam, {"weight_decay": 0.1}),
    (Adamax, {"weight_decay": 0.1}),
    (ASGD, {"weight_decay": 0.1, "t0": 2}),
    (Adadelta, {"weight_decay": 0.1}),
    (Rprop, {}),
]
FUSED = (Adam, AdamW, SGD, Adagrad)


def recipes(*ways: dict[str, Any]) -> list[Any]:
    """Every class and its flags, each in these ways."""
    return [
        pytest.param(cls, {**options, **way}, id="-".join([cls.__name__, *map(str, options), *map(str, way)]))
        for cls, options in RECIPES
        for way in ways
        if "fused" not in way or cls in FUSED
    ]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a few hundred elements are cut already, and the largest has two sections."""
    monkeypatch.setattr(stepping, "_PART", 128)
    monkeypatch.setattr(sections, "SECTION", 512)


def in_one_buffer(likes: Sequence[Tensor], dtype: torch.dtype, packed: bool = False) -> list[Tensor]:
    """Tensors of these shapes and strides that lie in one buffer, as masters, gradients and copies of a unit do."""
    sizes = [like.numel() * dtype.itemsize for like in likes]
    offsets, nbytes = lay_out(sizes)
    if packed:
        *offsets, nbytes = accumulate(sizes, initial=0)
    memory = torch.full((nbytes,), 255, dtype=torch.uint8)  # NaN between them
    return [tensor_in(memory, offset, like, dtype) for offset, like in zip(offsets, likes, strict=True)]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_same(mine: Tensor, plain: Tensor, what: str = "") -> None:
    assert (mine.dtype, mine.shape, mine.stride()) == (plain.dtype, plain.shape, plain.stride()), what
    assert bits(mine) == bits(plain), what


def snapshot(group: dict[str, Any]) -> dict[str, Any]:
    hyper = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in hyper.items()}


def step(
    unit: UnitStep,
    optimizer: Optimizer,
    hyper: dict[str, Any],
    gradients: Sequence[Tensor | None],
    scaling: Scaling,
    copies: Sequence[Tensor | None],
) -> None:
    """All sections of a step, as the thread for work on host memory steps them."""
    for master, gradient in zip(unit._masters, gradients, strict=True):
        if gradient is not None and keeps_state(optimizer, hyper):
            optimizer.state.setdefault(master, {})
    states = [optimizer.state.get(master, {}) for master in unit._masters]
    with torch.inference_mode(False), torch.no_grad(), without_torch_function():
        inputs = StepInputs(gradients, states, copies)
        for _ in unit.sections(optimizer, hyper, scaling, inputs, wait_for_all=lambda: None):
            pass


class Pair:
    """The same weights twice: stepped by a plain optimizer, and by `UnitStep`."""

    def __init__(
        self,
        make: Callable[[list[nn.Parameter]], Optimizer],
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        gradient_dtype: torch.dtype | None = None,
        copy_dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        packed: bool = False,
    ) -> None:
        likes = [torch.randn(shape).to(memory_format=memory_format) for shape in shapes]
        self.plain = [nn.Parameter(like.to(dtype)) for like in likes]
        self.masters = [nn.Parameter(memory) for memory in in_one_buffer(likes, dtype, packed)]
        for mine, plain in zip(self.masters, self.plain, strict=True):
            mine.data.copy_(plain.data)
        self.arrived = in_one_buffer(likes, gradient_dtype or dtype, packed)
        self.copies: list[Tensor | None] = [None] * len(likes)
        if copy_dtype is not None:
            self.copies = list(in_one_buffer(likes, copy_dtype))
        self.theirs, self.ours = make(self.plain), make(self.masters)
        self.units = self.new_units()

    def new_units(self) -> list[UnitStep]:
        return [UnitStep(group["params"]) for group in self.ours.param_groups]

    def make_gradients(self, missing: Sequence[int] = ()) -> None:
        """The same random gradients for both."""
        for index, (plain, arrived) in enumerate(zip(self.plain, self.arrived, strict=True)):
            arrived.copy_(torch.randn(arrived.shape))
            plain.grad = None if index in missing else torch.empty_like(plain.data).copy_(arrived)

    def step_ours(self, missing: Sequence[int] = (), scaling: Scaling | None = None) -> None:
        where = {id(master): index for index, master in enumerate(self.masters)}
        for group, unit in zip(self.ours.param_groups, self.units, strict=True):
            indices = [where[id(master)] for master in group["params"]]
            gradients = [None if index in missing else self.arrived[index] for index in indices]
            copies = [self.copies[index] for index in indices]
            step(unit, self.ours, snapshot(group), gradients, scaling or Scaling(), copies)

    def check(self, missing: Sequence[int] = ()) -> None:
        """Weights, state, gradients and copies have the same bits, the state also the same form."""
        for index, (mine, plain) in enumerate(zip(self.masters, self.plain, strict=True)):
            assert_same(mine.data, plain.data, f"weight {index}")
            self.check_state(index)
            if index in missing:
                continue
            if self.arrived[index].dtype == mine.dtype:
                assert plain.grad is not None
                assert_same(self.arrived[index], plain.grad, f"gradient {index}")
            lowered = self.copies[index]
            if lowered is not None:
                assert_same(lowered, plain.data.to(lowered.dtype), f"copy {index}")

    def check_state(self, index: int) -> None:
        state, plain_state = self.ours.state.get(self.masters[index]), self.theirs.state.get(self.plain[index])
        assert (state is None) == (plain_state is None), f"state {index}"
        for key in {**(state or {}), **(plain_state or {})}:
            assert_same(state[key], plain_state[key], f"{key} of weight {index}")

    def run(self, steps: int = 3, missing: Sequence[int] = ()) -> None:
        for _ in range(steps):
            self.make_gradients(missing)
            self.theirs.step()
            self.step_ours(missing)
            self.check(missing)


def recipe(cls: type[Optimizer], options: dict[str, Any]) -> Callable[[list[nn.Parameter]], Optimizer]:
    return lambda params: cls(params, **options)


ADAMW = recipe(AdamW, {"lr": 0.01})
FUSED_ADAMW = recipe(AdamW, {"lr": 0.01, "fused": True})
MOMENTUM = recipe(SGD, {"lr": 0.1, "momentum": 0.9})

# ------------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(("cls", "options"), recipes({}, {"foreach": True}, {"fused": True}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_bits_are_those_of_the_plain_step(cls: type[Optimizer], options: dict[str, Any], dtype: torch.dtype) -> None:
    if "fused" in options and not fused_kernel_works(cls.__name__, dtype):
        pytest.skip("torch's kernel leaves the weights as they are")
    Pair(recipe(cls, options), dtype=dtype).run()


@pytest.mark.parametrize(("cls", "options"), recipes({}, {"fused": True}))
@pytest.mark.parametrize(
    ("dtype", "lower"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float64, torch.float32)],
    ids=str,
)
def test_lower_gradients_and_copies(
    cls: type[Optimizer], options: dict[str, Any], dtype: torch.dtype, lower: torch.dtype
) -> None:
    """A gradient in a lower dtype counts as one that was cast, and stays as it is; the copy is of the new weight."""
    pair = Pair(recipe(cls, options), dtype=dtype, gradient_dtype=lower, copy_dtype=lower)
    for _ in range(2):
        pair.make_gradients()
        arrived = [gradient.clone() for gradient in pair.arrived]
        pair.theirs.step()
        pair.step_ours()
        pair.check()
        assert all(map(torch.equal, arrived, pair.arrived))


@pytest.mark.parametrize("make", [ADAMW, FUSED_ADAMW])
def test_only_some_weights_are_lowered(make: Any) -> None:
    """As under autocast: matrices are, norms are not."""
    pair = Pair(make, [(256,), (16, 32), (16, 32), (256,), (256,), (16, 32)])
    lowered = in_one_buffer(pair.arrived, torch.bfloat16)
    for index, gradient in enumerate(pair.arrived):
        if gradient.dim() == 2:
            pair.arrived[index] = lowered[index]
            pair.copies[index] = torch.empty_like(gradient, dtype=torch.bfloat16)
    pair.run()


@pytest.mark.parametrize("make", [ADAMW, FUSED_ADAMW, recipe(RMSprop, {"centered": True})])
def test_channels_last(make: Any) -> None:
    shapes = [(8, 4, 4, 4), (16, 4, 2, 2), (8, 3, 3, 3), (4, 8, 1, 1)]
    Pair(make, shapes, copy_dtype=torch.bfloat16, memory_format=torch.channels_last).run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_odd_weights_without_a_byte_between_them(dtype: torch.dtype, fused: bool) -> None:
    """The ends of weights round differently than what fills whole vectors, so they stay the ends."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "fused": fused}
    make = recipe(SGD, options) if fused_kernel_works("SGD", dtype) else FUSED_ADAMW
    Pair(make, [(5,), (100,), (64,), (129,), (63,), (7, 9), (320,), (1000,), (64,)], dtype=dtype, packed=True).run()


def test_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernels divide memory among threads where vectors end, so the number of threads decides nothing."""
    monkeypatch.setattr(stepping, "_PART", 1 << 15)
    pair = Pair(FUSED_ADAMW, [(500, 128), (128,), (300, 128), (1001,)], copy_dtype=torch.bfloat16)
    torch.set_num_threads(2)
    try:
        pair.run(2)
    finally:
        torch.set_num_threads(1)


def test_half_precision_masters() -> None:
    Pair(recipe(SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}), dtype=torch.float16).run()


@pytest.mark.parametrize("cls", BY_WEIGHT)
def test_optimizers_that_look_at_a_whole_weight(cls: type[Optimizer]) -> None:
    pair = Pair(
        recipe(cls, {"lr": 0.1}), [(16, 32), (32, 16), (4, 4)], gradient_dtype=torch.bfloat16, copy_dtype=torch.bfloat16
    )
    pair.run()


@given(data=st.data())
def test_any_sizes(data: st.DataObject) -> None:
    size = st.integers(0, 5) | st.sampled_from([64, 128, 192, 256, 512]) | st.integers(0, 700)
    sizes = data.draw(st.lists(size, min_size=1, max_size=8), label="sizes")
    cls, options = data.draw(st.sampled_from(RECIPES), label="recipe")
    fused = {"fused": True} if cls in FUSED and data.draw(st.booleans(), label="fused") else {}
    lower = data.draw(st.sampled_from([None, torch.bfloat16]), label="lower")
    missing = data.draw(st.sets(st.integers(0, len(sizes) - 1)), label="missing in the second step")
    torch.manual_seed(data.draw(st.integers(0, 9), label="seed"))
    pair = Pair(recipe(cls, {**options, **fused}), [(size,) for size in sizes], gradient_dtype=lower, copy_dtype=lower)
    pair.run(1)
    if len(missing) < len(sizes):
        pair.run(1, tuple(missing))
    pair.run(1)


# ------------------------------------------------------------------------------------------------ what training changes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lower", [False, True])
def test_clipping_by_norm_after_a_loss_scale(dtype: torch.dtype, lower: bool) -> None:
    pair = Pair(FUSED_ADAMW, dtype=dtype, gradient_dtype=torch.bfloat16 if lower else None)
    for max_norm in (0.5, 1e9):
        pair.make_gradients()
        inverse = torch.tensor(2.0**-4)
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_([plain.grad for plain in pair.plain], found, inverse)
        norm = clip_grad_norm_(pair.plain, max_norm)
        pair.theirs.step()
        pair.step_ours(scaling=Scaling((inverse, torch.clamp(max_norm / (norm + 1e-6), max=1.0))))
        pair.check()


@pytest.mark.parametrize("make", [ADAMW, FUSED_ADAMW])
def test_clipping_by_value(make: Any) -> None:
    pair = Pair(make)
    for _ in range(2):
        pair.make_gradients()
        clip_grad_value_(pair.plain, 0.3)
        pair.theirs.step()
        pair.step_ours(scaling=Scaling(clamp=0.3))
        pair.check()


@pytest.mark.parametrize("make", [ADAMW, FUSED_ADAMW, MOMENTUM, recipe(SGD, {"lr": 0.1})])
def test_weights_without_a_gradient_are_left_alone(make: Any) -> None:
    """Their number of steps falls behind that of their neighbors, which are joined without them."""
    pair = Pair(make, copy_dtype=torch.bfloat16)
    pair.run(1, missing=(1, 3, 5, 9))
    pair.run(2)
    pair.run(1, missing=(0, 2, 12))
    pair.run(1, missing=range(1, len(SHAPES)))
    pair.run(2)


def test_an_empty_weight_between_neighbors() -> None:
    """Without a gradient it is not in the call, and those around it are neighbors."""
    pair = Pair(recipe(ASGD, {"weight_decay": 0.1}), [(512,), (0,), (256,)])
    pair.run(1)
    pair.run(1, missing=(1,))
    pair.run(1)


def test_no_gradient_at_all() -> None:
    pair = Pair(ADAMW)
    pair.run(1, missing=range(len(SHAPES)))
    assert not pair.ours.state


def test_schedules_of_hyperparameters() -> None:
    pair = Pair(recipe(AdamW, {"lr": torch.tensor(0.01), "fused": True}))
    for factor in (1.0, 0.5, 0.0):
        for optimizer in (pair.theirs, pair.ours):
            optimizer.param_groups[0]["lr"].fill_(0.01 * factor)
            optimizer.param_groups[0]["betas"] = (0.9 * factor, 0.99)
        pair.run(1)


@pytest.mark.parametrize("fused", [False, True])
def test_momentum_comes_and_goes(fused: bool) -> None:
    """SGD keeps nothing without it, begins with it at any time, and keeps what it does not use."""
    pair = Pair(recipe(SGD, {"lr": 0.1, "fused": fused}))
    for momentum in (0.0, 0.9, 0.0, 0.5):
        for optimizer in (pair.theirs, pair.ours):
            optimizer.param_groups[0]["momentum"] = momentum
        pair.run(2)


def test_momentum_that_is_none() -> None:
    """As checkpoints of earlier versions of torch have it."""
    pair = Pair(MOMENTUM, [(128,), (128,)])
    for optimizer, weights in ((pair.theirs, pair.plain), (pair.ours, pair.masters)):
        for weight in weights:
            optimizer.state[weight]["momentum_buffer"] = None
    pair.run(2)
    averages = [pair.ours.state[master]["momentum_buffer"] for master in pair.masters]
    assert averages[0].data_ptr() + averages[0].nbytes == averages[1].data_ptr()


def test_fused_momentum_begins_for_one_weight_after_the_other() -> None:
    """Torch's kernel cannot step weights with and without momentum in one call; here they are stepped in two."""
    pair = Pair(recipe(SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}), [(5,), (7,), (64,)])
    alone = [SGD([plain], lr=0.1, momentum=0.9, fused=True) for plain in pair.plain]
    for missing in ((0,), (), ()):
        pair.make_gradients(missing)
        for optimizer in alone:
            optimizer.step()
        pair.step_ours(missing)
        for mine, plain in zip(pair.masters, pair.plain, strict=True):
            assert_same(mine.data, plain.data)


def test_the_snapshot_decides_not_the_group() -> None:
    """A scheduler may have changed the group when the unit steps."""
    pair = Pair(ADAMW)
    pair.make_gradients()
    pair.theirs.step()
    hyper = snapshot(pair.ours.param_groups[0])
    pair.ours.param_groups[0]["lr"] = 1e3
    before = dict(pair.ours.param_groups[0])
    step(pair.units[0], pair.ours, hyper, pair.arrived, Scaling(), pair.copies)
    pair.check()
    assert all(pair.ours.param_groups[0][key] is value for key, value in before.items())


def test_param_groups_of_an_optimizer() -> None:
    """With hyperparameters of their own, and weights of one that lie between those of the other."""

    def make(params: list[nn.Parameter]) -> Optimizer:
        groups = [
            {"params": params[::2], "lr": 0.1, "amsgrad": True},
            {"params": params[1::2], "weight_decay": 0.0, "fused": True},
        ]
        return AdamW(groups, lr=0.01)

    Pair(make).run()


def test_state_that_is_forgotten_after_a_first_step_is_made_elsewhere() -> None:
    """Whoever still holds the former can set it again."""
    pair = Pair(ADAMW)
    kept: tuple[list[Tensor], list[Tensor]] = [], []
    for _ in range(2):
        pair.make_gradients()
        pair.theirs.step()
        pair.step_ours()
        for held, optimizer in zip(kept, (pair.ours, pair.theirs), strict=True):
            held += [value for state in optimizer.state.values() for value in state.values()]
            optimizer.state.clear()
    for mine, plain in zip(*kept, strict=True):
        assert_same(mine, plain)


def test_two_optimizers_share_a_unit() -> None:
    pair = Pair(ADAMW)
    half = len(pair.masters) // 2
    optimizers = [
        (Adam(params[:half], lr=0.1), SGD(params[half:], lr=0.1, momentum=0.5)) for params in (pair.plain, pair.masters)
    ]
    units = [UnitStep(optimizer.param_groups[0]["params"]) for optimizer in optimizers[1]]
    for _ in range(3):
        pair.make_gradients()
        for part, plain, ours, unit in zip((slice(half), slice(half, None)), *optimizers, units, strict=True):
            plain.step()
            step(unit, ours, snapshot(ours.param_groups[0]), pair.arrived[part], Scaling(), pair.copies[part])
            pair.theirs, pair.ours = plain, ours
            for index in range(*part.indices(len(pair.masters))):
                assert_same(pair.masters[index].data, pair.plain[index].data)
                pair.check_state(index)


def test_gradients_arrive_elsewhere() -> None:
    """In one piece of the ring, then in the other, in another dtype, or in memory of their own."""
    pair = Pair(FUSED_ADAMW)
    ring = [pair.arrived, in_one_buffer(pair.arrived, torch.float32), in_one_buffer(pair.arrived, torch.bfloat16)]
    for arrived in [*ring, *ring, [torch.empty_like(gradient) for gradient in pair.arrived]]:
        pair.arrived = arrived
        pair.run(1)


def test_masters_get_other_memory() -> None:
    pair = Pair(ADAMW)
    pair.run(2)
    for master, memory in zip(pair.masters, in_one_buffer(pair.arrived, torch.float32), strict=True):
        master.data = memory.copy_(master.data)
    pair.run(2)


# --------------------------------------------------------------------------------------------------------- the state


@pytest.mark.parametrize(("cls", "options"), recipes({}, {"fused": True}))
def test_a_plain_optimizer_goes_on_with_the_state(cls: type[Optimizer], options: dict[str, Any]) -> None:
    """And the other way round: each loads what the other saved."""
    pair = Pair(recipe(cls, options))
    pair.run(2)
    saved = []
    for optimizer in (pair.theirs, pair.ours):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved.append(torch.load(file))
    pair.theirs.load_state_dict(saved[1])
    pair.ours.load_state_dict(saved[0])
    pair.run(2)
    # the same masters, by the plain class this time
    for master, arrived in zip(pair.masters, pair.arrived, strict=True):
        arrived.copy_(torch.randn(arrived.shape))
        master.grad = arrived
    for plain, master in zip(pair.plain, pair.masters, strict=True):
        plain.grad = master.grad.clone()
    pair.theirs.step()
    pair.ours.step()
    pair.check()
    pair.run(1)


def test_each_state_tensor_is_its_own() -> None:
    """Saving one weight's state does not take the buffer along, and no step counter is shared."""
    pair = Pair(FUSED_ADAMW)
    pair.run(2)
    tensors = [value for state in pair.ours.state.values() for value in state.values()]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    addresses = [tensor.data_ptr() for tensor in tensors if tensor.nbytes]
    assert len(set(addresses)) == len(addresses)


def test_copies_of_the_optimizer_are_independent() -> None:
    pair = Pair(ADAMW)
    pair.run(2)
    twin = copy.deepcopy(pair.ours)
    before = [value.clone() for state in twin.state.values() for value in state.values()]
    pair.run(2)
    assert all(map(torch.equal, before, [value for state in twin.state.values() for value in state.values()]))


def test_state_lies_side_by_side_from_the_first_step() -> None:
    pair = Pair(ADAMW, [(128,), (128,), (16, 16)])
    pair.run(1)
    averages = [pair.ours.state[master]["exp_avg"] for master in pair.masters]
    assert [right.data_ptr() - left.data_ptr() for left, right in pairwise(averages)] == [512, 512]


def test_changes_of_the_state_by_the_user_are_seen() -> None:
    pair = Pair(ADAMW)
    pair.run(2)
    for optimizer, weights in ((pair.theirs, pair.plain), (pair.ours, pair.masters)):
        optimizer.state[weights[1]]["step"].fill_(7)  # in place, among neighbors that are at 2
        optimizer.state[weights[2]]["exp_avg"] = torch.ones_like(weights[2].data)
        optimizer.state[weights[4]]["step"] = torch.tensor([3.0])  # as very old checkpoints have it
        del optimizer.state[weights[3]]
    pair.run(2)
    for optimizer in (pair.theirs, pair.ours):
        optimizer.state.clear()
    pair.run(2)


def test_a_counter_that_is_set_by_hand_is_seen() -> None:
    """In place, so that nothing lies elsewhere than before."""
    pair = Pair(ADAMW)
    pair.run(2)
    for optimizer, weights in ((pair.theirs, pair.plain), (pair.ours, pair.masters)):
        optimizer.state[weights[1]]["step"].fill_(7)
    pair.run(2)


def test_state_that_changed_places_is_put_right() -> None:
    pair = Pair(ADAMW, [(128,), (128,), (128,)])
    pair.run(2)
    for optimizer, weights in ((pair.theirs, pair.plain), (pair.ours, pair.masters)):
        first, second, third = (optimizer.state[weight] for weight in weights)
        first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]
        third["exp_avg"] = torch.ones(128)
    pair.run(2)


@pytest.mark.parametrize("load", [False, True])
def test_state_that_is_put_aside_is_not_written_to(load: bool) -> None:
    """As a search for a learning rate does: other state for some steps, and then the old one again."""
    pair = Pair(ADAMW)
    pair.run(2)
    aside = [optimizer.state for optimizer in (pair.theirs, pair.ours)]
    if load:
        saved = copy.deepcopy(pair.theirs.state_dict())
        pair.theirs.load_state_dict(copy.deepcopy(saved))
        pair.ours.load_state_dict(copy.deepcopy(saved))
    else:
        pair.theirs.state, pair.ours.state = defaultdict(dict), defaultdict(dict)
    pair.run(2)
    pair.theirs.state, pair.ours.state = aside
    pair.run(2)


def test_a_shared_step_counter_is_parted() -> None:
    """Plain torch would count one step for each weight that shares it; here each weight gets its own."""
    pair = Pair(ADAMW, [(128,), (128,)])
    pair.run(1)
    shared = torch.tensor(1.0)
    for master in pair.masters:
        pair.ours.state[master]["step"] = shared
    pair.run(1)


def test_state_in_another_dtype() -> None:
    """Momentum in fp32 for weights in bf16, put there by hand."""
    pair = Pair(MOMENTUM, dtype=torch.bfloat16)
    pair.run(1)
    for optimizer in (pair.theirs, pair.ours):
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].float()
    pair.run(2)


def test_state_in_other_strides_is_put_right() -> None:
    pair = Pair(ADAMW, [(8, 8, 4, 4)], memory_format=torch.channels_last)
    pair.run(1)
    state = pair.ours.state[pair.masters[0]]
    state["exp_avg"] = state["exp_avg"].contiguous()
    pair.run(1)


def test_an_error_of_the_optimizers_code_is_the_users() -> None:
    """As in plain torch: state without what the flags ask for."""
    pair = Pair(ADAMW)
    pair.run(1)
    pair.ours.param_groups[0]["amsgrad"] = True
    pair.make_gradients()
    with pytest.raises(KeyError, match="max_exp_avg_sq"):
        pair.step_ours()


# ------------------------------------------------------------------------------------------------------- its manners


class Recorder(TorchDispatchMode):
    """Writes down which operations run, and the sizes of the tensors that they get."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat_args = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
        self.calls.append((func.__name__.split(".")[0], [arg.numel() for arg in flat_args if isinstance(arg, Tensor)]))
        return func(*args, **(kwargs or {}))

    def sizes(self, *names: str) -> list[int]:
        """The size of the first tensor of each call of these operations."""
        return [sizes[0] for name, sizes in self.calls if name in names]


def test_one_kernel_call_for_a_unit() -> None:
    """The property that the speed comes from: one tensor, one parallel region, however many weights there are."""
    pair = Pair(FUSED_ADAMW, [(16, 16)] * 30)
    pair.run(2)
    with Recorder() as recorder:
        pair.step_ours()
    kernels = [sizes for name, sizes in recorder.calls if name == "_fused_adamw_"]
    # parameter, gradient, two averages, one counter
    assert kernels == [[30 * 256] * 4 + [1]]


@pytest.mark.parametrize("make", [ADAMW, FUSED_ADAMW])
def test_all_is_done_to_one_piece_before_the_next(make: Any) -> None:
    """No operation sees more than a piece, so it finds in the cache what the one before left there."""
    pair = Pair(make, [(16, 16)] * 30 + [(5,)] * 9, gradient_dtype=torch.bfloat16, copy_dtype=torch.bfloat16)
    pair.run(2)
    with Recorder() as recorder:
        pair.step_ours(scaling=Scaling((0.5,), clamp=0.1))
    update = "_fused_adamw_" if make is FUSED_ADAMW else "addcdiv_"
    order = [(name, sizes[0]) for name, sizes in recorder.calls if name in ("copy_", "mul_", "clamp_", update)]
    one_piece = [(name, 256) for name in ("copy_", "mul_", "clamp_", update, "copy_")]
    runs = [(name, size) for name, size in order if size > 5 and not (make is ADAMW and name == "mul_")]
    assert runs == [step for step in one_piece if step in runs] * 30
    small = [name for name, size in order if size == 5 and name != "mul_"]  # they share a call of the optimizer's code
    assert small == ["copy_", "clamp_"] * 9 + [update] * (9 if make is ADAMW else 1) + ["copy_"] * 9


def test_a_kernel_without_fusion_gets_pieces() -> None:
    """It goes through memory several times, so also where there is nothing but the update."""
    pair = Pair(ADAMW, [(16, 16)] * 30)
    pair.run(2)
    with Recorder() as recorder:
        pair.step_ours()
    assert recorder.sizes("addcdiv_") == [2 * stepping._PART] * 30


def test_gradients_are_not_held() -> None:
    """Their memory is used again only if nobody else holds it."""
    pair = Pair(ADAMW, gradient_dtype=torch.bfloat16)
    before = [users_of_storage(gradient) for gradient in pair.arrived]
    pair.run(2)
    assert [users_of_storage(gradient) for gradient in pair.arrived] == before


def test_hooks_and_schedulers_see_no_steps() -> None:
    """The user's `step` is one step; the engine tells of it, not the work that it does for it later."""
    pair = Pair(ADAMW)
    LambdaLR(pair.ours, lambda step: 1.0)
    seen: list[Optimizer] = []
    handles = [
        pair.ours.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append(optimizer)),
    ]
    pair.make_gradients()
    pair.step_ours()
    for handle in handles:
        handle.remove()
    assert seen == []


def test_a_scaler_at_work_in_the_other_thread_does_not_matter() -> None:
    """`GradScaler` lends fused optimizers its scale for the time of `step`."""
    pair = Pair(FUSED_ADAMW)
    pair.run(1)
    pair.ours.grad_scale, pair.ours.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    pair.run(1)


def test_changes_are_counted() -> None:
    """By autograd, and by the engine that looks whether masters have changed; only those that did."""
    pair = Pair(FUSED_ADAMW)
    before = [master._version for master in pair.masters]
    pair.run(1, missing=(2,))
    moved = [master._version > version for master, version in zip(pair.masters, before, strict=True)]
    assert moved == [index != 2 for index in range(len(moved))]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_in_another_thread_and_in_any_mode(mode: Any) -> None:
    """State is ordinary tensors, whatever mode the caller was in."""
    pair = Pair(ADAMW)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with mode():
                pair.step_ours()
        except BaseException as error:
            errors.append(error)

    for _ in range(2):
        pair.make_gradients()
        pair.theirs.step()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not errors
        pair.check()
    assert not any(value.is_inference() for state in pair.ours.state.values() for value in state.values())
    pair.run(1)


class Guarded(nn.Parameter):
    """As masters are in a step, but without an engine that knows what to do with an operation."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was redirected")


def test_guarded_masters() -> None:
    """In a step masters are of a class that redirects operations; the update means the masters themselves."""
    pair = Pair(FUSED_ADAMW, copy_dtype=torch.bfloat16)
    pair.run(1)
    pair.make_gradients()
    pair.theirs.step()
    for master in pair.masters:
        master.__class__ = Guarded
    pair.step_ours()
    assert all(type(master) is Guarded for master in pair.masters)
    for master in pair.masters:
        master.__class__ = nn.Parameter
    pair.check()


def test_a_gradient_of_another_form_is_refused() -> None:
    """As one flat tensor it would be of other elements, or of memory that is not on the host at all."""
    pair = Pair(ADAMW, [(4, 8)])
    pair.arrived = [torch.empty(8, 4).t()]
    with pytest.raises(ValueError, match=r"gradient of weight 0 has shape \(4, 8\) and strides \(1, 4\) on cpu"):
        pair.step_ours()
    pair.arrived = [torch.empty(4, 8, device="meta")]
    with pytest.raises(ValueError, match=r"gradient of weight 0 has .* on meta"):
        pair.step_ours()
    pair.arrived = [torch.empty(4, 8)]
    pair.copies = [torch.empty(32)]
    with pytest.raises(ValueError, match=r"lowered copy of weight 0 has shape \(32,\)"):
        pair.step_ours()


def test_a_weight_with_holes_is_stepped_by_itself() -> None:
    """Not by the engine, which has none; a flat tensor would be of the holes, too."""
    memory = torch.zeros(2, 512)
    master = nn.Parameter(memory[:, ::2])
    gradient = torch.ones(2, 512)[:, ::2]
    optimizer = AdamW([master])
    step(UnitStep([master]), optimizer, snapshot(optimizer.param_groups[0]), [gradient], Scaling(), [None])
    assert (memory[:, ::2] != 0).all()
    assert (memory[:, 1::2] == 0).all()


def test_a_first_step_that_fails_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(ADAMW, [(1024,)])
    pair.make_gradients()
    monkeypatch.setattr(torch.Tensor, "addcdiv_", fail_at_third_call(torch.Tensor.addcdiv_))
    with pytest.raises(Fault):
        pair.step_ours()
    assert not any(pair.ours.state.values())


class Fault(Exception):
    pass


def fail_at_third_call(func: Callable[..., Any]) -> Callable[..., Any]:
    calls = count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise Fault
        return func(*args, **kwargs)

    return call


def test_fused_kernels_that_do_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of SGD in half precision, up to torch 2.13."""
    assert all(fused_kernel_works(cls.__name__, dtype) for cls in FUSED for dtype in (torch.float32, torch.float64))
    assert all(fused_kernel_works(cls.__name__, torch.bfloat16) for cls in (Adam, AdamW, Adagrad))
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **kwargs: None)
    assert not fused_kernel_works.__wrapped__("SGD", torch.bfloat16)


# --------------------------------------------------------------------------------------------------- what it is not for


def why(optimizer: Optimizer) -> str | None:
    group = optimizer.param_groups[0]
    return why_not_by_unit(optimizer, group, group["params"])


@pytest.mark.parametrize("cls", sorted({cls for cls, _ in RECIPES} | set(BY_WEIGHT), key=str))
def test_optimizers_of_torch_are_stepped(cls: type[Optimizer]) -> None:
    optimizer = cls([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    assert why(optimizer) is None
    LambdaLR(optimizer, lambda step: 1.0)
    assert why(optimizer) is None


class Own(AdamW):
    """What it does is not known."""


class Odd(nn.Parameter):
    """So it is with a weight of a class of its own."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Own([nn.Parameter(torch.ones(2))]), "Own is not one of torch's"),
        (lambda: LBFGS([nn.Parameter(torch.ones(2))]), "LBFGS is not one of torch's"),
        (lambda: AdamW([nn.Parameter(torch.ones(2))], capturable=True), "AdamW has capturable=True"),
        (lambda: SGD([nn.Parameter(torch.ones(2))], differentiable=True), "SGD has differentiable=True"),
        (lambda: AdamW([Odd(torch.ones(2))]), "a weight is a Odd"),
        (lambda: AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))]), "not a dense tensor of real numbers"),
        (lambda: AdamW([nn.Parameter(torch.ones(4)[::2])]), "not a dense tensor"),
        (lambda: AdamW([nn.Parameter(torch.ones(2, device="meta"))]), "not a dense tensor .* meta"),
    ],
)
def test_weights_and_optimizers_that_are_refused(make: Callable[[], Optimizer], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(why(make()))


def test_sparse_gradients_are_not_for_it() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = SGD(embedding.parameters(), lr=0.1)
    assert why(optimizer) is None
    embedding(torch.tensor([1])).sum().backward()
    assert why(optimizer) == "a gradient is sparse"


def test_a_step_of_the_users_own_is_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = Adafactor([nn.Parameter(torch.ones(2))])
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    assert why(optimizer) == "`step` of Adafactor was replaced"
    optimizer = SGD([nn.Parameter(torch.ones(2))])
    monkeypatch.setattr(SGD, "step", lambda self, closure=None: None)
    assert why(optimizer) == "`step` of SGD was replaced"
