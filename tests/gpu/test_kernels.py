"""The fused kernels against plain torch, on a GPU: values, gradients, tokens without rows, sizes
that divide nothing.

T counts tokens, D is their width, R counts rows, H is the hidden size, E counts experts, K experts
per token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experts.kernels import fused, fused_gate, launching

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not launching.available(), reason="needs a CUDA device and Triton"),
]

DEVICE = "cuda:0"
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 4e-3},
}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)


def draw(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*sizes, generator=generator, device=DEVICE).to(dtype)


def make_row_map(tokens: int, top_k: int, absent: float) -> tuple[Tensor, Tensor]:
    """Rows in random order for some of the choices: the token of each row, and the row of each
    choice or -1."""
    generator = torch.Generator(DEVICE).manual_seed(tokens + top_k)
    has_row = torch.rand(tokens * top_k, generator=generator, device=DEVICE) >= absent
    choice_R = has_row.nonzero().flatten()
    choice_R = choice_R[torch.randperm(len(choice_R), generator=generator, device=DEVICE)]
    row_TK = torch.full((tokens * top_k,), -1, device=DEVICE)
    row_TK[choice_R] = torch.arange(len(choice_R), device=DEVICE)
    return choice_R // top_k, row_TK.view(tokens, top_k)


def plain_sum(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Sums in fp32, one choice after another. The index -1 names a row of zeros at the end."""
    padded_RD = torch.cat([rows_RD.float(), rows_RD.new_zeros(1, rows_RD.shape[1]).float()])
    total_TD = torch.zeros(row_TK.shape[0], rows_RD.shape[1], device=DEVICE)
    for row_T in row_TK.unbind(1):
        total_TD = total_TD + padded_RD[row_T]
    return total_TD.to(rows_RD.dtype)


def plain_swiglu(hidden_RH: Tensor, weights_R: Tensor) -> Tensor:
    gate, value = hidden_RH.float().chunk(2, -1)
    return (F.silu(gate) * value * weights_R[:, None]).to(hidden_RH.dtype)


