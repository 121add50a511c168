"""Hugging Face's Trainer, and those of TRL, for models that stream.

    from trl import SFTTrainer
    from sp_lightning.transformers import SuperpipelineTrainerMixin

    class Streamed(SuperpipelineTrainerMixin, SFTTrainer): pass

`SuperpipelineTrainer`, `SuperpipelineSFTTrainer`, `SuperpipelineDPOTrainer` and the like are such classes. They are
made when they are asked for, as their libraries take seconds to import.

[Note: names of transformers and accelerate]
No public API says that a model places itself. So this file relies on these names, which are private or undocumented.
`tests/test_transformers.py` fails if one of them changes.

- `Trainer.create_accelerator_and_postprocess` is called once in `__init__`, before a model is placed or prepared.
  `Accelerator.state` has what the Trainer's arguments and the variables of `accelerate launch` have come to.
- `Trainer._move_model_to_device` alone moves the Trainer's model.
- `Accelerator.prepare` calls the `prepare_model` of its own object for each model of a Trainer: the one
  that is trained, in `train`, after the optimizer was made; those of a reference and of a reward, in `__init__`.
- With `evaluation_mode=True` that leaves a model as it is among several processes, in place of torch's DDP around it.
- The Trainer calls `Accelerator.backward`, of its object.
- The Trainer enters `Accelerator.no_sync`, of its object, for all micro-batches of a step but the last one.
- `Trainer._load_optimizer_and_scheduler` loads the optimizer's state in all processes.
- `Accelerator.clip_grad_norm_`, of its object, clips. That of accelerate 1.15 reads all gradients to find out whether
  one is distributed, and so does the Trainer of transformers 5.24, once, if `_mixed_mesh_grads` is None.
- The Trainer itself sets `TrainingArguments._n_gpu` to 1 for models that are on several devices.
- TRL loads a model that is given by name with `model_init_kwargs` of its arguments, and after
  `create_accelerator_and_postprocess` a reference, whatever the model is. Without a `device_map` there, it puts them on
  the GPU, and it warns of such options if the model is an object.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from os import environ
from typing import Any

from torch import nn
from torch.utils.serialization import config

from sp_lightning.pipeline import Pipeline, PipelineOptions, Processes
from sp_lightning.planning import AutoPlanner
from sp_lightning.trainer.narrator import Narrator
from sp_lightning.trainer.processes import Meetings
from sp_lightning.trainer.steps import step_of_all


class SuperpipelineTrainerMixin:
    """Streams the models of a Trainer while it trains, evaluates or predicts. Put it before the Trainer's class.

    In between, models are plain ones on the CPU. The model of a reference or of a reward (DPO, GRPO) streams as well,
    with the same options: give each its part of the GPU, such as `memory_budget=0.4` for two.

    Args:
        model: The Trainer's own argument.
        positional: Further positional arguments of the Trainer.
        streaming: How models stream. The defaults work.
        named: Further arguments of the Trainer, by name.

    Attributes:
        pipelines: The pipelines of the models that stream now, the one that is trained last.

    Raises:
        TypeError: If a class has the Trainer's class first, or `streaming` is something else.
        ValueError: If the Trainer's arguments do not go with streaming.
    """

    args: Any
    accelerator: Any
    model: Any
    optimizer: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a class in which the Trainer's methods come first, as nothing would stream."""
        super().__init_subclass__(**options)
        makers = [kind for kind in cls.__mro__ if "create_accelerator_and_postprocess" in vars(kind)]
        has_trainer = not all(issubclass(kind, SuperpipelineTrainerMixin) for kind in makers)
        if has_trainer and makers[-1] is SuperpipelineTrainerMixin:
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise TypeError(
                f"{cls.__name__}({bases}) would not stream, because SuperpipelineTrainerMixin comes "
                "after the Trainer's class. Put it first: "
                f"`class {cls.__name__}(SuperpipelineTrainerMixin, ...)`."
            )

    def __init__(
        self,
        model: Any = None,
        *positional: Any,
        streaming: PipelineOptions | None = None,
        **named: Any,
    ) -> None:
        if not isinstance(streaming, PipelineOptions | None):
            raise TypeError(
                f"`streaming={streaming!r}` must be a `sp_lightning.PipelineOptions`, such as "
                "`streaming=PipelineOptions(k=3)`."
            )
        self.streaming = streaming or PipelineOptions()
        # Transformers shows warnings alone, unless it is asked for more; accelerate does so in the first process.
        logger = import_module("accelerate.logging").get_logger("transformers.sp_lightning")
        self._narrator = Narrator(logger.warning, self.streaming.k_prime)
        self.pipelines: list[Pipeline] = []
        self._streamed_others: list[nn.Module] = []  # models that were prepared before training
        self._streamed_scope: ExitStack | None = None
        # of each streamed model, for all of its runs
        self._meetings: dict[nn.Module, Meetings] = {}
        given = (model, *positional, *named.values())
        if str in map(type, given):
            for each in given:
                _load_on_cpu(each)
        super().__init__(model, *positional, **named)  # type: ignore[call-arg]

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Trainer's accelerator, which prepares models by streaming them."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        _check(self)
        _load_on_cpu(self.args)  # for a reference
        self.args._n_gpu = 1  # or models would be replicated
        accelerator = self.accelerator
        prepare, backward = accelerator.prepare_model, accelerator.backward

        def prepare_model(model: Any, *_: Any, **__: Any) -> Any:
            if self._streamed_scope is None:
                self._streamed_others.append(model)
            else:
                self._stream(model, trains=True)
                accelerator.backward = self.pipelines[-1].in_all_processes()(backward)
            return prepare(model, device_placement=False, evaluation_mode=True)

        accelerator.prepare_model = prepare_model
        accelerator.no_sync = lambda model: self._meetings[model].without_averages()
        accelerator.clip_grad_norm_ = nn.utils.clip_grad_norm_

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Leave the model in CPU memory."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, while models stream; afterwards they are plain ones on the CPU."""
        self._mixed_mesh_grads = False
        with self._while_streaming():
            output = super().train(*args, **kwargs)  # type: ignore[misc]
            self._share_weights()  # the last ones may be those of the best checkpoint
            self._narrator.end(self.pipelines[-1])
            return output

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as the Trainer does, while models stream."""
        with self._while_streaming():
            self._stream(self.model)
            self._share_weights()
            with self._meetings[self.model].evaluating():
                return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the Trainer's step, in which a loss may use weights outside of their modules."""
        for pipeline in self.pipelines:
            self._meetings[pipeline.module].begin_step(pipeline)
        with step_of_all(self.pipelines):
            loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        next(self._batches, None)
        return loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the Trainer's step of an evaluation or a prediction."""
        with step_of_all(self.pipelines):
            return super().prediction_step(*args, **kwargs)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """Load the optimizer's state into CPU memory, in the first process of each machine alone."""
        follows = self._meetings[self.model].follows
        state = self.args.distributed_state
        self.args.distributed_state = None  # several processes would load it onto their GPUs
        try:
            with config.patch("load.mmap", follows):  # type: ignore[attr-defined]
                super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        finally:
            self.args.distributed_state = state
        if follows:
            self.optimizer.state.clear()

    def _share_weights(self) -> None:
        """Wait for the other processes, and have all see what user code has written to the first one's weights."""
        for pipeline in self.pipelines:
            self._meetings[pipeline.module].share_weights(pipeline)

    @contextmanager
    def _while_streaming(self) -> Iterator[None]:
        """Stream models in this scope, and detach them at its end, also after an error. An inner scope does nothing."""
        if self._streamed_scope is not None:
            yield
            return
        with ExitStack() as attached:
            self._streamed_scope = attached
            try:
                for model in self._streamed_others:
                    self._stream(model)
                yield
            finally:
                self._streamed_scope = None
                self.pipelines = []

    def _stream(self, model: nn.Module, trains: bool = False) -> None:
        """Stream a model until the scope ends, unless it already does."""
        assert self._streamed_scope is not None
        if model in [pipeline.module for pipeline in self.pipelines]:
            return
        if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
            name = type(model).__name__
            raise ValueError(
                f"The {name} was loaded with a `device_map` of several devices. Load it with "
                "`device_map=None`. If the Trainer loads it by name, also give the Trainer "
                "`args`, such as `args=SFTConfig(...)`."
            )
        if model not in self._meetings:
            processes = None
            if self.args.world_size > 1:
                processes = Processes(int(environ["LOCAL_WORLD_SIZE"]), self.args.ddp_timeout_delta)
            self._meetings[model] = Meetings(processes)
        meetings = self._meetings[model]
        meetings.begin_run(trains)
        pipeline = Pipeline(
            model,
            self.args.device,
            options=self.streaming,
            planner=AutoPlanner(self._narrator.measured),
            processes=meetings.processes,
        )
        self.pipelines.append(self._streamed_scope.enter_context(pipeline))
        self._narrator.show(pipeline, [], trains)
        self._batches = self._streamed_scope.enter_context(closing(self._narrator.watch(pipeline)))


