"""The gate: its noise, extreme scores, ties, the bias, and precision.

T counts tokens, D is their width, E counts experts, K experts per token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experts.balance import update_balance
from experts.model import initialise
from experts.moe.gate import Gate, noise, scaled_share
from experts.moe.layer import MoELayer
from experts.types import Routing

WIDTH = 16
EXPERTS = 5


def make_gate(top_k: int = 2, width: int = WIDTH, experts: int = EXPERTS, **options: Any) -> Gate:
    gate = Gate(width, experts, top_k, **options)
    initialise(gate, 3)
    with torch.no_grad():
        gate.weight_ED.mul_(50)
    return gate


def make_tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def route(gate: Gate, x_TD: Tensor, **options: Any) -> Routing:
    previous_E = torch.zeros(len(gate.weight_ED), dtype=torch.int64)
    return gate(x_TD, previous_E, **options)


def call(compute: Callable[[], Tensor]) -> Tensor:
    """The replay of a first pass: it computes."""
    return compute()


# --- noise


def draw(positions: Tensor, seed: int = 11, width: int = 8, size: float = 0.25) -> Tensor:
    return noise(seed, positions, width, size, torch.float64)


def test_noise_depends_on_seed_position_and_column_only() -> None:
    whole_TD = draw(torch.arange(100))
    assert torch.equal(draw(torch.arange(37, 64)), whole_TD[37:64])
    some_T = torch.tensor([99, 3, 3, 50])
    assert torch.equal(draw(some_T), whole_TD[some_T])
    assert torch.equal(draw(torch.arange(100), width=3), whole_TD[:, :3])
    assert draw(torch.arange(0)).shape == (0, 8)
    for seed in (10, 12, 11 + 2**40):
        other_TD = draw(torch.arange(100), seed=seed)
        assert not torch.isclose(other_TD, whole_TD).all(1).any()


def splitmix64(state: int) -> int:
    """The finalizer of SplitMix64 as published, in unsigned arithmetic."""
    mask = 2**64 - 1
    state &= mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_noise_is_splitmix64_of_seed_position_and_column() -> None:
    positions = [0, 1, 2, 700, 2**40]
    for seed in (0, 11, -5, 2**62):
        drawn_TD = draw(torch.tensor(positions), seed=seed, width=3)
        for row, position in enumerate(positions):
            for column in range(3):
                state = position * 0x9E3779B97F4A7C15 + column * 0xBF58476D1CE4E5B9 + seed
                uniform = (splitmix64(state) >> 40) / 2**24
                assert float(drawn_TD[row, column]) == 1.0 + 0.25 * (2.0 * uniform - 1.0)


def test_noise_keeps_its_values_between_versions() -> None:
    """A resumed run must draw the noise of the run before it."""
    drawn_TD = noise(7, torch.tensor([0, 3]), 3, 1.0, torch.float64)
    assert (drawn_TD * 2**23).tolist() == [[1224240, 16524829, 3000803], [15112256, 341550, 2319603]]


def test_noise_in_fp32_is_that_in_fp64_rounded() -> None:
    exact_TD = draw(torch.arange(1000))
    rounded_TD = noise(11, torch.arange(1000), 8, 0.25, torch.float32)
    assert rounded_TD.dtype == torch.float32
    torch.testing.assert_close(rounded_TD.double(), exact_TD, rtol=0, atol=2e-7)


def test_noise_is_uniform_around_one() -> None:
    factors = draw(torch.arange(40_000)).reshape(-1)
    count = len(factors)
    assert 0.75 <= float(factors.min()) < 0.7501
    assert 1.2499 < float(factors.max()) <= 1.25
    assert float(factors.mean()) == pytest.approx(1.0, abs=4 * 0.25 / math.sqrt(3 * count))
    assert float(factors.var()) == pytest.approx(0.25**2 / 3, rel=0.01)
    bins = torch.histc(factors, 64, 0.75, 1.25)
    chi_square = float(((bins - count / 64) ** 2 / (count / 64)).sum())
    assert chi_square < 63 + 4 * math.sqrt(2 * 63)


@pytest.mark.parametrize("lag", [1, 2, 3, 8, 64, 1024])
def test_noise_of_neighbours_is_uncorrelated(lag: int) -> None:
    """Neighbours are positions of a sequence, samples of a batch, columns, and the seeds of layers
    and steps."""
    first_TD = draw(torch.arange(20_000))
    shifted_TD = draw(torch.arange(lag, 20_000 + lag))
    other_seed_TD = draw(torch.arange(20_000), seed=11 + lag)
    wide_TD = draw(torch.arange(100), width=2048)
    pairs = {
        "position": (first_TD, shifted_TD),
        "seed": (first_TD, other_seed_TD),
        "position and seed": (shifted_TD, other_seed_TD),
        "column": (wide_TD[:, :1000], wide_TD[:, lag : 1000 + lag]),
    }
    for name, (a, b) in pairs.items():
        correlation = float(torch.corrcoef(torch.stack([a.reshape(-1), b.reshape(-1)]))[0, 1])
        assert abs(correlation) < 4 / math.sqrt(a.numel()), name


def test_noise_multiplies_the_input_of_the_gate() -> None:
    gate = make_gate()
    x_TD = make_tokens(9, WIDTH)
    noise_TD = noise(5, torch.arange(9), WIDTH, 0.5, torch.float32)
    noisy = route(gate, x_TD, noise_TD=noise_TD)
    expected = route(gate, x_TD * noise_TD)
    assert torch.equal(noisy.experts_TK, expected.experts_TK)
    assert torch.equal(noisy.weights_TK, expected.weights_TK)
    assert not torch.equal(noisy.weights_TK, route(gate, x_TD).weights_TK)


# --- extreme scores


@pytest.mark.parametrize("strength", [0.5, 100.0])
def test_scores_that_underflow_have_finite_weights_and_gradients(strength: float) -> None:
    """All sigmoid scores are zero in fp32.

    ``strength`` scales the gradients that reach the gate."""
    gate = make_gate(scores="sigmoid")
    with torch.no_grad():
        gate.weight_ED.fill_(-50.0)
    x_TD = torch.ones(3, WIDTH, requires_grad=True)
    routing = gate(x_TD, torch.tensor([7, 0, 0, 0, 0]))
    assert routing.weights_TK.tolist() == [[0.0, 0.0]] * 3
    assert routing.balance == 0
    assert routing.z.isfinite()
    for experts in routing.experts_TK.tolist():
        assert len(set(experts)) == 2
        assert set(experts) <= set(range(EXPERTS))
    weighted = (routing.weights_TK * torch.tensor([strength, -strength])).sum()
    loss = weighted + strength * routing.balance + 1e-3 * routing.z
    for gradient in torch.autograd.grad(loss, [x_TD, gate.weight_ED]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_huge_logits_have_finite_weights_and_gradients(scores: Any) -> None:
    gate = make_gate(scores=scores)
    routing = route(gate, 1e6 * make_tokens(20, WIDTH).requires_grad_())
    (routing.weights_TK.square().sum() + routing.balance).backward()
    assert routing.weights_TK.isfinite().all()
    assert gate.weight_ED.grad is not None
    assert gate.weight_ED.grad.isfinite().all()


# --- ties


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias_rate", [0.0, 0.1])
@pytest.mark.parametrize(("experts", "top_k"), [(3, 2), (8, 3), (17, 4)])
def test_ties_do_not_depend_on_the_other_tokens(
    scores: Any, bias_rate: float, experts: int, top_k: int
) -> None:
    """Tokens of small whole numbers: most have equal scores.

    A token's choice must not depend on its batch."""
    gate = make_gate(top_k, width=2, experts=experts, scores=scores, bias_rate=bias_rate)
    with torch.no_grad():
        gate.weight_ED.copy_(torch.randint(0, 2, (experts, 2), generator=torch.Generator().manual_seed(2)))
    x_TD = torch.randint(0, 2, (200, 2), generator=torch.Generator().manual_seed(3)).float()
    batch = route(gate, x_TD)
    assert all(len(set(row)) == top_k for row in batch.experts_TK.tolist())
    single = [route(gate, x_1D) for x_1D in x_TD.split(1)]
    assert torch.equal(torch.cat([routing.experts_TK for routing in single]), batch.experts_TK)
    assert torch.equal(route(gate, x_TD, replay=call).experts_TK, batch.experts_TK)


