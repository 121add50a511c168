"""Masters while a step runs: which operations go to the device, which stay on the host, and when."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from sp_lightning.pipeline import Pipeline, PipelineOptions
from sp_lightning.pipeline.weights.at_work import EngineAtWork
from sp_lightning.pipeline.weights.guard import Guard, HostParameter
from sp_lightning.pipeline.weights.suspension import guards_resumed, guards_suspended, resume_guards, suspend_guards
from sp_lightning.pipeline.weights.weight import Weight

from ..parts import place


class Owner:
    """A pipeline that writes down what it was asked for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.served: list[str] = []
        self.in_use: list[str] = []
        self.written: list[str] = []
        self.looked_at: list[str] = []
        self.gradients: list[str] = []

    def before_access(self, weight: Weight) -> None:
        self.looked_at.append(weight.name)

    def before_gradient_read(self, weight: Weight) -> None:
        self.gradients.append(f"{weight.name} read")

    def before_gradient_set(self, weight: Weight) -> None:
        self.gradients.append(f"{weight.name} dropped")

    def serve(self, weight: Weight) -> nn.Parameter:
        self.served.append(weight.name)
        return weight.twin.parameter

    def note_use(self, weights: Iterable[Weight]) -> None:
        self.in_use += [weight.name for weight in weights]

    def note_alias(self, weight: Weight) -> None:
        """The copies on the device would be checked."""

    def note_write(self, weight: Weight) -> None:
        self.written.append(weight.name)


class Scene:
    """Two guarded weights: masters of ones on the host, twins of twos on the "device"."""

    def __init__(self) -> None:
        self.placed = place([torch.ones(3, 3), torch.ones(3)])
        for twin in self.placed.twins:
            twin.data.fill_(2)
        self.owner = Owner()
        self.w, self.b = (weight.master for weight in self.placed.weights)
        self.guard = Guard(self.owner, self.placed.weights)
        self.guard.arm()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.guard.disarm()
    assert not guards_suspended()


COMPUTES: list[Callable[[Scene], Any]] = [
    lambda s: s.w + 1,
    lambda s: 1 + s.w,
    lambda s: -s.w,
    lambda s: s.w @ s.w,
    lambda s: torch.ones(1, 3) @ s.w,
    lambda s: F.linear(torch.ones(1, 3), s.w, s.b),
    lambda s: F.embedding(torch.tensor([0]), s.w),
    lambda s: s.w.sum(),
    lambda s: s.w.square().mean(),
    lambda s: s.w.norm(),
    lambda s: s.w.t(),
    lambda s: s.w.T,
    lambda s: s.w[0],
    lambda s: s.w.clone(),
    lambda s: s.w.view(-1),
    lambda s: s.w.to(torch.float64),
    lambda s: s.w.float(),
    lambda s: s.w == 2,
    lambda s: torch.cat([s.w, s.w]),
    lambda s: torch.stack((s.b, s.b)),
    lambda s: torch.einsum("ij,j->i", s.w, s.b),
    lambda s: torch.add(torch.ones(3), other=s.b),
    lambda s: torch.ones(3).add_(s.b),
    lambda s: torch._foreach_mul([s.w, s.b], 2.0)[0],
    lambda s: s.w.type(torch.float64),
]

ON_THE_HOST: list[Callable[[Scene], Any]] = [
    lambda s: s.w.shape,
    lambda s: s.w.size(0),
    lambda s: s.w.dtype,
    lambda s: s.w.numel(),
    lambda s: s.w.dim(),
    lambda s: len(s.w),
    lambda s: s.w.stride(),
    lambda s: s.w.data_ptr(),
    lambda s: s.w.requires_grad,
    lambda s: s.w.requires_grad_(True),
    lambda s: s.w.is_leaf,
    lambda s: s.w._version,
    lambda s: s.w.grad,
    lambda s: setattr(s.w, "grad", None),
    lambda s: setattr(s.w, "requires_grad", True),
    lambda s: s.w.untyped_storage(),
    lambda s: s.w.is_floating_point(),
    lambda s: repr(s.w),
    lambda s: hash(s.w),
    lambda s: s.w.tolist(),
    lambda s: s.w.detach().numpy(),
    lambda s: s.w.detach().cpu(),
    lambda s: s.w.register_hook(print),
    lambda s: isinstance(s.w, nn.Parameter),
    lambda s: {s.w: 1}[s.w],
]


