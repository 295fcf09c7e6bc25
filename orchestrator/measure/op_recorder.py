"""Writes down every operation that torch is asked for: what it is, how large, and what memory is alive meanwhile."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.plan.cost.ops import (
    AttentionOp,
    MessageKind,
    MessageOp,
    MicroBatchOps,
    MoveKind,
    MoveOp,
    ProductLayout,
    ProductOp,
)

_BLOCK = 512  # bytes that allocators round up to
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "logits": 0}  # where their first factor stands
_KINDS: dict[str, MoveKind] = {
    **dict.fromkeys(["gelu", "silu", "silu_backward", "exp", "sigmoid", "tanh", "pow", "erf"], "heavy"),
    **dict.fromkeys(["native_layer_norm", "_softmax", "_softmax_backward_data"], "norm"),
    **dict.fromkeys(
        ["native_layer_norm_backward", "native_batch_norm_backward", "_fused_rms_norm_backward"],
        "norm_backward",
    ),
    **dict.fromkeys(["_log_softmax", "_log_softmax_backward_data", "logsumexp"], "norm"),
    **dict.fromkeys(["native_batch_norm", "_fused_rms_norm"], "norm"),
    **dict.fromkeys(
        [
            "index_select",
            "index_add_",
            "index_add",
            "embedding",
            "embedding_dense_backward",
            "gather",
            "index",
        ],
        "rows",
    ),
    **dict.fromkeys(
        [
            "scatter_",
            "scatter",
            "scatter_add_",
            "index_copy_",
            "index_put_",
            "index_put",
            "copy_rows",
            "sum_rows",
        ],
        "rows",
    ),
    **dict.fromkeys(["nll_loss_forward", "nll_loss_backward"], "rows"),
    **dict.fromkeys(
        ["sort", "topk", "argmax", "nonzero_static", "cumsum", "choose", "choose_backward"], "sort"
    ),
    **dict.fromkeys(["sum", "mean", "amax", "norm"], "reduce"),
    "gelu_backward": "gelu_backward",
}
_FEW_INDICES = 3072  # up to which torch sums gradients of an embedding in one kernel, without sorting them
_OURS = "experts"  # the operators that are written in Python
_FREE = {
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "alias",
    "_unsafe_view",
}


class Recorder(TorchDispatchMode):
    """Collects the work of what runs inside it."""

    def __init__(self, on_gpu: bool = False) -> None:
        super().__init__()
        self._on_gpu = on_gpu
        self._seen: Counter[Any] = Counter()
        self._operations = self._views = self._launches = self._sorts = 0
        self._before_wait: MicroBatchOps | None = None
        self._alive = self._peak = 0.0
        self._known: set[int] = set()

    def knows(self, tensors: Sequence[Tensor]) -> None:
        """These are not new: their memory is counted elsewhere."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        space, _, name = func._schema.name.partition("::")
        if space == "prim":  # a question about a tensor
            return made
        if name in _FREE or _only_looks(func):
            self._views += 1
        else:
            self._launches += space == _OURS
            self._operations += space != _OURS
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._sorts += self._on_gpu and _sorts(name, inputs)
            self._write(name, inputs, results)
        for tensor in results:
            self._watch(tensor)
        return made

    def _write(self, name: str, inputs: list[Tensor], results: list[Tensor]) -> None:
        if name in _PRODUCTS:
            self._seen[_product(*inputs[_PRODUCTS[name] : _PRODUCTS[name] + 2])] += 1
        elif name.startswith("_scaled_dot_product"):
            self._seen[_attention(inputs, "backward" in name)] += 1
        else:
            moved = sum(_read(tensor) for tensor in inputs) + sum(_read(tensor) for tensor in results)
            self._seen[MoveOp(_KINDS.get(name, "plain"), moved)] += 1

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._alive += size
        self._peak = max(self._peak, self._alive)
        weakref.finalize(storage, self._freed, storage._cdata, size)

    def _freed(self, address: int, size: float) -> None:
        self._known.discard(address)
        self._alive -= size

    def experts(
        self, rows: int, experts: int, sizes: tuple[int, int], layout: ProductLayout, dtype: torch.dtype
    ) -> None:
        """A product of rows with the matrices of their experts, or, ``tn``, the gradient of these."""
        each, (inner, outer) = max(1, round(rows / experts)), sizes
        m, k, n = (inner, each, outer) if layout == "tn" else (each, inner, outer)
        self._launches += experts > 1
        self._operations += experts == 1
        self._seen[ProductOp(m, k, n, layout, experts, _PRECISIONS[dtype], of_experts=True)] += 1

    def move(self, kind: MoveKind, size: int) -> None:
        self._operations += 1
        self._seen[MoveOp(kind, size)] += 1

    def count(self, operations: int) -> None:
        """Operations too small to be worth more than their number."""
        self._operations += operations

    def wait(self) -> None:
        """The host reads a figure from the device, which it must wait for."""
        self._operations += 1
        self._before_wait = self._work_so_far()

    def message(self, kind: MessageKind, size: int) -> None:
        self._seen[MessageOp(kind, size)] += 1

    def work(self, samples: int, parameters: int, expert_parameters: int, tensors: int) -> MicroBatchOps:
        found = self._work_so_far()
        return replace(
            found,
            samples=samples,
            parameters=parameters,
            expert_parameters=expert_parameters,
            tensors=tensors,
            peak_bytes=self._peak,
            before_wait=self._before_wait,
        )

    def _work_so_far(self) -> MicroBatchOps:
        seen: list[Any] = [replace(entry, times=times) for entry, times in self._seen.items()]
        return MicroBatchOps(
            samples=0,
            products=tuple(entry for entry in seen if isinstance(entry, ProductOp)),
            attentions=tuple(entry for entry in seen if isinstance(entry, AttentionOp)),
            moves=tuple(entry for entry in seen if isinstance(entry, MoveOp)),
            messages=tuple(entry for entry in seen if isinstance(entry, MessageOp)),
            operations=self._operations,
            launches=self._launches,
            sorts=self._sorts,
            views=self._views,
        )


def _only_looks(func: Any) -> bool:
    """Whether an operation returns its input's memory, unchanged."""
    returns = [entry.alias_info for entry in func._schema.returns]
    return bool(returns) and all(info is not None and not info.is_write for info in returns)


def _sorts(name: str, inputs: list[Tensor]) -> bool:
    return name == "sort" or (name == "embedding_dense_backward" and inputs[1].numel() > _FEW_INDICES)


def _product(a: Tensor, b: Tensor) -> ProductOp:
    transposed = [x.stride(-2) == 1 and x.shape[-1] > 1 and x.shape[-2] > 1 for x in (a, b)]
    layout: ProductLayout = "tn" if transposed[0] else "nt" if transposed[1] else "nn"
    batch = a.shape[0] if a.ndim == 3 else 1
    return ProductOp(
        a.shape[-2],
        a.shape[-1],
        b.shape[-1] if b.shape[-2] == a.shape[-1] else b.shape[-2],
        layout,
        batch,
        _PRECISIONS[a.dtype],
    )


def _attention(inputs: list[Tensor], backward: bool) -> AttentionOp:
    batch, heads, length, width = inputs[0].shape
    return AttentionOp(batch * heads, length, width, backward, _PRECISIONS[inputs[0].dtype])


def _read(tensor: Tensor) -> int:
    """Bytes that are touched: of an expanded tensor only those that are there."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