def test_weights_of_a_tie_are_equal() -> None:
    gate = make_gate(3)
    with torch.no_grad():
        gate.weight_ED.zero_()
    routing = route(gate, make_tokens(7, WIDTH))
    torch.testing.assert_close(routing.weights_TK, torch.full((7, 3), 1 / 3))
    assert int(routing.counts_E.sum()) == 21


@pytest.mark.parametrize("bias_rate", [0.0, 0.1])
def test_a_recomputed_pass_repeats_the_choice_of_the_first(bias_rate: float) -> None:
    """The weights are the scores of the replayed experts, whatever the gate would choose now."""
    gate = make_gate(normalise=False, bias_rate=bias_rate)
    x_TD = make_tokens(3, WIDTH)
    first_TK = torch.tensor([[4, 0], [1, 2], [3, 1]])
    routing = route(gate, x_TD, replay=lambda _: first_TK)
    assert torch.equal(routing.experts_TK, first_TK)
    scores_TE = F.linear(x_TD, gate.weight_ED).softmax(-1)
    assert torch.equal(routing.weights_TK, scores_TE.gather(1, first_TK))
    assert routing.counts_E.tolist() == [1, 2, 1, 1, 1]


# --- bias


def test_the_bias_moves_towards_experts_with_too_few_tokens() -> None:
    layer = MoELayer(4, [3, 3, 3, 3], 1, bias_rate=0.25)
    update_balance(layer, [torch.tensor([3, 9, 0, 0])])
    assert layer.gate.bias_E.tolist() == [0.0, -0.25, 0.25, 0.25]
    update_balance(layer, [torch.tensor([4, 4, 4, 5])])  # a mean of 4.25
    assert layer.gate.bias_E.tolist() == [0.25, 0.0, 0.5, 0.0]
    update_balance(layer, [torch.tensor([2, 2, 2, 2])])
    assert layer.gate.bias_E.tolist() == [0.25, 0.0, 0.5, 0.0]
    assert layer.load_E.tolist() == [2, 2, 2, 2]


