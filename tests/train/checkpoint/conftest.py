"""The snapshots of three hosts, taken once for all tests that read them."""

from __future__ import annotations

import pytest

from harness.storage.snapshots import HOST_OF, TASK, HostSnapshots, take_snapshots
from orchestrator.checkpoint.files import Contents


@pytest.fixture(scope="session")
def three_hosts() -> tuple[HostSnapshots, Contents]:
    """The snapshots of three hosts, and the checkpoint of the same step."""
    return take_snapshots(TASK, HOST_OF)
