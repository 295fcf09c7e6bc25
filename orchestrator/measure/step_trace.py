"""What a step does, operation by operation, found with tensors that have shapes but no data: products with their sizes, bytes that
the others move, messages between hosts, and the most memory that is alive at once.

A GPU's step is traced without a GPU too: its fused kernels and the types that autocast chooses there are put in place of the
CPU's, so that what is predicted for a cluster does not depend on the machine that predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import comb
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from experts.balance import moe_layers
from experts.bank import ExpertBank, SizeClass
from experts.context import MoEContext
from experts.exchange import Exchange, LocalExchange, Meter, PendingRows
from experts.kernels import fused
from experts.kernels.grouped import grouped_works
from experts.kernels.loop import activate, row_counts
from experts.layer import MoELayer
from experts.model import attach, place
from orchestrator.measure.model_facts import fake_batch, first_samples, quietly
from orchestrator.measure.op_recorder import Recorder
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.tasks.task import Task
from orchestrator.tasks.validate import as_loss, build_checked_model
from orchestrator.train.data import as_dataset
from orchestrator.train.parts.precision import autocast
from orchestrator.train.parts.recompute import recompute_blocks
from orchestrator.types import PrecisionName

_CPU = torch.device("cpu")
_CHECKS = 8  # small operations of a grouped product: sums and checks of its offsets


@dataclass(frozen=True)
class TraceOptions:
    """What is traced for: the kind of device, the arithmetic, how experts are computed, and how many hosts share them out."""

    on_gpu: bool = False
    precision: PrecisionName = "fp32"
    grouped: bool = True
    """Experts of a size in one operation, where their sizes allow it; else one after another."""
    hosts: int = 1
    chunks: int = 1
    recompute: bool = False


def trace_step(task: Task, micro_batch: int, setting: TraceOptions | None = None) -> MicroBatchOps:
    """The work of one micro-batch of so many samples on one device, forward and backward. With several hosts it is that of the
    first of them, each with as many samples, the tokens evenly spread over the experts."""
    setting = setting or TraceOptions()
    batch = first_samples(as_dataset(task.train_data()), micro_batch)
    with quietly(), FakeTensorMode(allow_non_fake_inputs=True) as mode, ExitStack() as stack:
        model = build_checked_model(task)
        model.train()
        recorder = Recorder(setting.on_gpu)
        hosts = _share_out(model, setting, recorder)
        for _, layer in moe_layers(model):
            layer.bank._compute = partial(_compute, layer.bank, setting, recorder)  # pyright: ignore[reportAttributeAccessIssue]
            if layer.capacity is not None:  # how many rows are left
                layer.register_forward_pre_hook(lambda *_: recorder.wait())
        if setting.recompute:
            recompute_blocks(model, hosts)
        if setting.on_gpu:
            stack.enter_context(_as_on_a_gpu(setting.precision, recorder))
        inputs = fake_batch(mode, batch, _CPU)
        recorder.knows([*model.parameters(), *model.buffers()])
        stack.enter_context(recorder)
        with autocast(setting.precision, _CPU):
            loss, _ = as_loss(task.loss(model, inputs), micro_batch)
        loss.sum.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    lodged = sum(
        p.numel() for module in model.modules() if isinstance(module, ExpertBank) for p in module.parameters()
    )
    parameters = sum(p.numel() for p in model.parameters())
    return recorder.work(micro_batch, parameters, lodged if setting.hosts > 1 else 0, len(trained))


def experts_of(task: Task) -> int:
    """Experts of the layer with the most; 0 for a dense model."""
    with quietly(), FakeTensorMode(allow_non_fake_inputs=True):
        return max((len(layer.load_E) for _, layer in moe_layers(build_checked_model(task))), default=0)


def _share_out(model: nn.Module, setting: TraceOptions, recorder: Recorder) -> MoEContext:
    """Leave the first host's experts to the model, and let its layers talk to hosts that are not there."""
    layers = [layer for _, layer in moe_layers(model)]
    if setting.hosts == 1 or not layers:
        hosts = MoEContext(LocalExchange())
    else:
        place(model, [[expert % setting.hosts for expert in range(len(layer.load_E))] for layer in layers], 0)
        hosts = _EvenlySpreadContext(_RecordingExchange(setting.hosts, recorder), setting.chunks)
        for layer in layers:
            layer.register_forward_pre_hook(hosts.enter)
    attach(model, hosts)
    return hosts