def test_without_a_rate_the_bias_stays_zero() -> None:
    layer = MoELayer(4, [3, 3], 1)
    update_balance(layer, [torch.tensor([9, 1])])
    assert not layer.gate.bias_E.any()
    assert "gate.bias_E" in layer.state_dict()


def test_without_a_rate_a_bias_is_ignored_in_first_and_recomputed_passes() -> None:
    """A checkpoint of a run with a rate has a bias that is not zero."""
    gate = make_gate()
    x_TD = make_tokens(40, WIDTH)
    expected_TK = route(gate, x_TD).experts_TK
    gate.bias_E.copy_(torch.tensor([3.0, 0, 0, 0, 0]))
    assert torch.equal(route(gate, x_TD).experts_TK, expected_TK)
    assert torch.equal(route(gate, x_TD, replay=call).experts_TK, expected_TK)


def test_the_bias_evens_out_the_load() -> None:
    layer = MoELayer(WIDTH, [3] * EXPERTS, 2, bias_rate=0.02)
    initialise(layer, 1)
    with torch.no_grad():
        layer.gate.weight_ED.mul_(30)
        layer.gate.weight_ED[0, 0] += 4  # a favourite
    x_TD = make_tokens(400, WIDTH)
    x_TD[:, 0].abs_()
    imbalance: list[float] = []
    for _ in range(60):
        _, routing = layer(x_TD)
        imbalance.append(float(routing.counts_E.max() / routing.counts_E.double().mean()))
        update_balance(layer, [routing.counts_E])
    assert imbalance[0] > 1.8
    assert imbalance[-1] < 1.2


