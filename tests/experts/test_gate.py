"""The gate: noise that depends on nothing but its place, scores at the ends of their range, the bias, and precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experts.balance import update_balance
from experts.gate import Gate, noise, scaled_share
from experts.layer import MoELayer
from experts.model import initialise
from experts.types import Routing

WIDTH, EXPERTS = 16, 5


def make(top_k: int = 2, width: int = WIDTH, experts: int = EXPERTS, **options: Any) -> Gate:
    gate = Gate(width, experts, top_k, **options)
    initialise(gate, 3)
    with torch.no_grad():
        gate.weight_ED.mul_(50)
    return gate


def tokens_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def route(gate: Gate, x_TD: Tensor) -> Routing:
    return gate(x_TD, torch.zeros(len(gate.weight_ED), dtype=torch.int64))


# --- noise


def drawn(positions: Tensor, seed: int = 11, width: int = 8, size: float = 0.25) -> Tensor:
    return noise(seed, positions, width, size, torch.float64)


def test_noise_depends_on_seed_position_and_column_alone() -> None:
    whole_TD = drawn(torch.arange(100))
    assert torch.equal(drawn(torch.arange(37, 64)), whole_TD[37:64])
    some_T = torch.tensor([99, 3, 3, 50])
    assert torch.equal(drawn(some_T), whole_TD[some_T])
    assert torch.equal(drawn(torch.arange(100), width=3), whole_TD[:, :3])
    assert drawn(torch.arange(0)).shape == (0, 8)
    for seed in (10, 12, 11 + 2**40):
        assert not torch.isclose(drawn(torch.arange(100), seed=seed), whole_TD).all(1).any()


def test_noise_is_the_same_in_fp32_but_for_rounding() -> None:
    exact_TD = drawn(torch.arange(1000))
    rounded_TD = noise(11, torch.arange(1000), 8, 0.25, torch.float32)
    assert rounded_TD.dtype == torch.float32
    torch.testing.assert_close(rounded_TD.double(), exact_TD, rtol=0, atol=2e-7)


def test_noise_is_uniform_around_one() -> None:
    factors = drawn(torch.arange(40_000)).reshape(-1)
    count = len(factors)
    assert 0.75 <= float(factors.min()) < 0.7501
    assert 1.2499 < float(factors.max()) <= 1.25
    assert float(factors.mean()) == pytest.approx(1.0, abs=4 * 0.25 / math.sqrt(3 * count))
    assert float(factors.var()) == pytest.approx(0.25**2 / 3, rel=0.01)
    bins = torch.histc(factors, 64, 0.75, 1.25)
    chi_square = float(((bins - count / 64) ** 2 / (count / 64)).sum())
    assert chi_square < 63 + 4 * math.sqrt(2 * 63)


@pytest.mark.parametrize("lag", [1, 2, 3, 8, 64, 1024])
def test_neighbours_have_nothing_to_do_with_each_other(lag: int) -> None:
    """Positions of one sequence, samples of one batch, columns, and the seeds of layers and steps."""
    here_TD = drawn(torch.arange(20_000), width=8)
    beside = {
        "position": (here_TD, drawn(torch.arange(lag, 20_000 + lag), width=8)),
        "seed": (here_TD, drawn(torch.arange(20_000), seed=11 + lag, width=8)),
        "seed for position": (
            drawn(torch.arange(lag, 20_000 + lag), width=8),
            drawn(torch.arange(20_000), seed=11 + lag, width=8),
        ),
        "column": (
            drawn(torch.arange(100), width=2048)[:, :1000],
            drawn(torch.arange(100), width=2048)[:, lag : 1000 + lag],
        ),
    }
    for name, (a, b) in beside.items():
        together = float(torch.corrcoef(torch.stack([a.reshape(-1), b.reshape(-1)]))[0, 1])
        assert abs(together) < 4 / math.sqrt(a.numel()), name


def test_noise_touches_what_the_gate_sees_and_no_more() -> None:
    gate, x_TD = make(), tokens_of(9, WIDTH)
    factors_TD = noise(5, torch.arange(9), WIDTH, 0.5, torch.float32)
    noisy = gate(x_TD, torch.zeros(EXPERTS, dtype=torch.int64), factors_TD)
    shaken = route(gate, x_TD * factors_TD)
    assert torch.equal(noisy.experts_TK, shaken.experts_TK)
    assert torch.equal(noisy.weights_TK, shaken.weights_TK)
    assert not torch.equal(noisy.weights_TK, route(gate, x_TD).weights_TK)


# --- scores at the ends of their range


def underflowing() -> tuple[Gate, Tensor]:
    """All scores are zero in fp32."""
    gate = make(scores="sigmoid")
    with torch.no_grad():
        gate.weight_ED.fill_(-50.0)
    return gate, torch.ones(3, WIDTH, requires_grad=True)


def pulled(gate: Gate, x_TD: Tensor, strength: float) -> list[Tensor]:
    """Gradients, when the weights and the losses are pulled at with some strength."""
    routing = gate(x_TD, torch.tensor([7, 0, 0, 0, 0]))
    pull = (routing.weights_TK * torch.tensor([strength, -strength])).sum() + strength * routing.balance
    return list(torch.autograd.grad(pull + 1e-3 * routing.z, [x_TD, gate.weight_ED]))


def test_scores_that_are_all_zero_have_finite_weights_and_gradients() -> None:
    gate, x_TD = underflowing()
    routing = gate(x_TD, torch.tensor([7, 0, 0, 0, 0]))
    assert routing.weights_TK.tolist() == [[0.0, 0.0]] * 3
    assert routing.balance == 0
    assert routing.z.isfinite()
    assert all(set(row) <= set(range(EXPERTS)) and len(set(row)) == 2 for row in routing.experts_TK.tolist())
    for gradient in pulled(gate, x_TD, 0.5):
        assert gradient.isfinite().all()


def test_scores_that_are_all_zero_stand_any_pull() -> None:
    for gradient in pulled(*underflowing(), strength=100.0):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_overwhelming_logits_have_finite_weights_and_gradients(scores: Any) -> None:
    gate, x_TD = make(scores=scores), 1e6 * tokens_of(20, WIDTH).requires_grad_()
    routing = route(gate, x_TD)
    (routing.weights_TK.square().sum() + routing.balance).backward()
    assert routing.weights_TK.isfinite().all()
    assert gate.weight_ED.grad is not None
    assert gate.weight_ED.grad.isfinite().all()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias_rate", [0.0, 0.1])
@pytest.mark.parametrize(("experts", "top_k"), [(3, 2), (8, 3), (17, 4)])
def test_ties_are_broken_alike_whoever_else_is_there(
    scores: Any, bias_rate: float, experts: int, top_k: int
) -> None:
    """Rows of small whole numbers: most have equal scores. A token's choice must not depend on the batch it is in."""
    gate = make(top_k, width=2, experts=experts, scores=scores, bias_rate=bias_rate)
    with torch.no_grad():
        gate.weight_ED.copy_(torch.randint(0, 2, (experts, 2), generator=torch.Generator().manual_seed(2)))
    x_TD = torch.randint(0, 2, (200, 2), generator=torch.Generator().manual_seed(3)).float()
    whole = route(gate, x_TD)
    assert all(len(set(row)) == top_k for row in whole.experts_TK.tolist())
    alone = [route(gate, x_1D) for x_1D in x_TD.split(1)]
    assert torch.equal(torch.cat([one.experts_TK for one in alone]), whole.experts_TK)
    repeated = gate(x_TD, torch.zeros(experts, dtype=torch.int64), None, lambda make: make())
    assert torch.equal(repeated.experts_TK, whole.experts_TK)


