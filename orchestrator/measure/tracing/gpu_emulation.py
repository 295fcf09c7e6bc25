"""The operations of a GPU, traced without one: its fused kernels, and the precisions that its
autocast chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from experts.kernels import launching
from orchestrator.measure.tracing.op_recorder import OpRecorder
from orchestrator.types import PrecisionName


@contextmanager
def emulated_gpu(precision: PrecisionName, recorder: OpRecorder) -> Iterator[None]:
    """Let the model call the fused kernels of GPUs: the shapes of their results can be traced
    anywhere."""
    before = launching.available
    launching.available = lambda x=None: x is None or x.dtype in launching.DTYPES
    try:
        with ExitStack() as stack:
            if precision != "fp32":
                stack.enter_context(_GpuAutocast(recorder))
            yield
    finally:
        launching.available = before


class _GpuAutocast(TorchFunctionMode):
    """The fp32 operations of a GPU's autocast, which a CPU's autocast runs in low precision.

    A norm is computed from a copy in fp32, the softmax of a loss in fp32 without a copy.
    """

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

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