# --- gradients and precision


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_weight_of_a_single_expert_keeps_its_gradient(scores: Any) -> None:
    """Normalised, a single weight would be one whatever the gate computes."""
    gate = make_gate(1, scores=scores)
    routing = route(gate, make_tokens(12, WIDTH))
    assert (routing.weights_TK < 1).all()
    routing.weights_TK.sum().backward()
    assert gate.weight_ED.grad is not None
    assert float(gate.weight_ED.grad.norm()) > 1e-2


def test_normalised_weights_sum_to_one_and_others_are_the_scores() -> None:
    x_TD = make_tokens(12, WIDTH)
    scores_TE = (x_TD @ make_gate().weight_ED.t()).sigmoid()
    best_TK = scores_TE.topk(2).values
    plain = route(make_gate(scores="sigmoid", normalise=False), x_TD)
    torch.testing.assert_close(plain.weights_TK, best_TK)
    normalised = route(make_gate(scores="sigmoid"), x_TD)
    torch.testing.assert_close(normalised.weights_TK, best_TK / best_TK.sum(1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_logits_are_computed_in_at_least_fp32(dtype: torch.dtype) -> None:
    gate = make_gate().to(dtype)
    x_TD = make_tokens(64, WIDTH, dtype=dtype)
    logits_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    routing = route(gate, x_TD)
    assert {t.dtype for t in (routing.weights_TK, routing.balance, routing.z)} == {logits_dtype}
    logits_TE = F.linear(x_TD.to(logits_dtype), gate.weight_ED.to(logits_dtype))
    weights_TK, experts_TK = logits_TE.softmax(-1).topk(2)
    assert torch.equal(routing.experts_TK, experts_TK)
    assert torch.equal(routing.weights_TK, weights_TK / weights_TK.sum(1, keepdim=True))
    routing.weights_TK.square().sum().backward()
    assert gate.weight_ED.grad is not None
    assert gate.weight_ED.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_autocast_does_not_change_the_gate(dtype: torch.dtype, scores: Any) -> None:
    gate = make_gate(scores=scores)
    x_TD = make_tokens(64, WIDTH, dtype=dtype)
    plain = route(gate, x_TD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = route(gate, x_TD)
    assert torch.equal(cast.experts_TK, plain.experts_TK)
    for a, b in ((cast.weights_TK, plain.weights_TK), (cast.balance, plain.balance), (cast.z, plain.z)):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_under_autocast_keeps_the_type_of_its_input(dtype: torch.dtype) -> None:
    layer = MoELayer(WIDTH, [8, 8, 16], 2, shared=4)
    initialise(layer, 1)
    x = make_tokens(4, 6, WIDTH, dtype=dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, routing = layer(x)
    y.float().square().sum().backward()
    assert y.dtype == dtype
    assert routing.weights_TK.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == dtype
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


# --- the balance loss, and wrong arguments


def test_the_share_of_an_expert_is_one_for_an_even_load() -> None:
    assert scaled_share(torch.tensor([0, 0, 0]), torch.float64, 3).tolist() == [1.0, 1.0, 1.0]
    assert scaled_share(torch.tensor([4, 4]), torch.float64, 2).tolist() == [1.0, 1.0]
    assert scaled_share(torch.tensor([0, 1]), torch.float64, 2).tolist() == [0.0, 2.0]
    assert scaled_share(torch.tensor([6, 0, 3]), torch.float64, 3).tolist() == [2.0, 0.0, 1.0]


def test_a_new_gate_has_small_weights_a_normalised_top_k_and_no_bias() -> None:
    gate = Gate(2000, 8, 8)
    weight_ED = gate.weight_ED.detach()
    assert float(weight_ED.mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(weight_ED.std()) == pytest.approx(0.02, rel=0.03)
    assert (gate.scores, gate.normalise, gate.bias_rate) == ("softmax", True, 0.0)


@pytest.mark.parametrize("top_k", [0, 6])
def test_top_k_outside_the_number_of_experts_is_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k is {top_k}; with 5 experts it must lie between 1 and 5"):
        Gate(WIDTH, EXPERTS, top_k)
