"""The private torch APIs that the engine needs, each with the reason why no public one serves.

A test fails when one of them changes: tests/pipeline/test_torch_private.py, or a test of the feature that needs it. All
else is public torch, or is used where it is needed because torch's packages rely on it: `torch.utils._pytree` and
`_python_dispatch`, `torch._ops`, `torch._foreach_*`, `torch.multiprocessing.reductions`, `Tensor._base` and `_version`,
the dictionaries of hooks, and of modules `_parameters`, `_buffers`, `_modules`, `_apply`, `_call_impl`,
`_compiled_call_impl` and an RNN's `_flat_weights`.
trainer/precision.py overrides private parts of `GradScaler`; trainer/__init__.py gathers those of Lightning.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable, forward_ad, profiler
from torch.autograd.graph import Node
from torch.fx import _symbolic_trace
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from sp_lightning.optim import optimizers as ours

SavedTensorHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


top_saved_tensor_hooks: Callable[[], SavedTensorHooks | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)
"""Return the saved-tensor hooks that autograd would call now.

Autograd calls only the innermost pair. Ours must pass tensors that are not weights on to the pair below, or a user's
`checkpoint(use_reentrant=False)` is silently disabled; the public API can push a pair but not look at it.
"""

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return the id of the backward pass whose node this thread runs; -1 outside. A reentrant pass has its own."""


def in_backward() -> bool:
    """Tell whether this thread runs a node of a backward pass: in a checkpoint's recomputation, not in a forward."""
    return graph_task() != -1


running_node: Callable[[], Node | None] = torch._C._current_autograd_node
"""Return the node of a backward pass that this thread runs, or whose hooks it runs; None outside of backward."""


def run_backward_by(function: Callable[..., Any]) -> Any:
    """Have a function run all backward passes that Python code calls, and return torch's own.

    It is below `Tensor.backward`, `torch.autograd.grad` and checkpoints. Torch's hooks are for nodes and tensors, not
    for a whole pass. Torch replaces both names, too, and restores them, while it traces.
    """
    places: Any = (torch.autograd, torch.autograd.graph)
    run = places[0]._engine_run_backward
    for place in places:
        place._engine_run_backward = function
    return run


