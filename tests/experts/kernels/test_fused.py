"""Tensors that the kernels read and write, without a GPU: kernels take rows as contiguous.

R counts rows, T tokens, D is their width, H the hidden size, E counts experts, K experts per token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from experts.kernels import fused, slot_sort
from experts.kernels.fused_experts import experts_fused
from experts.kernels.fused_gate import choose, gate_logits
from experts.types import RowMap

R, T, D, H, E, K = 6, 3, 4, 5, 2, 2
_ops: Any = torch.ops.experts


def transposed(*shape: int, device: str = "cpu") -> Tensor:
    """Return a tensor whose two last dimensions are stored the other way round."""
    *outer, rows, columns = shape
    return torch.ones(*outer, columns, rows, device=device).transpose(-1, -2)


def test_kernels_get_contiguous_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Tensor] = []
    monkeypatch.setattr(
        fused, "launch", lambda *given, **_: launched.extend(a for a in given if isinstance(a, Tensor))
    )
    weights_R = torch.ones(2 * R)[::2]
    fused.swiglu(transposed(R, 2 * H), weights_R)
    fused.swiglu_backward(transposed(R, H), transposed(R, 2 * H), weights_R)
    assert len(launched) >= 9
    assert all(tensor.is_contiguous() for tensor in launched)


def test_results_are_described_as_contiguous() -> None:
    """Compiled code relies on the strides of the description."""
    weights_R = torch.ones(R, device="meta")
    hidden_RH = transposed(R, 2 * H, device="meta")
    x_TD = transposed(T, D, device="meta")
    matrices = [transposed(E, D, 2 * H, device="meta"), transposed(E, H, D, device="meta")]
    counts_L, token_R, row_TK = (torch.ones(n, dtype=torch.int64, device="meta") for n in (E, R, T * K))
    rows = [weights_R, counts_L, row_TK.view(T, K)]
    y_TD, hidden = _ops.compute(x_TD, token_R, rows, matrices, False)
    passed = (x_TD, None, hidden, rows, matrices, True)
    d_x_TD, d_weights_R, d_matrices = _ops.compute_backward(transposed(T, D, device="meta"), *passed)
    slots_TK = transposed(T, K, device="meta").to(torch.int64)
    results = [
        *_ops.swiglu_backward(transposed(R, H, device="meta"), hidden_RH, weights_R),
        *_ops.sort_choices(slots_TK, E, slot_sort.EVERY),
        *(y_TD, d_x_TD, d_weights_R, *d_matrices),
    ]
    assert [result.shape for result in d_matrices] == [matrix.shape for matrix in matrices]
    assert all(result.is_contiguous() for result in results)


def test_experts_without_gradients_have_none() -> None:
    x_TD = torch.ones(T, D, device="meta")
    rows = [torch.ones(R, device="meta")] * 3
    matrices = [torch.ones(E, D, 2 * H, device="meta"), torch.ones(E, H, D, device="meta")]
    *_, d_matrices = _ops.compute_backward(x_TD, x_TD, None, x_TD, rows, matrices, False)
    assert d_matrices == []


ROW_MAP = RowMap(
    torch.ones(R, dtype=torch.int64, device="meta"), torch.ones(T, K, dtype=torch.int64, device="meta"), True
)


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype, device="meta")


def of_experts(in_fp8: bool, x_TD: Tensor) -> Tensor:
    matrices = [(on_meta(E, D, 2 * H), on_meta(E, H, D))]
    return experts_fused(x_TD, matrices, on_meta(E), on_meta(R), ROW_MAP, in_fp8)


DIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "experts": partial(of_experts, False),
    "experts in fp8": partial(of_experts, True),
    "copies of rows": lambda x_TD: fused.gather_rows(x_TD, ROW_MAP.token_R, ROW_MAP.row_TK),
    "sums of rows": lambda x_TD: fused.sum_rows(x_TD, ROW_MAP.row_TK, ROW_MAP.token_R),
    "swiglu": lambda x_TD: fused.weighted_swiglu(x_TD, on_meta(T)),
    "choice": lambda x_TD: choose(x_TD, on_meta(D), K, True)[0],
    "logits": lambda x_TD: gate_logits(x_TD.bfloat16(), on_meta(E, D, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_derivatives_are_refused(name: str) -> None:
    """They would be wrong: autograd does not see into the operators."""
    x_TD = on_meta(T, D).requires_grad_()
    result = DIFFERENTIABLE[name](x_TD)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(result.sum(), x_TD, create_graph=True)
    (grad_TD,) = torch.autograd.grad(DIFFERENTIABLE[name](x_TD).sum(), x_TD)
    assert grad_TD.shape == (T, D)
