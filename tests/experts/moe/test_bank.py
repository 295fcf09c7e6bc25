"""Banks: the slots of their experts, their weights, and banks of a part of the experts.

R counts rows, D is their width, E counts experts, L those of this bank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experts.moe import bank as bank_module
from experts.moe.bank import (
    _MAX_UNUSED_BYTES,
    ExpertBank,
    ExpertForm,
    SizeClass,
    computing_dtype,
    size_classes,
    without_memory,
)
from experts.moe.weight_copy import WeightCopy
from experts.tokens.dispatch import sort_by_slot
from experts.types import Kind
from harness.moe.oracle import expert_oracle

SIZES = (6, 3, 6, 9, 3)


def weights_of(bank: ExpertBank, expert: int) -> tuple[Tensor, Tensor]:
    """The two matrices of an expert, by global id."""
    (group,) = (group for group in bank.classes if expert in group.rows)
    place = group.rows.index(expert)
    stacks = {role: stack for each, role, stack in bank.stacks() if each == group}
    return stacks["up"][place].detach(), stacks["down"][place].detach()


def test_experts_are_stacked_by_size_and_then_by_id() -> None:
    assert size_classes(SIZES, (4, 3, 2, 0)) == (
        SizeClass(3, (4,)),
        SizeClass(6, (0, 2)),
        SizeClass(9, (3,)),
    )
    assert ExpertBank(4, SIZES).slots().tolist() == [2, 0, 3, 4, 1]
    part = ExpertBank(4, SIZES, held=(3, 0))
    assert part.held == (0, 3)
    assert part.slot_E.tolist() == [0, -1, -1, 1, -1]


@pytest.mark.parametrize(("kind", "factor"), [("swiglu", 2), ("ffn", 1)])
def test_stacks_have_the_shapes_of_their_kind(kind: Kind, factor: int) -> None:
    shapes = {
        (group.hidden, role): tuple(stack.shape) for group, role, stack in ExpertBank(4, SIZES, kind).stacks()
    }
    assert shapes[6, "up"] == (2, 4, factor * 6)
    assert shapes[6, "down"] == (2, 6, 4)
    assert shapes[9, "up"] == (1, 4, factor * 9)


def test_new_weights_are_normal_with_the_root_of_the_inputs_as_scale() -> None:
    bank = ExpertBank(64, (400, 400))
    for _, role, stack in bank.stacks():
        inputs = 64 if role == "up" else 400
        assert float(stack.detach().mean()) == pytest.approx(0.0, abs=0.01)
        assert float(stack.detach().std()) == pytest.approx(inputs**-0.5, rel=0.03)


def test_slots_are_no_part_of_a_checkpoint() -> None:
    """They follow from the placement, which may differ when a run is resumed."""
    assert sorted(ExpertBank(4, (3, 3)).state_dict()) == ["down_3", "up_3"]


def test_a_bank_without_memory_gets_zeros() -> None:
    with without_memory():
        bank = ExpertBank(4, SIZES)
    bank.get_parameter("up_3").requires_grad_(False)
    assert all(stack.is_meta for _, _, stack in bank.stacks())
    bank.materialise()
    assert not any(stack.is_meta or stack.any() for _, _, stack in bank.stacks())
    assert not bank.get_parameter("up_3").requires_grad
    assert bank.get_parameter("up_6").requires_grad


def test_weights_that_have_memory_are_kept() -> None:
    bank = ExpertBank(4, SIZES)
    before = [stack.detach().clone() for _, _, stack in bank.stacks()]
    bank.materialise()
    assert all(torch.equal(stack, old) for (_, _, stack), old in zip(bank.stacks(), before, strict=True))
    assert not any(stack.is_meta for _, _, stack in ExpertBank(4, SIZES).stacks()), "the block has ended"


def test_a_part_holds_copies_of_its_experts() -> None:
    whole = ExpertBank(4, SIZES, "ffn")
    whole.kernel = "loop"
    whole.get_parameter("down_9").requires_grad_(False)
    part = whole.part((2, 3, 4))
    assert (part.held, part.kind, part.kernel, part.width) == ((2, 3, 4), "ffn", "loop", 4)
    for expert in (2, 3, 4):
        for own, original in zip(weights_of(part, expert), weights_of(whole, expert), strict=True):
            assert torch.equal(own, original)
            assert own.data_ptr() != original.data_ptr()
    assert not part.get_parameter("down_9").requires_grad
    assert part.get_parameter("up_9").requires_grad


def test_the_slots_of_a_part_are_on_the_device_of_the_whole() -> None:
    whole = ExpertBank(4, (3, 3))
    whole.slot_E = whole.slot_E.to("meta")
    assert whole.part((1,)).slot_E.is_meta


@pytest.mark.parametrize("kind", ["swiglu", "ffn"])
@pytest.mark.parametrize("held", [(0, 1, 2, 3, 4), (0, 2), ()])
def test_rows_are_computed_by_their_experts(kind: Kind, held: tuple[int, ...]) -> None:
    """Rows are sorted by slot; every second expert has none."""
    bank = ExpertBank(4, SIZES, kind, held).double()
    experts = [expert for group in bank.classes for expert in group.rows]
    counts = [3 if slot % 2 == 0 else 0 for slot in range(len(experts))]
    rows_RD = torch.randn(sum(counts), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights_R = torch.linspace(0.5, 2.0, sum(counts), dtype=torch.float64)
    computed_RD = bank(rows_RD, torch.tensor(counts, dtype=torch.int64), weights_R)
    owners = [expert for expert, count in zip(experts, counts, strict=True) for _ in range(count)]
    expected = [
        weight * expert_oracle(row_D, *weights_of(bank, expert), kind)
        for row_D, weight, expert in zip(rows_RD, weights_R, owners, strict=True)
    ]
    torch.testing.assert_close(computed_RD, torch.stack(expected) if expected else rows_RD)


def test_experts_compute_in_the_type_of_autocast() -> None:
    x = torch.zeros(2)
    assert computing_dtype(x) == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert computing_dtype(x) == torch.bfloat16


@pytest.mark.parametrize(
    ("kernel", "dtype", "compiling", "used"),
    [
        ("grouped", torch.bfloat16, False, "grouped"),
        ("grouped", torch.float32, False, "grouped"),
        ("loop", torch.bfloat16, False, "loop"),
        ("grouped", torch.bfloat16, True, "grouped"),
        ("grouped", torch.float32, True, "loop"),
        ("loop", torch.float32, True, "loop"),
    ],
)
def test_the_compiler_gets_grouped_products_in_bf16_only(
    monkeypatch: pytest.MonkeyPatch, kernel: str, dtype: torch.dtype, compiling: bool, used: str
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(bank_module, "choose_kernel", lambda *_: kernel)
    monkeypatch.setattr(bank_module, "experts_grouped", lambda rows_RD, *_: calls.append("grouped"))
    monkeypatch.setattr(bank_module, "experts_loop", lambda rows_RD, *_: calls.append("loop"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(torch.compiler, "disable", lambda function: function)
    bank = ExpertBank(4, (3, 3))
    bank(torch.zeros(2, 4, dtype=dtype), torch.tensor([1, 1]), torch.ones(2, dtype=dtype))
    assert calls == [used]


def test_experts_that_name_no_activation_have_that_of_their_kind() -> None:
    hidden = torch.linspace(-3, 3, 8).reshape(1, 8)
    gate, value = hidden.chunk(2, dim=-1)
    half = torch.tensor([0.5])
    torch.testing.assert_close(ExpertForm("swiglu").activate(hidden, half), F.silu(gate) * value / 2)
    torch.testing.assert_close(ExpertForm("ffn").activate(hidden, half), F.gelu(hidden) / 2)
    assert torch.equal(ExpertForm("ffn", torch.relu).activate(hidden, half), hidden.relu() / 2)


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("with_copies", [False, True])
def test_recomputed_experts_have_the_same_gradients_and_keep_less(in_bf16: bool, with_copies: bool) -> None:
    counts_L = torch.tensor([5, 0, 7, 1, 3, 4, 2])

    def run(recomputes: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        bank = ExpertBank(16, (8, 24, 8, 8, 24, 8, 8))
        bank.recomputes = recomputes
        if with_copies:
            stacks = {f"{role}_{group.hidden}": stack for group, role, stack in bank.stacks()}
            bank.copies = {name: WeightCopy(stack, torch.bfloat16) for name, stack in stacks.items()}
        rows_RD = torch.randn(22, 16, requires_grad=True)
        weights_R = torch.rand(22, requires_grad=True)
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bf16),
        ):
            loss = bank(rows_RD, counts_L, weights_R).float().square().sum()
        leaves = [rows_RD, weights_R, *bank.parameters()]
        loss.backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None], sum(kept.values())

    expected, all_kept = run(recomputes=False)
    found, less_kept = run(recomputes=True)
    assert len(found) == len(expected) == 6
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=0)
    assert less_kept < all_kept / 2


def test_a_buffer_for_several_sizes_is_used_where_it_wastes_little() -> None:
    """One expert of four is as wide as the buffer; the others leave most of their rows unused."""
    bank = ExpertBank(64, (64, 64, 64, 4096))
    assert bank._unused_bytes(1000, 2) == 2 * (4096 - 1072) * 1000 * 2
    assert bank._unused_bytes(1000, 2) < _MAX_UNUSED_BYTES < bank._unused_bytes(10_000, 2)
    assert ExpertBank(64, (64, 64))._unused_bytes(10**6, 2) == 0


def test_a_bank_in_fp8_refuses_to_compute_in_another_type() -> None:
    bank = ExpertBank(64, (64, 64))
    bank.fp8 = True
    assert bank.part((0,)).fp8
    x_TD = torch.randn(4, 64)
    trip = sort_by_slot(torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1), 2, None)
    with pytest.raises(ValueError, match=r"torch\.float32 on cpu .* cannot compute in fp8"):
        bank(x_TD, trip.counts_L, trip.weights_R, trip.row_map)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), pytest.raises(ValueError, match="bfloat16"):
        bank(x_TD, trip.counts_L, trip.weights_R, trip.row_map)
    # Rows without a map are a measurement of the experts, not a pass.
    assert bank(x_TD, trip.counts_L, trip.weights_R).isfinite().all()


@torch.no_grad()
def test_a_bank_in_fp8_measures_tokens_in_fp32_as_one_without_it() -> None:
    bank = ExpertBank(64, (64, 64))
    x_TD = torch.randn(4, 64)
    trip = sort_by_slot(torch.tensor([[0], [1], [1], [0]]), torch.rand(4, 1), 2, None)
    expected_TD = bank(x_TD, trip.counts_L, trip.weights_R, trip.row_map)
    bank.fp8 = True
    assert torch.equal(bank(x_TD, trip.counts_L, trip.weights_R, trip.row_map), expected_TD)
