"""Steps of expert hosts with rows counted or bounded, in one chunk or two: two tiny hosts on a CPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from benchmarks.parallel.exchange_overlap import VARIANTS, _measure, _row
from harness.hosts.thread_hosts import run_gloo_threads
from orchestrator.train.group.world import World


def measure(rows: str, chunks: int, world: World) -> dict[str, Any]:
    return _measure(world, rows, chunks, steps=1, small=True)


def test_all_variants_have_one_loss() -> None:
    losses = []
    for variant in VARIANTS:
        first, _ = run_gloo_threads(2, partial(measure, *variant))
        assert len(_row(variant, first)) == 10
        losses.append(first["loss"])
    assert math.isfinite(losses[0])
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
