"""The snapshots of three hosts, taken once for all tests that read them."""

from __future__ import annotations

import pytest

from orchestrator.checkpoint.files import Contents
from tests.support.storage.snapshots import HOST_OF, TASK, HostSnapshots, take_snapshots


@pytest.fixture(scope="session")
def three_hosts() -> tuple[HostSnapshots, Contents]:
    """The snapshots of three hosts, and the checkpoint of the same step."""
    return take_snapshots(TASK, HOST_OF)