def has_foreign_step_hooks(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer has step hooks besides the engine's own pair, which is registered for all optimizers.

    They may look at the optimizer's parameters or change their gradients, and torch decides the order of hooks.
    Optimizers that wrap another one may have none, as they do not call `Optimizer.__init__` (Opacus's, for one).
    """
    of_all = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(len(hooks) > 1 for hooks in of_all) or any(getattr(optimizer, name, None) for name in names)


def scope_that_ends_before_backward() -> str | None:
    """Name a scope around this call that changes what it computes, but will have ended when backward runs.

    Torch keeps track of these scopes only internally.
    """
    if parametrize._cache_enabled:
        return "`parametrize.cached()`"
    return "forward-mode differentiation" if forward_ad._current_level >= 0 else None


def is_capturing() -> bool:
    """Tell whether calls are being captured as a graph: by `torch.jit.trace`, `torch.fx`, `make_fx` or `torch.export`.

    Torch's own question about the latter three logs a warning each time.
    """
    fx: Any = _symbolic_trace
    # the flag is that of torch 2.9
    by_fx = fx._get_is_fx_tracing() if hasattr(fx, "_get_is_fx_tracing") else fx._is_fx_tracing_flag
    return bool(torch._C._is_tracing() or by_fx)


active_ddp: Callable[[], object] = nn.parallel.DistributedDataParallel._get_active_ddp_module
"""Return the wrapper of torch's DDP that runs a forward in this process; None if none does. It is made for dynamo."""

DDP_AVERAGES_NOTHING = (
    "Torch's `DistributedDataParallel` does not see the gradients of a model that superpipeline streams, and would "
    "average none of them. Leave it out, and train with a strategy and `devices=`, or with `Pipeline(processes=...)`."
)

when_backward_ends: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Run a function after the last node of the backward pass that is running now, as DDP and FSDP2 do."""

without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""Let the engine read masters without its own `__torch_function__` guard seeing it."""


def remember_device_constructors() -> None:
    """Have `with torch.device(...)` know torch's own factories, by identity, before others stand for them."""
    from torch.utils._device import _device_constructors

    _device_constructors()  # which is cached


def register_builtin(function: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Have `torch.jit.script` take a function for one of torch's, which it knows by identity."""
    known = torch.jit._builtins._find_builtin(original)  # type: ignore[no-untyped-call]
    if known is not None:
        torch.jit._builtins._register_builtin(function, known)


def apply_of(kind: type[Function]) -> Callable[[type[Function]], Callable[..., Any]]:
    """Return a function that binds `apply` of custom autograd Functions (C's, or a Python classmethod) to a class."""
    apply: Any = vars(kind)["apply"]
    return lambda cls: apply.__get__(None, cls)


def replace_wrapped(wrapper: Any, function: Any) -> Any:
    """Have a wrapper of torch's call another function, and return the one that it wrapped.

    Programs that imported the wrapper by its name before this package would not see another wrapper in its place.
    """
    wrapper.__closure__[0].cell_contents = function
    return wrapper.__wrapped__


def in_transform() -> bool:
    """Tell whether a transform of `torch.func` is under way: `jvp` and `vmap` forbid no hooks, but wrap tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def profiler_is_on() -> bool:
    """Tell whether torch's profiler is on: `record_function` calls two of torch's operations even if it is not."""
    return profiler._is_profiler_enabled


def contains_others(tensor: Tensor) -> bool:
    """Tell whether a tensor consists of others and has no memory of its own, as quantized weights do.

    It says so by a protocol that torch's own packages, `torch.compile` among them, and torchao share.
    """
    return hasattr(type(tensor), "__tensor_flatten__")


_PARTS_OF_SPARSE = ("_indices", "_values", "crow_indices", "ccol_indices", "col_indices", "row_indices", "values")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor consists of: those that it contains, or only itself.

    A sparse tensor has no storage. Its parts have public names only for some layouts, and if it is coalesced.
    """
    if contains_others(tensor):
        container: Any = tensor
        names, _ = container.__tensor_flatten__()
        return [part for name in names for part in parts_of(getattr(tensor, name))]
    if tensor.layout is torch.strided:
        return [tensor]
    parts = []
    for name in _PARTS_OF_SPARSE:
        with suppress(RuntimeError):  # not of this layout
            parts.append(getattr(tensor.detach(), name)())
    return parts


_PLAIN = (Tensor, nn.Parameter)


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage. Views share it (`W.t()`), which `is` and `isinstance` would miss.

    Torch's private function bypasses classes with `__torch_function__`; `untyped_storage()` asks them.
    """
    if type(tensor) not in _PLAIN:
        if isinstance(tensor, UninitializedTensorMixin):  # it has no memory yet
            return 0
        if hasattr(type(tensor), "__tensor_flatten__"):  # see `contains_others`
            tensor = parts_of(tensor)[0]
    try:
        key: int = torch._C._storage_address(tensor)  # type: ignore[attr-defined]
    except (NotImplementedError, RuntimeError):  # functorch's wrappers have no storage of their own
        return 0
    return key


def alias_count(tensor: Tensor) -> int:
    """Return how many tensors share a tensor's storage; Python sees only those that are objects.

    Torch counts the storage's own object as well, once there is one.
    """
    alone = torch.empty(1)
    counts = [torch._C._storage_Use_Count(storage._cdata) for storage in map(Tensor.untyped_storage, (tensor, alone))]
    return counts[0] - counts[1] + 1


_OF_ALL_GRADIENTS = "register_multi_grad_hook.<locals>.get_inner_hook"


def tensor_hooks(parameter: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return the hooks of `Tensor.register_hook`: the graph holds the twin, so the master's are called by hand.

    Torch's hook for all of several tensors counts nodes of the graph, which is not built on masters.
    """
    hooks = list((parameter._backward_hooks or {}).values())
    for hook in hooks:
        if getattr(hook, "__qualname__", "").startswith(_OF_ALL_GRADIENTS):
            raise RuntimeError(
                "`torch.autograd.graph.register_multi_grad_hook` was given weights between steps, so its hook would "
                'never be called. Register it in the step, before the loss, on `weight[:]`, or with `mode="any"`.'
            )
    return hooks


_ZERO_GRADS = (inspect.unwrap(Optimizer.zero_grad).__code__, nn.Module.zero_grad.__code__)


def zeroing() -> bool | None:
    """Return the `set_to_none` of torch's `zero_grad` if that has asked a guard for a gradient; else None.

    For a weight without a gradient, `zero_grad` asks for that and does no more, and no hook tells that it was called.
    """
    frame = sys._getframe(3)  # below this function, the guard and `__torch_function__`
    if frame.f_code not in _ZERO_GRADS:
        return None
    return bool(frame.f_locals["set_to_none"])


def stand_in_for(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same attributes, which others can replace there; torch would copy state as well."""
    stand_in: Optimizer = object.__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer))
    return stand_in


CodeOfStep = Callable[[dict[Tensor, dict[str, Any]]], None]


def code_of_step(optimizer: Optimizer, group: dict[str, Any]) -> CodeOfStep:
    """Return a function that runs the `step` of an optimizer's class, with hyperparameters, for a state's parameters.

    It calls the function below torch's wrapper around `step`: it runs many times for parts of a unit, and neither hooks
    nor the profiler should take these for steps of the user's. No public name leads there.
    """
    step: Callable[[Optimizer], Any] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    stepped = stand_in_for(optimizer)
    # by a GradScaler to fused kernels, for the user's own call
    for lent in ("grad_scale", "found_inf"):
        vars(stepped).pop(lent, None)
    for check in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        # it asks the driver for its devices at each call, for 0.1 ms
        vars(stepped)[check] = lambda: None
    stepped.param_groups = [group]

    def run(state: dict[Tensor, dict[str, Any]]) -> None:
        group["params"] = list(state)
        stepped.state = state  # type: ignore[assignment]
        step(stepped)

    return run


def step_is_replaced(optimizer: Optimizer) -> bool:
    """Tell whether the `step` of torch's or our own class was replaced, in the class or in this object.

    A scheduler wraps it in the object, too, to notice calls, but then the wrapped function is the class's own.
    """
    step = type(optimizer).step
    in_object = vars(optimizer).get("step", step)
    # a mock has no such attribute, and all others
    wrapped = getattr(in_object, "__wrapped__", None)
    by_a_scheduler = hasattr(in_object, "_wrapped_by_lr_sched") and wrapped is step
    if in_object is not step and not by_a_scheduler:
        return True
    # not every callable has code: a mock, a partial
    code = getattr(inspect.unwrap(step), "__code__", None)
    folders = [os.path.dirname(str(package.__file__)) for package in (torch.optim, ours)]
    return code is None or os.path.dirname(code.co_filename) not in folders


def use_expandable_segments(unused: torch.cuda.Stream) -> None:
    """Have torch's allocator map freed memory to where it is needed next, unless the user has configured it.

    It would otherwise cut tensors that stay from large free blocks, whose rest is too small for another large one.
    Public is only an environment variable, which has to be set before torch is imported. Some virtual devices cannot
    map memory, and only say so at an allocation, on a stream that has none yet.
    """
    if sys.platform != "linux" or torch.version.cuda is None or torch.cuda.get_allocator_backend() != "native":
        return
    if torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]:
        return
    configure: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:  # torch 2.9
        configure = torch.cuda.memory._set_allocator_settings
    configure("expandable_segments:True")
    try:
        with torch.cuda.stream(unused):
            torch.empty(1, device=unused.device)
    except RuntimeError:
        configure("expandable_segments:False")


def hide_from_dynamo(modules: Iterable[ModuleType]) -> None:
    """Make `torch.compile` skip the code in these modules, but compile what that code calls.

    In a model that is compiled as a whole, a gate must break the graph and run uncompiled, while the unit's forward
    below it is compiled. `torch.compiler.disable` covers one function: with `recursive`, nothing below it is compiled;
    without, dynamo goes on to trace each function of the engine that it calls. Torch hides its own packages this way.
    """
    # takes a second: only once there is something to attach to
    from torch._dynamo import trace_rules

    for module in modules:
        trace_rules.SKIP_DIRS.append(str(module.__file__).removesuffix("__init__.py"))
    trace_rules._recompile_re()  # once: `trace_rules.add` takes 10 ms for each module


def call_before_compiling(action: Callable[[], None]) -> None:
    """Run `action` whenever torch is about to compile, before `torch.compiler.is_compiling()` becomes true.

    While dynamo compiles, it is true in all threads (torch 2.15), and an optimizer that steps in another thread then
    computes with tensors where it otherwise uses Python numbers. Dynamo's own callbacks come too late.
    """
    session = getattr(torch.compiler, "_compile_session_context", None)
    if session is None:  # in this torch it is true only for code that is being traced
        return

    @contextmanager
    def session_after_action() -> Iterator[None]:
        action()
        with session():
            yield

    torch.compiler._compile_session_context = session_after_action


def explain_graph_break(function: Callable[..., Any], reason: str) -> None:
    """Set the reason that `torch.compile(..., fullgraph=True)` gives at a function of ours; not public for methods."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def without_compile(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` wrapped, in a class that is not public; else the module itself."""
    # importing takes seconds; it is there if anything is wrapped
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module._orig_mod
    return module


def is_compiled(module: nn.Module) -> bool:
    """Tell whether the user has had this very module compiled; none of the three ways leaves public traces."""
    forward = vars(module).get("forward")
    in_place = module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")
    return in_place or without_compile(module) is not module
