"""Guarded masters: a weight that is touched outside of its unit is noticed at once, and served correctly.

`F.linear(x, self.emb.weight)`, an L2 penalty over `self.parameters()`, a parent that reads a child's weight,
`module.forward(x)` called past `__call__`: none of these enters a unit, so the module tree holds masters, which lie on
the host. While a step runs, masters therefore have a class with `__torch_function__`: an operation on one is redirected
to the weight on the device, which the pipeline makes resident from then on. Reading attributes and writing in place
(`p.grad`, `p.data.clamp_()`, `p.copy_()`) still go to the master. Outside of steps masters are ordinary Parameters.

[Note: masters that are not finished]
After a backward or an optimizer step, gradients may still be on their way, and weights still be stepped. Until that is
done, masters keep the guarded class, now only to notice accesses: the first access to any master waits, and from then
on all of them are ordinary. So nobody sees half a step, and only code that looks has to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.torch_private import sees_torch_functions, without_torch_function
from sp_lightning.pipeline.weights.inner_gradients import DIFFERENTIATING, differentiate
from sp_lightning.pipeline.weights.operands import instances_in, replace_instances
from sp_lightning.pipeline.weights.quantized import QuantizedWeight
from sp_lightning.pipeline.weights.suspension import guards_suspended
from sp_lightning.pipeline.weights.weight import Weight

_DEVICE_PROPERTIES = {"device", "is_cuda", "is_xpu", "is_mps", "is_cpu", "get_device"}
_COMPUTED_PROPERTIES = {"T", "H", "mT", "mH", "real", "imag"}
_RUN_ON_MASTER = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "element_size",
    "is_floating_point", "is_complex", "is_signed", "is_inference", "is_pinned", "is_shared", "is_same_size",
    "is_set_to", "data_ptr", "storage", "untyped_storage", "storage_type", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "share_memory_", "detach", "numpy",
    "tolist", "__len__", "__repr__", "__format__", "__hash__", "__deepcopy__", "__reduce_ex__", "__setstate__",
    "__array__", "__dlpack__", "__dlpack_device__", "__set__", "__delete__", "has_names",
}  # fmt: skip
_ALIASES = {"detach", "numpy", "__array__", "storage", "untyped_storage", "data_ptr", "__dlpack__"}


_ACCESSORS = ("__get__", "__set__", "__delete__")
_GRADIENT: Any = torch.Tensor.grad
METADATA = {
    "shape", "dtype", "layout", "ndim", "is_leaf", "requires_grad", "grad_fn", "names", "is_sparse", "is_meta",
    "is_quantized", "is_nested", "is_mkldnn", "nbytes", "itemsize", "output_nr", "retains_grad", "_base",
    "_backward_hooks", "_post_accumulate_grad_hooks", "size", "dim", "ndimension", "numel", "nelement", "stride",
    "storage_offset", "is_contiguous", "element_size", "is_floating_point", "is_complex", "is_signed", "is_inference",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "__len__", "__hash__", *_DEVICE_PROPERTIES,
}  # fmt: skip


class Owner(Protocol):
    """What the guard knows of its owner, which decides what follows from an access."""

    device: torch.device

    def before_access(self, weight: Weight) -> None:
        """Have a master finished, because somebody outside of the engine looks at it."""

    def before_gradient_read(self, weight: Weight) -> None:
        """Provide a master's `.grad`, because somebody reads it."""

    def before_gradient_set(self, weight: Weight) -> None:
        """Note that somebody gives a master another `.grad`, or none."""

    def serve(self, weight: Weight) -> nn.Parameter:
        """Return the weight on the device, for an operation outside of its unit."""

    def casts_in_new_graph(self, weight: Weight) -> list[range] | None:
        """Return which elements of a weight a graph that is being built in backward casts; None if none is."""

    def note_use(self, weights: Iterable[Weight]) -> None:
        """Note that an operation outside of their units has used weights, as they were served."""

    def note_write(self, weight: Weight) -> None:
        """Note that the master may be written to now."""

    def note_alias(self, weight: Weight) -> None:
        """Note that somebody gets an alias of the master, and may write to that."""


