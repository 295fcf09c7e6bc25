"""Whether hosts keep snapshots of their state in memory, by the host memory of a node. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError
from orchestrator.plan.estimate import ModelFacts
from orchestrator.strategies import StrategyFacts
from orchestrator.types import NOT_USED, Choice, Rejected, bytes_text

_FP32_BYTES = 4
_BUFFERS = 2  # of each host: one is filled while the other is fetched
_SETS = 2  # the newest complete set, and the one that is coming in
_OBJECT_STORE_SHARE = 0.3
"""The part of the memory that Ray takes for its object store, unless told otherwise."""
_NO_SNAPSHOTS = "a lost host costs the steps since the last checkpoint"


@dataclass(frozen=True)
class NodeMemory:
    """The host memory of a node that has hosts, in bytes."""

    free: float
    """Free memory, the object store's part and that of the training included."""
    training: float = 0.0
    """Memory that the run takes in any case: copies of the state that become checkpoints, and on
    CPUs the training itself."""
    object_store: float | None = None
    """The size of Ray's object store; None if it is not known yet."""

    @property
    def object_store_size(self) -> float:
        return _OBJECT_STORE_SHARE * self.free if self.object_store is None else self.object_store


@dataclass(frozen=True)
class SnapshotMemory:
    """The host memory that snapshots need on the node of the main host, in bytes."""

    buffers: float
    """The buffers of the node's hosts."""
    object_store: float
    """The snapshots of the node's hosts, in Ray's object store."""
    backups: float
    """Copies of the snapshots of other nodes' hosts."""

    @property
    def total(self) -> float:
        return self.buffers + self.object_store + self.backups


def snapshot_memory(
    facts: ModelFacts, hosts: int, hosts_on_node: int, sharded: bool = False
) -> SnapshotMemory:
    """Estimate the memory of snapshots: the state of the experts of a node, and the dense part once, or the
    shards of the node's hosts."""
    dense_share = hosts_on_node / hosts if sharded else 1.0
    one_set = _state_bytes(facts, hosts, hosts_on_node, dense_share)
    has_other_nodes = hosts > hosts_on_node
    return SnapshotMemory(_BUFFERS * one_set, _SETS * one_set, _SETS * one_set if has_other_nodes else 0.0)


def checkpoint_memory(facts: ModelFacts, hosts: int, hosts_on_node: int) -> float:
    """Estimate the memory of the copy that becomes a checkpoint: each host copies its experts and its
    share of the dense part."""
    return _state_bytes(facts, hosts, hosts_on_node, dense_share=hosts_on_node / hosts)


def _state_bytes(facts: ModelFacts, hosts: int, hosts_on_node: int, dense_share: float) -> float:
    """Return the bytes of the weights, moments and averages of a node's experts and of a share of the dense
    part.

    Weights that are not saved, as the frozen ones beside adapters, count as spread evenly over experts and
    dense part."""
    most_experts = -(-facts.experts // hosts)
    expert_parameters = hosts_on_node * facts.expert_parameters * most_experts / max(1, facts.experts)
    dense_parameters = facts.parameters - facts.expert_parameters
    trained_share = facts.trainable / max(1, facts.parameters)
    saved_share = 1 - facts.unsaved / max(1, facts.parameters)
    state_of_trained = facts.moments + facts.averages
    # Beside frozen weights in a shorter type, which are not saved, adapters are in fp32.
    weight_bytes = _FP32_BYTES if facts.unsaved else facts.weight_bytes
    bytes_per_parameter = weight_bytes * saved_share + _FP32_BYTES * state_of_trained * trained_share
    return (expert_parameters + dense_share * dense_parameters) * bytes_per_parameter


def why_no_snapshots(strategy: StrategyFacts) -> str | None:
    """Return why workers of a strategy take no snapshots; None if they do."""
    if strategy.replaces_workers:
        return None
    if strategy.in_process:
        return f"{NOT_USED}one process has no peers that would outlive it"
    return f"{NOT_USED}after a loss all workers restart from a checkpoint"


def choose_snapshots(
    config: Config, unused: str | None, needed: SnapshotMemory, node: NodeMemory
) -> Choice[str]:
    """Choose ``on``, ``without backups`` or ``off``.

    If memory is short, backups on other nodes go first, then the snapshots. An interval that the user
    set is refused instead of ignored."""
    every = config.checkpoint.snapshot_every
    if unused:
        return Choice("off", unused + (f", instead of --snapshot-every {every}" if every != "auto" else ""))
    if every == 0:
        return Choice("off", f"set by --snapshot-every 0: {_NO_SNAPSHOTS}")
    if every == "auto" and config.parallel.max_failures == 0:
        return Choice("off", "--max-failures 0 allows no recovery that would need them")
    shortage = _shortage(needed, node, backups=False)
    if shortage and every != "auto":
        raise ResourceError(
            f"--snapshot-every {every}: {shortage}. Use --snapshot-every 0 to recover from checkpoints, "
            "fewer hosts on a node, or a larger object store (ray start --object-store-memory BYTES)"
        )
    if shortage:
        return Choice("off", _NO_SNAPSHOTS, (Rejected("on", shortage),))
    backups_shortage = _shortage(needed, node, backups=True)
    if backups_shortage:
        reason = "the loss of a whole node costs the steps since the last checkpoint"
        return Choice("without backups", reason, (Rejected("on", backups_shortage),))
    parts = f"buffers {bytes_text(needed.buffers)}, object store {bytes_text(needed.object_store)}"
    if needed.backups:
        parts += f", backups of other nodes {bytes_text(needed.backups)}"
    return Choice("on", f"they need {bytes_text(needed.total)} of a node's memory: {parts}")


def _shortage(needed: SnapshotMemory, node: NodeMemory, backups: bool) -> str | None:
    """Return the memory that is missing for snapshots, in words; None if they fit."""
    if needed.object_store > node.object_store_size:
        return (
            f"the snapshots of a node's hosts need {bytes_text(needed.object_store)} of Ray's object store, "
            f"which has {bytes_text(node.object_store_size)}"
        )
    total = needed.total if backups else needed.total - needed.backups
    free = max(0.0, node.free - node.training)
    if total > free:
        what = "snapshots with backups" if backups else "snapshots"
        return f"{what} need {bytes_text(total)} of a node's memory, of which {bytes_text(free)} is free"
    return None
