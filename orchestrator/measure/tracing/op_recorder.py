"""Records the operations that torch runs: their kind, their size, and the memory that is alive
meanwhile."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.measure.tracing.operator_sizes import (
    PRECISIONS,
    attention_op,
    convolution_ops,
    is_attention,
)
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

_ALLOCATION_BYTES = 512  # allocators round up to multiples
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "logits": 0}  # with the index of the first factor
_CONVOLUTIONS = {"convolution", "convolution_backward"}
_OPERATIONS_OF_KIND: dict[MoveKind, tuple[str, ...]] = {
    "heavy": ("gelu", "silu", "silu_backward", "exp", "sigmoid", "tanh", "pow", "erf"),
    "gelu_backward": ("gelu_backward",),
    "norm": (
        "native_layer_norm",
        "native_batch_norm",
        "_fused_rms_norm",
        "_softmax",
        "_softmax_backward_data",
        "_log_softmax",
        "_log_softmax_backward_data",
        "logsumexp",
    ),
    "norm_backward": (
        "native_layer_norm_backward",
        "native_batch_norm_backward",
        "_fused_rms_norm_backward",
    ),
    "rows": (
        "index_select",
        "index_add_",
        "index_add",
        "embedding",
        "embedding_dense_backward",
        "gather",
        "index",
        "scatter_",
        "scatter",
        "scatter_add_",
        "index_copy_",
        "index_put_",
        "index_put",
        "copy_rows",
        "sum_rows",
        "nll_loss_forward",
        "nll_loss_backward",
    ),
    "sort": ("sort", "topk", "argmax", "nonzero_static", "cumsum", "choose", "choose_backward"),
    "reduce": ("sum", "mean", "amax", "norm"),
}
_KINDS: dict[str, MoveKind] = {name: kind for kind, names in _OPERATIONS_OF_KIND.items() for name in names}
_MAX_UNSORTED_INDICES = (
    3072  # up to which torch sums gradients of an embedding in one kernel, without sorting
)
_OWN_NAMESPACE = "experts"  # of the operators that this project launches from Python
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


@dataclass(frozen=True)
class MemoryPeaks:
    """Most bytes alive at once, apart from parameters and the gradients of blocks."""

    whole: float
    """In the whole pass. Activations of all blocks are among them."""
    without_gradients: float
    """In the whole pass, apart from the gradients of all parameters."""
    last: float
    """While gradients of blocks accumulate. Near the end of a pass the gradients of all blocks are alive next
    to it."""


class OpRecorder(TorchDispatchMode):
    """Collects the operations that run inside it."""

    def __init__(self, on_gpu: bool = False) -> None:
        super().__init__()
        self._on_gpu = on_gpu
        self._alive_bytes = 0.0
        self._known_storages: set[int] = set()
        self.restart()

    def restart(self) -> None:
        """Forget the operations so far, to record another pass."""
        self._counts: Counter[Any] = Counter()
        self._operations = 0
        self._views = 0
        self._launches = 0
        self._sorts = 0
        self._before_wait: MicroBatchOps | None = None
        self._peak_bytes = 0.0
        self._block_gradient_bytes = 0.0
        self._gradient_bytes = 0.0
        self._peak_without_block_gradients = 0.0
        self._peak_without_gradients = 0.0
        self._last_peak = 0.0

    def ignore_memory_of(self, tensors: Sequence[Tensor]) -> None:
        """Do not count the memory of these tensors: it is counted as parameters."""
        self._known_storages |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "prim":  # a question about a tensor, such as its device
            return output
        if name in _FREE or _returns_view(func):
            self._views += 1
        else:
            own = namespace == _OWN_NAMESPACE
            self._launches += own
            self._operations += not own
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._sorts += self._on_gpu and _sorts(name, inputs)
            if is_attention(name):
                self._counts[attention_op(func, args, kwargs)] += 1
            elif name in _CONVOLUTIONS:
                self._counts.update(convolution_ops(func, args, kwargs, output))
            else:
                self._record(name, inputs, results)
        for tensor in results:
            self._track_memory(tensor)
        return output

    def _record(self, name: str, inputs: list[Tensor], results: list[Tensor]) -> None:
        if name in _PRODUCTS:
            first = _PRODUCTS[name]
            self._counts[_product_op(*inputs[first : first + 2])] += 1
        else:
            moved_bytes = sum(_touched_bytes(tensor) for tensor in (*inputs, *results))
            self._counts[MoveOp(_KINDS.get(name, "plain"), moved_bytes)] += 1

    def _track_memory(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known_storages:
            return
        self._known_storages.add(storage._cdata)
        size = -(-storage.nbytes() // _ALLOCATION_BYTES) * _ALLOCATION_BYTES
        self._alive_bytes += size
        self._peak_bytes = max(self._peak_bytes, self._alive_bytes)
        of_pass = self._alive_bytes - self._gradient_bytes
        self._peak_without_gradients = max(self._peak_without_gradients, of_pass)
        without_block_gradients = self._alive_bytes - self._block_gradient_bytes
        self._peak_without_block_gradients = max(self._peak_without_block_gradients, without_block_gradients)
        self._last_peak = max(self._last_peak, without_block_gradients)
        weakref.finalize(storage, self._forget_storage, storage._cdata, size)

    def _forget_storage(self, address: int, size: float) -> None:
        # A later storage may have the same address.
        self._known_storages.discard(address)
        self._alive_bytes -= size

    def record_gradient(self, parameter: Tensor) -> None:
        """Record that the gradient of a parameter is complete. It stays alive to the end."""
        assert parameter.grad is not None
        self._gradient_bytes += parameter.grad.nbytes

    def record_block_gradient(self, parameter: Tensor) -> None:
        """Record that the gradient of a block's parameter is complete, in addition to ``record_gradient``."""
        assert parameter.grad is not None
        if not self._block_gradient_bytes:
            self._last_peak = 0.0
        self._block_gradient_bytes += parameter.grad.nbytes

    def recorded_memory(self) -> MemoryPeaks:
        return MemoryPeaks(
            whole=self._peak_without_block_gradients,
            without_gradients=self._peak_without_gradients,
            last=self._last_peak,
        )

    def record_expert_product(
        self, rows: int, experts: int, sizes: tuple[int, int], layout: ProductLayout, dtype: torch.dtype
    ) -> None:
        """Record a product of rows with the matrices of their experts or, ``tn``, the gradient of
        these matrices."""
        inner, outer = sizes
        rows_per_expert = max(1, round(rows / experts))
        m, k, n = (inner, rows_per_expert, outer) if layout == "tn" else (rows_per_expert, inner, outer)
        self._launches += experts > 1
        self._operations += experts == 1
        self._counts[ProductOp(m, k, n, layout, experts, PRECISIONS[dtype], of_experts=True)] += 1

    def record_attention(self, op: AttentionOp) -> None:
        self._operations += 1
        self._counts[op] += 1

    def record_move(self, kind: MoveKind, size_bytes: int) -> None:
        self._operations += 1
        self._counts[MoveOp(kind, size_bytes)] += 1

    def record_small_operations(self, count: int) -> None:
        """Record operations whose only cost is their overhead."""
        self._operations += count

    def record_wait(self) -> None:
        """Record that the host waits to read a value of the device."""
        self._operations += 1
        self._before_wait = self._ops_so_far()

    def record_message(self, message: MessageKind, size_bytes: int) -> None:
        self._counts[MessageOp(message, size_bytes)] += 1

    def recorded_ops(self) -> MicroBatchOps:
        """Return all recorded operations."""
        return replace(self._ops_so_far(), peak_bytes=self._peak_bytes, before_wait=self._before_wait)

    def _ops_so_far(self) -> MicroBatchOps:
        ops: list[Any] = [replace(op, times=times) for op, times in self._counts.items()]
        return MicroBatchOps(
            samples=0,
            products=tuple(op for op in ops if isinstance(op, ProductOp)),
            attentions=tuple(op for op in ops if isinstance(op, AttentionOp)),
            moves=tuple(op for op in ops if isinstance(op, MoveOp)),
            messages=tuple(op for op in ops if isinstance(op, MessageOp)),
            operations=self._operations,
            launches=self._launches,
            sorts=self._sorts,
            views=self._views,
        )