class GoesFirst:
    """A kind of guarded tensor that is replaced among the operands of an operation before masters are."""


class Guard:
    """Turns masters into guarded Parameters and back.

    Args:
        owner: Decides what follows from an access.
        weights: All weights.

    Attributes:
        armed: Whether masters are guarded.
        redirects: Whether operations on them are redirected; otherwise accesses are only noticed.
    """

    def __init__(self, owner: Owner, weights: Iterable[Weight]) -> None:
        self.owner = owner
        self._entries = {id(w.master): (self, w) for w in weights if not isinstance(w, QuantizedWeight)}
        self.armed = False
        self.redirects = False

    def arm(self) -> None:
        """Redirect operations on masters from now on."""
        self.redirects = True
        self._guard_masters()

    def watch(self) -> None:
        """Only notice operations on masters from now on, and run them as they are."""
        self.redirects = False
        self._guard_masters()

    def _guard_masters(self) -> None:
        if not self.armed:
            self.armed = True
            _guarded.update(self._entries)
            for _, weight in self._entries.values():
                weight.master.__class__ = HostParameter

    def disarm(self) -> None:
        """Turn masters back into ordinary Parameters."""
        self.redirects = False
        if self.armed:
            for _, weight in self._entries.values():
                weight.master.__class__ = nn.Parameter
            for master in self._entries:
                _guarded.pop(master, None)  # an interrupt may have come in the middle of either
            self.armed = False

    def redirect(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that has masters among its arguments."""
        name = getattr(func, "__name__", "")
        if not self.redirects or guards_suspended():
            return self._on_the_host(func, args, kwargs, writes=False)
        if name == "__get__":
            return self._read_property(func, args)
        if name in _DEVICE_PROPERTIES or (name == "type" and len(args) + len(kwargs) == 1):
            return self._ask_the_device(func, args)
        writes = _writes_to_a_master(func, args, kwargs)
        on_host = self._computes_on_host(name, args, kwargs)
        if writes or name in _RUN_ON_MASTER or (on_host and not _needs_gradient(args, kwargs)):
            return self._on_the_host(func, args, kwargs, writes)
        if name == "clone" and not torch.is_grad_enabled():
            # mostly of all weights, which somebody is about to swap for others: they need not stay on the device
            return self._on_the_host(func, args, kwargs, writes=False).to(self.owner.device)
        if func in DIFFERENTIATING:
            return differentiate(func, HostParameter, lambda master: _weight_of(master).leaves(), args, kwargs)
        with without_torch_function():
            new_args, new_kwargs = replace_instances(
                (args, kwargs), HostParameter, lambda master: self.owner.serve(_weight_of(master))
            )
        result = func(*new_args, **new_kwargs)
        self.owner.note_use([_weight_of(master) for master in _masters_in((args, kwargs))])
        return result

    def access_gradient(self, accessor: Callable[..., Any], args: tuple[Any, ...], weight: Weight) -> Any:
        """Read, set or delete a master's `.grad`, on the host: a short path, as `zero_grad` takes it for each."""
        if accessor.__name__ == "__get__":
            self.owner.before_gradient_read(weight)
        else:
            self.owner.before_gradient_set(weight)
        with without_torch_function():
            return accessor(*args)

    def _read_property(self, func: Any, args: tuple[Any, ...]) -> Any:
        name = subject_of(func)
        if name in _DEVICE_PROPERTIES:
            return self._ask_the_device(func, args)
        if name in _COMPUTED_PROPERTIES:
            result = func(self.owner.serve(_weight_of(args[0])))
            self.owner.note_use([_weight_of(args[0])])
            return result
        return self._on_the_host(func, args, {}, writes=name == "data")

    def _ask_the_device(self, func: Any, args: tuple[Any, ...]) -> Any:
        # transformers' `model.device` asks the first parameter where to place inputs: in a step, on the device
        probe = torch.empty(0, dtype=_weight_of(args[0]).host.dtype, device=self.owner.device)
        return func(probe, *args[1:])

    def _on_the_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], writes: bool) -> Any:
        name = subject_of(func)
        for master in args[:1] if is_accessor(func) else _masters_in((args, kwargs)):
            weight = _weight_of(master)
            if name not in METADATA:
                self.owner.before_access(weight)
            if writes:
                self.owner.note_write(weight)
            elif name in _ALIASES:
                self.owner.note_alias(weight)
        with without_torch_function():
            return func(*args, **kwargs)

    def _computes_on_host(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether an operation is one on the host, as other operands are there: a hand-made EMA, an anchor."""
        if name == "cpu":
            return True
        if self.owner.device.type == "cpu" or name == "__getitem__":  # an index may be on the host
            return False
        return any(
            not isinstance(value, HostParameter) and value.device.type == "cpu" and value.dim()
            for value in instances_in((args, kwargs), Tensor)
        )


_guarded: dict[int, tuple[Guard, Weight]] = {}


class HostParameter(nn.Parameter):
    """The class of masters while a step runs: same object, same memory, and `isinstance(p, nn.Parameter)` holds."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Hand the operation to the guard of the first master among its arguments."""
        # mostly, an attribute is read or written
        master = args[0] if args and type(args[0]) is cls else next(_masters_in((args, kwargs or {})), None)
        found = _guarded.get(id(master))
        if found is None:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        guard, weight = found
        if getattr(func, "__self__", None) is _GRADIENT:
            return guard.access_gradient(func, args, weight)
        if any(issubclass(kind, GoesFirst) for kind in types):
            return NotImplemented
        return guard.redirect(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy it as an ordinary Parameter: in a step to the device, where code in a step computes with the copy."""
        copied = self._as_ordinary(lambda: self.__deepcopy__(memo))
        found = _guarded.get(id(self))
        if found is not None and found[0].redirects and not guards_suspended():
            with torch.inference_mode(False), torch.no_grad():
                copied.data = copied.data.to(found[0].owner.device)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as an ordinary Parameter."""
        return self._as_ordinary(lambda: self.__reduce_ex__(protocol))

    def __hash__(self) -> int:
        """Hash by identity; a lookup in an optimizer's state is an access, as it leads to what the step writes."""
        found = _guarded.get(id(self))
        if found is not None and not found[0].redirects and sees_torch_functions():
            found[0].owner.before_access(found[1])
        return id(self)

    def _as_ordinary(self, action: Callable[[], Any]) -> Any:
        found = _guarded.get(id(self))
        if found is not None:
            found[0].owner.before_access(found[1])
        guarded = type(self)
        self.__class__ = nn.Parameter  # type: ignore[assignment]
        try:
            return action()
        finally:
            self.__class__ = guarded


def is_accessor(func: Callable[..., Any]) -> bool:
    """Tell whether a function reads, sets or deletes an attribute of its first argument."""
    return getattr(func, "__name__", "") in _ACCESSORS


def subject_of(func: Callable[..., Any]) -> str:
    """Return the name of an operation or, if that is to access an attribute, the attribute's name."""
    subject = getattr(func, "__self__", None) if is_accessor(func) else func
    return getattr(subject, "__name__", "")


def _weight_of(master: HostParameter) -> Weight:
    return _guarded[id(master)][1]


def _needs_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(master.requires_grad for master in _masters_in((args, kwargs)))


def _masters_in(value: Any) -> Iterator[Any]:
    return instances_in(value, HostParameter)


def _writes_to_a_master(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in METADATA:  # `requires_grad_`
        return False
    first = next(iter(args or kwargs.values()), None)  # torch.nn.init passes it by name
    sets_data = name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data
    targets = (first if sets_data or _writes_in_place(name) else None, kwargs.get("out"))
    return next(_masters_in(targets), None) is not None


def _writes_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__") or name == "__setitem__"
    return name.endswith("_")
