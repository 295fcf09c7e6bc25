"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, cluster

# Before torch is imported, here and in what tests start. Tensors of tests are tiny: threads that wait for each other, on two cores
# that are busy, cost ten times what they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _group(item: pytest.Item) -> str:
    """Tests that start Ray run one after another, beside all the others; those of one file together."""
    starts_ray = item.get_closest_marker("ray") is not None or "shared_cluster" in getattr(item, "fixturenames", ())
    return "ray" if starts_ray or item.path.stem == "test_readme" else str(item.path)


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: _group(item) != "ray")  # the longest way first


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """The one Ray of the suite: four CPU slots, no GPU."""
    with cluster(cpus=4) as made:
        yield made
