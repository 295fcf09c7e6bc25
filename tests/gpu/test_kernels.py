"""The fused kernels against their plain forms, on a GPU: values, gradients, tokens without rows, sizes that divide nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experts.kernels import fused, fused_gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not fused.available(), reason="needs a CUDA device and Triton"),
]

DEVICE = "cuda:0"
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 4e-3},
}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)


def drawn(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*sizes, generator=generator, device=DEVICE).to(dtype)


def pairs(tokens: int, top_k: int, missing: float) -> tuple[Tensor, Tensor]:
    """Rows in random order for a share of the choices: the token of each row, and the row of each choice or -1."""
    generator = torch.Generator(DEVICE).manual_seed(tokens + top_k)
    there = torch.rand(tokens * top_k, generator=generator, device=DEVICE) >= missing
    chosen_R = there.nonzero().flatten()
    chosen_R = chosen_R[torch.randperm(len(chosen_R), generator=generator, device=DEVICE)]
    back_R = torch.full((tokens * top_k,), -1, device=DEVICE)
    back_R[chosen_R] = torch.arange(len(chosen_R), device=DEVICE)
    return chosen_R // top_k, back_R.view(tokens, top_k)


def plain_sum(rows_RD: Tensor, back_TK: Tensor) -> Tensor:
    """A row of zeros stands for those that are not there. In fp32, one choice after another."""
    padded = torch.cat([rows_RD.float(), rows_RD.new_zeros(1, rows_RD.shape[1]).float()])
    total = torch.zeros(back_TK.shape[0], rows_RD.shape[1], device=DEVICE)
    for column_T in back_TK.unbind(1):
        total = total + padded[column_T]
    return total.to(rows_RD.dtype)


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
    return weights_TK, experts_TK, (probabilities_TE * share_E).sum(), logits_TE.logsumexp(-1).square().sum()


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
@pytest.mark.parametrize(("tokens", "top_k", "width", "missing"), ROWS)
def test_rows_out_and_back(dtype: torch.dtype, tokens: int, top_k: int, width: int, missing: float) -> None:
    """Copies are exact; sums are those of fp32 in the order of choices, to the bit."""
    token_R, back_TK = pairs(tokens, top_k, missing)
    (x_TD,) = leaves(drawn(tokens, width, dtype=dtype))
    grad_RD = drawn(len(token_R), width, dtype=dtype, seed=1)
    rows_RD = fused.gather_rows(x_TD, token_R, back_TK)
    rows_RD.backward(grad_RD)
    assert torch.equal(rows_RD, x_TD[token_R])
    assert x_TD.grad is not None
    assert torch.equal(x_TD.grad, plain_sum(grad_RD, back_TK))

    (rows_RD,) = leaves(grad_RD)
    grad_TD = drawn(tokens, width, dtype=dtype, seed=2)
    made_TD = fused.sum_rows(rows_RD, back_TK, token_R)
    made_TD.backward(grad_TD)
    assert torch.equal(made_TD, plain_sum(grad_RD, back_TK))
    assert rows_RD.grad is not None
    assert torch.equal(rows_RD.grad, grad_TD[token_R])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_indices_of_both_widths_and_foreign_strides(index: torch.dtype) -> None:
    token_R, back_TK = pairs(40, 3, 0.3)
    x_TD = drawn(64, 40).t()
    rows_RD = fused.gather_rows(x_TD, token_R.to(index), back_TK.to(index))
    assert torch.equal(rows_RD, x_TD[token_R])
    assert torch.equal(
        fused.sum_rows(rows_RD.t().contiguous().t(), back_TK.to(index), token_R.to(index)),
        plain_sum(rows_RD, back_TK),
    )


def test_what_has_no_row_is_zero_whatever_lay_in_memory() -> None:
    token_R, back_TK = pairs(300, 2, 1.0)
    for _ in range(3):
        poison = torch.full((300, 512), float("nan"), device=DEVICE)
        del poison
        assert not fused.sum_rows(drawn(0, 512), back_TK, token_R).any()


@DTYPES
@pytest.mark.parametrize(
    ("rows", "hidden"), [(33, 1000), (257, 24), (19, 2056), (5, 14336), (7, 17), (0, 64)]
)
def test_weighted_swiglu(dtype: torch.dtype, rows: int, hidden: int) -> None:
    given = drawn(rows, 2 * hidden, dtype=dtype), drawn(rows, seed=1).sigmoid()
    grad_RH = drawn(rows, hidden, dtype=dtype, seed=2)
    (hidden_a, weights_a), (hidden_b, weights_b) = leaves(*given), leaves(*given)
    made, expected = fused.weighted_swiglu(hidden_a, weights_a), plain_swiglu(hidden_b, weights_b)
    made.backward(grad_RH)
    expected.backward(grad_RH)
    torch.testing.assert_close(made, expected, **TOLERANCES[dtype])
    torch.testing.assert_close(hidden_a.grad, hidden_b.grad, **TOLERANCES[dtype])
    torch.testing.assert_close(weights_a.grad, weights_b.grad, rtol=1e-5, atol=1e-5 * hidden**0.5)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(33, 8, 1), (100, 128, 8), (7, 300, 16), (50, 3, 3), (1000, 60, 5), (0, 4, 2)],
)
def test_choosing(tokens: int, experts: int, top_k: int, normalise: bool) -> None:
    logits, share_E = 2 * drawn(tokens, experts), drawn(experts, seed=1).exp()
    (mine,), (theirs,) = leaves(logits), leaves(logits.double())
    found, expected = (
        fused_gate.choose(mine, share_E, top_k, normalise),
        plain_choice(theirs, share_E.double(), top_k, normalise),
    )
    grad_TK = drawn(tokens, top_k, seed=2)
    torch.autograd.backward(
        (found[0], 0.3 * found[2] + 0.7 * found[3]), (grad_TK, torch.ones((), device=DEVICE))
    )
    torch.autograd.backward(
        (expected[0], 0.3 * expected[2] + 0.7 * expected[3]), (grad_TK.double(), torch.ones_like(expected[2]))
    )
    assert torch.equal(found[1], expected[1])
    for a, b in (
        (found[0], expected[0]),
        (found[2], expected[2]),
        (found[3], expected[3]),
        (mine.grad, theirs.grad),
    ):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-5)


def test_a_choice_among_what_is_no_number_stays_in_range() -> None:
    logits_TE = drawn(16, 5)
    logits_TE[3], logits_TE[4, 2] = float("nan"), float("inf")
    weights_TK, experts_TK, balance, _ = fused_gate.choose(logits_TE, torch.ones(5, device=DEVICE), 3, True)
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in experts_TK.tolist())
    assert weights_TK[3].isnan().all()
    assert balance.isnan()


@pytest.mark.parametrize(("tokens", "width", "experts"), [(300, 128, 8), (1000, 1024, 60), (17, 64, 3)])
def test_logits_of_the_gate_are_exact_in_fp32(tokens: int, width: int, experts: int) -> None:
    given = drawn(tokens, width, dtype=torch.bfloat16), drawn(experts, width, dtype=torch.bfloat16, seed=1)
    grad_TE = drawn(tokens, experts, seed=2)
    (x, weight), (x_64, weight_64) = leaves(*given), leaves(*(tensor.double() for tensor in given))
    logits, expected = fused_gate.gate_logits(x, weight), F.linear(x_64, weight_64)
    logits.backward(grad_TE)
    expected.backward(grad_TE.double())
    assert logits.dtype == torch.float32
    assert apart(logits, expected) < 1e-5
    assert apart(x.grad, x_64.grad) < 3e-3  # the rounding of a result in bf16
    assert apart(weight.grad, weight_64.grad) < 3e-3


def apart(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def test_logits_refuse_other_types() -> None:
    with pytest.raises(TypeError, match="bf16 was needed"):
        fused_gate.gate_logits(drawn(4, 8), drawn(2, 8))


def whole(x_TD: Tensor, weight_ED: Tensor, share_E: Tensor, token_R: Tensor, back_TK: Tensor) -> Tensor:
    """All of them in a row."""
    weights_TK, _, balance, z = fused_gate.choose(
        fused_gate.gate_logits(x_TD, weight_ED), share_E, back_TK.shape[1], True
    )
    rows_RD = fused.gather_rows(x_TD, token_R, back_TK)
    made_RH = fused.weighted_swiglu(rows_RD, weights_TK.reshape(-1)[: len(token_R)])
    return fused.sum_rows(made_RH, back_TK, token_R).float().square().mean() + 1e-3 * (balance + z)


def example() -> tuple[Any, ...]:
    token_R, back_TK = pairs(64, 2, 0.25)
    x_TD, weight_ED = leaves(
        drawn(64, 128, dtype=torch.bfloat16), drawn(8, 128, dtype=torch.bfloat16, seed=1)
    )
    return x_TD, weight_ED, torch.ones(8, device=DEVICE), token_R, back_TK


def test_nothing_waits_for_the_device() -> None:
    given = example()
    whole(*given).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole(*given).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_twice_is_the_same_to_the_bit() -> None:
    def gradients() -> list[Tensor | None]:
        given = example()
        whole(*given).backward()
        return [given[0].grad, given[1].grad]

    for a, b in zip(gradients(), gradients(), strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_compiled_they_are_the_same() -> None:
    eager, compiled = example(), example()
    expected = whole(*eager)
    expected.backward()
    found = torch.compile(whole, fullgraph=True)(*compiled)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(compiled[0].grad, eager[0].grad, **TOLERANCES[torch.bfloat16])
    torch.testing.assert_close(compiled[1].grad, eager[1].grad, **TOLERANCES[torch.bfloat16])


def test_traced_without_a_device_they_have_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        token_R, back_TK = (
            torch.zeros(96, dtype=torch.int64, device=DEVICE),
            torch.zeros(64, 2, dtype=torch.int64, device=DEVICE),
        )
        x_TD = torch.empty(64, 128, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        weight_ED = torch.empty(8, 128, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        whole(x_TD, weight_ED, torch.ones(8, device=DEVICE), token_R, back_TK).backward()
        assert x_TD.grad is not None
        assert x_TD.grad.shape == (64, 128)


def test_rows_past_the_reach_of_32_bits() -> None:
    """2³¹ elements and more: offsets are computed in 64 bits."""
    tokens, width = 600_000, 4096
    token_T = torch.arange(tokens, device=DEVICE)
    x_TD = torch.empty(tokens, width, dtype=torch.bfloat16, device=DEVICE)
    x_TD.copy_((token_T % 251).unsqueeze(1))
    back_T1 = token_T.flip(0).unsqueeze(1)
    rows_RD = fused.gather_rows(x_TD, token_T.flip(0), back_T1)
    assert torch.equal(rows_RD[:, 7], x_TD[:, 7].flip(0))
    assert torch.equal(fused.sum_rows(rows_RD, back_T1, token_T.flip(0))[-5:], x_TD[-5:])
    made_RH = fused.weighted_swiglu(rows_RD, torch.ones(tokens, device=DEVICE))
    torch.testing.assert_close(made_RH[:5], plain_swiglu(rows_RD[:5], torch.ones(5, device=DEVICE)))
    torch.testing.assert_close(made_RH[-5:], plain_swiglu(rows_RD[-5:], torch.ones(5, device=DEVICE)))
