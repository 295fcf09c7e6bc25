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


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """The one Ray of the suite: four CPU slots, no GPU."""
    with cluster(cpus=4) as made:
        yield made
