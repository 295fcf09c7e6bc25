"""Experts from tokens to tokens in one function, on a GPU, against the loop over experts in fp64.

T counts tokens, D is their width, R counts rows, H is the hidden size, E counts experts, K experts
per token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from experts.kernels import fused_experts, launching
from experts.kernels.grouped import grouped_product
from experts.kernels.row_products import RowTiles, row_product
from experts.moe.bank import ExpertBank
from experts.moe.layer import MoELayer
from experts.tokens.dispatch import sort_by_slot
from experts.types import Kernel, Trip

DEVICE = torch.device("cuda:0")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (launching.available() and fused_experts.works(DEVICE, torch.bfloat16, 64, [64])),
        reason="needs a CUDA device of Hopper or later, and Triton",
    ),
]

# Tokens, experts, top-k, width, hidden size, and how the tokens choose.
CASES = [
    (300, 7, 2, 64, 64, "even"),
    (300, 7, 2, 192, 320, "one"),
    (1, 3, 1, 128, 64, "even"),
    (515, 32, 4, 256, 192, "skewed"),
    (129, 5, 3, 64, 576, "last"),
    (2048, 4, 2, 512, 1024, "even"),
    (40, 100, 8, 128, 128, "even"),
    (50, 1, 1, 64, 128, "even"),
]
cases = pytest.mark.parametrize(("tokens", "experts", "top_k", "width", "hidden", "choice"), CASES)


def draw(*sizes: int, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(DEVICE)


def choose(tokens: int, experts: int, top_k: int, choice: str) -> Tensor:
    scores_TE = draw(tokens, experts, seed=1)
    number_E = torch.arange(experts, device=DEVICE)
    shift_E = {"even": 0 * number_E, "one": -9.0 * (number_E >= top_k), "skewed": -0.3 * number_E}
    shift_E["last"] = 9.0 * (number_E >= experts - top_k)
    return (scores_TE + shift_E[choice]).topk(top_k).indices


def make_trip(slots_TK: Tensor, weights_TK: Tensor, experts: int, absent: float = 0.0) -> Trip:
    if not absent:
        return sort_by_slot(slots_TK, weights_TK, experts, None)
    has_row_TK = draw(*slots_TK.shape, seed=3).sigmoid() >= absent
    slots_TK = torch.where(has_row_TK, slots_TK, -1)
    return sort_by_slot(slots_TK, weights_TK, experts, int(has_row_TK.sum()))


def gradients(
    bank: ExpertBank, x_TD: Tensor, trip_of: tuple[Tensor, float], experts: int, kernel: Kernel
) -> list[Tensor]:
    """Return the output and the gradients of tokens, weights and experts."""
    slots_TK, absent = trip_of
    x_TD = x_TD.detach().requires_grad_()
    weights_TK = draw(*slots_TK.shape, seed=4).sigmoid().to(torch.promote_types(x_TD.dtype, torch.float32))
    weights_TK.requires_grad_()
    bank.kernel = kernel
    bank.zero_grad(set_to_none=True)
    trip = make_trip(slots_TK, weights_TK, experts, absent)
    y_TD = bank(x_TD, trip.counts_L, trip.weights_R, trip.row_map)
    y_TD.backward(draw(*y_TD.shape, seed=5).to(y_TD.dtype))
    of_experts = [parameter.grad for parameter in bank.parameters() if parameter.grad is not None]
    found = [y_TD.detach(), x_TD.grad, weights_TK.grad, *of_experts]
    return [tensor.double() for tensor in found if tensor is not None]


@cases
@pytest.mark.parametrize("absent", [0.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_as_close_to_the_oracle_as_those_of_separate_kernels(
    tokens: int,
    experts: int,
    top_k: int,
    width: int,
    hidden: int,
    choice: str,
    absent: float,
    dtype: torch.dtype,
) -> None:
    bank = ExpertBank(width, [hidden] * experts).to(DEVICE, dtype)
    x_TD = draw(tokens, width, seed=2).to(dtype)
    compare_with_oracle(bank, x_TD, (choose(tokens, experts, top_k, choice), absent))


def compare_with_oracle(bank: ExpertBank, x_TD: Tensor, trip_of: tuple[Tensor, float]) -> None:
    """Compare errors against fp64 with those of the loop over experts."""
    experts = len(bank.sizes)
    one_by_one = gradients(bank, x_TD, trip_of, experts, "loop")
    fused_results = gradients(bank, x_TD, trip_of, experts, "grouped")
    oracle = gradients(bank.double(), x_TD.double(), trip_of, experts, "loop")
    names = ("output", "tokens", "weights", *(name for name, _ in bank.named_parameters()))
    for name, result, plain, wanted in zip(names, fused_results, one_by_one, oracle, strict=True):
        scale = wanted.norm() + 1e-30
        error = float((result - wanted).norm() / scale)
        plain_error = float((plain - wanted).norm() / scale)
        assert error <= 1.1 * plain_error + 1e-6, (name, error, plain_error)


def test_there_may_be_more_experts_than_torchs_grouped_product_takes() -> None:
    """It refuses 1,024 groups: gradients of weights are then left to our own kernel."""
    bank = ExpertBank(64, [64] * 1100).to(DEVICE, torch.bfloat16)
    x_TD = draw(300, 64, seed=2).bfloat16()
    compare_with_oracle(bank, x_TD, (choose(300, 1100, 4, "even"), 0.0))


SIZES = {
    "two": (300, (64, 128), 1, "even"),
    "three": (515, (192, 64, 64, 128, 64, 192, 64), 3, "skewed"),
    "rows for the smallest alone": (129, (64, 64, 128, 320), 2, "one"),
    "rows for the largest alone": (129, (64, 64, 320, 320), 2, "last"),
    "many": (2048, (256, 512, 1024, 256), 2, "even"),
}


@pytest.mark.parametrize("absent", [0.0, 0.4])
@pytest.mark.parametrize("case", SIZES)
def test_experts_of_several_sizes_are_as_close_to_the_oracle_as_separate_kernels(
    case: str, absent: float
) -> None:
    tokens, sizes, top_k, choice = SIZES[case]
    bank = ExpertBank(128, sizes).to(DEVICE, torch.bfloat16)
    x_TD = draw(tokens, 128, seed=2).bfloat16()
    compare_with_oracle(bank, x_TD, (choose(tokens, len(sizes), top_k, choice), absent))


def test_the_host_never_waits_for_experts_of_three_sizes() -> None:
    layer = MoELayer(256, (512, 128, 256, 128, 512, 256), 2).to(DEVICE, torch.bfloat16)
    x_TD = draw(1000, 256, seed=2).bfloat16().requires_grad_()

    def pass_through() -> None:
        y_TD, _ = layer(x_TD)
        y_TD.sum().backward()

    pass_through()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pass_through()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@cases
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gather", [False, True])
def test_row_products_equal_torchs_grouped_product(
    tokens: int,
    experts: int,
    top_k: int,
    width: int,
    hidden: int,
    choice: str,
    transposed: bool,
    gather: bool,
) -> None:
    slots_TK = choose(tokens, experts, top_k, choice)
    trip = sort_by_slot(slots_TK, torch.ones_like(slots_TK, dtype=torch.float32), experts, None)
    x_TD = draw(tokens, width, seed=2).bfloat16()
    token_R = trip.row_map.token_R
    shape = (experts, hidden, width) if transposed else (experts, width, hidden)
    matrices = draw(*shape, seed=6).bfloat16()
    matrices = matrices.transpose(1, 2) if transposed else matrices
    tiles = RowTiles.of(trip.counts_L, len(token_R))
    assert tiles.ends_E.tolist() == trip.counts_L.cumsum(0).tolist()
    rows_RD = x_TD[token_R]
    found = row_product(x_TD if gather else rows_RD, matrices, tiles, token_R if gather else None)
    wanted = grouped_product(rows_RD, matrices, tiles.ends_E)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2 * width**0.5)


def test_frozen_experts_get_no_gradient_and_tokens_do() -> None:
    bank = ExpertBank(64, [128] * 4).to(DEVICE, torch.bfloat16).requires_grad_(False)
    x_TD = draw(50, 64, seed=2).bfloat16()
    trip_of = (choose(50, 4, 2, "even"), 0.0)
    fused_results = gradients(bank, x_TD, trip_of, 4, "grouped")
    plain_results = gradients(bank, x_TD, trip_of, 4, "loop")
    assert len(fused_results) == 3
    for result, wanted in zip(fused_results, plain_results, strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_that_are_all_padding_are_not_computed(fp8: bool) -> None:
    """As on a host that receives no token in a step: the bound of its rows stays."""
    bank = ExpertBank(64, [128, 64, 64]).to(DEVICE, torch.bfloat16)
    bank.fp8 = fp8
    x_TD = draw(50, 64, seed=2).bfloat16().requires_grad_()
    weights_TK = draw(50, 2, seed=4).requires_grad_()
    slots_TK = torch.full((50, 2), -1, device=DEVICE)
    trip = sort_by_slot(slots_TK, weights_TK, 3, 64, bounded=True)
    y_TD = bank(x_TD, trip.counts_L, trip.weights_R, trip.row_map)
    y_TD.sum().backward()
    for leaf in (x_TD, weights_TK, *bank.parameters()):
        assert leaf.grad is not None
        assert not leaf.grad.any()
    assert not y_TD.any()


@pytest.mark.parametrize("fp8", [False, True])
def test_offsets_of_hidden_rows_may_exceed_32_bits(fp8: bool) -> None:
    """80,000 hidden rows of 28,672 numbers are more than 2**31: the same tokens in four parts are not."""
    tokens = 80_000
    bank = ExpertBank(64, [14_336] * 2).to(DEVICE, torch.bfloat16)
    bank.fp8 = fp8
    x_TD = draw(tokens, 64, seed=2).bfloat16()
    grad_TD = draw(tokens, 64, seed=5).bfloat16()
    slots_TK = (torch.arange(tokens, device=DEVICE) % 2).unsqueeze(1)

    def run(parts: int) -> list[Tensor]:
        bank.zero_grad(set_to_none=True)
        results: list[list[Tensor]] = []
        slices = zip(x_TD.chunk(parts), grad_TD.chunk(parts), slots_TK.chunk(parts), strict=True)
        for x_PD, grad_PD, slots_PK in slices:
            leaf_PD = x_PD.detach().requires_grad_()
            trip = sort_by_slot(slots_PK, torch.ones_like(slots_PK, dtype=torch.float32), 2, None)
            y_PD = bank(leaf_PD, trip.counts_L, trip.weights_R, trip.row_map)
            y_PD.backward(grad_PD)
            assert leaf_PD.grad is not None
            results.append([y_PD.detach(), leaf_PD.grad])
        of_experts = [p.grad.float() for p in bank.parameters() if p.grad is not None]
        return [*(torch.cat(tensors).float() for tensors in zip(*results, strict=True)), *of_experts]

    for whole, in_parts in zip(run(1), run(4), strict=True):
        assert float((whole - in_parts).norm() / in_parts.norm()) < 0.01


def test_a_second_backward_pass_is_refused() -> None:
    bank = ExpertBank(64, [128] * 4).to(DEVICE, torch.bfloat16)
    x_TD = draw(50, 64, seed=2).bfloat16().requires_grad_()
    trip = make_trip(choose(50, 4, 2, "even"), draw(50, 2, seed=4), 4, 0.0)
    y_TD = bank(x_TD, trip.counts_L, trip.weights_R, trip.row_map)
    y_TD.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass through the same experts"):
        y_TD.sum().backward()


def test_memory_that_torch_fills_first_is_no_second_pass() -> None:
    """Deterministic algorithms fill new tensors with NaN: none of it reaches a result."""
    bank = ExpertBank(64, [128, 64, 64]).to(DEVICE, torch.bfloat16)
    x_TD = draw(50, 64, seed=2).bfloat16()
    trip_of = (choose(50, 3, 2, "even"), 0.4)
    wanted = gradients(bank, x_TD, trip_of, 3, "grouped")
    torch.use_deterministic_algorithms(True)
    try:
        found = gradients(bank, x_TD, trip_of, 3, "grouped")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_wrong_counts_are_bounded() -> None:
    tiles = RowTiles.of(torch.tensor([300, 2**40, 0], device=DEVICE), 200)
    assert tiles.ends_E.tolist() == [200, 200, 200]
    assert int(tiles.count_1) == 2


def test_kept_for_the_backward_pass_are_tokens_hidden_rows_and_routing() -> None:
    layer = MoELayer(256, [512] * 8, 2).to(DEVICE, torch.bfloat16)
    x_TD = draw(1024, 256, seed=2).bfloat16().requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y_TD, _ = layer(x_TD)
    y_TD.sum().backward()
    for parameter in layer.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    tokens_bytes = 1024 * 256 * 2
    hidden_bytes = 2048 * 1024 * 2
    routing_bytes = 1024 * (8 * 4 + 2 * 40) + 4096
    assert sum(kept.values()) <= tokens_bytes + hidden_bytes + routing_bytes


def test_a_compiled_layer_computes_the_same() -> None:
    layer = MoELayer(128, [256] * 6, 2).to(DEVICE, torch.bfloat16)
    x_TD = draw(200, 128, seed=2).bfloat16()
    results = []
    for function in (layer, torch.compile(layer)):
        layer.zero_grad(set_to_none=True)
        y_TD, _ = function(x_TD)
        y_TD.backward(draw(*y_TD.shape, seed=5).to(y_TD.dtype))
        results.append([y_TD.detach(), *(p.grad for p in layer.parameters() if p.grad is not None)])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(plain, compiled, rtol=2e-2, atol=2e-2)


def test_a_layer_in_cuda_graphs_of_the_compiler_computes_the_same() -> None:
    """The hidden rows of a recorded pass are overwritten in each replay of the backward pass."""
    layer = MoELayer(128, [256] * 6, 2).to(DEVICE, torch.bfloat16)
    compiled = torch.compile(layer, mode="reduce-overhead")
    x_TD = draw(200, 128, seed=2).bfloat16()
    grad_TD = draw(200, 128, seed=5).bfloat16()

    def results(function: Callable[[Tensor], tuple[Tensor, object]]) -> list[Tensor]:
        layer.zero_grad(set_to_none=True)
        y_TD, _ = function(x_TD)
        y_TD.backward(grad_TD)
        found = [y_TD, *(p.grad for p in layer.parameters() if p.grad is not None)]
        return [tensor.detach().clone() for tensor in found]

    wanted = results(layer)
    for _ in range(4):  # a warm-up, the recording, and replays
        torch.compiler.cudagraph_mark_step_begin()
        for found, plain in zip(results(compiled), wanted, strict=True):
            torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-2)