def _returns_view(func: Any) -> bool:
    """Return whether an operation returns the memory of its input, unchanged."""
    alias_infos = [entry.alias_info for entry in func._schema.returns]
    return bool(alias_infos) and all(info is not None and not info.is_write for info in alias_infos)


def _sorts(name: str, inputs: list[Tensor]) -> bool:
    """Return whether a GPU sorts for this operation."""
    if name == "embedding_dense_backward":
        return inputs[1].numel() > _MAX_UNSORTED_INDICES
    return name == "sort"


def _product_op(a: Tensor, b: Tensor) -> ProductOp:
    layout: ProductLayout = "nn"
    if _is_transposed(a):
        layout = "tn"
    elif _is_transposed(b):
        layout = "nt"
    return ProductOp(
        m=a.shape[-2],
        k=a.shape[-1],
        n=b.shape[-1] if b.shape[-2] == a.shape[-1] else b.shape[-2],
        layout=layout,
        batch=a.shape[0] if a.ndim == 3 else 1,
        precision=PRECISIONS[a.dtype],
    )


def _is_transposed(matrix: Tensor) -> bool:
    return matrix.stride(-2) == 1 and matrix.shape[-1] > 1 and matrix.shape[-2] > 1


def _touched_bytes(tensor: Tensor) -> int:
    """Return the bytes that an operation touches: an expanded tensor has fewer than its shape
    says."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