@pytest.mark.parametrize("work", COMPUTES)
def test_computing_goes_to_the_device(scene: Scene, work: Callable[[Scene], Any]) -> None:
    """In whatever argument the master is: the values are the twin's."""
    result = work(scene)
    assert scene.owner.served
    assert set(scene.owner.in_use) == set(scene.owner.served)
    assert scene.owner.written == []
    scene.guard.disarm()
    masters = scene.w, scene.b
    scene.w, scene.b = (twin.parameter for twin in scene.placed.twins)  # type: ignore[assignment]
    assert torch.equal(result, work(scene))
    scene.w, scene.b = masters


@pytest.mark.parametrize("work", ON_THE_HOST)
def test_reading_attributes_reads_the_master(scene: Scene, work: Callable[[Scene], Any]) -> None:
    work(scene)
    assert scene.owner.served == []
    assert scene.w.dtype is torch.float32


WRITES: list[Callable[[Tensor], Any]] = [
    lambda w: w.copy_(torch.zeros(3, 3)),
    lambda w: w.add_(1),
    lambda w: w.zero_(),
    lambda w: w.__setitem__(0, 5.0),
    lambda w: w.__iadd__(1),
    lambda w: w.__imul__(2),
    lambda w: w.clamp_(0, 0.5),
    lambda w: w.data.mul_(3),
    lambda w: setattr(w, "data", torch.zeros(3, 3)),
    lambda w: nn.init.normal_(w),
    lambda w: torch._foreach_mul_([w], 2.0),
    lambda w: torch._foreach_mul_([torch.ones(2), w], 2.0),
    lambda w: torch.add(torch.zeros(3, 3), 5, out=w),
]


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_writing_in_place_changes_the_master(scene: Scene, write: Callable[[Tensor], Any]) -> None:
    """The engine is told, so that the device gets the new values."""
    write(scene.w)
    assert scene.owner.written == ["unit.0"]
    assert scene.owner.served == []
    scene.guard.disarm()
    assert not torch.equal(scene.w, torch.ones(3, 3))
    assert scene.placed.twins[0].data.eq(2).all()


@pytest.mark.parametrize("ask", [lambda w: w.device, lambda w: torch.Tensor.device.__get__(w)])
def test_the_device_of_a_weight_is_the_compute_device(scene: Scene, ask: Callable[[Tensor], Any]) -> None:
    """transformers places inputs by its first parameter's device."""
    scene.owner.device = torch.device("meta")
    assert ask(scene.w).type == "meta"
    assert not scene.w.is_cpu
    scene.guard.disarm()
    assert scene.w.is_cpu


def test_a_hand_made_ema_averages_the_masters(scene: Scene) -> None:
    """Beside another tensor on the host a master is one, too."""
    scene.owner.device = torch.device("meta")
    average = torch.zeros(3, 3)
    with torch.no_grad():
        average.lerp_(scene.w, 0.5)
        moved = average + scene.w
        torch._foreach_lerp_([average], [scene.w], 0.5)  # as `torch.optim.swa_utils` does
        both = torch.stack([average, scene.w])
    assert scene.owner.served == []
    assert average.eq(0.75).all()
    assert moved.eq(1.5).all()
    assert both.mean() == 0.875


def test_an_index_on_the_host_is_one_of_the_weight_on_the_device(scene: Scene) -> None:
    """Devices take such an index; the rows that come out are on the device."""
    scene.owner.device = torch.device("meta")
    assert scene.w[torch.tensor([0, 2])].eq(2).all()
    assert scene.w[:, torch.tensor([True, False, True])].eq(2).all()


