"""A host that resumes reads the dense part and its own experts, however many hosts there are."""

from __future__ import annotations

import pytest
import torch

from experts.expert_state import stacked_names
from harness.hosts.many_hosts import ManyHosts
from orchestrator.runtime.expert_parallel.snapshot_references import SnapshotReferences
from orchestrator.train.checkpoint.snapshot_format import SnapshotHeader
from orchestrator.train.checkpoint.snapshot_source import ExpertsMissing, hosts_to_read
from orchestrator.train.checkpoint.state import TrainState


def header(rank: int, *experts: int) -> SnapshotHeader:
    return SnapshotHeader(0, 1, rank, 3, 0, 0, {"bank": experts})


def part_bytes(snapshots: list[SnapshotReferences], rank: int) -> int:
    return snapshots[0].dense.size + snapshots[rank].own.size


def assert_same_state(state: TrainState, experts: TrainState, main: TrainState) -> None:
    """The experts are those of the host's own rank, and the rest is the main host's."""
    stacked = stacked_names(state.model)
    parameters = dict(state.model.named_parameters())
    for name, parameter in parameters.items():
        origin = experts if name in stacked else main
        expected = origin.model.get_parameter(name)
        assert torch.equal(parameter, expected), name
        for slot, value in origin.optimizer.state[expected].items():
            assert torch.equal(state.optimizer.state[parameter][slot], value), (name, slot)


@pytest.mark.parametrize("hosts", [2, 8, 64])
def test_a_host_reads_the_dense_part_and_its_own_experts(hosts: int) -> None:
    case = ManyHosts(hosts, experts=2 * hosts)
    snapshots = case.take_snapshots()
    for rank in {0, 1, hosts - 1}:
        state, num_bytes = case.restore(snapshots, rank)
        assert num_bytes == part_bytes(snapshots, rank)
        assert_same_state(state, case.state_of(rank, seed=rank), case.state_of(0, seed=0))


def test_the_bytes_of_a_host_do_not_grow_with_the_hosts() -> None:
    """But for the gate, which has a row for each expert."""
    read: dict[int, int] = {}
    for hosts in (2, 8, 64):
        case = ManyHosts(hosts, experts=2 * hosts)
        read[hosts] = max(case.restore(case.take_snapshots(), rank)[1] for rank in (1, hosts - 1))
    gate_bytes = 3 * 4 * ManyHosts(0, 0).width
    grown = [read[hosts] - read[2] - gate_bytes * 2 * (hosts - 2) for hosts in (8, 64)]
    assert max(grown) < 0.01 * read[2], read


def test_a_host_under_another_placement_reads_the_hosts_of_its_experts() -> None:
    before = ManyHosts(5, experts=15)
    snapshots = before.take_snapshots()
    after = ManyHosts(4, experts=15)
    for rank in range(4):
        state, num_bytes = after.restore(snapshots, rank)
        origins = {expert % 5 for expert in range(15) if expert % 4 == rank} | {rank}
        expected = sum(snapshots[origin].own.size for origin in origins) + snapshots[0].dense.size
        assert num_bytes == expected
        (bank,) = [module for name, module in state.model.named_modules() if name == "moe.bank"]
        for stack, names in stacked_names(state.model).items():
            for position, name in enumerate(names):
                expert = int(name.split(".")[-2])
                origin = before.state_of(expert % 5, seed=expert % 5).model
                index = stacked_names(origin)[stack].index(name)
                restored = bank.get_parameter(stack.removeprefix("moe.bank."))[position]
                assert torch.equal(restored, origin.get_parameter(stack)[index]), name


def test_the_host_of_the_same_rank_is_read_first() -> None:
    headers = [header(0, 0, 3), header(1, 1), header(2, 2, 4)]
    assert [h.rank for h in hosts_to_read(headers, 2, {"bank": (0, 2)})] == [2, 0]
    assert [h.rank for h in hosts_to_read(headers, 1, {"bank": ()})] == [1], "for its random state"
    assert [h.rank for h in hosts_to_read(headers, 7, {"bank": (4,)})] == [2], "a new rank"


def test_an_expert_that_no_snapshot_holds_is_named() -> None:
    with pytest.raises(ExpertsMissing, match=r"no snapshot has expert 5 of bank.*hosts \[0, 1\]"):
        hosts_to_read([header(0, 0), header(1, 1)], 0, {"bank": (0, 5)})
