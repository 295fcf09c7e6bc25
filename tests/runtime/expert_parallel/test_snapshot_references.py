"""The references that the driver hands to each host of a new generation."""

from __future__ import annotations

from types import SimpleNamespace

from orchestrator.runtime.expert_parallel.snapshot_references import SnapshotReferences, references_for


def snapshots_of(size: int, generation: int) -> list[SnapshotReferences]:
    return [
        SnapshotReferences(
            SimpleNamespace(rank=rank, size=size, generation=generation), f"own {rank}", f"dense {rank}"
        )
        for rank in range(size)
    ]


def test_a_host_gets_its_own_experts_and_the_dense_part() -> None:
    snapshots = snapshots_of(3, generation=4)
    main, own = references_for(snapshots, rank=2, size=3, generation=5)
    assert (main.dense, main.own) == ("dense 0", None)
    assert own == snapshots[2]
    assert references_for(snapshots, rank=0, size=3, generation=5) == (snapshots[0],)


def test_hosts_that_place_the_experts_anew_get_all_references() -> None:
    snapshots = snapshots_of(3, generation=4)
    for size, generation in ((2, 5), (4, 5), (3, 6)):
        assert references_for(snapshots, 1, size, generation) == tuple(snapshots)
    assert references_for([], 1, 3, 5) == ()
