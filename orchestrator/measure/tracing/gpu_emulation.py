"""The operations of a GPU, traced without one: its fused kernels, and the precisions that its
autocast chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from experts.kernels import launching
from experts.moe.bank import computing_dtype
from orchestrator.measure.tracing.op_recorder import OpRecorder, attention_of
from orchestrator.types import PrecisionName


@contextmanager
def emulated_gpu(precision: PrecisionName, recorder: OpRecorder) -> Iterator[None]:
    """Let the model call the fused kernels of GPUs: the shapes of their results can be traced
    anywhere."""
    before = launching.available
    launching.available = lambda x=None: x is None or x.dtype in launching.DTYPES
    try:
        with ExitStack() as stack:
            stack.enter_context(_GpuAttention(recorder))
            if precision != "fp32":
                stack.enter_context(_GpuAutocast(recorder))
            yield
    finally:
        launching.available = before


class _RecordingMode(TorchFunctionMode):
    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder


class _GpuAttention(_RecordingMode):
    """Attention that a GPU fuses and a CPU does not: with dropout, and with values of another width.

    A CPU computes it with products of whole matrices, also above the diagonal, whose results take memory
    for all pairs. A GPU's kernel draws the random numbers of dropout itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward and not kwargs.get("need_weights", True):
            # Attention inside of it is not seen here. Without training it is the same but for dropout.
            return func(*args, **kwargs | {"training": False})
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        dtype = computing_dtype(query)
        is_fused = query.ndim == 4 and dtype in launching.DTYPES
        if is_fused and query.shape[-1] != value.shape[-1]:
            apply: Any = _NarrowAttention.apply
            inputs = [tensor.to(dtype) for tensor in (query, key, value)]
            return apply(*inputs, attn_mask, is_causal, self._recorder)
        dropout_p = 0.0 if is_fused else dropout_p
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


class _NarrowAttention(torch.autograd.Function):
    """Fused attention with values that are narrower, or wider, than keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        recorder: OpRecorder,
    ) -> Tensor:
        result = query.new_empty(*query.shape[:-1], value.shape[-1])
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        op = attention_of(query, value, mask, is_causal)
        recorder.record_attention(op)
        ctx.save_for_backward(query, key, value, result, log_sums)
        ctx.op = op
        ctx.recorder = recorder
        return result

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        ctx.recorder.record_attention(replace(ctx.op, backward=True))
        inputs = ctx.saved_tensors[:3]
        return *(torch.empty_like(tensor) for tensor in inputs), None, None, None


class _GpuAutocast(_RecordingMode):
    """The fp32 operations of a GPU's autocast, which a CPU's autocast runs in low precision.

    A norm is computed from a copy in fp32, the softmax of a loss in fp32 without a copy.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.layer_norm:
            return func(args[0].float(), *args[1:], **kwargs)
        plain = not kwargs.get("label_smoothing") and kwargs.get("weight") is None
        if func is F.cross_entropy and args[0].dtype != torch.float32 and plain:
            log_probabilities: Any = _LogSoftmax.apply(args[0], self._recorder)
            return F.nll_loss(
                log_probabilities,
                args[1],
                reduction=kwargs.get("reduction", "mean"),
                ignore_index=kwargs.get("ignore_index", -100),
            )
        return func(*args, **kwargs)


class _LogSoftmax(torch.autograd.Function):
    """A log-softmax from low precision to fp32 in one pass, and back in one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorder: OpRecorder) -> Tensor:
        result = torch.empty_like(x, dtype=torch.float32)
        recorder.record_move("norm", x.nbytes + result.nbytes)
        ctx.save_for_backward(result)
        ctx.dtype = x.dtype
        ctx.recorder = recorder
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        grad_x = torch.empty_like(result, dtype=ctx.dtype)
        ctx.recorder.record_move("norm", grads[0].nbytes + result.nbytes + grad_x.nbytes)
        return grad_x, None
