"""The two kernels for experts against each other on a CPU, the checks around torch's operator, and
the choice between them.

R counts rows, D is their width, H the hidden size, E counts experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from experts.kernels import expert_tables, launching
from experts.kernels.expert_tables import TiledClass
from experts.kernels.grouped import (
    bounded_offsets,
    checked_offsets,
    choose_kernel,
    experts_grouped,
    grouped_product,
    grouped_works,
    is_fused,
)
from experts.kernels.loop import activate, experts_loop, row_counts
from experts.kernels.row_products import RowTiles
from experts.model import initialise
from experts.moe.bank import ExpertBank
from experts.types import Kernel, Kind

CPU = torch.device("cpu")
COUNTS = {
    "even": [4, 4, 4],
    "uneven": [1, 7, 2, 5],
    "empty first": [0, 3, 5],
    "empty in the middle": [3, 0, 0, 5],
    "empty last": [3, 5, 0],
    "all in one": [0, 0, 9, 0],
    "one expert": [6],
    "one expert without rows": [0],
    "no rows at all": [0, 0, 0],
    "single rows": [1] * 17,
}
OFFSETS = torch.tensor([2, 6], dtype=torch.int32)  # two groups of 2 and 4 rows
Compute = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Kind], Tensor]
both_kernels = pytest.mark.parametrize("compute", [experts_loop, experts_grouped], ids=["loop", "grouped"])


def make_experts(
    experts: int,
    width: int,
    hidden: int,
    kind: Kind,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(experts)
    inner = 2 * hidden if kind == "swiglu" else hidden
    up_EDH = torch.randn(experts, width, inner, generator=generator) / width**0.5
    down_EHD = torch.randn(experts, hidden, width, generator=generator) / hidden**0.5
    return up_EDH.to(dtype), down_EHD.to(dtype)


def run_pass(
    compute: Compute,
    counts: list[int],
    kind: Kind,
    width: int = 8,
    hidden: int = 12,
) -> tuple[Tensor, ...]:
    """Output, and gradients of the rows, of both matrices and of the weights of rows."""
    generator = torch.Generator().manual_seed(5)
    rows_RD = torch.randn(sum(counts), width, generator=generator)
    weights_R = torch.rand(sum(counts), generator=generator)
    upstream_RD = torch.randn(sum(counts), width, generator=generator)
    up_EDH, down_EHD = make_experts(len(counts), width, hidden, kind)
    inputs = [tensor.requires_grad_() for tensor in (rows_RD, up_EDH, down_EHD, weights_R)]
    output_RD = compute(rows_RD, up_EDH, down_EHD, torch.tensor(counts), weights_R, kind)
    return output_RD.detach(), *torch.autograd.grad((output_RD * upstream_RD).sum(), inputs)


def compute_row_by_row(
    rows_RD: Tensor,
    up_EDH: Tensor,
    down_EHD: Tensor,
    counts_E: Tensor,
    weights_R: Tensor,
    kind: Kind,
) -> Tensor:
    expert_of = [expert for expert, count in enumerate(counts_E.tolist()) for _ in range(count)]
    outputs: list[Tensor] = []
    for row_D, weight, expert in zip(rows_RD, weights_R, expert_of, strict=True):
        hidden_H = row_D @ up_EDH[expert]
        if kind == "ffn":
            inner_H = F.gelu(hidden_H)
        else:
            gate_H, value_H = hidden_H.chunk(2)
            inner_H = gate_H * torch.sigmoid(gate_H) * value_H
        outputs.append(weight * (inner_H @ down_EHD[expert]))
    if outputs:
        return torch.stack(outputs)
    return rows_RD + 0 * (up_EDH.sum() + down_EHD.sum() + weights_R.sum())


@both_kernels
@pytest.mark.parametrize("kind", ["swiglu", "ffn"])
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("width", "hidden"), [(8, 12), (20, 36)])
def test_kernels_equal_row_by_row(
    width: int,
    hidden: int,
    name: str,
    kind: Kind,
    compute: Compute,
) -> None:
    results = run_pass(compute, COUNTS[name], kind, width, hidden)
    expected = run_pass(compute_row_by_row, COUNTS[name], kind, width, hidden)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)


@both_kernels
def test_an_expert_without_rows_has_a_zero_gradient(compute: Compute) -> None:
    """Freed memory full of NaN shows gradients that are left uninitialised."""
    for _ in range(3):
        poison = torch.full((4096,), float("nan"))
        del poison
        _, _, d_up_EDH, d_down_EHD, _ = run_pass(compute, [3, 0, 5, 0], "swiglu")
        for gradient in (d_up_EDH, d_down_EHD):
            assert gradient.isfinite().all()
            assert not gradient[[1, 3]].any()
            assert gradient[[0, 2]].any()


# --- strides


def product_by_group(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.cat([rows[:2] @ weights[0], rows[2:] @ weights[1]])


def test_an_expanded_gradient_passes_through_the_grouped_product() -> None:
    """The operator itself fails on it."""
    rows = torch.randn(6, 8, requires_grad=True)
    weights = make_experts(2, 8, 4, "ffn")[0].requires_grad_()
    grouped_product(rows, weights, OFFSETS).sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    torch.testing.assert_close(rows.grad, weights.detach().sum(2)[[0, 0, 1, 1, 1, 1]])
    torch.testing.assert_close(weights.grad[0], rows.detach()[:2].sum(0).unsqueeze(1).expand(8, 4))


def test_rows_may_have_any_strides() -> None:
    rows = torch.randn(8, 6).t()
    weights, _ = make_experts(2, 8, 4, "ffn")
    torch.testing.assert_close(grouped_product(rows, weights, OFFSETS), product_by_group(rows, weights))


def test_weights_may_have_the_strides_that_the_operator_supports() -> None:
    rows = torch.randn(6, 8)
    transposed = torch.randn(2, 4, 8).transpose(1, 2)
    expanded = torch.randn(1, 8, 4).expand(2, 8, 4)
    every_second = torch.randn(2, 16, 4)[:, ::2]
    for weights in (transposed, expanded, every_second):
        torch.testing.assert_close(grouped_product(rows, weights, OFFSETS), product_by_group(rows, weights))
    with pytest.raises(RuntimeError, match="strides should be multiple of 16 bytes"):
        grouped_product(rows, torch.randn(2, 8, 6)[:, :, :4], OFFSETS)


# --- refused arguments


@pytest.mark.parametrize("offsets", [[2, 5, 8], [0, 0, 8], [8, 8, 8], [3, 3, 8]])
def test_offsets_that_cover_the_rows_are_accepted(offsets: list[int]) -> None:
    assert checked_offsets(torch.tensor(offsets, dtype=torch.int32), 8).tolist() == offsets


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 12), min_size=1, max_size=9))
def test_bounded_offsets_cover_the_rows_whatever_they_were(offsets: list[int]) -> None:
    """On a GPU nothing asserts: no group reads beyond the rows, and every row is written."""
    bounded_E = bounded_offsets(torch.tensor(offsets, dtype=torch.int32), 8)
    bounded = bounded_E.tolist()
    assert bounded_E.dtype == torch.int32
    assert bounded == sorted(bounded)
    assert (min(bounded) >= 0, bounded[-1]) == (True, 8)
    assert (bounded == offsets) == (min(offsets) >= 0 and offsets == sorted(offsets) and offsets[-1] == 8)


@pytest.mark.parametrize(
    "offsets",
    [[2, 5, 7], [2, 5, 9], [5, 2, 8], [-1, 2, 8], [2, 9, 8], [0, 0, 0]],
    ids=["too short", "too long", "descending", "negative", "past the end", "all zero"],
)
def test_offsets_that_do_not_cover_the_rows_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError) as caught:
        checked_offsets(torch.tensor(offsets, dtype=torch.int32), 8)
    assert str(caught.value) == f"offsets {offsets} do not cover 8 rows in order"


@pytest.mark.parametrize("counts", [[3, 2], [3, 4], [-1, 7]])
def test_the_grouped_kernel_refuses_counts_that_do_not_cover_the_rows(counts: list[int]) -> None:
    experts = make_experts(2, 8, 4, "ffn")
    with pytest.raises(ValueError, match="do not cover 6 rows in order"):
        experts_grouped(torch.randn(6, 8), *experts, torch.tensor(counts), torch.ones(6), "ffn")


@pytest.mark.parametrize(("counts", "num_rows"), [([3, 2], 6), ([1, 2], 0)])
def test_the_loop_refuses_counts_that_do_not_cover_the_rows(
    counts: list[int],
    num_rows: int,
) -> None:
    experts = make_experts(2, 8, 4, "ffn")
    message = f"the counts of the experts sum to {sum(counts)} rows; there are {num_rows}"
    with pytest.raises(RuntimeError, match=message):
        experts_loop(torch.randn(num_rows, 8), *experts, torch.tensor(counts), torch.ones(num_rows), "ffn")


def refusal(rows: Tensor, weights: Tensor, offsets: Tensor) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        grouped_product(rows, weights, offsets)
    return str(caught.value)


def test_wrong_types_are_refused_by_name() -> None:
    rows = torch.randn(6, 8)
    weights, _ = make_experts(2, 8, 4, "ffn")
    assert refusal(rows, weights.bfloat16(), OFFSETS).startswith(
        "rows are torch.float32, weights torch.bfloat16; "
        "one of torch.bfloat16, torch.float16, torch.float32 was needed"
    )
    text = refusal(rows.double(), weights.double(), OFFSETS)
    assert "rows are torch.float64, weights torch.float64" in text
    assert "offsets in torch.int64" in refusal(rows, weights, OFFSETS.long())


def test_sizes_that_do_not_match_are_refused() -> None:
    rows = torch.randn(6, 8)
    weights, _ = make_experts(2, 8, 4, "ffn")
    text = refusal(torch.randn(6, 4), weights, OFFSETS)
    assert text.startswith("rows (6, 4), weights (2, 8, 4), (2,) offsets in torch.int32;")
    assert "(1,) offsets" in refusal(rows, weights, OFFSETS[1:])
    assert "(3,) offsets" in refusal(rows, weights, torch.tensor([2, 4, 6], dtype=torch.int32))


@pytest.mark.parametrize(
    ("inner", "outer", "dtype", "multiple"),
    [
        (6, 8, torch.float32, 4),
        (8, 6, torch.float32, 4),
        (12, 8, torch.bfloat16, 8),
        (8, 20, torch.float16, 8),
    ],
)
def test_sizes_that_the_operator_does_not_support_are_refused(
    inner: int, outer: int, dtype: torch.dtype, multiple: int
) -> None:
    rows = torch.zeros(6, inner, dtype=dtype)
    weights = torch.zeros(2, inner, outer, dtype=dtype)
    text = refusal(rows, weights, OFFSETS)
    assert text == f"weights of {inner} × {outer} in {dtype}; multiples of {multiple} were needed"


# --- the choice


@pytest.mark.parametrize(
    ("dtype", "width", "hidden", "works"),
    [
        (torch.float32, 8, 12, True),
        (torch.float32, 6, 12, False),
        (torch.float32, 8, 10, False),
        (torch.bfloat16, 8, 16, True),
        (torch.bfloat16, 8, 12, False),
        (torch.float64, 8, 16, False),
    ],
)
def test_the_grouped_kernel_works_for_some_types_and_sizes(
    dtype: torch.dtype, width: int, hidden: int, works: bool
) -> None:
    assert grouped_works(CPU, dtype, width, hidden) is works
    assert not grouped_works(torch.device("meta"), dtype, width, hidden)
    if works:
        assert choose_kernel("grouped", CPU, dtype, width, hidden) == "grouped"
        return
    message = f"does not take experts of {width} × {hidden} in {dtype} on cpu, .*--expert-kernel auto"
    with pytest.raises(ValueError, match=message):
        choose_kernel("grouped", CPU, dtype, width, hidden)


@pytest.mark.parametrize(
    ("dtype", "width", "hidden", "chosen"),
    [
        (torch.float32, 8, 16, "grouped"),
        (torch.float32, 256, 255, "loop"),  # not a multiple of 16 bytes
        (torch.float32, 256, 256, "grouped"),
        (torch.bfloat16, 8, 16, "loop"),
        (torch.float64, 8, 16, "loop"),
    ],
)
def test_on_a_cpu_the_type_decides_and_the_loop_can_be_forced(
    dtype: torch.dtype, width: int, hidden: int, chosen: Kernel
) -> None:
    assert not is_fused(CPU, dtype)
    assert choose_kernel("auto", CPU, dtype, width, hidden) == chosen
    assert choose_kernel("loop", CPU, dtype, width, hidden) == "loop"


def test_more_experts_than_a_fused_product_takes_are_computed_in_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch refuses them: "Can't process more than 1024 groups"."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gpu = torch.device("cuda", 0)
    sizes = (gpu, torch.bfloat16, 64, 32)
    assert choose_kernel("auto", *sizes, 1023) == "grouped"
    assert choose_kernel("auto", *sizes, 1024) == "loop"
    with pytest.raises(ValueError, match=r"64 × 32 .* 1024 of one size; .* at most 1023 of one size"):
        choose_kernel("grouped", *sizes, 1024)
    bank = ExpertBank(64, [32] * 1024)
    assert bank.waits_for_counts(gpu, torch.bfloat16)
    assert not ExpertBank(64, [32] * 1023).waits_for_counts(gpu, torch.bfloat16)


@pytest.mark.parametrize("fp8", [False, True])
def test_our_own_kernels_compute_any_number_of_experts(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(launching, "available", lambda: True)
    bank = ExpertBank(64, [64] * 1024)
    bank.fp8 = fp8
    assert not bank.waits_for_counts(torch.device("cuda", 0), torch.bfloat16)


@pytest.mark.parametrize("experts", [1023, 1024])
def test_gradients_of_many_experts_are_left_to_our_kernel(
    experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first size class: that of the others is ours anyway."""
    used: list[str] = []
    monkeypatch.setattr(expert_tables.F, "grouped_mm", lambda *_, **__: used.append("torch"))
    monkeypatch.setattr(expert_tables, "weight_gradient", lambda *_: used.append("ours"))
    number_E = torch.arange(experts, dtype=torch.int32)
    tiles = RowTiles(64, number_E, number_E, number_E[:1], number_E, number_E + 1)
    matrices = torch.zeros(experts, 1, 1)
    rows = torch.zeros(experts, 1)
    expert_tables.weight_gradients([rows], [rows], [TiledClass(matrices, matrices, tiles)])
    assert used == ["torch" if experts == 1023 else "ours"]


