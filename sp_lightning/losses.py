"""Losses that take less device memory than their textbook form. They need torch alone, and work under any strategy.

[Note: slices of the vocabulary, each computed twice]
A language model's logits are by far its largest activation: 8192 tokens times 128 000 words are 2 GB in bf16, and up
to 8 GB more while the loss is computed in fp32. `chunked_cross_entropy` materializes only a slice of them at a time.
It slices the vocabulary, not the tokens, and recomputes the slices in backward, where other implementations compute
the gradients in forward. Both choices are about exactness and memory:

- The weight's gradient sums over tokens. With slices of the vocabulary, each of its rows is the result of one matrix
  product, as in plain training. With slices of the tokens it would be a sum of rounded products, unless it was
  accumulated in fp32: twice the memory of a head in bf16, read and written once per slice. The gradient that sums over
  the vocabulary is that of `hidden`, which is small, and is accumulated in fp32.
- Backward knows the gradient of the loss, and with it the scale of a GradScaler, before anything is rounded to fp16.
  A forward that computes gradients does not: they may underflow in fp16, or their sum over all tokens overflow.
- Forward keeps only two numbers per token for backward. Evaluation computes nothing in excess, `retain_graph` and
  unneeded gradients (a frozen head under LoRA) need no special case, and a streamed weight is fetched for backward like
  any other.

The price is four matrix products of the head in place of three, each of ordinary size, as a slice of logits is about as
large as `hidden`. On one CPU core (2048 tokens, width 512, 32 000 words) forward and backward take 1.25 times as long
as with all logits in fp32. Under autocast to bf16 they take no longer, where three products with a sum in fp32 take 1.6
times as long. Memory on top of the inputs falls from 760 to 140 MiB; 62 of these are the weight's gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

_ENOUGH_LOGITS = 1 << 22  # in a slice: more of them do not make a device any faster
_LEAST_SLICES = 8
_ALIGNMENT = 16  # rows: tensor cores want a matrix's side to be a multiple of this


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    softcap: float | None = None,
    shift: bool = False,
) -> Tensor:
    """Compute the cross entropy of a linear head without materializing all of its logits.

    Loss and gradients equal, up to rounding, those of
    `F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)`, also under autocast. As in transformers, the loss
    is computed and returned in fp32 where `hidden` has a lower precision. The slice of logits that is in memory is
    about as large as `hidden`, and at most an eighth of all logits.

    Args:
        hidden: Floating-point input of the head, of shape `(..., width)`.
        weight: The head's weight, of shape `(vocabulary, width)`: `lm_head.weight`, or a tied embedding's.
        labels: Indices into the vocabulary, of shape `(...)`.
        bias: The head's bias, of shape `(vocabulary,)`.
        ignore_index: Label of positions that contribute neither to the loss nor to the gradients.
        reduction: `"mean"` over positions that are not ignored (NaN if there are none), `"sum"`, or `"none"`.
        softcap: If given, logits become `softcap * tanh(logits / softcap)`, as Gemma's do.
        shift: Whether each position predicts the next one's label, as where transformers is given `labels=input_ids`.

    Returns:
        The loss: a scalar, or with `reduction="none"` a tensor of the shape of `labels`.

    Raises:
        ValueError: If shapes or options are invalid.
        RuntimeError: If a linear layer does not take these dtypes, a label is no index of the vocabulary (on a GPU:
            torch's device-side assertion), or gradients are differentiated again.

    Examples:
        >>> hidden, head = torch.randn(2, 5, 8, requires_grad=True), torch.nn.Linear(8, 100, bias=False)
        >>> tokens = torch.randint(0, 100, (2, 5))
        >>> loss = chunked_cross_entropy(hidden, head.weight, tokens, shift=True)
        >>> loss.backward()
    """
    arguments = dict(locals())  # a copy, because a debugger adds to it
    tensors = (hidden, weight, labels, bias)
    if has_torch_function(tensors):  # superpipeline replaces a guarded master by its twin here
        return handle_torch_function(chunked_cross_entropy, tensors, **arguments)
    _check_shapes(hidden, weight, labels)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction={reduction!r}` must be 'mean', 'sum' or 'none'.")
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    is_counted = labels != ignore_index
    flat = hidden.reshape(-1, weight.shape[1])
    # the dtype that a linear layer computes in, with or without autocast
    dtype = F.linear(flat[:0], weight[:0]).dtype
    counted = labels.masked_fill(~is_counted, 0).reshape(-1)
    losses: Tensor = _TokenLosses.apply(flat.to(dtype), weight, bias, counted, softcap)
    losses = losses.view_as(labels).masked_fill(~is_counted, 0)
    total = losses if reduction == "none" else losses.sum()
    return total / is_counted.sum() if reduction == "mean" else total


class _TokenLosses(torch.autograd.Function):
    """Computes one loss for each row of `hidden`; see [Note: slices of the vocabulary, each computed twice]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, softcap: float | None
    ) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # online softmax: probabilities are exp(logit - peak) / norm, where peak is the highest logit so far
        peak = hidden.new_full(labels.shape, torch.finfo(dtype).min, dtype=dtype)
        norm = torch.zeros_like(peak)
        # torch checks the labels and their dtype: an exception on the CPU, a device-side assertion on a GPU
        target = hidden.new_zeros(len(weight), dtype=dtype).gather(0, labels)
        with _without_autocast(hidden):
            for part in _slices(hidden, weight, bias, labels, softcap):
                logits = part.logits
                target = torch.where(part.is_inside, logits.gather(1, part.column).squeeze(1), target)
                last_peak = peak
                peak = torch.maximum(peak, logits.amax(1))
                norm = norm * (last_peak - peak).exp() + logits.sub_(peak[:, None]).exp_().sum(1)
        ctx.save_for_backward(hidden, weight, bias, labels, peak, norm)
        ctx.softcap = softcap
        return norm.log() - (target - peak)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # `once_differentiable` would treat a gradient penalty as a constant
        if torch.is_grad_enabled():
            raise RuntimeError(
                "The gradients of chunked_cross_entropy cannot be differentiated again "
                "(create_graph=True). Use F.cross_entropy(F.linear(hidden, weight), labels) where "
                "second derivatives are needed."
            )
        hidden, weight, bias, labels, peak, norm = ctx.saved_tensors
        softcap = ctx.softcap
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=norm.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        with _without_autocast(hidden):
            for part in _slices(hidden, weight, bias, labels, softcap):
                logits = part.logits
                slope = None if softcap is None else 1 - (logits / softcap).square()
                # (probability - target) * outer gradient, computed in the memory of the logits
                grad_logits = logits.sub_(peak[:, None]).exp_().mul_((gradient / norm)[:, None])
                grad_logits.scatter_add_(1, part.column, (-gradient * part.is_inside)[:, None])
                if slope is not None:
                    grad_logits *= slope
                if grad_bias is not None:
                    grad_bias[part.rows] = grad_logits.sum(0)
                lowered = grad_logits.to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight[part.rows] = lowered.t() @ hidden
                if grad_hidden is not None:
                    grad_hidden += lowered @ part.weight
        # autograd casts the sum in fp32 to the dtype of `hidden`
        return grad_hidden, grad_weight, grad_bias, None, None


