"""Real steps under forced loads, on two hosts as threads: the rows of the tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.moe import imbalance_real
from benchmarks.moe.imbalance_real import Figures, Loads
from harness.hosts.thread_hosts import run_gloo_threads
from harness.runs.benchmark_runs import Table, wrong_figures
from orchestrator.train.group.world import World

TOKENS = 20


def run(job: Callable[[World, int, Loads], list[Figures]], shares: list[float]) -> list[list[Figures]]:
    """Run four steps on both hosts. Return the figures by variant and host."""
    loads = [np.array(shares)] * 4
    by_host = run_gloo_threads(2, lambda world: job(world, TOKENS, loads))
    return [list(hosts) for hosts in zip(*by_host, strict=True)]


def test_forced_loads_have_a_row() -> None:
    row = imbalance_real.row("one hot", run(imbalance_real.alternating_variants, [0.7, 0.1, 0.1, 0.1]))
    table = Table(imbalance_real.COLUMNS, [list(map(str, row))])
    zero = ("changes", "ms moving, in all", "share of the time", "ms of a decision without change")
    assert wrong_figures(table, (*zero, "ms per step, even")) == []
    # The first host has the experts 0 and 2, and so eight tenths of the tokens.
    assert table.cells("max/mean without") == ["1.60"]


def test_bytes_of_one_and_two_replicas_are_compared() -> None:
    figures = run(imbalance_real.replica_variants, [0.25, 0.25, 0.25, 0.25])
    one, two = (variant[0].bytes for variant in figures)
    assert len(one) == len(two) == 4
    assert min(one + two) > 0
    assert len(imbalance_real.bytes_row(figures)) == 3