def test_weights_of_a_tie_are_even() -> None:
    gate = make(3)
    with torch.no_grad():
        gate.weight_ED.zero_()
    routing = route(gate, tokens_of(7, WIDTH))
    torch.testing.assert_close(routing.weights_TK, torch.full((7, 3), 1 / 3))
    assert int(routing.counts_E.sum()) == 21


# --- bias


def test_the_bias_moves_towards_the_experts_that_had_too_few() -> None:
    layer = MoELayer(4, [3, 3, 3, 3], 1, bias_rate=0.25)
    update_balance(layer, [torch.tensor([3, 9, 0, 0])])
    assert layer.gate.bias_E.tolist() == [0.0, -0.25, 0.25, 0.25]
    update_balance(layer, [torch.tensor([4, 4, 4, 5])])  # a mean of 4.25
    assert layer.gate.bias_E.tolist() == [0.25, 0.0, 0.5, 0.0]
    update_balance(layer, [torch.tensor([2, 2, 2, 2])])
    assert layer.gate.bias_E.tolist() == [0.25, 0.0, 0.5, 0.0]
    assert layer.load_E.tolist() == [2, 2, 2, 2]


def test_without_a_rate_the_bias_stays() -> None:
    layer = MoELayer(4, [3, 3], 1)
    update_balance(layer, [torch.tensor([9, 1])])
    assert not layer.gate.bias_E.any()
    assert "gate.bias_E" in layer.state_dict()