class _Slice(NamedTuple):
    """A slice of the vocabulary."""

    rows: slice  # the rows of the head
    weight: Tensor  # these rows, in the dtype to compute in
    logits: Tensor  # in at least fp32, in memory that may be overwritten
    column: Tensor  # the column of each label, clamped into the slice
    is_inside: Tensor  # whether the label really is there


def _slices(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, softcap: float | None
) -> Iterator[_Slice]:
    """Compute the logits, one slice after the other."""
    tokens, width = hidden.shape
    vocabulary = len(weight)
    count = min(max(width, _ENOUGH_LOGITS // max(tokens, 1)), -(-vocabulary // _LEAST_SLICES))
    count = -(-count // _ALIGNMENT) * _ALIGNMENT
    for start in range(0, vocabulary, count):
        rows = slice(start, start + count)
        # this cast is done by hand, as autocast would make a copy of the whole head
        piece, bias_piece = weight[rows].to(hidden.dtype), None if bias is None else bias[rows].to(hidden.dtype)
        logits = _capped(F.linear(hidden, piece, bias_piece), softcap)
        column = labels - start
        inside = column.clamp(0, len(piece) - 1)
        yield _Slice(rows, piece, logits, inside[:, None], inside == column)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return logits in at least fp32, in memory that may be overwritten."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    device = tensor.device.type
    # not on the meta device
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            "`hidden` must have the shape (..., width) and `weight` (vocabulary, width), got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}."
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            "`labels` must have the shape of `hidden` without its last dimension, "
            f"{tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}."
        )


def loss_in_slices(model: Any) -> None:
    """Have a causal language model of transformers compute the loss of `labels=` without all of its logits.

    Loss and gradients are the model's own, up to rounding, by `chunked_cross_entropy`. The logits that come with a loss
    are those of the last position alone. With `reduction="none"` in a call of the model, its loss is that of each
    token: minus its log-probability. Modules, parameters and checkpoints stay as they are, and a second call changes
    nothing.

    Args:
        model: A model such as `AutoModelForCausalLM` loads, before it gets adapters.

    Raises:
        ValueError: If it is another kind of model, or its head is more than a linear layer.
        RuntimeError: At the first loss, if the model does more to logits than its head and a soft cap.

    Examples:
        >>> loss_in_slices(model)  # doctest: +SKIP
        >>> loss = model(input_ids, labels=input_ids).loss  # doctest: +SKIP
        >>> log_probabilities = -model(input_ids, labels=input_ids, reduction="none").loss  # doctest: +SKIP
    """
    used = inspect.unwrap(type(model).forward).__code__
    head = getattr(model, "get_output_embeddings", lambda: None)()
    is_plain = isinstance(head, nn.Linear) and not [*head.children()]
    if not (is_plain and "loss_function" in used.co_names and "logits_to_keep" in used.co_varnames):
        raise ValueError(f"`{type(model).__name__}` has no loss of transformers' over the logits of a linear layer.")
    if isinstance(model.loss_function, _LossOfHidden):
        return
    loss = _LossOfHidden(model)
    model.register_forward_pre_hook(loss.ask_for_one, with_kwargs=True)
    model.base_model.register_forward_hook(loss.note_hidden)
    model.register_forward_hook(loss.forget_hidden, always_call=True)
    model.loss_function = loss


class _LossOfHidden:
    """A model's `loss_function`, computed from the head's input and not from its output."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_asked = self._is_checked = False
        self._hidden: Any = None

    def ask_for_one(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Have the model compute the logits of one position, where it computes a loss."""
        given = inspect.signature(type(self._model).forward).bind(self._model, *args, **kwargs)
        self._is_asked = given.arguments.get("labels") is not None
        if self._is_asked:
            given.arguments["logits_to_keep"] = 1
        return given.args[1:], given.kwargs

    def note_hidden(self, _: nn.Module, args: Any, output: Any) -> None:
        """Note the input of the head."""
        self._hidden = output[0] if self._is_asked else None

    def forget_hidden(self, *_: Any) -> None:
        """Let go of the head's input, and of its graph, also after an exception."""
        self._is_asked = False
        self._hidden = None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum", "none"] | None = None,
        **others: Any,
    ) -> Tensor:
        """Compute the loss as transformers does, which gives it arguments of the model, too."""
        hidden = self._hidden
        head = self._model.get_output_embeddings()
        softcap = getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)
        if not self._is_checked:
            with torch.no_grad():
                expected = _capped(F.linear(hidden[:, -1:], head.weight, head.bias), softcap)
            if not torch.allclose(logits[:, -1:].float(), expected, rtol=0.02, atol=0.02):
                words = "does more to its logits than its head and a soft cap. Train without `loss_in_slices`"
                raise RuntimeError(f"`{type(self._model).__name__}` {words}.")
            self._is_checked = True
        loss = chunked_cross_entropy(
            hidden,
            head.weight,
            (labels if shift_labels is None else shift_labels).to(hidden.device),
            bias=head.bias,
            ignore_index=ignore_index,
            reduction=reduction or ("mean" if num_items_in_batch is None else "sum"),
            softcap=softcap,
            shift=shift_labels is None,
        )
        return loss if num_items_in_batch is None or reduction is not None else loss / num_items_in_batch
