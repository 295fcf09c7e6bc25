"""Tests of gradient buckets."""

from __future__ import annotations

import torch
from torch.nn.parallel import distributed

from orchestrator.train.strategies.buckets import BUCKET_MB, gradient_buckets


def test_buckets_hold_neighbours_up_to_a_size() -> None:
    sizes = [100, 300_000, 10, 200_000, 5]
    buckets = gradient_buckets([torch.zeros(size) for size in sizes], 1)
    assert [[len(tensor) for tensor in bucket] for bucket in buckets] == [[100], [300_000], [10, 200_000, 5]]


def test_a_bucket_of_exactly_the_size_is_full() -> None:
    quarters = [torch.zeros(2**16) for _ in range(5)]
    assert [len(bucket) for bucket in gradient_buckets(quarters, 1)] == [4, 1]


def test_the_size_is_that_of_torchs_own_buckets() -> None:
    assert BUCKET_MB == distributed._DEFAULT_BUCKET_CAP_MB


def test_a_bucket_holds_one_dtype() -> None:
    tensors = [torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(2)]
    assert [len(bucket) for bucket in gradient_buckets(tensors, 25)] == [1, 1, 1]


def test_nothing_needs_no_bucket() -> None:
    assert list(gradient_buckets([], 25)) == []
