"""Experts with products in fp8, on a GPU, against the same quantisation in plain torch and against fp32.

T counts tokens, D is their width, R counts rows, H is the hidden size, E counts experts, K experts
per token; a product has inner size K and outer size N."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experts.kernels import fp8, fused_experts, launching
from experts.kernels.fp8 import Quantised, quantise, quantise_transposed, row_product
from experts.kernels.launching import Span
from experts.kernels.row_products import RowTiles
from experts.moe.bank import ExpertBank
from experts.moe.layer import MoELayer
from experts.tokens.dispatch import sort_by_slot
from experts.types import Trip
from harness.runs.records import by_step
from orchestrator.config.settings import Config
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.trainer import Trainer

DEVICE = torch.device("cuda:0")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (launching.available() and fused_experts.works(DEVICE, torch.bfloat16, 64, [64], True)),
        reason="needs a CUDA device of Hopper or later, and Triton",
    ),
]

# Tokens, hidden sizes of the experts, top-k, width, and how the tokens choose.
CASES = {
    "even": (300, (64,) * 7, 2, 64, "even"),
    "experts without tokens": (300, (320,) * 7, 2, 192, "one"),
    "one token": (1, (64,) * 3, 1, 128, "even"),
    "one expert": (50, (128,), 1, 64, "even"),
    "skewed": (515, (192,) * 32, 4, 256, "skewed"),
    "rows for the last alone": (129, (576,) * 5, 3, 64, "last"),
    "large": (2048, (1024,) * 4, 2, 512, "even"),
    "few rows for each": (40, (128,) * 100, 8, 128, "even"),
    "wider than a tile": (100, (2304,) * 2, 1, 2112, "even"),
    "two sizes": (300, (64, 128), 1, 128, "even"),
    "three sizes": (515, (192, 64, 64, 128, 64, 192, 64), 3, 128, "skewed"),
    "rows for the smallest alone": (129, (64, 64, 128, 320), 2, 128, "one"),
    "rows for the largest alone": (129, (64, 64, 320, 320), 2, 128, "last"),
}
cases = pytest.mark.parametrize("case", CASES)


def draw(*sizes: int, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(DEVICE)


def make_trip(tokens: int, experts: int, top_k: int, choice: str, absent: float = 0.0) -> Trip:
    """Return the rows of a batch. A part of the choices is absent: they are experts of other hosts."""
    number_E = torch.arange(experts, device=DEVICE)
    shift_E = {"even": 0 * number_E, "one": -9.0 * (number_E >= top_k), "skewed": -0.3 * number_E}
    shift_E["last"] = 9.0 * (number_E >= experts - top_k)
    slots_TK = (draw(tokens, experts, seed=1) + shift_E[choice]).topk(top_k).indices
    weights_TK = draw(tokens, top_k, seed=4).sigmoid()
    if not absent:
        return sort_by_slot(slots_TK, weights_TK, experts, None)
    has_row_TK = draw(tokens, top_k, seed=3).sigmoid() >= absent
    # The bound is larger than the number of rows: the last rows belong to no expert.
    bound = int(has_row_TK.sum()) + 5
    return sort_by_slot(torch.where(has_row_TK, slots_TK, -1), weights_TK, experts, bound, bounded=True)


def plain_quantised(rows: Tensor) -> Quantised:
    scales = rows.float().abs().amax(-1).clamp(1e-30) * (1 / 448)
    return Quantised((rows.float() * (1 / scales).unsqueeze(-1)).to(fp8.DTYPE), scales)


def values(quantised: Quantised) -> Tensor:
    return quantised.numbers.float() * quantised.scales.unsqueeze(-1)


def rounded(rows: Tensor) -> Tensor:
    """Return rows after quantisation."""
    return values(plain_quantised(rows))


def equal_bits(found: Quantised, wanted: Quantised) -> bool:
    same_numbers = torch.equal(found.numbers.view(torch.uint8), wanted.numbers.view(torch.uint8))
    return same_numbers and torch.equal(found.scales, wanted.scales)


@pytest.mark.parametrize("shape", [(1, 64), (70, 64), (33, 4096), (3, 5, 2112)], ids=str)
def test_rows_are_quantised_as_in_plain_torch(shape: tuple[int, ...]) -> None:
    rows = (draw(*shape, seed=1) * draw(*shape[:-1], 1, seed=2).exp()).bfloat16()
    rows[-1, ..., :] = 0.0
    rows[0, ..., :] *= 1e-20
    assert equal_bits(quantise(rows), plain_quantised(rows))


@pytest.mark.parametrize("shape", [(1, 64, 64), (3, 192, 320), (2, 1000, 72), (1, 4200, 72)], ids=str)
def test_transposed_matrices_are_quantised_as_in_plain_torch(shape: tuple[int, ...]) -> None:
    matrices = draw(*shape, seed=1).bfloat16()
    matrices[0, :, 3] = 0.0
    wanted = plain_quantised(matrices.transpose(1, 2).contiguous())
    assert equal_bits(quantise_transposed(matrices), wanted)


def test_only_rows_of_a_span_are_quantised() -> None:
    rows = draw(40, 128, seed=1).bfloat16()
    result = Quantised(torch.zeros(40, 128, device=DEVICE).to(fp8.DTYPE), torch.zeros(40, device=DEVICE))
    begin_1, end_1 = torch.tensor([[7], [31]], dtype=torch.int32, device=DEVICE).unbind()
    fp8.write_quantised(rows, result, Span(begin_1, end_1))
    wanted = plain_quantised(rows)
    outside = torch.tensor([row < 7 or row >= 31 for row in range(40)], device=DEVICE)
    assert not result.numbers.float()[outside].any()
    assert not result.scales[outside].any()
    inside = Quantised(result.numbers[7:31], result.scales[7:31])
    assert equal_bits(inside, Quantised(wanted.numbers[7:31], wanted.scales[7:31]))


@pytest.mark.parametrize("transposed", [False, True])
def test_numbers_that_are_not_finite_stay_visible(transposed: bool) -> None:
    rows = draw(3, 64, 64, seed=1).bfloat16()
    rows[0, 1, 2] = torch.nan
    rows[1, 1, 2] = torch.inf
    rows[2, 1, 2] = -torch.inf
    rows[2, 3] = torch.nan
    found = values(quantise_transposed(rows.transpose(1, 2)) if transposed else quantise(rows))
    not_finite = ~rows.isfinite()
    assert found[not_finite].isnan().all()
    rows_with_infinity = rows.isinf().any(-1)
    assert found[~not_finite & ~rows_with_infinity.unsqueeze(-1)].isfinite().all()


@cases
@pytest.mark.parametrize("gather", [False, True])
def test_products_are_those_of_quantised_operands(case: str, gather: bool) -> None:
    tokens, sizes, top_k, width, choice = CASES[case]
    trip = make_trip(tokens, len(sizes), top_k, choice)
    token_R = trip.row_map.token_R
    x_TD = draw(tokens, width, seed=2).bfloat16()
    matrices = draw(len(sizes), sizes[0], width, seed=6).bfloat16()
    tiles = RowTiles.of(trip.counts_L, len(token_R))
    found_RN = x_TD.new_full((len(token_R), sizes[0]), torch.nan)
    rows = quantise(x_TD if gather else x_TD[token_R])
    row_product(rows, quantise(matrices), tiles, found_RN, token_R if gather else None)
    rows_of_expert = rounded(x_TD)[token_R].split(trip.counts_L.tolist())
    pairs = zip(rows_of_expert, rounded(matrices), strict=True)
    wanted_RN = torch.cat([rows_RK @ matrix_NK.t() for rows_RK, matrix_NK in pairs])
    assert relative_error(found_RN, wanted_RN) < 0.006


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-30))


def results(bank: ExpertBank, x_TD: Tensor, trip: Trip) -> dict[str, Tensor]:
    """Return the output and the gradients of tokens, weights and experts."""
    x_TD = x_TD.detach().requires_grad_()
    weights_R = trip.weights_R.detach().to(torch.promote_types(x_TD.dtype, torch.float32)).requires_grad_()
    bank.zero_grad(set_to_none=True)
    y_TD = bank(x_TD, trip.counts_L, weights_R, trip.row_map)
    y_TD.backward(draw(*y_TD.shape, seed=5).to(y_TD.dtype))
    of_experts = {name: parameter.grad for name, parameter in bank.named_parameters()}
    found = {"output": y_TD.detach(), "tokens": x_TD.grad, "weights": weights_R.grad} | of_experts
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def emulated(bank: ExpertBank, x_TD: Tensor, trip: Trip) -> dict[str, Tensor]:
    """Return what ``results`` returns, computed by a loop over experts in plain torch, in fp32 where the
    kernels have fp8 operands or sums."""
    token_R = trip.row_map.token_R
    grad_TD = draw(*x_TD.shape, seed=5).to(x_TD.dtype)
    output_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    d_x_TD = torch.zeros_like(output_TD)
    d_weights_R = torch.zeros_like(trip.weights_R)
    d_stacks = {name: torch.zeros_like(stack) for name, stack in bank.named_parameters()}
    counts = trip.counts_L.tolist()
    end = 0
    places = [(group.hidden, number) for group in bank.classes for number in range(len(group.rows))]
    for (hidden, number), count in zip(places, counts, strict=True):
        begin, end = end, end + count
        up_DH = bank.get_parameter(f"up_{hidden}").detach()[number]
        down_HD = bank.get_parameter(f"down_{hidden}").detach()[number]
        token_r = token_R[begin:end]
        weight_r = trip.weights_R[begin:end].detach().unsqueeze(1)
        gate, value = (rounded(x_TD)[token_r] @ rounded(up_DH.t()).t()).bfloat16().float().chunk(2, -1)
        activated = F.silu(gate) * value
        output_rD = (rounded(activated * weight_r) @ rounded(down_HD.t()).t()).bfloat16()
        output_TD.index_add_(0, token_r, output_rD.float())

        d_activated = (rounded(grad_TD)[token_r] @ rounded(down_HD).t()).bfloat16().float()
        d_weights_R[begin:end] = (d_activated * activated).sum(1)
        d_activated = d_activated * weight_r
        sigmoid = gate.sigmoid()
        d_gate = d_activated * value * sigmoid * (1 + gate * (1 - sigmoid))
        d_hidden = torch.cat([d_gate, d_activated * gate * sigmoid], 1).bfloat16()
        d_x_TD.index_add_(0, token_r, (rounded(d_hidden) @ rounded(up_DH).t()).bfloat16().float())
        d_up = x_TD[token_r].float().t() @ d_hidden.float()
        d_down = (activated * weight_r).bfloat16().float().t() @ grad_TD[token_r].float()
        d_stacks[f"up_{hidden}"][number] = d_up.bfloat16()
        d_stacks[f"down_{hidden}"][number] = d_down.bfloat16()
    return {"output": output_TD, "tokens": d_x_TD, "weights": d_weights_R} | d_stacks


def fp8_bank(width: int, sizes: tuple[int, ...]) -> ExpertBank:
    torch.manual_seed(0)
    bank = ExpertBank(width, sizes).to(DEVICE, torch.bfloat16)
    bank.fp8 = True
    return bank


@cases
@pytest.mark.parametrize("absent", [0.0, 0.4])
def test_results_are_those_of_the_same_quantisation_in_plain_torch(case: str, absent: float) -> None:
    tokens, sizes, top_k, width, choice = CASES[case]
    if tokens == 1 and absent:
        pytest.skip("there may be no row")
    bank = fp8_bank(width, sizes)
    x_TD = draw(tokens, width, seed=2).bfloat16()
    trip = make_trip(tokens, len(sizes), top_k, choice, absent)
    found = results(bank, x_TD, trip)
    for name, wanted in emulated(bank, x_TD, trip).items():
        # Half of the error of fp8. Sums differ by 0.0025, which rounds some numbers to another one of fp8.
        assert relative_error(found[name], wanted) < 0.035, name


@pytest.mark.parametrize("case", ["skewed", "large", "three sizes"])
def test_results_differ_from_fp64_by_the_rounding_of_fp8(case: str) -> None:
    tokens, sizes, top_k, width, choice = CASES[case]
    bank = fp8_bank(width, sizes)
    x_TD = draw(tokens, width, seed=2).bfloat16()
    trip = make_trip(tokens, len(sizes), top_k, choice)
    found = results(bank, x_TD, trip)
    bank.fp8 = False
    bank.kernel = "loop"
    wanted = results(bank.double(), x_TD.double(), trip)
    for name, result in found.items():
        error = relative_error(result, wanted[name])
        # Three bits of mantissa: an operand is rounded by 0.026 on average, and up to four follow each other.
        assert 0.01 < error < 0.1, (name, error)


def test_a_token_that_is_not_finite_is_seen_in_its_own_output_alone() -> None:
    bank = fp8_bank(128, (192,) * 4)
    x_TD = draw(50, 128, seed=2).bfloat16()
    x_TD[3, 7] = torch.nan
    x_TD[8, 0] = torch.inf
    x_TD[9] = 0.0
    found = results(bank, x_TD, make_trip(50, 4, 2, "even"))
    seen_T = ~found["output"].isfinite().all(1)
    assert seen_T.nonzero().flatten().tolist() == [3, 8]
    assert not found["output"][9].any()
    assert found["tokens"][9].isfinite().all()


def test_a_gradient_that_is_not_finite_is_seen() -> None:
    bank = fp8_bank(128, (192,) * 4)
    x_TD = draw(50, 128, seed=2).bfloat16().requires_grad_()
    trip = make_trip(50, 4, 2, "even")
    grad_TD = draw(50, 128, seed=5).bfloat16()
    grad_TD[3, 7] = torch.nan
    bank(x_TD, trip.counts_L, trip.weights_R, trip.row_map).backward(grad_TD)
    assert x_TD.grad is not None
    seen_T = ~x_TD.grad.isfinite().all(1)
    assert seen_T.nonzero().flatten().tolist() == [3]
    assert bank.get_parameter("down_192").grad.isnan().any()  # pyrefly: ignore[missing-attribute]


def test_frozen_experts_get_no_gradient_and_tokens_do() -> None:
    bank = fp8_bank(64, (128,) * 4)
    x_TD = draw(50, 64, seed=2).bfloat16()
    trip = make_trip(50, 4, 2, "even")
    trained = results(bank, x_TD, trip)
    frozen = results(bank.requires_grad_(False), x_TD, trip)
    assert set(frozen) == {"output", "tokens", "weights"}
    for name, found in frozen.items():
        assert torch.equal(found, trained[name]), name


def fp8_layer(width: int, sizes: list[int], top_k: int) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(width, sizes, top_k).to(DEVICE, torch.bfloat16)
    layer.bank.fp8 = True
    return layer


def layer_results(layer: MoELayer, function: Callable[[Tensor], tuple[Tensor, object]]) -> list[Tensor]:
    x_TD = draw(1000, 256, seed=2).bfloat16().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y_TD, _ = function(x_TD)
    y_TD.backward(draw(*y_TD.shape, seed=5).to(y_TD.dtype))
    grads = [tensor.grad for tensor in (x_TD, *layer.parameters())]
    return [y_TD.detach(), *(grad for grad in grads if grad is not None)]


THREE_SIZES = [512, 128, 256, 128, 512, 256]


def test_results_are_bitwise_equal_from_run_to_run() -> None:
    layer = fp8_layer(256, THREE_SIZES, 2)
    first, second = layer_results(layer, layer), layer_results(layer, layer)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_compiled_layer_computes_the_same() -> None:
    layer = fp8_layer(256, [256] * 6, 2)
    plain, compiled = layer_results(layer, layer), layer_results(layer, torch.compile(layer))
    for one, other in zip(plain, compiled, strict=True):
        assert relative_error(other, one) < 0.03


def test_the_host_never_waits() -> None:
    layer = fp8_layer(256, THREE_SIZES, 2)
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


def test_a_captured_pass_computes_the_same_for_other_tokens() -> None:
    """A replay reads tokens and weights again: both are quantised in the graph."""
    bank = fp8_bank(256, (512, 128, 128))
    trip = make_trip(500, 3, 2, "skewed")
    x_TD = draw(500, 256, seed=2).bfloat16().requires_grad_()
    grad_TD = draw(500, 256, seed=5).bfloat16()
    inputs = [x_TD, *bank.parameters()]

    def pass_through() -> list[Tensor]:
        y_TD = bank(x_TD, trip.counts_L, trip.weights_R, trip.row_map)
        return [y_TD, *torch.autograd.grad(y_TD, inputs, grad_TD)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pass_through()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = pass_through()
    with torch.no_grad():
        x_TD.copy_(draw(500, 256, seed=7))
        bank.get_parameter("up_128").mul_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    for found, wanted in zip(captured, pass_through(), strict=True):
        assert torch.equal(found, wanted)


def test_kept_for_the_backward_pass_are_tokens_hidden_rows_and_routing() -> None:
    layer = fp8_layer(256, [512] * 8, 2)
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


def test_a_second_backward_pass_is_refused() -> None:
    bank = fp8_bank(64, (128,) * 4)
    x_TD = draw(50, 64, seed=2).bfloat16().requires_grad_()
    trip = make_trip(50, 4, 2, "even")
    y_TD = bank(x_TD, trip.counts_L, trip.weights_R, trip.row_map)
    y_TD.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass through the same experts"):
        y_TD.sum().backward()


def test_gradients_take_the_place_of_hidden_rows() -> None:
    width, hidden, experts, tokens = 256, 1024, 4, 4096
    bank = fp8_bank(width, (hidden,) * experts)
    x_TD = draw(tokens, width, seed=2).bfloat16().requires_grad_()
    trip = make_trip(tokens, experts, 2, "even")
    y_TD = bank(x_TD, trip.counts_L, trip.weights_R, trip.row_map)
    grad_TD = torch.ones_like(y_TD)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y_TD.backward(grad_TD)
    taken = torch.cuda.max_memory_allocated() - before
    num_rows = 2 * tokens
    inner_bytes = num_rows * hidden * 2
    quantised_bytes = num_rows * 2 * hidden
    rows_bytes = num_rows * width * 2
    weights_bytes = 3 * experts * width * hidden * 2
    assert taken < inner_bytes + quantised_bytes + rows_bytes + weights_bytes + inner_bytes // 4


@pytest.mark.parametrize(
    "settings", [{"cuda_graph": "off"}, {"cuda_graph": "on"}, {"compile": "on"}], ids=str
)
def test_a_run_learns_as_in_bf16(settings: dict[str, str], tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}
    for precision in ("bf16", "fp8"):
        folder = tmp_path / precision
        config = Config.of(task="text", precision=precision, max_steps=60, run_dir=folder, **settings)
        assert Trainer(config=config, quiet=True).fit().status == "completed"
        losses[precision] = [event["loss"] for event in by_step(read_events(folder / "events.jsonl"))]
    assert losses["fp8"][-1] < 0.7 * losses["fp8"][0]
    assert losses["fp8"] != losses["bf16"]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.05)


def test_experts_change_in_a_run_and_its_model_computes_anywhere(tmp_path: Path) -> None:
    """A birth or merge measures the layer outside of autocast; the model at the end has no fp8 left."""
    config = Config.of(
        precision="fp8",
        width=64,
        expert_hidden_size=64,
        experts=4,
        evolution="bold",
        sleep_every=5,
        birth_entropy=0.1,
        birth_patience=1,
        newborn_warmup=5,
        merge_similarity=0.2,
        batch_size=48,
        max_steps=60,
        change_tolerance=1000.0,
        run_dir=tmp_path,
    )
    result = Trainer(config=config, quiet=True).fit()
    assert result.status == "completed"
    changes = of_kind(read_events(tmp_path / "events.jsonl"), "expert")
    assert any(event["output_change"] is not None for event in changes), [e["change"] for e in changes]
    model = result.model
    for device in ("cuda", "cpu"):
        logits_BC, _ = model.to(device)(torch.randn(3, 64, device=device))
        assert logits_BC.isfinite().all()