def test_a_bank_computes_the_same_with_each_kernel() -> None:
    """Experts of three sizes, one of them without rows, in stacked order."""
    kernels: tuple[Kernel, ...] = ("loop", "grouped", "auto")
    results: dict[Kernel, list[Tensor]] = {}
    for kernel in kernels:
        bank = ExpertBank(8, [4, 16, 4, 8])
        initialise(bank, 1)
        bank.kernel = kernel
        rows_RD = torch.randn(11, 8, generator=torch.Generator().manual_seed(1))
        output_RD = bank(rows_RD, torch.tensor([4, 0, 2, 5]), torch.linspace(0.1, 1, 11))
        gradients = torch.autograd.grad(output_RD.square().sum(), [stack for *_, stack in bank.stacks()])
        results[kernel] = [output_RD, *gradients]
    for automatic, grouped in zip(results["auto"], results["grouped"], strict=True):
        assert torch.equal(automatic, grouped)
    for grouped, loop in zip(results["grouped"], results["loop"], strict=True):
        torch.testing.assert_close(grouped, loop, rtol=1e-5, atol=1e-5)


def test_a_bank_refuses_a_kernel_that_does_not_work() -> None:
    bank = ExpertBank(8, [4, 6])
    initialise(bank, 1)
    bank.kernel = "grouped"
    with pytest.raises(ValueError, match=r"experts of 8 × 6 in torch\.float32 on cpu"):
        bank(torch.randn(2, 8), torch.tensor([1, 1]), torch.ones(2))