def test_gradients_are_asked_of_the_leaf_in_the_graph(scene: Scene) -> None:
    """autograd.grad(loss, masters): the graph was built on the twins."""
    loss = (scene.placed.twins[0].parameter * 3).sum()
    (gradient,) = torch.autograd.grad(loss, [scene.w])
    assert gradient.eq(3).all()
    assert scene.owner.served == []


def test_disarmed_masters_are_ordinary(scene: Scene) -> None:
    assert type(scene.w) is HostParameter
    scene.guard.arm()
    scene.guard.disarm()
    assert type(scene.w) is nn.Parameter
    assert (scene.w + 1).eq(2).all()
    assert scene.owner.served == []
    scene.guard.disarm()


def test_guards_are_suspended_while_an_optimizer_steps(scene: Scene) -> None:
    """While one steps, masters are masters; a closure computes on the device again."""
    suspend_guards(sys._getframe())
    assert guards_suspended()
    assert (scene.w + 1).eq(2).all()
    with guards_resumed():
        assert not guards_suspended()
        assert (scene.w + 1).eq(3).all()
    assert (scene.w + 1).eq(2).all()
    resume_guards()
    assert (scene.w + 1).eq(3).all()


def test_optimizers_that_step_others(scene: Scene) -> None:
    """SAM, Lookahead: when the inner one has stepped, the outer one goes on."""
    suspend_guards(sys._getframe())
    suspend_guards(sys._getframe())
    resume_guards()
    assert guards_suspended()
    resume_guards()
    assert not guards_suspended()
    resume_guards()


def test_an_optimizer_that_raised_steps_no_more(scene: Scene) -> None:
    """torch calls no hook then."""

    def step() -> None:
        suspend_guards(sys._getframe())
        assert guards_suspended()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step()
    assert not guards_suspended()
    assert (scene.w + 1).eq(3).all()


def test_an_optimizer_steps_in_its_own_thread(scene: Scene) -> None:
    """What another thread does with masters is no optimizer's doing."""
    seen: list[bool] = []
    suspend_guards(sys._getframe())
    thread = threading.Thread(target=lambda: seen.append(guards_suspended()))
    thread.start()
    thread.join()
    assert guards_suspended()
    resume_guards()
    assert seen == [False]


def test_optimizers_step_in_two_threads() -> None:
    """One does not end the other's suspension."""
    begun, ended = threading.Event(), threading.Event()

    def steps() -> None:
        suspend_guards(sys._getframe())
        begun.set()
        ended.wait()
        resume_guards()

    suspend_guards(sys._getframe())
    other = threading.Thread(target=steps)
    other.start()
    begun.wait()
    assert guards_suspended()
    with guards_resumed():
        assert not guards_suspended()
        ended.set()
        other.join()
    assert guards_suspended()
    resume_guards()
    assert not guards_suspended()


def test_the_engine_reads_masters_itself(scene: Scene) -> None:
    at_work = EngineAtWork()
    assert not at_work
    with at_work:
        assert at_work
        with at_work:
            assert (scene.w + 1).eq(2).all()
        assert at_work
    assert not at_work
    assert (scene.w + 1).eq(3).all()


