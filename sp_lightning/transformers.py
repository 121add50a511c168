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
- `Accelerator.prepare` calls the `prepare_model` of its own object for each model of a Trainer: the one
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
        self._streamed_others: list[nn.Module] = []  # models that were prepared before training
        self._streamed_scope: ExitStack | None = None
        args: Any = named.get("args")
        if isinstance(model, str) and hasattr(args, "model_init_kwargs"):
            # TRL would spread the model over all devices
            args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}
        super().__init__(model, *positional, **named)  # type: ignore[call-arg]

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Trainer's accelerator, which prepares models by streaming them."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        _check(self)
        self.args._n_gpu = min(self.args.n_gpu, 1)  # or models would be replicated
        prepare = self.accelerator.prepare_model

        def prepare_model(model: Any, device_placement: Any = None, **options: Any) -> Any:
            if self._streamed_scope is None:
                self._streamed_others.append(model)
            else:
                self._stream(model)
            return prepare(model, device_placement=False, **options)

        self.accelerator.prepare_model = prepare_model
        self.accelerator.clip_grad_norm_ = nn.utils.clip_grad_norm_

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Leave the model in CPU memory."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, while models stream; afterwards they are plain ones on the CPU."""
        self._mixed_mesh_grads = False
        with self._while_streaming():
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as the Trainer does, while models stream."""
        with self._while_streaming():
            self._stream(self.model)
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the Trainer's step, in which a loss may use weights outside of their modules."""
        with step_of_all(self.pipelines):
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the Trainer's step of an evaluation or a prediction."""
        with step_of_all(self.pipelines):
            return super().prediction_step(*args, **kwargs)  # type: ignore[misc]

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

    def _stream(self, model: nn.Module) -> None:
        """Stream a model until the scope ends, unless it already does."""
        assert self._streamed_scope is not None
        if any(pipeline.module is model for pipeline in self.pipelines):
            return
        if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
            name = type(model).__name__
            raise ValueError(f"The {name} was loaded with a `device_map` of several devices: leave it out.")
        pipeline = Pipeline(model, self.args.device, options=self.streaming, planner=AutoPlanner())
        self.pipelines.append(self._streamed_scope.enter_context(pipeline))


def _check(trainer: Any) -> None:
    """Refuse arguments of a Trainer that move models themselves, or need their weights on the GPU."""
    args = trainer.args
    refused = {
        "run in several processes: start one, or use Lightning's Trainer": args.world_size > 1,
        "work with DeepSpeed: leave it out": trainer.is_deepspeed_enabled,
        "work with FSDP: leave it out": trainer.is_fsdp_enabled,
        "work with `torch_compile=True`: use `PipelineOptions(compile=True)`": args.torch_compile,
        "work with `fp16=True`: use `bf16=True`": args.fp16,
        "work with `fp16_full_eval=True`: use `bf16=True`": args.fp16_full_eval,
        "work with `bf16_full_eval=True`: use `bf16=True`": args.bf16_full_eval,
        "work with `precompute_ref_log_probs=True` on a GPU: leave it out": (
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