# --- parts of the loop


@pytest.mark.parametrize("kind", ["swiglu", "ffn"])
def test_weights_of_rows_may_be_applied_between_the_products(kind: Kind) -> None:
    hidden_RH = torch.randn(5, 12, dtype=torch.float64)
    weights_R = torch.rand(5)
    expected_RH = activate(hidden_RH, torch.ones(5), kind) * weights_R.double().unsqueeze(1)
    torch.testing.assert_close(activate(hidden_RH, weights_R, kind), expected_RH)


def test_a_traced_model_has_an_even_split() -> None:
    assert row_counts(torch.empty(4, dtype=torch.int64, device="meta"), 10) == [3, 3, 2, 2]
    assert row_counts(torch.tensor([1, 0, 9]), 10) == [1, 0, 9]


def test_kernels_agree_in_half_precision() -> None:
    rows_RD = torch.randn(7, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights_R = torch.rand(7, generator=torch.Generator().manual_seed(2))
    experts = make_experts(3, 8, 8, "swiglu", torch.bfloat16)
    counts_E = torch.tensor([2, 0, 5])
    loop_RD = experts_loop(rows_RD, *experts, counts_E, weights_R, "swiglu")
    grouped_RD = experts_grouped(rows_RD, *experts, counts_E, weights_R, "swiglu")
    assert loop_RD.dtype == grouped_RD.dtype == torch.bfloat16
    torch.testing.assert_close(grouped_RD, loop_RD, rtol=2e-2, atol=2e-2)
