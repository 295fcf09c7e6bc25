"""The capacity of experts: choices are kept in order, over all hosts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from experts.moe.capacity import capacity_mask
from experts.moe.context import MoEContext, StepContext
from experts.tokens.exchange import LocalExchange, PendingRows
from harness.moe.oracle import kept_oracle


@dataclass
class FixedCounts:
    """An exchange whose other hosts have sent these counts."""

    rank: int
    tables: list[list[int]]
    """The counts that each host sends to all others."""
    calls: int = 0

    @property
    def size(self) -> int:
        return len(self.tables)

    def all_to_all_counts(self, counts_NC: Tensor, header: Sequence[int]) -> Tensor:
        assert counts_NC.tolist() == [self.tables[self.rank]] * self.size
        self.calls += 1
        return torch.tensor(self.tables)

    def all_to_all_rows(
        self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> PendingRows:
        raise AssertionError("only counts are exchanged")


def count_choices(choices: Sequence[Sequence[int]], top_k: int, experts: int) -> list[int]:
    """How many tokens chose each expert first, second and so on."""
    return [sum(chosen[k] == e for chosen in choices) for k in range(top_k) for e in range(experts)]


def draw_choices(draw: random.Random, tokens: int, experts: int, top_k: int) -> list[list[int]]:
    """Choices that prefer experts with low ids."""
    return [sorted(range(experts), key=lambda e: draw.random() * (1 + e))[:top_k] for _ in range(tokens)]


@pytest.mark.parametrize("seed", range(60))
def test_capacity_is_given_out_in_order(seed: int) -> None:
    draw = random.Random(seed)
    hosts = draw.randint(1, 4)
    experts = draw.randint(1, 9)
    top_k = draw.randint(1, experts)
    capacity = draw.choice([0.1, 0.5, 1.0, 1.25, 2.0])
    choices = [draw_choices(draw, draw.choice([0, 1, 5, 12]), experts, top_k) for _ in range(hosts)]
    dummy_hosts = {host for host in range(hosts) if hosts > 1 and draw.random() < 0.2}
    real_choices = [() if host in dummy_hosts else choices[host] for host in range(hosts)]
    all_choices = [chosen for of_host in real_choices for chosen in of_host]
    expected = iter(kept_oracle(all_choices, experts, capacity))
    tables = [count_choices(of_host, top_k, experts) for of_host in real_choices]
    for host in range(hosts):
        experts_TK = torch.tensor(choices[host], dtype=torch.int64).view(-1, top_k)
        exchange = FixedCounts(host, tables) if hosts > 1 else LocalExchange()
        context = MoEContext(exchange, step=StepContext(dummy=host in dummy_hosts))
        kept_TK = capacity_mask(experts_TK, experts, capacity, context)
        assert kept_TK.shape == experts_TK.shape
        if host not in dummy_hosts:
            assert kept_TK.tolist() == [next(expected) for _ in choices[host]]
        if isinstance(exchange, FixedCounts):
            assert exchange.calls == 1, "each host takes part once, with or without tokens"


def test_first_choices_are_kept_before_second_ones() -> None:
    """Each expert takes two: the second choice of the first token comes after the first choices of
    all tokens."""
    choices = torch.tensor([[1, 0], [0, 1], [0, 1], [0, 1]])
    kept = capacity_mask(choices, 2, 0.5, MoEContext())
    assert kept.tolist() == [[True, False], [True, True], [True, False], [False, False]]
