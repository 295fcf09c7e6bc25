"""Whether the memory of a node holds the snapshots of its hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.fakes.inventories import gpu, machine, model
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError
from orchestrator.plan.inventory.cluster import Cluster, Node
from orchestrator.plan.planning import plan
from orchestrator.plan.snapshots import (
    NodeMemory,
    SnapshotMemory,
    checkpoint_memory,
    choose_snapshots,
    snapshot_memory,
)
from orchestrator.types import GIB, Choice

NEEDED = SnapshotMemory(buffers=10 * GIB, object_store=10 * GIB, backups=10 * GIB)


def choose(node: NodeMemory, **settings: Any) -> Choice[str]:
    return choose_snapshots(Config.of(**settings), None, NEEDED, node)


def test_a_node_keeps_its_experts_and_the_dense_part_once() -> None:
    """Seven experts on three hosts: the largest host has three of them."""
    facts = model(parameters=100 + 70, trainable=170, expert_parameters=70, experts=7)
    one_set = 12 * (2 * 30 + 100)
    assert snapshot_memory(facts, 3, 2) == SnapshotMemory(2 * one_set, 2 * one_set, 2 * one_set)
    one_node = snapshot_memory(facts, 3, 3)
    assert one_node.backups == 0, "there is no other node"
    frozen = model(parameters=170, trainable=0, expert_parameters=70, experts=7)
    assert snapshot_memory(frozen, 3, 2).buffers == 2 * 4 * 160, "frozen weights have no moments"
    adapters = replace(facts, trainable=17, unsaved=153)
    expected = 2 * one_set / 10
    assert snapshot_memory(adapters, 3, 2).buffers == pytest.approx(expected), "a tenth is trained and saved"


def test_a_node_keeps_the_shards_of_its_hosts() -> None:
    """Two of three hosts on the node: two thirds of the dense part."""
    facts = model(parameters=99 + 70, trainable=169, expert_parameters=70, experts=7)
    one_set = 12 * (2 * 30 + 66)
    sharded = snapshot_memory(facts, 3, 2, sharded=True)
    assert sharded == SnapshotMemory(2 * one_set, 2 * one_set, 2 * one_set)
    assert snapshot_memory(facts, 3, 3, sharded=True) == snapshot_memory(facts, 3, 3), "all of it"


@pytest.mark.parametrize(("moments", "averages", "numbers"), [(2.0, 1.0, 4), (1.0, 0.0, 2), (0.5, 0.0, 1.5)])
def test_the_state_is_that_of_the_chosen_optimizer_and_of_averages(
    moments: float, averages: float, numbers: float
) -> None:
    """AdamW with an average, SGD, and AdamW with a byte per number."""
    facts = model(parameters=170, trainable=170, expert_parameters=70, experts=7)
    facts = replace(facts, moments=moments, averages=averages)
    assert snapshot_memory(facts, 3, 2).buffers == 2 * 4 * numbers * 160


def test_the_copy_for_a_checkpoint_has_each_hosts_experts_and_its_share_of_the_dense_part() -> None:
    facts = model(parameters=99 + 70, trainable=169, expert_parameters=70, experts=7)
    assert checkpoint_memory(facts, 3, 2) == pytest.approx(12 * (2 * 30 + 66))


def test_the_plan_counts_the_copy_for_checkpoints() -> None:
    """On GPUs the training takes no host memory, but its checkpoints do."""
    facts = model(parameters=10**9, trainable=10**9, expert_parameters=9 * 10**8, experts=8, moe_layers=1)
    config = Config.of(parallel_strategy="expert_parallel", workers=2, evolution="off")
    snapshots = snapshot_memory(facts, 2, 2).total
    copies = checkpoint_memory(facts, 2, 2)
    nodes = (Node("10.0.0.1", 8, 2, 8, 100 * GIB),)

    def planned(ram_free: float) -> Choice[str]:
        inventory = machine(gpu(0), gpu(1), ram_free=int(ram_free))
        return plan(config, inventory, facts, cluster=Cluster(nodes, joined=True)).snapshots

    assert planned(snapshots + copies + GIB).value == "on"
    assert planned(snapshots + copies - GIB).value == "off"


def test_snapshots_that_fit_name_their_memory() -> None:
    choice = choose(NodeMemory(free=100 * GIB, object_store=30 * GIB))
    assert choice.value == "on"
    assert "30.0 GiB" in choice.reason
    assert not choice.rejected


@pytest.mark.parametrize(
    ("node", "value", "shortage"),
    [
        (NodeMemory(29 * GIB, 0, 30 * GIB), "without backups", "30.0 GiB of a node's memory, of which 29.0"),
        (NodeMemory(19 * GIB, 0, 30 * GIB), "off", "20.0 GiB of a node's memory, of which 19.0 GiB"),
        (NodeMemory(100 * GIB, 81 * GIB, 30 * GIB), "off", "of which 19.0 GiB is free"),
        (NodeMemory(900 * GIB, 0, 9 * GIB), "off", "10.0 GiB of Ray's object store, which has 9.0 GiB"),
        (NodeMemory(32 * GIB), "off", "Ray's object store, which has 9.6 GiB"),
    ],
    ids=["backups", "memory", "training", "object store", "object store of the default size"],
)
def test_snapshots_are_reduced_with_a_reason(node: NodeMemory, value: str, shortage: str) -> None:
    choice = choose(node)
    assert choice.value == value
    assert "since the last checkpoint" in choice.reason
    (rejected,) = choice.rejected
    assert rejected.option == "on"
    assert shortage in rejected.why


def test_an_interval_that_was_set_is_refused_instead() -> None:
    node = NodeMemory(900 * GIB, 0, 9 * GIB)
    with pytest.raises(ResourceError, match=r"--snapshot-every 10: .*has 9\.0 GiB.* --snapshot-every 0"):
        choose(node, snapshot_every=10)
    without_backups = NodeMemory(29 * GIB, 0, 30 * GIB)
    assert choose(without_backups, snapshot_every=10).value == "without backups"


def test_snapshots_that_are_not_wanted_or_not_used_are_off() -> None:
    node = NodeMemory(100 * GIB)
    assert "--snapshot-every 0" in choose(node, snapshot_every=0).reason
    no_recovery = choose(node, max_failures=0)
    assert (no_recovery.value, no_recovery.rejected) == ("off", ())
    assert choose(node, max_failures=0, snapshot_every=5).value == "on"
    unused = choose_snapshots(Config.of(snapshot_every=5), "not used: no experts", NEEDED, node)
    assert (unused.value, unused.reason) == ("off", "not used: no experts, instead of --snapshot-every 5")


def test_the_plan_takes_the_smallest_object_store_of_the_cluster() -> None:
    facts = model(parameters=10**9, trainable=10**9, expert_parameters=9 * 10**8, experts=8, moe_layers=1)
    config = Config.of(parallel_strategy="expert_parallel", workers=2, gpu_mode="cpu")
    inventory = machine(ram_free=900 * GIB)

    def planned(*stores: int) -> Choice[str]:
        nodes = tuple(Node(f"10.0.0.{number}", 8, 0, 8, store) for number, store in enumerate(stores))
        return plan(config, inventory, facts, cluster=Cluster(nodes, joined=True)).snapshots

    assert planned(100 * GIB, 100 * GIB).value == "on"
    assert planned(100 * GIB, 1 * GIB).value == "off"
    driver = Node("10.0.0.9", 0, 0, 8, 1 * GIB)
    workers = Node("10.0.0.1", 8, 0, 8, 100 * GIB)
    with_driver = Cluster((driver, workers), joined=True)
    assert plan(config, inventory, facts, cluster=with_driver).snapshots.value == "on", "no host runs there"
    assert plan(Config.of(), machine(), facts).snapshots.value == "off", (
        "one process recovers from checkpoints"
    )
