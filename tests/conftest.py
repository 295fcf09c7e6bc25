"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, cluster


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """The one Ray of the suite: four CPU slots, no GPU."""
    with cluster(cpus=4) as made:
        yield made
