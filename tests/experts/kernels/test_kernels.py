"""The two ways to compute experts against each other on a CPU, and what the wrapper around torch's operator refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experts.bank import ExpertBank
from experts.kernels.choice import choose_kernel, is_fused
from experts.kernels.grouped import check_offsets, experts_grouped, grouped_product, grouped_works
from experts.kernels.loop import activate, experts_loop, row_counts
from experts.model import initialise
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
Compute = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Kind], Tensor]


def weights_of(
    experts: int, width: int, hidden: int, kind: Kind, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(experts)
    inner = 2 * hidden if kind == "swiglu" else hidden
    up = torch.randn(experts, width, inner, generator=generator) / width**0.5
    return up.to(dtype), (torch.randn(experts, hidden, width, generator=generator) / hidden**0.5).to(dtype)


def passed(
    compute: Compute, counts: list[int], kind: Kind, width: int = 8, hidden: int = 12
) -> tuple[Tensor, ...]:
    """Output and gradients of rows, weights of rows and both matrices."""
    generator = torch.Generator().manual_seed(5)
    rows, scale = (
        torch.randn(sum(counts), width, generator=generator),
        torch.rand(sum(counts), generator=generator),
    )
    upstream = torch.randn(sum(counts), width, generator=generator)
    given = [
        tensor.requires_grad_() for tensor in (rows, *weights_of(len(counts), width, hidden, kind), scale)
    ]
    rows, up, down, scale = given
    made = compute(rows, up, down, torch.tensor(counts), scale, kind)
    return made.detach(), *torch.autograd.grad((made * upstream).sum(), given)


def plainly(rows: Tensor, up: Tensor, down: Tensor, counts: Tensor, scale: Tensor, kind: Kind) -> Tensor:
    """Row by row."""
    expert_of = [expert for expert, count in enumerate(counts.tolist()) for _ in range(count)]
    made = []
    for row, weight, expert in zip(rows, scale, expert_of, strict=True):
        hidden = row @ up[expert]
        half = len(hidden) // 2
        inner = (
            F.gelu(hidden) if kind == "ffn" else hidden[:half] * torch.sigmoid(hidden[:half]) * hidden[half:]
        )
        made.append(weight * (inner @ down[expert]))
    return torch.stack(made) if made else rows + 0 * (up.sum() + down.sum() + scale.sum())


@pytest.mark.parametrize("compute", [experts_loop, experts_grouped], ids=["loop", "grouped"])
@pytest.mark.parametrize("kind", ["swiglu", "ffn"])
@pytest.mark.parametrize("name", COUNTS)
def test_kernels_equal_row_by_row(name: str, kind: Kind, compute: Compute) -> None:
    counts = COUNTS[name]
    found, expected = passed(compute, counts, kind), passed(plainly, counts, kind)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["swiglu", "ffn"])
@pytest.mark.parametrize("name", COUNTS)
def test_grouped_equals_loop(name: str, kind: Kind) -> None:
    found, expected = (
        passed(compute, COUNTS[name], kind, width=20, hidden=36)
        for compute in (experts_grouped, experts_loop)
    )
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compute", [experts_loop, experts_grouped], ids=["loop", "grouped"])
def test_an_expert_without_rows_has_a_gradient_of_zero_whatever_lay_in_memory(compute: Compute) -> None:
    for _ in range(3):
        poison = torch.full((4096,), float("nan"))
        del poison
        _, _, d_up, d_down, _ = passed(compute, [3, 0, 5, 0], "swiglu")
        for gradient in (d_up, d_down):
            assert gradient.isfinite().all()
            assert not gradient[[1, 3]].any()
            assert gradient[[0, 2]].any()


def test_an_expanded_gradient_passes_through_the_grouped_product() -> None:
    """The operator itself fails on it."""
    rows, (weights, _) = torch.randn(6, 8), weights_of(2, 8, 4, "ffn")
    for tensor in (rows, weights):
        tensor.requires_grad_()
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    grouped_product(rows, weights, offsets).sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    torch.testing.assert_close(rows.grad, weights.detach().sum(2)[[0, 0, 1, 1, 1, 1]])
    torch.testing.assert_close(weights.grad[0], rows.detach()[:2].sum(0).unsqueeze(1).expand(8, 4))


def test_rows_may_have_foreign_strides() -> None:
    rows, (weights, _) = torch.randn(8, 6).t(), weights_of(2, 8, 4, "ffn")
    found = grouped_product(rows, weights, torch.tensor([2, 6], dtype=torch.int32))
    torch.testing.assert_close(found, torch.cat([rows[:2] @ weights[0], rows[2:] @ weights[1]]))


def test_weights_may_have_strides_that_the_operator_takes() -> None:
    rows, offsets = torch.randn(6, 8), torch.tensor([2, 6], dtype=torch.int32)
    for weights in (
        torch.randn(2, 4, 8).transpose(1, 2),
        torch.randn(1, 8, 4).expand(2, 8, 4),
        torch.randn(2, 16, 4)[:, ::2],
    ):
        torch.testing.assert_close(
            grouped_product(rows, weights, offsets), torch.cat([rows[:2] @ weights[0], rows[2:] @ weights[1]])
        )
    with pytest.raises(RuntimeError, match="strides should be multiple of 16 bytes"):
        grouped_product(rows, torch.randn(2, 8, 6)[:, :, :4], offsets)


# --- what is refused


@pytest.mark.parametrize("offsets", [[2, 5, 8], [0, 0, 8], [8, 8, 8], [3, 3, 8]])
def test_offsets_that_cover_the_rows_are_taken(offsets: list[int]) -> None:
    check_offsets(torch.tensor(offsets, dtype=torch.int32), 8)


@pytest.mark.parametrize(
    "offsets",
    [[2, 5, 7], [2, 5, 9], [5, 2, 8], [-1, 2, 8], [2, 9, 8], [0, 0, 0]],
    ids=["short", "long", "back", "minus", "past", "none"],
)
def test_offsets_that_do_not_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError) as caught:
        check_offsets(torch.tensor(offsets, dtype=torch.int32), 8)
    assert str(caught.value) == f"offsets {offsets} do not cover 8 rows in order"


@pytest.mark.parametrize("counts", [[3, 2], [3, 4], [-1, 7]])
def test_counts_that_do_not_cover_the_rows_are_refused(counts: list[int]) -> None:
    rows, weights, scale = torch.randn(6, 8), weights_of(2, 8, 4, "ffn"), torch.ones(6)
    with pytest.raises(ValueError, match="do not cover 6 rows in order"):
        experts_grouped(rows, *weights, torch.tensor(counts), scale, "ffn")


def test_the_loop_refuses_counts_that_do_not_cover_the_rows() -> None:
    rows, weights, scale = torch.randn(6, 8), weights_of(2, 8, 4, "ffn"), torch.ones(6)
    with pytest.raises(RuntimeError, match="the counts of the experts sum to 5 rows; there are 6"):
        experts_loop(rows, *weights, torch.tensor([3, 2]), scale, "ffn")


def test_no_rows_with_nonzero_counts_are_refused() -> None:
    weights = weights_of(2, 8, 4, "ffn")
    with pytest.raises(RuntimeError, match="the counts of the experts sum to 3 rows; there are 0"):
        experts_loop(torch.randn(0, 8), *weights, torch.tensor([1, 2]), torch.ones(0), "ffn")


def refused(rows: Tensor, weights: Tensor, offsets: Tensor) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        grouped_product(rows, weights, offsets)
    return str(caught.value)


def test_wrong_types_are_refused_by_name() -> None:
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    rows, (weights, _) = torch.randn(6, 8), weights_of(2, 8, 4, "ffn")
    text = refused(rows, weights.bfloat16(), offsets)
    assert text.startswith(
        "rows are torch.float32, weights torch.bfloat16; one of torch.bfloat16, torch.float16, torch.float32 was needed"
    )
    assert "rows are torch.float64, weights torch.float64" in refused(
        rows.double(), weights.double(), offsets
    )
    assert "offsets in torch.int64" in refused(rows, weights, offsets.long())


def test_sizes_that_do_not_belong_together_are_refused() -> None:
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    rows, (weights, _) = torch.randn(6, 8), weights_of(2, 8, 4, "ffn")
    assert refused(torch.randn(6, 4), weights, offsets).startswith(
        "rows (6, 4), weights (2, 8, 4), (2,) offsets in torch.int32;"
    )
    assert "(1,) offsets" in refused(rows, weights, offsets[1:])
    assert "(3,) offsets" in refused(rows, weights, torch.tensor([2, 4, 6], dtype=torch.int32))


@pytest.mark.parametrize(
    ("inner", "outer", "dtype", "multiple"),
    [
        (6, 8, torch.float32, 4),
        (8, 6, torch.float32, 4),
        (12, 8, torch.bfloat16, 8),
        (8, 20, torch.float16, 8),
    ],
)
def test_strides_that_the_operator_cannot_take_are_refused(
    inner: int, outer: int, dtype: torch.dtype, multiple: int
) -> None:
    rows, weights = torch.zeros(6, inner, dtype=dtype), torch.zeros(2, inner, outer, dtype=dtype)
    text = refused(rows, weights, torch.tensor([2, 6], dtype=torch.int32))
    assert text == f"weights of {inner} × {outer} in {dtype}; multiples of {multiple} were needed"


# --- which one


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
def test_where_the_grouped_product_works(dtype: torch.dtype, width: int, hidden: int, works: bool) -> None:
    assert grouped_works(CPU, dtype, width, hidden) is works
    assert not grouped_works(torch.device("meta"), dtype, width, hidden)
    if works:
        assert choose_kernel("grouped", CPU, dtype, width, hidden) == "grouped"
    else:
        with pytest.raises(
            ValueError,
            match=f"does not take experts of {width} × {hidden} in {dtype} on cpu; .*--expert-kernel auto",
        ):
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


def test_a_bank_computes_alike_with_each_kernel() -> None:
    """Experts of three sizes, one of them without rows, in stacked order."""
    made = {}
    kernels: tuple[Kernel, ...] = ("loop", "grouped", "auto")
    for kernel in kernels:
        bank = ExpertBank(8, [4, 16, 4, 8])
        initialise(bank, 1)
        bank.kernel = kernel
        rows = torch.randn(11, 8, generator=torch.Generator().manual_seed(1))
        y = bank(rows, torch.tensor([4, 0, 2, 5]), torch.linspace(0.1, 1, 11))
        y.square().sum().backward()
        made[kernel] = [y, *(stack.grad for *_, stack in bank.stacks())]
    assert all(torch.equal(a, b) for a, b in zip(made["auto"], made["grouped"], strict=True))
    for mine, other in zip(made["grouped"], made["loop"], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_a_bank_refuses_a_kernel_that_cannot_be_had() -> None:
    bank = ExpertBank(8, [4, 6])
    initialise(bank, 1)
    bank.kernel = "grouped"
    with pytest.raises(ValueError, match=r"experts of 8 × 6 in torch\.float32 on cpu"):
        bank(torch.randn(2, 8), torch.tensor([1, 1]), torch.ones(2))


# --- the loop's parts


def test_weights_inside_are_weights_outside() -> None:
    """A row's weight is applied between the two products."""
    kinds: tuple[Kind, ...] = ("swiglu", "ffn")
    for kind in kinds:
        hidden, scale = torch.randn(5, 12, dtype=torch.float64), torch.rand(5)
        torch.testing.assert_close(
            activate(hidden, scale, kind), activate(hidden, torch.ones(5), kind) * scale.double().unsqueeze(1)
        )


def test_a_traced_model_has_an_even_split() -> None:
    assert row_counts(torch.empty(4, dtype=torch.int64, device="meta"), 10) == [3, 3, 2, 2]
    assert row_counts(torch.tensor([1, 0, 9]), 10) == [1, 0, 9]


def test_half_precision_on_tiny_shapes() -> None:
    answers: dict[Any, Tensor] = {}
    for compute in (experts_loop, experts_grouped):
        weights = weights_of(3, 8, 8, "swiglu", torch.bfloat16)
        rows = torch.randn(7, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
        answers[compute] = compute(
            rows,
            *weights,
            torch.tensor([2, 0, 5]),
            torch.rand(7, generator=torch.Generator().manual_seed(2)),
            "swiglu",
        )
        assert answers[compute].dtype == torch.bfloat16
    torch.testing.assert_close(answers[experts_grouped], answers[experts_loop], rtol=2e-2, atol=2e-2)
