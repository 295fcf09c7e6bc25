"""The throughput of timed blocks and its confidence interval."""

from __future__ import annotations

import random

import pytest

from orchestrator.measure.timed_steps import TimedBlock, rate_of


def test_the_interval_of_two_blocks_uses_students_t() -> None:
    """The 97.5% quantile with one degree of freedom is 12.706."""
    rate, interval = rate_of([TimedBlock(1.0, 1, 90), TimedBlock(1.0, 1, 110)])
    assert rate == 100
    deviation = (200 / 1) ** 0.5
    assert interval == pytest.approx(12.7062 * deviation / 2**0.5 / 100, rel=1e-5)


def test_the_interval_contains_the_true_rate_in_95_of_100_cases() -> None:
    """Short last batches included."""
    generator = random.Random(0)
    contained = 0
    for _ in range(400):
        samples = [64 if generator.random() < 0.8 else 20 for _ in range(12)]
        blocks = [TimedBlock(count / 100 * generator.gauss(1, 0.1), 1, count) for count in samples]
        rate, interval = rate_of(blocks)
        contained += abs(rate - 100) <= interval * rate
    assert 0.90 < contained / 400 < 0.99
    assert rate_of([TimedBlock(2.0, 4, 100)]) == (50.0, float("inf"))
    assert rate_of([TimedBlock(1.0, 1, 10)] * 5) == (10.0, 0.0)
