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
- `Trainer._move_model_to_device` alone moves the Trainer's model.
- `Accelerator.prepare` calls the `prepare_model` of its own object, by which each model of a Trainer passes: the one
  that is trained, in `train`, after the optimizer was made; those of a reference and of a reward, in `__init__`.
- `Accelerator.clip_grad_norm_`, of its object, clips. That of accelerate 1.15 reads all gradients to find out whether
  one is distributed, and so does the Trainer of transformers 5.24, once, if `_mixed_mesh_grads` is None.
- The Trainer itself sets `TrainingArguments._n_gpu` to 1 for models that are on several devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from torch import nn

from sp_lightning.pipeline import Pipeline, PipelineOptions
from sp_lightning.planning import AutoPlanner

_PREFIX = "Superpipeline"


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
        ValueError: If the Trainer's arguments do not go with streaming.
    """

    args: Any
    accelerator: Any
    model: Any

    def __init__(
        self,
        model: Any = None,
        *positional: Any,
        streaming: PipelineOptions | None = None,
        **named: Any,
    ) -> None:
        self.streaming = streaming or PipelineOptions()
        self.pipelines: list[Pipeline] = []
        self._others: list[nn.Module] = []  # models that were prepared before training
        self._attached: ExitStack | None = None
        args: Any = named.get("args")
        if isinstance(model, str) and hasattr(args, "model_init_kwargs"):
            # TRL would spread the model over all devices
            args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}
        trainer: Any = super()
        trainer.__init__(model, *positional, **named)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Trainer's accelerator, which prepares models by streaming them."""
        trainer: Any = super()
        trainer.create_accelerator_and_postprocess()
        _check(self)
        self.args._n_gpu = min(self.args.n_gpu, 1)  # or models would be replicated
        prepare = self.accelerator.prepare_model

        def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
            if self._attached is None:
                self._others.append(model)
            else:
                self._attach(model)
            return prepare(model, device_placement=False, evaluation_mode=evaluation_mode)

        self.accelerator.prepare_model = prepare_model
        self.accelerator.clip_grad_norm_ = nn.utils.clip_grad_norm_

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Leave the model in CPU memory."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, while models stream; afterwards they are plain ones on the CPU."""
        trainer: Any = super()
        self._mixed_mesh_grads = False
        with self._streaming():
            return trainer.train(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as the Trainer does, while models stream."""
        trainer: Any = super()
        with self._streaming():
            self._attach(self.model)
            return trainer.evaluation_loop(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the Trainer's step, in which a loss may use weights outside of their modules."""
        trainer: Any = super()
        with self._step():
            return trainer.training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the Trainer's step of an evaluation or a prediction."""
        trainer: Any = super()
        with self._step():
            return trainer.prediction_step(*args, **kwargs)

    @contextmanager
    def _step(self) -> Iterator[None]:
        with ExitStack() as steps:
            for pipeline in self.pipelines:
                steps.enter_context(pipeline.step())
            yield

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        """Stream models in this scope, and detach them at its end, also after an error. An inner scope does nothing."""
        if self._attached is not None:
            yield
            return
        with ExitStack() as attached:
            self._attached = attached
            try:
                for model in self._others:
                    self._attach(model)
                yield
            finally:
                self._attached = None
                self.pipelines = []

    def _attach(self, model: nn.Module) -> None:
        """Stream a model until the scope ends, unless it already does."""
        assert self._attached is not None
        if any(pipeline.module is model for pipeline in self.pipelines):
            return
        if len(set(getattr(model, "hf_device_map", None) or {"": 0})) > 1:
            raise ValueError(
                f"The {type(model).__name__} was loaded with `device_map`, which spreads it over devices itself. "
                "Load it without."
            )
        pipeline = Pipeline(model, self.args.device, options=self.streaming, planner=AutoPlanner())
        self.pipelines.append(self._attached.enter_context(pipeline))


def _check(trainer: Any) -> None:
    """Refuse arguments of a Trainer that move models themselves, or need their weights on the GPU."""
    args = trainer.args
    refused = {
        "several processes (`torchrun`, `accelerate launch`)": (
            args.world_size > 1,
            "Start one with `python`, or use Lightning's Trainer with `strategy='superpipeline'`",
        ),
        "`deepspeed`": (trainer.is_deepspeed_enabled, "Leave it out"),
        "`fsdp`": (trainer.is_fsdp_enabled, "Leave it out"),
        "`torch_compile=True`": (args.torch_compile, "Use `streaming=PipelineOptions(compile=True)`"),
        "`fp16=True`": (args.fp16, "Use `bf16=True`"),
        "`fp16_full_eval` or `bf16_full_eval`": (
            args.fp16_full_eval or args.bf16_full_eval,
            "Load the model in that dtype, or use `bf16=True`",
        ),
        "`precompute_ref_log_probs=True` on a GPU": (
            getattr(args, "precompute_ref_log_probs", False) and args.device.type != "cpu",
            "Leave it out: the reference streams in each step",
        ),
    }
    for what, (is_asked_for, remedy) in refused.items():
        if is_asked_for:
            raise ValueError(f"{type(trainer).__name__} streams its model, which does not go with {what}. {remedy}.")


def __getattr__(name: str) -> Any:
    """Make the class that streams the models of a Trainer: `SuperpipelineSFTTrainer` for TRL's `SFTTrainer`."""
    if not (name.startswith(_PREFIX) and name.endswith("Trainer")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    trainer = name.removeprefix(_PREFIX)
    package = "transformers" if trainer in ("Trainer", "Seq2SeqTrainer") else "trl"
    try:
        library = import_module(package)
    except ImportError as error:
        raise ImportError(f"`{name}` needs {package}: `pip install 'sp-lightning[trl]'`.") from error
    if not hasattr(library, trainer):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, as {package} has no {trainer!r}")
    made = type(name, (SuperpipelineTrainerMixin, getattr(library, trainer)), {"__module__": __name__})
    globals()[name] = made
    return made