class _RecordingExchange:
    """Hosts that are not there: what would travel is written down."""

    rank = 0

    def __init__(self, size: int, recorder: Recorder) -> None:
        self.size, self.recorder = size, recorder

    def all_to_all_counts(self, counts_NC: Tensor, header: Sequence[int]) -> list[list[int]]:
        self.recorder.wait()
        self.recorder.message(
            "counts", 8 * (self.size - 1) * -(-(counts_NC.shape[1] + len(header) + 1) // 64) * 64
        )
        return []

    def all_to_all_rows(
        self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> PendingRows:
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        self.recorder.message("rows", (len(rows) - send_counts[0]) * rows.stride(0) * rows.itemsize)
        return PendingRows(received, None, Meter())


class _EvenlySpreadContext(MoEContext):
    """Where numbers of rows would be read from tensors, which have none, there are those of evenly spread tokens."""

    def __init__(self, exchange: Exchange, chunks: int) -> None:
        super().__init__(exchange, chunks)
        self._even: tuple[list[list[int]], list[list[int]]] = ([], [])

    def enter(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(layer, MoELayer)
        tokens = arguments[0].numel() // arguments[0].shape[-1]
        self._even = even_rows(
            tokens, len(layer.load_E), layer.gate.top_k, self.exchange.size, self.num_chunks
        )

    def replayed(self, compute: Any) -> Any:
        try:
            return super().replayed(compute)
        except DataDependentOutputException:
            return self._even


def even_rows(
    tokens: int, experts: int, top_k: int, hosts: int, chunks: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Rows and pairs that the first host sends to each, and gets from each, where tokens choose any experts alike: a token
    goes to a host that has any of its experts, once."""
    held = [len(range(host, experts, hosts)) for host in range(hosts)]
    wanted = [1 - comb(experts - here, top_k) / comb(experts, top_k) for here in held]
    cut = [tokens * (part + 1) // chunks - tokens * part // chunks for part in range(chunks)]
    sent = [
        [
            count
            for part in cut
            for count in (round(part * wanted[h]), round(part * top_k * held[h] / experts))
        ]
        for h in range(hosts)
    ]
    return sent, [sent[0]] * hosts


def _compute(
    bank: ExpertBank,
    setting: TraceOptions,
    recorder: Recorder,
    group: SizeClass,
    rows_RD: Tensor,
    counts_E: Tensor,
    weights_R: Tensor,
) -> Tensor:
    """In place of a bank's own: its products are written down by the rows of each expert, an even split."""
    dtype = rows_RD.dtype
    up_EDH, down_EHD = (bank.get_parameter(f"{role}_{group.hidden}").to(dtype) for role in ("up", "down"))
    together = setting.grouped and grouped_works(_CPU, dtype, bank.width, group.hidden)
    if not together or len(bank.classes) > 1:  # the host must know the rows of each expert, or of each size
        recorder.wait()
    if together:
        recorder.count(_CHECKS)
        hidden = _ExpertProduct.apply(rows_RD, up_EDH, recorder)
        return _ExpertProduct.apply(activate(hidden, weights_R, bank.kind), down_EHD, recorder)  # pyright: ignore
    sizes, made = row_counts(counts_E, rows_RD.shape[0]), []
    for rows, up, down, weights in zip(
        rows_RD.split(sizes), up_EDH.unbind(), down_EHD.unbind(), weights_R.split(sizes), strict=True
    ):
        hidden = _ExpertProduct.apply(rows, up[None], recorder)
        made.append(_ExpertProduct.apply(activate(hidden, weights, bank.kind), down[None], recorder))
    return torch.cat(made)  # pyright: ignore[reportArgumentType]


class _ExpertProduct(torch.autograd.Function):
    """Rows times the matrices of their experts: one operation forward, two backward."""

    @staticmethod
    def forward(ctx: Any, rows_RK: Tensor, weights_EKN: Tensor, recorder: Recorder) -> Tensor:
        ctx.save_for_backward(rows_RK, weights_EKN)
        ctx.recorder = recorder
        experts, inner, outer = weights_EKN.shape
        recorder.experts(rows_RK.shape[0], experts, (inner, outer), "nn", rows_RK.dtype)
        return rows_RK.new_empty(rows_RK.shape[0], outer)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ARG004
        rows_RK, weights_EKN = ctx.saved_tensors
        experts, inner, outer = weights_EKN.shape
        ctx.recorder.experts(rows_RK.shape[0], experts, (outer, inner), "nt", rows_RK.dtype)
        ctx.recorder.experts(rows_RK.shape[0], experts, (inner, outer), "tn", rows_RK.dtype)
        return torch.empty_like(rows_RK), torch.empty_like(weights_EKN), None


class _Upcasting(TorchFunctionMode):
    """Autocast of GPUs computes norms of a copy in fp32, and the softmax of a loss in fp32 without one; that of CPUs does not."""

    def __init__(self, recorder: Recorder) -> None:
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
            logarithms: Any = _LogSoftmax.apply(args[0], self._recorder)
            return F.nll_loss(
                logarithms,
                args[1],
                reduction=kwargs.get("reduction", "mean"),
                ignore_index=kwargs.get("ignore_index", -100),
            )
        return func(*args, **kwargs)


class _LogSoftmax(torch.autograd.Function):
    """Of low precision to fp32 in one pass, and back in one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorder: Recorder) -> Tensor:
        made = torch.empty_like(x, dtype=torch.float32)
        recorder.move("norm", x.nbytes + made.nbytes)
        ctx.save_for_backward(made)
        ctx.dtype, ctx.recorder = x.dtype, recorder
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (made,) = ctx.saved_tensors
        back = torch.empty_like(made, dtype=ctx.dtype)
        ctx.recorder.move("norm", grads[0].nbytes + made.nbytes + back.nbytes)
        return back, None


@contextmanager
def _as_on_a_gpu(precision: PrecisionName, recorder: Recorder) -> Iterator[None]:
    """The fused kernels of GPUs, whose results have shapes wherever they are traced."""
    before = fused.available
    fused.available = lambda x=None: x is None or x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    try:
        with ExitStack() as stack:
            if precision != "fp32":
                stack.enter_context(_Upcasting(recorder))
            yield
    finally:
        fused.available = before
