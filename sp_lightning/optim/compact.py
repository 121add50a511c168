"""What the optimizers share: their options, a step on several threads, checkpoints, and the way back to torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from sp_lightning.optim.formats import read_master, read_moment, write_moment
from sp_lightning.optim.layout import State, check_group, count_in, is_compact, laid_like, make_state, moment_in
from sp_lightning.optim.passes import run
from sp_lightning.optim.rules import NO_SCALING, Memory, Pass, Rule, Scaling

COMPACT = "compact"
"""The name of what only the last param group of a checkpoint of compact state has: words for who meets it."""


class Work(NamedTuple):
    """What is to be done for a weight."""

    weight: Tensor
    gradient: Tensor  # as it arrived; it is only read
    state: State  # the optimizer's, of the weight; empty before it is made, and if there is none
    copy: Tensor | None = None  # a copy of the weight in bf16, to be written
    # what is done to the gradient before; None if that is too much
    scaling: Scaling | None = NO_SCALING


class CompactOptimizer(Optimizer):
    """An optimizer over fp32 and bf16 parameters, on the CPU or an accelerator."""

    # which takes, and refuses, the same options
    checked_by: ClassVar[type[Optimizer]] = torch.optim.Adam
    first: ClassVar[str]
    second: ClassVar[str] = ""  # none

    def __init__(
        self,
        params: Any,
        options: dict[str, Any],
        foreach: bool | None,
        fused: bool | None,
        **formats: str | None,
    ) -> None:
        of_torch: Any = self.checked_by
        of_torch([torch.empty(0, device="cpu")], **options, foreach=foreach, fused=fused)
        for option, value in options.items():
            if value != value:  # torch's SGD takes NaN
                raise ValueError(f"Invalid {option} value: {value}")
        super().__init__(params, {**options, **formats})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            if find_spec("numba") is None and any(p.device.type == "cpu" for p in group["params"]):
                name = type(self).__name__
                raise ImportError(f'{name} needs numba on the CPU: pip install "sp-lightning[fast]"')
        except Exception:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; on the CPU on as many threads as torch uses."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(p.grad.is_sparse for p in stepped):
            raise RuntimeError("a gradient is sparse: use Embedding(sparse=False), or an optimizer of torch.optim")
        passes: list[Pass] = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            passes += self.passes_of(group, [Work(p, p.grad, self.state[p]) for p in params])
        run(passes)
        increment_version(stepped)
        return loss

    @classmethod
    def passes_of(cls, group: dict[str, Any], works: Sequence[Work]) -> list[Pass]:
        """Count the step that follows, the first of which makes the state; return its passes."""
        for work in works:
            if not work.state and "master" in group:  # torch's SGD may step without state
                work.state.update(make_state(work.weight, group, cls.moments_of(group)))
        steps = count_in([work.state for work in works])
        rules = {step: cls.rule(group, step) for step in set(steps)}
        return [cls.pass_of(group, work, step, rules[step]) for work, step in zip(works, steps, strict=True)]

    @classmethod
    def pass_of(cls, group: dict[str, Any], work: Work, step: float, rule: Rule) -> Pass:
        """Return the pass that takes this step of a weight, whose update has these numbers."""
        p, gradient, state, copy, scaling = work
        assert scaling is not None
        low = state.get("master", state.get("low"))
        first, first_scale = moment_in(state, cls.first)
        second, second_scale = moment_in(state, cls.second)
        for kept in (low, first, second):
            if kept is not None and kept.stride() != p.stride():
                raise RuntimeError("a parameter lies in memory in another order than its optimizer state: make it anew")
        is_random = group.get("master") == "split24" or group.get("moments", "fp32") != "fp32"
        return Pass(
            rule,
            Memory(p, low, laid_like(gradient, p), first, second, copy, first_scale, second_scale),
            scaling._replace(factor=-scaling.factor) if group["maximize"] else scaling,
            seed=int(step) * 0x9E3779B1 & 0x7FFFFFFF if is_random else None,
        )

    # ---------------------------------------------------------------------------------------------- of each optimizer

    @classmethod
    def moments_of(cls, group: dict[str, Any]) -> list[str]:
        """Return the names of the moments that a parameter has."""
        return [name for name in (cls.first, cls.second) if name]

    @classmethod
    def rule(cls, group: dict[str, Any], step: float) -> Rule:
        """Return the numbers of an update, as the kernels take them; steps are counted from one."""
        raise NotImplementedError

    def state_bytes(self, group: dict[str, Any]) -> int:
        """Return the bytes of state that a first step makes of the parameters of a group."""
        trained = [p for p in group["params"] if p.requires_grad]
        made = [make_state(p.to("meta"), group, self.moments_of(group)) for p in trained]
        return sum(value.nbytes for state in made for value in state.values())

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def master(self, p: Tensor) -> Tensor:
        """Return the fp32 weight of a parameter."""
        return read_master(p, self.state.get(p, {}))

    def export(self) -> Iterator[tuple[Tensor, Tensor, State]]:
        """Yield each parameter, its fp32 weight, and its state as torch's optimizer keeps it, one after the other.

        Examples:
            >>> for p, weight, state in optimizer.export():
            ...     torch_optimizer.state[twin_of[p]] = state
        """
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                plain: State = {"step": state["step"].clone()} if state else {}
                for name in self.moments_of(group) if state else ():
                    plain[name] = self._read_moment(state, name)
                yield p, self.master(p), plain

    def _read_moment(self, state: State, name: str) -> Tensor:
        moment, scale = moment_in(state, name)
        assert moment is not None
        value = moment.to(torch.float32, copy=True) if scale is None else read_moment(moment, scale)
        return value.abs() if name == self.second else value

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint. Compact state comes with a param group more, for which torch's optimizers refuse it.

        They pass over state whose name they do not know, and SGD would go on without its momentum.
        """
        saved = super().state_dict()
        if any(map(is_compact, saved["state"].values())):
            words = (
                f"this is state of sp_lightning.optim.{type(self).__name__}, with masters or "
                "moments in fewer bytes: load it into one like it, or give torch's optimizer what "
                "its `export()` yields"
            )
            saved["param_groups"].append({"params": [], COMPACT: words})
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of an optimizer like this one, or of torch's: then masters begin with the weights."""
        saved_groups = [group for group in state_dict["param_groups"] if COMPACT not in group]
        for number, own in enumerate(self.param_groups[: len(saved_groups)]):
            saved = saved_groups[number]
            merged = {**own, **saved}
            if (merged["master"], merged["moments"]) != (own["master"], own["moments"]):
                raise ValueError(
                    f"the checkpoint has master={merged['master']!r}, "
                    f"moments={merged['moments']!r}, but this optimizer master={own['master']!r}, "
                    f"moments={own['moments']!r}: make it with those of the checkpoint, or move "
                    "state over with `export()`"
                )
            if saved.get("amsgrad"):
                raise ValueError("the checkpoint has amsgrad=True: continue it with torch's optimizer")
            saved_groups[number] = merged
        # torch would cast all state to the dtype of the weight
        super().load_state_dict({**state_dict, "param_groups": saved_groups, "state": {}})
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            for p, number in zip(group["params"], saved["params"], strict=True):
                if state_dict["state"].get(number):
                    self.state[p] = self._load(p, group, state_dict["state"][number])

    def _load(self, p: Tensor, group: dict[str, Any], saved: State) -> State:
        moments = self.moments_of(group)
        state = make_state(p, group, moments)
        saved = {name: value for name, value in saved.items() if value is not None}
        of_torch = {*moments} <= saved.keys() <= {"step", *moments}
        if saved.keys() != state.keys() and not of_torch:
            raise ValueError(
                f"the checkpoint has {', '.join(saved)}, but {type(self).__name__} over {p.dtype} "
                f"keeps {', '.join(state)}: load it into the optimizer that it is of, or move "
                "state over with `export()`"
            )
        for name, value in saved.items():
            target, scale = moment_in(state, name)
            assert target is not None
            if name != "step" and value.numel() != target.numel():
                saved_shape, shape = tuple(value.shape), tuple(target.shape)
                raise ValueError(f"the checkpoint's {name} has {saved_shape}, the parameter's {shape}")
            if scale is None:
                target.copy_(value)
            else:
                value = value.float().sqrt() if name == self.second else value.float()
                write_moment(target, scale, laid_like(value, p))
        # torch's SGD does not count; a momentum that is there is not the first
        if "step" not in saved:
            state["step"].fill_(1.0)
        return state
