"""Runs on three nodes with addresses, process ids and clocks of their own, undisturbed and disturbed.

Each equals the undisturbed run. They go through the real command, which joins the cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.hosts.namespace_cluster import NamespaceCluster, namespace_cluster
from harness.hosts.namespace_runs import (
    CASES,
    STRATEGIES,
    TOLERANCE,
    Case,
    Outcome,
    run_case,
    undisturbed,
)
from harness.hosts.namespaces import reason_not_allowed

_NOT_ALLOWED = reason_not_allowed()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(_NOT_ALLOWED is not None, reason=str(_NOT_ALLOWED)),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[NamespaceCluster]:
    with namespace_cluster(3) as started:
        yield started


@pytest.fixture(scope="module")
def calm(cluster: NamespaceCluster) -> dict[str, Outcome]:
    """The undisturbed run of each strategy."""
    return {strategy: run_case(cluster, undisturbed(strategy)) for strategy in STRATEGIES}


def test_nodes_share_the_run_folder_and_both_strategies_agree(calm: dict[str, Outcome]) -> None:
    experts, data = (calm[strategy] for strategy in STRATEGIES)
    assert experts.problems == data.problems == []
    assert experts.losses == pytest.approx(data.losses, rel=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_disturbed_run_ends_with_the_losses_of_the_undisturbed_one(
    cluster: NamespaceCluster, calm: dict[str, Outcome], case: Case
) -> None:
    outcome = run_case(cluster, case, calm[case.strategy])
    assert outcome.problems == [], outcome.seen
