"""Records the operations that torch runs: their kind and their size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
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

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_ATTENTION = "_scaled_dot_product"  # begins the names of fused attention on any device
_MASKS = ("attn_mask", "attn_bias")
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


class OpRecorder(TorchDispatchMode):
    """Collects the operations that run inside it."""

    def __init__(self, on_gpu: bool = False) -> None:
        super().__init__()
        self.on_gpu = on_gpu
        self.restart()

    def restart(self) -> None:
        """Forget the operations so far, to record another pass."""
        self._counts: Counter[Any] = Counter()
        self._operations = 0
        self._views = 0
        self._launches = 0
        self._sorts = 0
        self._before_wait: MicroBatchOps | None = None

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
            self._sorts += self.on_gpu and _sorts(name, inputs)
            if name.startswith(_ATTENTION):
                self._counts[_attention_op(func, args, kwargs)] += 1
            elif name in _CONVOLUTIONS:
                self._counts.update(_convolution_ops(func, args, kwargs, output))
            else:
                self._record(name, inputs, results)
        return output

    def _record(self, name: str, inputs: list[Tensor], results: list[Tensor]) -> None:
        if name in _PRODUCTS:
            first = _PRODUCTS[name]
            self._counts[_product_op(*inputs[first : first + 2])] += 1
        else:
            moved_bytes = sum(_touched_bytes(tensor) for tensor in (*inputs, *results))
            self._counts[MoveOp(_KINDS.get(name, "plain"), moved_bytes)] += 1

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

    @property
    def flops(self) -> float:
        """FLOP of the products and attentions so far."""
        counted = ((op, times) for op, times in self._counts.items() if hasattr(op, "flops"))
        return sum(op.flops * times for op, times in counted)

    def recorded_ops(self) -> MicroBatchOps:
        """Return all recorded operations."""
        return replace(self._ops_so_far(), before_wait=self._before_wait)

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


# --- the arithmetic of attention and of convolutions, from the arguments of their operators


def _attention_op(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionOp:
    """Return the arithmetic of a call of fused attention."""
    arguments = _by_name(operator, args, kwargs)
    mask = next((arguments[name] for name in _MASKS if arguments.get(name) is not None), None)
    is_causal = bool(arguments.get("is_causal"))
    op = attention_of(arguments["query"], arguments["value"], mask, is_causal)
    return replace(op, backward="backward" in operator._schema.name)


def attention_of(query: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> AttentionOp:
    """Return the arithmetic of fused attention, forward.

    A mask over as many keys as queries counts as a causal one, unless it is the same for all queries: its
    values are not known here, and transformers makes one in every trace, also where it would compute
    without one."""
    batch, heads, length, width = query.shape
    keys, value_width = value.shape[-2:]
    if mask is not None and keys == length and _differs_by_query(mask):
        is_causal = True
    return AttentionOp(
        heads=batch * heads,
        pairs=_causal_pairs(length, keys) if is_causal else length * keys,
        width=width,
        precision=PRECISIONS[query.dtype],
        value_width=value_width if value_width != width else None,
    )


def _differs_by_query(mask: Tensor) -> bool:
    """Whether a mask has a row for each query; one that hides padding has a single row for all."""
    return mask.shape[-2] > 1 and mask.stride(-2) > 0


def _causal_pairs(length: int, keys: int) -> float:
    """Return the pairs below the diagonal, which begins at the first query and the first key."""
    square = min(length, keys)
    return square**2 / 2 + (length - square) * keys


def _convolution_ops(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> list[ProductOp]:
    """Return the product of a convolution, or those of the gradients that its backward pass computes."""
    arguments = _by_name(operator, args, kwargs)
    source: Tensor = arguments["input"]
    weight: Tensor = arguments["weight"]
    groups = arguments["groups"]
    if arguments["transposed"]:
        positions = _positions(source)
        inner, outer = len(weight) // groups, weight[0].numel()
    else:
        positions = _positions(arguments.get("grad_output", output))
        inner, outer = weight[0].numel(), len(weight) // groups
    # Groups are one product: a kernel computes them together.
    rows = positions * groups
    precision = PRECISIONS[weight.dtype]
    if "output_mask" not in arguments:
        return [ProductOp(rows, inner, outer, "conv", precision=precision)]
    of_source, of_weight, _ = arguments["output_mask"]
    ops = []
    if of_source:
        ops.append(ProductOp(rows, outer, inner, "conv", precision=precision))
    if of_weight:
        ops.append(ProductOp(inner, rows, outer, "conv", precision=precision))
    return ops


def _positions(images: Tensor) -> int:
    """Return the positions of all images, without their channels."""
    return images.shape[0] * prod(images.shape[2:])


def _by_name(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in operator._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)
