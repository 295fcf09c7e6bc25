"""AdamW with averages in 8 bit, against a slow one that rounds number by number."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from orchestrator.train.optim.adamw8bit import BLOCK, AdamW8bit, Table, decode, encode

CPU = torch.device("cpu")
LR, BETAS, EPS, DECAY = 0.02, (0.8, 0.95), 1e-8, 0.1
STEPS = 6


def gradient_of(step: int, shape: torch.Size) -> Tensor:
    """Gradients of sizes from 1e-6 to 1; those of the first row are zero every other step."""
    generator = torch.Generator().manual_seed(step)
    sizes = 10.0 ** (-6 * torch.rand(shape, generator=generator, dtype=torch.float64))
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64) * sizes
    if step % 2:
        gradient[0] = 0
    return gradient


def train(weight: Tensor, rows: slice = slice(None)) -> tuple[Tensor, AdamW8bit]:
    parameter = nn.Parameter(weight[rows].clone())
    group = {"params": [parameter], "weight_decay": DECAY}
    optimizer = AdamW8bit([group], lr=LR, betas=BETAS, eps=EPS)
    for step in range(STEPS):
        parameter.grad = gradient_of(step, weight.shape)[rows].to(weight.dtype)
        optimizer.step()
    return parameter.detach(), optimizer


def slow_rounded(values: list[float], signed: bool) -> list[float]:
    """Round the numbers of one block, each to the nearest value of the table."""
    table = Table.of(signed, CPU, torch.float64).values.tolist()
    scale = max(map(abs, values))
    if scale == 0:
        return values
    rounded = []
    for value in values:
        place = bisect_left(table, value / scale)
        candidates = table[max(0, place - 1) : place + 1]
        if not signed and value > 0:
            candidates = [candidate for candidate in candidates if candidate > 0]
        rounded.append(scale * min(candidates, key=lambda candidate: abs(candidate - value / scale)))
    return rounded


def slow_row(weights: list[float], gradients: list[list[float]]) -> list[float]:
    """Train one row of a weight with lists of numbers."""
    means = [0.0] * len(weights)
    roots = [0.0] * len(weights)
    weights = list(weights)
    for step, gradient in enumerate(gradients, 1):
        for index, slope in enumerate(gradient):
            means[index] = BETAS[0] * means[index] + (1 - BETAS[0]) * slope
            roots[index] = math.sqrt(BETAS[1] * roots[index] ** 2 + (1 - BETAS[1]) * slope**2)
            mean = means[index] / (1 - BETAS[0] ** step)
            root = roots[index] / math.sqrt(1 - BETAS[1] ** step)
            weights[index] = weights[index] * (1 - LR * DECAY) - LR * mean / (root + EPS)
        means = list(chain.from_iterable(slow_rounded(block, True) for block in _blocks(means)))
        roots = list(chain.from_iterable(slow_rounded(block, False) for block in _blocks(roots)))
    return weights


def _blocks(values: list[float]) -> list[list[float]]:
    return [values[begin : begin + BLOCK] for begin in range(0, len(values), BLOCK)]


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 2 * BLOCK // 3 + 7), (1, BLOCK)])
def test_steps_equal_those_of_the_slow_one(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found, _ = train(weight)
    gradients = [gradient_of(step, weight.shape).flatten(1).tolist() for step in range(STEPS)]
    for row, weights in enumerate(weight.flatten(1).tolist()):
        expected = slow_row(weights, [gradient[row] for gradient in gradients])
        torch.testing.assert_close(
            found[row].flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9
        )


def test_an_expert_of_a_stack_is_trained_as_if_it_were_alone() -> None:
    """Its state is a slice of the stack's: hosts save and load it by expert."""
    weight = torch.randn((4, 30, 11), generator=torch.Generator().manual_seed(9))
    together, optimizer = train(weight)
    alone, own_optimizer = train(weight, slice(2, 3))
    assert torch.equal(together[2:3], alone)
    (state,) = optimizer.state.values()
    (own_state,) = own_optimizer.state.values()
    for slot, value in own_state.items():
        assert torch.equal(state[slot] if slot == "step" else state[slot][2:3], value), slot


def test_vectors_are_trained_as_by_adamw() -> None:
    weight = torch.randn(700, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found, _ = train(weight)
    parameter = nn.Parameter(weight.clone())
    adamw = torch.optim.AdamW([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in range(STEPS):
        parameter.grad = gradient_of(step, weight.shape)
        adamw.step()
    torch.testing.assert_close(found, parameter.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 300), (300,)])
def test_a_16_bit_weight_is_computed_in_fp32_and_rounded_once(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    short, wide = nn.Parameter(weight.clone()), nn.Parameter(weight.float())
    optimizers = [
        AdamW8bit([{"params": [parameter], "weight_decay": DECAY}], lr=LR, betas=BETAS, eps=EPS)
        for parameter in (short, wide)
    ]
    for step in range(STEPS):
        gradient = gradient_of(step, weight.shape).bfloat16()
        for parameter, optimizer in zip((short, wide), optimizers, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
        assert torch.equal(short, wide.bfloat16()), step
        wide.data = short.float()
    (state,), (wide_state,) = (optimizer.state.values() for optimizer in optimizers)
    for slot, value in wide_state.items():
        assert torch.equal(state[slot], value), slot


def test_the_state_of_a_matrix_takes_a_byte_for_each_average() -> None:
    _, optimizer = train(torch.zeros(8, 1024))
    (state,) = optimizer.state.values()
    num_bytes = sum(value.numel() * value.itemsize for value in state.values() if value.ndim)
    assert num_bytes == 2 * 8 * (1024 + 4 * 4)


@pytest.mark.parametrize(("signed", "smallest", "num_large"), [(True, 0.55e-6, 65), (False, 0.325e-6, 129)])
def test_a_byte_has_values_of_seven_decades(signed: bool, smallest: float, num_large: int) -> None:
    """Half of them in the largest decade, in equal distances."""
    values = Table.of(signed, CPU, torch.float64).values
    assert len(values.unique()) == 256
    assert (values.diff() > 0).all()
    positive = values[values > 0]
    assert float(positive[0]) == pytest.approx(smallest)
    assert float(positive[-1]) == 1.0
    large = positive[positive > 0.1]
    assert len(large) == num_large
    torch.testing.assert_close(
        large[:-1].diff(), torch.full((num_large - 2,), 0.9 / (num_large - 1)).double()
    )
    assert signed == bool((values < 0).any())


def test_a_small_root_is_never_rounded_to_zero() -> None:
    """The first average divided by zero would be a step of any size."""
    table = Table.of(False, CPU, torch.float32)
    values = torch.tensor([[1.0, 1e-12, 0.0]])
    codes = encode(values, table)
    assert codes.data.tolist() == [[255, 1, 0]]
    assert float(decode(codes, table)[0, 1]) > 0