def test_real_optimizers_step_masters_inside_of_a_step() -> None:
    """Momentum is made from masters, not from the device, and nothing becomes resident by it."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    pipeline = Pipeline(model, "cpu", options=PipelineOptions(k=2, units=nn.Linear, debug=True))
    with pipeline.step():
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    assert pipeline.stats.promotions == 0
    pipeline.detach()


# --------------------------------------------------------------------------------------------------- copies and pickles


def tagged(parameter: nn.Parameter) -> nn.Parameter:
    """User code hangs things on parameters; torch pickles them."""
    parameter.no_decay = True  # type: ignore[attr-defined]
    return parameter


def by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    assert b"sp_lightning" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(value: Any) -> Any:
    data = pickle.dumps(value)
    assert b"sp_lightning" not in data
    return pickle.loads(data)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch])
def test_a_copy_made_in_a_step_is_an_ordinary_parameter(scene: Scene, duplicate: Callable[[Any], Any]) -> None:
    """With the master's values, not the device's; alone, twice in a list, and as part of a state."""
    scene.w.requires_grad_(False)
    first, second, state = duplicate([scene.w, scene.w, {"w": scene.w.data}])
    scene.guard.disarm()
    assert type(first) is nn.Parameter
    assert first is second
    assert torch.equal(first, scene.w)
    assert first.requires_grad is False
    assert torch.equal(state["w"], scene.w)
    assert first.data_ptr() != scene.w.data_ptr()
    assert scene.owner.served == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch])
def test_a_copy_made_in_a_step_keeps_what_a_plain_one_keeps(scene: Scene, duplicate: Callable[[Any], Any]) -> None:
    """Attributes on parameters survive a step's checkpoint exactly where they survive a plain one."""
    plain = duplicate(tagged(nn.Parameter(torch.ones(2))))
    guarded = duplicate(tagged(scene.b))
    assert vars(guarded) == vars(plain)


# ---------------------------------------------------------------------------------------- masters that are not finished


@pytest.fixture
def watched(scene: Scene) -> Scene:
    """Between steps: operations on masters are what they seem to be, but who looks at one is noticed."""
    scene.guard.disarm()
    scene.guard.watch()
    return scene


METADATA: dict[str, Callable[[Scene], Any]] = {
    "shape": lambda s: s.w.shape,
    "size": lambda s: s.w.size(0),
    "dtype": lambda s: s.w.dtype,
    "numel": lambda s: s.w.numel(),
    "dim": lambda s: (s.w.dim(), s.w.ndim, s.w.ndimension()),
    "len": lambda s: len(s.w),
    "stride": lambda s: s.w.stride(),
    "bytes": lambda s: (s.w.nbytes, s.w.itemsize, s.w.element_size()),
    "layout": lambda s: (s.w.layout, s.w.is_contiguous(), s.w.is_sparse),
    "requires_grad": lambda s: s.w.requires_grad,
    "set requires_grad": lambda s: setattr(s.w, "requires_grad", True),
    "requires_grad_": lambda s: s.w.requires_grad_(True),
    "is_leaf": lambda s: s.w.is_leaf,
    "grad_fn": lambda s: s.w.grad_fn,
    "device": lambda s: (s.w.device, s.w.is_cpu, s.w.is_cuda),
    "is_floating_point": lambda s: (s.w.is_floating_point(), torch.is_floating_point(s.w), s.w.is_complex()),
    "register_hook": lambda s: s.w.register_hook(print).remove(),
    "hook after accumulation": lambda s: s.w.register_post_accumulate_grad_hook(print).remove(),
    "isinstance": lambda s: isinstance(s.w, nn.Parameter),
    "identity": lambda s: s.w is s.b,
    "in a list": lambda s: id(s.w) in [id(s.b), id(s.w)],
    "an attribute of one's own": lambda s: setattr(s.w, "no_decay", True),
}

LOOKS: dict[str, Callable[[Scene], Any]] = {
    "data": lambda s: s.w.data,
    "set data": lambda s: setattr(s.w, "data", torch.zeros(3, 3)),
    "detach": lambda s: s.w.detach(),
    "detach_": lambda s: s.w.detach_(),
    "data_ptr": lambda s: s.w.data_ptr(),
    "storage": lambda s: s.w.untyped_storage(),
    "version": lambda s: s.w._version,
    "hash": lambda s: hash(s.w),
    "key of a state": lambda s: {s.w: 1}.get(s.w),
    "item": lambda s: s.b[0].item(),
    "tolist": lambda s: s.w.tolist(),
    "numpy": lambda s: torch.no_grad()(lambda: s.w.detach().numpy())(),
    "repr": lambda s: repr(s.w),
    "format": lambda s: f"{s.w}",
    "clone": lambda s: s.w.clone(),
    "add": lambda s: s.w + 1,
    "add, reversed": lambda s: 1 + s.w,
    "norm": lambda s: s.w.norm(),
    "other's argument": lambda s: torch.ones(3, 3).add_(s.w.detach()),
    "in place": lambda s: torch.no_grad()(lambda: s.w.add_(1))(),
    "out": lambda s: torch.no_grad()(lambda: torch.add(torch.zeros(3, 3), 5, out=s.w))(),
    "in a list": lambda s: torch._foreach_norm([torch.ones(2), s.w]),
    "by name": lambda s: torch.add(torch.ones(3, 3), other=s.w),
    "cast": lambda s: s.w.to(torch.float64),
    "cpu": lambda s: s.w.cpu(),
    "equal": lambda s: torch.equal(s.w, s.w),
    "deepcopy": lambda s: copy.deepcopy(s.w),
    "pickle": lambda s: pickle.dumps(s.w),
    "save": lambda s: torch.save({"w": s.w}, io.BytesIO()),
    "share_memory_": lambda s: s.w.share_memory_(),
    "iteration": lambda s: list(s.w),
    "linear": lambda s: F.linear(torch.ones(1, 3), s.w),
}