def test_a_bias_counts_alike_in_a_pass_that_is_repeated() -> None:
    gate, x_TD = make(), tokens_of(40, WIDTH)
    gate.bias_E.copy_(torch.tensor([3.0, 0, 0, 0, 0]))  # as a checkpoint of a run with a rate has it
    repeated = gate(x_TD, torch.zeros(EXPERTS, dtype=torch.int64), None, lambda make: make())
    assert torch.equal(repeated.experts_TK, route(gate, x_TD).experts_TK)


def test_the_bias_evens_out_the_load() -> None:
    layer = MoELayer(WIDTH, [3] * EXPERTS, 2, bias_rate=0.02)
    initialise(layer, 1)
    with torch.no_grad():
        layer.gate.weight_ED.mul_(30)
        layer.gate.weight_ED[0, 0] += 4  # a favourite
    x_TD = tokens_of(400, WIDTH)
    x_TD[:, 0].abs_()
    loads = []
    for _ in range(60):
        _, routing = layer(x_TD)
        loads.append(float(routing.counts_E.max() / routing.counts_E.double().mean()))
        update_balance(layer, [routing.counts_E])
    assert loads[0] > 1.8
    assert loads[-1] < 1.2


# --- gradients and precision


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_one_expert_per_token_keeps_the_gate_in_the_loss(scores: Any) -> None:
    """Normalised, a single weight would be one whatever the gate says."""
    gate, x_TD = make(1, scores=scores), tokens_of(12, WIDTH)
    routing = route(gate, x_TD)
    assert (routing.weights_TK < 1).all()
    routing.weights_TK.sum().backward()
    assert gate.weight_ED.grad is not None
    assert float(gate.weight_ED.grad.norm()) > 1e-2


def test_normalised_weights_sum_to_one_and_others_are_the_scores() -> None:
    x_TD = tokens_of(12, WIDTH)
    scores_TE = (x_TD @ make().weight_ED.t()).sigmoid()
    best_TK = scores_TE.topk(2).values
    plain = route(make(scores="sigmoid", normalise=False), x_TD)
    torch.testing.assert_close(plain.weights_TK, best_TK)
    whole = route(make(scores="sigmoid"), x_TD)
    torch.testing.assert_close(whole.weights_TK, best_TK / best_TK.sum(1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_logits_are_computed_in_fp32_or_better(dtype: torch.dtype) -> None:
    gate, x_TD = make().to(dtype), tokens_of(64, WIDTH, dtype=dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    routing = route(gate, x_TD)
    assert {t.dtype for t in (routing.weights_TK, routing.balance, routing.z)} == {exact}
    logits_TE = F.linear(x_TD.to(exact), gate.weight_ED.to(exact))
    weights_TK, experts_TK = logits_TE.softmax(-1).topk(2)
    assert torch.equal(routing.experts_TK, experts_TK)
    assert torch.equal(routing.weights_TK, weights_TK / weights_TK.sum(1, keepdim=True))
    routing.weights_TK.square().sum().backward()
    assert gate.weight_ED.grad is not None
    assert gate.weight_ED.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_autocast_does_not_reach_the_gate(dtype: torch.dtype, scores: Any) -> None:
    gate, x_TD = make(scores=scores), tokens_of(64, WIDTH, dtype=dtype)
    plain = route(gate, x_TD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = route(gate, x_TD)
    assert torch.equal(cast.experts_TK, plain.experts_TK)
    for a, b in ((cast.weights_TK, plain.weights_TK), (cast.balance, plain.balance), (cast.z, plain.z)):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_under_autocast_takes_and_gives_the_same_type(dtype: torch.dtype) -> None:
    layer = MoELayer(WIDTH, [8, 8, 16], 2, shared=4)
    initialise(layer, 1)
    x = tokens_of(4, 6, WIDTH, dtype=dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, routing = layer(x)
    y.float().square().sum().backward()
    assert y.dtype == dtype
    assert routing.weights_TK.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all()
        for p in layer.parameters()
    )


# --- the balance loss, and mistakes


def test_the_share_of_an_expert_is_one_where_all_are_used_alike() -> None:
    assert scaled_share(torch.tensor([0, 0, 0]), torch.float64).tolist() == [1.0, 1.0, 1.0]
    assert scaled_share(torch.tensor([4, 4]), torch.float64).tolist() == [1.0, 1.0]
    assert scaled_share(torch.tensor([6, 0, 3]), torch.float64).tolist() == [2.0, 0.0, 1.0]


@pytest.mark.parametrize("top_k", [0, 6])
def test_more_experts_per_token_than_there_are_is_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k is {top_k}; with 5 experts it must lie between 1 and 5"):
        Gate(WIDTH, EXPERTS, top_k)
