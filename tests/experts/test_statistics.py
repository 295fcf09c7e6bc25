"""Tests of the statistics of routing."""

from __future__ import annotations

import torch
from torch import Tensor

from experts.gate import Gate
from experts.statistics import ExpertStatistics, reduce_statistics

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