@pytest.mark.parametrize("look", METADATA.values(), ids=METADATA)
def test_metadata_waits_for_nothing(watched: Scene, look: Callable[[Scene], Any]) -> None:
    """An unfinished step does not change it: loggers and schedulers ask for it between steps."""
    guarded = look(watched)
    owner = watched.owner
    assert (owner.looked_at, owner.gradients, owner.served) == ([], [], [])
    watched.guard.disarm()
    plain = look(watched)
    assert plain is guarded or plain == guarded


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_an_access_is_reported_before_it_happens(watched: Scene, look: Callable[[Scene], Any]) -> None:
    """Before it sees anything, and it sees the master."""
    seen_before: list[float] = []

    def finish(weight: Weight) -> None:
        if not watched.owner.looked_at:
            seen_before.append(weight.host.sum().item())
            weight.host.fill_(7)  # the step ends
        watched.owner.looked_at.append(weight.name)

    watched.owner.before_access = finish  # type: ignore[method-assign]
    look(watched)
    assert watched.owner.looked_at
    assert seen_before in ([9.0], [3.0])
    assert watched.owner.served == []


@pytest.mark.parametrize("look", [lambda s: s.w.clone(), lambda s: s.w + 0, lambda s: s.w.detach(), lambda s: s.w.data])
def test_between_steps_operations_mean_the_master(watched: Scene, look: Callable[[Scene], Tensor]) -> None:
    """With the values of the host, and a graph to the master where plain training would have one."""
    result = look(watched)
    assert result.eq(1).all()
    assert type(result) is Tensor
    if result.requires_grad:
        result.sum().backward()
        watched.guard.disarm()
        assert watched.w.grad.eq(1).all()


def test_looking_at_one_master_says_which(watched: Scene) -> None:
    watched.b.tolist()
    assert set(watched.owner.looked_at) == {"unit.1"}
    watched.owner.looked_at.clear()
    torch.cat([watched.w.view(-1), watched.b])
    assert set(watched.owner.looked_at) == {"unit.0", "unit.1"}


@pytest.mark.parametrize("armed", [True, False], ids=["in-a-step", "between-steps"])
def test_gradients_are_asked_for(scene: Scene, armed: bool) -> None:
    """Only that one, and whether it is read or replaced."""
    if not armed:
        scene.guard.disarm()
        scene.guard.watch()
    scene.b.grad = torch.ones(3)
    assert scene.owner.gradients == ["unit.1 dropped"]
    assert scene.b.grad.tolist() == [1, 1, 1]
    assert scene.owner.gradients[1:] == ["unit.1 read"]
    scene.b.grad = None
    del scene.b.grad
    assert scene.owner.gradients[2:] == ["unit.1 dropped"] * 2
    assert scene.owner.looked_at == []


