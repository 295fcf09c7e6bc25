"""Tests of the statistics of routing."""

from __future__ import annotations

import torch
from torch import Tensor

from experts.moe.gate import Gate
from experts.moe.statistics import ExpertStatistics, reduce_statistics

PASSES = 7


def observe(flush_after: set[int], top_k: int) -> Tensor:
    """Return the sums over several passes, added up over the hosts after some of them."""
    torch.manual_seed(0)
    gate = Gate(8, 5, top_k)
    statistics = ExpertStatistics(5, 8)
    for number in range(PASSES):
        x_TD = torch.randn(11 + number, 8)
        statistics.observe(x_TD, gate(x_TD, torch.zeros(5, dtype=torch.int64)), gate, torch.arange(len(x_TD)))
        if number in flush_after:
            reduce_statistics([statistics], lambda tensor: tensor)
    reduce_statistics([statistics], lambda tensor: tensor)
    return statistics.sums


def test_a_snapshot_in_between_changes_no_bit() -> None:
    for top_k in (2, 5):
        whole = observe(set(), top_k)
        assert float(whole[1]) > 0
        for moments in ({0}, {2, 4}, {0, 1, 2, 3, 4, 5}):
            assert observe(moments, top_k).equal(whole)


def test_tokens_are_kept_only_of_a_step_that_is_measured() -> None:
    gate = Gate(8, 5, 2)
    statistics = ExpertStatistics(5, 8)
    position_T = torch.arange(40)
    for seed, samples in ((0, True), (1, False)):
        x_TD = torch.randn(40, 8, generator=torch.Generator().manual_seed(seed))
        statistics.begin_step(samples)
        statistics.observe(x_TD, gate(x_TD, torch.zeros(5, dtype=torch.int64)), gate, position_T)
    reduce_statistics([statistics], lambda tensor: tensor)
    assert statistics.tokens == 80, "both steps are counted"
    kept = statistics.gather_sample(lambda tensor: tensor.unsqueeze(0))
    first = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    assert all((first == token).all(1).any() for token in kept)
