"""Tests of sharded data parallel: the same run on several workers and in one process."""

from __future__ import annotations

import pytest

from harness.runs.steppers import UNEVEN_EXPERTS, DoubleDigits, DoubleText
from harness.runs.worker_runs import (
    WorkerCase,
    assert_workers_equal_one_process,
    assert_workers_follow_one_process_in_fp32,
)
from orchestrator.tasks.digits import Digits


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize(
    "case",
    [
        WorkerCase(DoubleDigits, 2, 16, 64, sharding="zero2"),
        WorkerCase(DoubleDigits, 3, 7, 50, samples=101, sharding="zero3"),
        WorkerCase(DoubleText, 2, 4, 16, sharding="zero3", steps=6),
        WorkerCase(DoubleDigits, 4, 2, 8, samples=15, sharding="zero3"),  # a last batch of 7 over four
    ],
    ids=str,
)
def test_sharded_workers_are_exact_in_fp64(case: WorkerCase) -> None:
    assert_workers_equal_one_process(case)


@pytest.mark.extended
def test_sharded_workers_are_exact_in_fp32() -> None:
    config = UNEVEN_EXPERTS.but(balance_loss=0.01)
    case = WorkerCase(Digits, 2, 8, 64, sharding="zero3", steps=50, config=config)
    assert_workers_follow_one_process_in_fp32(case)