@pytest.mark.parametrize("armed", [True, False], ids=["in-a-step", "between-steps"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "module"])
def test_zero_grad_does_not_make_gradients(scene: Scene, armed: bool, set_to_none: bool, whose: str) -> None:
    """It reads them to throw them away; only where it writes zeros there must be something to write to."""
    module = nn.Module()
    module.w, module.b = scene.w, scene.b
    optimizer = SGD([scene.w, scene.b], lr=0.1)
    if not armed:
        scene.guard.disarm()
        scene.guard.watch()
    scene.w.grad = torch.ones(3, 3)
    scene.owner.gradients.clear()
    (optimizer if whose == "optimizer" else module).zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert set(scene.owner.gradients) == {"unit.0 dropped", "unit.1 dropped"}
    else:
        assert {"unit.0 read", "unit.1 read"} <= set(scene.owner.gradients)
    if whose == "optimizer" or armed:  # `module.parameters()` keeps them in a set, which asks for their hashes
        assert scene.owner.looked_at == []
    scene.guard.disarm()
    assert scene.w.grad is None if set_to_none else scene.w.grad.eq(0).all()


def test_zero_grad_is_quick(watched: Scene) -> None:
    """It comes to each weight twice, between steps, when nothing computes: a handful of calls each time."""

    def calls(masters: list[nn.Parameter]) -> int:
        optimizer, count = SGD(masters, lr=0.1), 0
        for master in masters:
            master.grad = torch.ones_like(master)

        def see(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(see)
        try:
            optimizer.zero_grad()
        finally:
            sys.setprofile(None)
        return count

    plain = calls([nn.Parameter(torch.ones(3)) for _ in range(2)])
    assert calls([watched.w, watched.b]) - plain <= 2 * 2 * 5


def test_optimizers_that_are_made_between_steps_look_at_no_values(watched: Scene) -> None:
    """They ask what their parameters are, and in which groups."""
    SGD([{"params": [watched.w]}, {"params": [watched.b], "lr": 1.0}], lr=0.1)
    assert watched.owner.gradients == []


@pytest.mark.parametrize(
    "reads", [lambda s, o: o.state[s.w], lambda s, o: s.w in o.state, lambda s, o: o.state.get(s.w)]
)
def test_looking_up_optimizer_state_is_an_access(watched: Scene, reads: Callable[[Scene, Any], Any]) -> None:
    """The step that is under way writes it."""
    optimizer = SGD([watched.w], lr=0.1, momentum=0.9)
    watched.owner.looked_at.clear()
    reads(watched, optimizer)
    assert set(watched.owner.looked_at) == {"unit.0"}


def test_accesses_by_the_engine_are_not_reported(watched: Scene) -> None:
    """Its own thread reads masters, and state by master, while they are being stepped."""
    with EngineAtWork():
        watched.w.sum()
        hash(watched.w)
        assert watched.w.grad is None
    owner = watched.owner
    assert (owner.looked_at, owner.gradients) == ([], [])


def test_an_optimizer_is_noticed_too(scene: Scene) -> None:
    """One that is left with masters must not step them while others do."""
    suspend_guards(sys._getframe())
    scene.w.add(1)
    assert scene.w.grad is None
    resume_guards()
    assert scene.owner.looked_at == ["unit.0"]
    assert scene.owner.gradients == ["unit.0 read"]
    assert scene.owner.served == []


def test_watching_turns_into_guarding_and_back(watched: Scene) -> None:
    """A step begins while the last one's work is under way, and ends before it."""
    watched.guard.arm()
    assert (watched.w + 1).eq(3).all()
    assert watched.owner.served == ["unit.0"]
    watched.guard.watch()
    assert (watched.w + 1).eq(2).all()
    assert watched.owner.served == ["unit.0"]
    watched.guard.disarm()
    assert type(watched.w) is nn.Parameter
    assert not watched.guard.armed
    assert not watched.guard.redirects


def test_in_a_step_a_hash_is_a_hash(scene: Scene) -> None:
    """User code keeps modules' parameters in sets; that reads no values."""
    assert hash(scene.w) == id(scene.w)
    assert len({scene.w, scene.b, scene.w}) == 2
    assert scene.owner.looked_at == []