def _load_on_cpu(args: Any) -> None:
    """Have TRL load models into CPU memory, if these are its arguments and the user has not decided."""
    for name in ("model_init_kwargs", "teacher_model_init_kwargs"):
        if hasattr(args, name):
            setattr(args, name, {"device_map": None, **(getattr(args, name) or {})})


def _check(trainer: Any) -> None:
    """Refuse a Trainer that moves its models itself, or needs their weights on the GPU."""
    args, accelerator = trainer.args, trainer.accelerator
    precision, compiler = accelerator.mixed_precision, accelerator.state.dynamo_plugin.backend.value
    kind = accelerator.distributed_type.value
    refused = {
        "know how many processes this machine runs. Start them with `torchrun` or `accelerate launch`": (
            args.world_size > 1 and "LOCAL_WORLD_SIZE" not in environ
        ),
        "work with FSDP. Leave it out": trainer.is_fsdp_enabled,
        f"work with {kind}. Leave it out": not kind.startswith(("NO", "MULTI_")),
        "work with `parallelism_config`. Leave it out": getattr(args, "parallelism_config", None),
        f"work with dynamo's {compiler}, of `torch_compile=True` or `accelerate launch`. Use "
        "`PipelineOptions(compile=True)`": compiler != "NO",
        f"work with the precision {precision}, of `fp16=True` or `accelerate launch`. Use `bf16=True`": (
            precision not in ("no", "bf16")
        ),
        "work with `fp16_full_eval=True` or `bf16_full_eval=True`. Use `bf16=True`": (
            args.fp16_full_eval or args.bf16_full_eval
        ),
        "work with `precompute_ref_log_probs=True` on a GPU. Leave it out": (
            args.device.type != "cpu" and getattr(args, "precompute_ref_log_probs", False)
        ),
    }
    for what in refused:
        if refused[what]:
            raise ValueError(f"{type(trainer).__name__} streams its model, and does not {what}.")


def __getattr__(name: str) -> Any:
    """Make the class that streams the models of a Trainer: `SuperpipelineSFTTrainer` for TRL's `SFTTrainer`."""
    trainer = name.removeprefix("Superpipeline")
    if trainer == name or not name.endswith("Trainer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = "transformers" if trainer in ("Trainer", "Seq2SeqTrainer") else "trl"
    try:
        base = getattr(import_module(package), trainer)
    except ImportError as error:
        raise ImportError(f"`{name}` needs {package}: `pip install 'sp-lightning[trl]'`.") from error
    made = globals()[name] = type(name, (SuperpipelineTrainerMixin, base), {"__module__": __name__})
    return made
