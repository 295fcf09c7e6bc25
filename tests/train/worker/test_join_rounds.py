"""Joining takes a host the same number of rounds however many hosts there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.hosts.joining import join_counts
from harness.hosts.thread_hosts import HostCounts


@pytest.fixture(autouse=True)
def thread_count() -> Iterator[None]:
    """Hosts in threads set torch's number of threads side by side: restore it."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def cost_of(counts: list[HostCounts]) -> dict[str, int]:
    """Return the most that any host did, and the keys that all hosts together have set."""
    return {
        "rounds": max(host.rounds for host in counts),
        "reads": max(host.store["get"] + host.store["add"] + host.store["wait"] for host in counts),
        "keys in one look": max(host.most_keys for host in counts),
        "keys set by all": sum(host.store["set"] for host in counts),
    }


@pytest.mark.extended
@pytest.mark.parametrize("deterministic", [False, True])
def test_rounds_and_store_operations_do_not_grow_with_the_hosts(tmp_path: Path, deterministic: bool) -> None:
    few = cost_of(join_counts(2, tmp_path / "few", deterministic=deterministic))
    several = cost_of(join_counts(8, tmp_path / "several", deterministic=deterministic))
    many = cost_of(join_counts(64, tmp_path / "many", deterministic=deterministic))
    assert few == several == many
    assert many["keys in one look"] == 1, "a host waits for a single key"


def test_all_hosts_take_part_in_the_same_collectives(tmp_path: Path) -> None:
    counts = join_counts(3, tmp_path / "run")
    assert counts[0].collectives == counts[1].collectives == counts[2].collectives
    assert counts[0].collectives["all-reduce"] > 0, "the counts are those of the hosts"