def plain_choice(
    logits_TE: Tensor, share_E: Tensor, top_k: int, normalise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    probabilities_TE = logits_TE.softmax(-1)
    weights_TK, experts_TK = probabilities_TE.topk(top_k)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    balance = (probabilities_TE * share_E).sum()
    z = logits_TE.logsumexp(-1).square().sum()
    return weights_TK, experts_TK, balance, z


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


ROWS = [(129, k, 24, 0.4) for k in range(1, 9)] + [
    (37, 2, 1000, 0.0),
    (64, 6, 2056, 0.9),
    (3, 2, 4096, 1.0),
    (50, 16, 17, 0.5),
    (0, 2, 64, 0.0),
]


@DTYPES
@pytest.mark.parametrize(("tokens", "top_k", "width", "absent"), ROWS)
def test_rows_are_copied_and_summed_exactly(
    dtype: torch.dtype,
    tokens: int,
    top_k: int,
    width: int,
    absent: float,
) -> None:
    """Sums are those of fp32 in the order of choices, to the bit; one operation is the other's
    backward pass."""
    token_R, row_TK = make_row_map(tokens, top_k, absent)
    (x_TD,) = leaves(draw(tokens, width, dtype=dtype))
    grad_RD = draw(len(token_R), width, dtype=dtype, seed=1)
    rows_RD = fused.gather_rows(x_TD, token_R, row_TK)
    rows_RD.backward(grad_RD)
    assert torch.equal(rows_RD, x_TD[token_R])
    assert x_TD.grad is not None
    assert torch.equal(x_TD.grad, plain_sum(grad_RD, row_TK))

    (rows_RD,) = leaves(grad_RD)
    grad_TD = draw(tokens, width, dtype=dtype, seed=2)
    sum_TD = fused.sum_rows(rows_RD, row_TK, token_R)
    sum_TD.backward(grad_TD)
    assert torch.equal(sum_TD, plain_sum(grad_RD, row_TK))
    assert rows_RD.grad is not None
    assert torch.equal(rows_RD.grad, grad_TD[token_R])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_indices_of_both_widths_and_any_strides(index_dtype: torch.dtype) -> None:
    token_R, row_TK = (index.to(index_dtype) for index in make_row_map(40, 3, 0.3))
    x_TD = draw(64, 40).t()
    rows_RD = fused.gather_rows(x_TD, token_R, row_TK)
    assert torch.equal(rows_RD, x_TD[token_R])
    transposed_RD = rows_RD.t().contiguous().t()
    assert torch.equal(fused.sum_rows(transposed_RD, row_TK, token_R), plain_sum(rows_RD, row_TK))


@DTYPES
@pytest.mark.parametrize("padding", [1, 4, 16])
def test_a_section_of_longer_rows_is_summed(dtype: torch.dtype, padding: int) -> None:
    """The rows of an exchange carry weights behind their features."""
    token_R, row_TK = make_row_map(70, 2, 0.3)
    packed_RD = draw(len(token_R), 200 + padding, dtype=dtype)
    section_RD = packed_RD[:, :200]
    assert torch.equal(fused.sum_rows(section_RD, row_TK, token_R), plain_sum(section_RD, row_TK))
    tail_RD = packed_RD[:, 200:]
    assert torch.equal(fused.sum_rows(tail_RD, row_TK, token_R), plain_sum(tail_RD, row_TK))


@DTYPES
@pytest.mark.parametrize("padding", [1, 8, 56])
def test_a_section_of_longer_rows_is_copied_once(dtype: torch.dtype, padding: int) -> None:
    """Rows that arrived from other hosts are such sections. Only the result takes memory."""
    token_R, row_TK = make_row_map(4096, 2, 0.3)
    packed_TD = draw(4096, 512 + padding, dtype=dtype)
    for section_TD in (packed_TD[:, :512], packed_TD[:, padding:], packed_TD[:, :512].t().contiguous().t()):
        assert torch.equal(fused.gather_rows(section_TD, token_R, row_TK), section_TD[token_R])
    section_TD = packed_TD[:, padding:]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before_bytes = torch.cuda.memory_allocated(DEVICE)
    rows_RD = fused.gather_rows(section_TD, token_R, row_TK)
    peak_bytes = torch.cuda.max_memory_allocated(DEVICE) - before_bytes
    assert peak_bytes < rows_RD.nbytes + section_TD.nbytes / 2


def test_a_token_without_rows_is_zero() -> None:
    """Freed memory full of NaN shows results that are left uninitialised."""
    token_R, row_TK = make_row_map(300, 2, 1.0)
    for _ in range(3):
        poison = torch.full((300, 512), float("nan"), device=DEVICE)
        del poison
        assert not fused.sum_rows(draw(0, 512), row_TK, token_R).any()


@DTYPES
@pytest.mark.parametrize(
    ("rows", "hidden"), [(33, 1000), (257, 24), (19, 2056), (5, 14336), (7, 17), (0, 64)]
)
def test_weighted_swiglu(dtype: torch.dtype, rows: int, hidden: int) -> None:
    inputs = (draw(rows, 2 * hidden, dtype=dtype), draw(rows, seed=1).sigmoid())
    grad_RH = draw(rows, hidden, dtype=dtype, seed=2)
    hidden_RH, weights_R = leaves(*inputs)
    plain_hidden_RH, plain_weights_R = leaves(*inputs)
    output_RH = fused.weighted_swiglu(hidden_RH, weights_R)
    expected_RH = plain_swiglu(plain_hidden_RH, plain_weights_R)
    output_RH.backward(grad_RH)
    expected_RH.backward(grad_RH)
    torch.testing.assert_close(output_RH, expected_RH, **TOLERANCES[dtype])
    torch.testing.assert_close(hidden_RH.grad, plain_hidden_RH.grad, **TOLERANCES[dtype])
    torch.testing.assert_close(weights_R.grad, plain_weights_R.grad, rtol=1e-5, atol=1e-5 * hidden**0.5)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(33, 8, 1), (100, 128, 8), (7, 300, 16), (50, 3, 3), (1000, 60, 5), (0, 4, 2)],
)
def test_the_choice_equals_plain_torch(
    tokens: int,
    experts: int,
    top_k: int,
    normalise: bool,
) -> None:
    """In fp32, against fp64."""
    share_E = draw(experts, seed=1).exp()
    (logits_TE,) = leaves(2 * draw(tokens, experts))
    (exact_logits_TE,) = leaves(logits_TE.double())
    grad_TK = draw(tokens, top_k, seed=2)

    def backward(routing: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        weights_TK, _, balance, z = routing
        losses = 0.3 * balance + 0.7 * z
        torch.autograd.backward((weights_TK, losses), (grad_TK.to(weights_TK.dtype), torch.ones_like(losses)))

    result = fused_gate.choose(logits_TE, share_E, top_k, normalise)
    expected = plain_choice(exact_logits_TE, share_E.double(), top_k, normalise)
    backward(result)
    backward(expected)
    weights_TK, experts_TK, *losses = result
    exact_weights_TK, exact_experts_TK, *exact_losses = expected
    assert torch.equal(experts_TK, exact_experts_TK)
    assert logits_TE.grad is not None
    assert exact_logits_TE.grad is not None
    values = [weights_TK, *losses, logits_TE.grad]
    exact_values = [exact_weights_TK, *exact_losses, exact_logits_TE.grad]
    for value, exact in zip(values, exact_values, strict=True):
        torch.testing.assert_close(value, exact.float(), rtol=1e-5, atol=1e-5)


def test_experts_chosen_by_nan_logits_stay_in_range() -> None:
    logits_TE = draw(16, 5)
    logits_TE[3] = float("nan")
    logits_TE[4, 2] = float("inf")
    weights_TK, experts_TK, balance, _ = fused_gate.choose(logits_TE, torch.ones(5, device=DEVICE), 3, True)
    for experts in experts_TK.tolist():
        assert len(set(experts)) == 3
        assert set(experts) <= set(range(5))
    assert weights_TK[3].isnan().all()
    assert balance.isnan()


@pytest.mark.parametrize(("tokens", "width", "experts"), [(300, 128, 8), (1000, 1024, 60), (17, 64, 3)])
def test_logits_of_the_gate_are_exact_in_fp32(tokens: int, width: int, experts: int) -> None:
    inputs = (draw(tokens, width, dtype=torch.bfloat16), draw(experts, width, dtype=torch.bfloat16, seed=1))
    grad_TE = draw(tokens, experts, seed=2)
    x_TD, weight_ED = leaves(*inputs)
    exact_x_TD, exact_weight_ED = leaves(*(tensor.double() for tensor in inputs))
    logits_TE = fused_gate.gate_logits(x_TD, weight_ED)
    exact_logits_TE = F.linear(exact_x_TD, exact_weight_ED)
    logits_TE.backward(grad_TE)
    exact_logits_TE.backward(grad_TE.double())
    assert logits_TE.dtype == torch.float32
    assert relative_error(logits_TE, exact_logits_TE) < 1e-5
    # 3e-3 is the rounding of a result in bf16.
    assert relative_error(x_TD.grad, exact_x_TD.grad) < 3e-3
    assert relative_error(weight_ED.grad, exact_weight_ED.grad) < 3e-3


def relative_error(value: Tensor | None, exact: Tensor | None) -> float:
    assert value is not None
    assert exact is not None
    return float((value.detach().double() - exact.detach()).norm() / exact.detach().norm())


def test_logits_refuse_other_types() -> None:
    with pytest.raises(TypeError, match="bf16 was needed"):
        fused_gate.gate_logits(draw(4, 8), draw(2, 8))


# --- all kernels together


def run_all(
    x_TD: Tensor,
    weight_ED: Tensor,
    share_E: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
) -> Tensor:
    """A loss that every kernel takes part in."""
    logits_TE = fused_gate.gate_logits(x_TD, weight_ED)
    weights_TK, _, balance, z = fused_gate.choose(logits_TE, share_E, row_TK.shape[1], True)
    rows_RD = fused.gather_rows(x_TD, token_R, row_TK)
    output_RH = fused.weighted_swiglu(rows_RD, weights_TK.reshape(-1)[: len(token_R)])
    sum_TH = fused.sum_rows(output_RH, row_TK, token_R)
    return sum_TH.float().square().mean() + 1e-3 * (balance + z)


def make_inputs() -> tuple[Any, ...]:
    token_R, row_TK = make_row_map(64, 2, 0.25)
    x_TD, weight_ED = leaves(draw(64, 128, dtype=torch.bfloat16), draw(8, 128, dtype=torch.bfloat16, seed=1))
    return x_TD, weight_ED, torch.ones(8, device=DEVICE), token_R, row_TK


def gradients_of(loss: Tensor, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs[:2])


def test_the_host_does_not_wait_for_the_device() -> None:
    inputs = make_inputs()
    run_all(*inputs).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_all(*inputs).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_results_are_reproducible_to_the_bit() -> None:
    inputs = make_inputs()
    first = gradients_of(run_all(*inputs), inputs)
    second = gradients_of(run_all(*inputs), inputs)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_compiled_kernels_compute_the_same() -> None:
    inputs = make_inputs()
    expected = run_all(*inputs)
    loss = torch.compile(run_all, fullgraph=True)(*inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-4)
    for a, b in zip(gradients_of(loss, inputs), gradients_of(expected, inputs), strict=True):
        torch.testing.assert_close(a, b, **TOLERANCES[torch.bfloat16])


def test_traced_kernels_have_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        token_R = torch.zeros(96, dtype=torch.int64, device=DEVICE)
        row_TK = torch.zeros(64, 2, dtype=torch.int64, device=DEVICE)
        x_TD = torch.empty(64, 128, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        weight_ED = torch.empty(8, 128, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        run_all(x_TD, weight_ED, torch.ones(8, device=DEVICE), token_R, row_TK).backward()
        assert x_TD.grad is not None
        assert x_TD.grad.shape == (64, 128)


@pytest.mark.whole_gpu
def test_more_than_2_to_the_31_elements() -> None:
    """Offsets are computed in 64 bits. The tensors take 16 GiB."""
    tokens, width = 600_000, 4096
    token_T = torch.arange(tokens, device=DEVICE)
    x_TD = torch.empty(tokens, width, dtype=torch.bfloat16, device=DEVICE)
    x_TD.copy_((token_T % 251).unsqueeze(1))
    token_R = token_T.flip(0)
    row_T1 = token_T.flip(0).unsqueeze(1)
    rows_RD = fused.gather_rows(x_TD, token_R, row_T1)
    assert torch.equal(rows_RD[:, 7], x_TD[:, 7].flip(0))
    assert torch.equal(fused.sum_rows(rows_RD, row_T1, token_R)[-5:], x_TD[-5:])
    output_RH = fused.weighted_swiglu(rows_RD, torch.ones(tokens, device=DEVICE))
    ones_R = torch.ones(5, device=DEVICE)
    torch.testing.assert_close(output_RH[:5], plain_swiglu(rows_RD[:5], ones_R))
    torch.testing.assert_close(output_RH[-5:], plain_swiglu(rows_RD[-5:], ones_R))
