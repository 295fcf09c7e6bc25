"""Snapshots of a small model trained on real ranks, next to the checkpoint of the same step."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experts.hosts.membership import GroupMembership
from harness.hosts.ranks import run_ranks
from harness.runs.steppers import make_stepper, run_steps
from harness.runs.tiny_model import Tiny
from orchestrator.checkpoint.files import Contents, HostPart, load, write_manifest, write_part
from orchestrator.checkpoint.hashed_file import Hashes
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.shard_rows import shard_rows
from orchestrator.plan.estimate import ShardingForm
from orchestrator.train.checkpoint.capture import capture
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.snapshot_format import (
    Bytes,
    SnapshotHeader,
    SnapshotPart,
    merge_snapshots,
    read_part,
)
from orchestrator.train.checkpoint.snapshots import Snapshots, SnapshotTarget
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.stepper import Stepper

CPU = torch.device("cpu")
SIZES = (3, 9, 3, 5, 9, 2, 4)
TASK = Tiny((SIZES, SIZES))
HOST_OF = ((0, 1, 1, 2, 1, 0, 1), (2, 2, 0, 1, 0, 0, 2))
GENERATION = 5
PROGRESS = Progress(
    step=4,
    epoch=1,
    position=12,
    samples=52,
    best_value=0.5,
    best_step=3,
    epoch_loss=1.25,
    validation={"loss": 0.5, "step": 3},
)

HostSnapshot = tuple[SnapshotHeader, Bytes, Bytes]
"""The header, the bytes of the host's own part, and those of the dense part."""
HostSnapshots = Sequence[HostSnapshot]
"""One snapshot of each host, all of the same step."""
HostResult = tuple[HostSnapshot, HostPart]
"""A host's snapshot, and its part of the checkpoint of the same step."""


class CopyingSink:
    """A sink that copies each snapshot at once, so that there is always space."""

    def __init__(self) -> None:
        self.snapshots: list[HostSnapshot] = []

    def wait_for_space(self, membership: GroupMembership) -> None: ...

    def put(self, header: Any, own: Any, dense: Any) -> None:
        self.snapshots.append((header, own.copy(), dense.copy()))


class CountingSource:
    """Snapshots in this process, as a source that counts the bytes that are fetched from it."""

    def __init__(self, snapshots: HostSnapshots) -> None:
        self._snapshots = {header.rank: (header, own, dense) for header, own, dense in snapshots}
        self.bytes_fetched = 0
        self.ranks_read: list[int] = []

    @property
    def headers(self) -> list[SnapshotHeader]:
        return [header for header, _, _ in self._snapshots.values()]

    def fetch_dense(self) -> tuple[SnapshotHeader, Bytes]:
        header, _, dense = self._snapshots[0]
        self.bytes_fetched += dense.size
        return header, dense

    def fetch_own(self, rank: int) -> Bytes:
        own = self._snapshots[rank][1]
        self.bytes_fetched += own.size
        self.ranks_read.append(rank)
        return own


def own_part(snapshot: HostSnapshot) -> SnapshotPart:
    header, own, _ = snapshot
    return SnapshotPart(header.rank, header.own_end, own)


def dense_part(snapshot: HostSnapshot) -> SnapshotPart:
    header, _, dense = snapshot
    return SnapshotPart(header.rank, header.dense_end, dense)


def merge_all(snapshots: HostSnapshots, rank: int = 0, without: Set[str] = frozenset()) -> Contents:
    """Merge the snapshots of all hosts, with all rows of what is in shards."""
    (main,) = [snapshot for snapshot in snapshots if snapshot[0].rank == 0]
    own_parts = [own_part(snapshot) for snapshot in snapshots]
    entries = [entry for part in own_parts for entry in read_part(part)[0]]
    wanted = {e.parameter: shard_rows(e.rows.total, 0, 1) for e in entries if e.rows is not None}
    return merge_snapshots(dense_part(main), own_parts, rank, without, wanted)


def state_of(stepper: Stepper) -> TrainState:
    return TrainState(stepper.strategy.model, stepper.optimizer.inner, stepper.precision)


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    random.gauss(0, 1)  # the generator keeps the second number of a pair
    np.random.randn(3)


def snapshot_and_checkpoint(state: TrainState, world: World) -> HostResult:
    """Take a snapshot of the state, and a checkpoint of the same step."""
    sink = CopyingSink()
    target = SnapshotTarget(sink, PinnedBuffers(CPU), GENERATION)
    Snapshots(state, world, target).take(PROGRESS)
    return sink.snapshots[0], capture(state, PROGRESS, world, PinnedBuffers(CPU)).part


def captured_contents(state: TrainState, progress: Progress) -> Contents:
    """Return the checkpoint of one process, as it is read from disk."""
    return merge_parts([capture(state, progress, World.single_process(), PinnedBuffers(CPU)).part])


def merge_parts(parts: Sequence[HostPart]) -> Contents:
    """Return what one process reads of a checkpoint that several hosts have written."""
    with TemporaryDirectory() as folder:
        files: dict[str, Hashes] = {}
        for rank, part in enumerate(parts):
            files |= write_part(Path(folder), rank, part)
        write_manifest(Path(folder), 4, files)
        return load(Path(folder))


def train_and_snapshot(
    rank: int, size: int, store: str, task: Tiny, host_of: Any, sharding: ShardingForm
) -> HostResult:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        placement = host_of if size > 1 else None
        stepper, feed = make_stepper(
            task, 4, 12, learning_rate=1e-2, world=world, host_of=placement, sharding=sharding
        )
        run_steps(stepper, feed, 4)
        seed_generators(rank)
        return snapshot_and_checkpoint(state_of(stepper), world)


def take_snapshots(
    task: Tiny, host_of: Any, size: int = 3, sharding: ShardingForm = "none"
) -> tuple[HostSnapshots, Contents]:
    """Train on ``size`` hosts. Return the snapshots of all, and the checkpoint of the same step."""
    results = run_ranks(train_and_snapshot, size, task, host_of, sharding)
    contents = merge_parts([part for _, part in results])
    return [snapshot for snapshot, _ in results], contents


def assert_same_contents(actual: Contents, expected: Contents) -> None:
    """Tensors equal to the bit, and plain state equal."""
    assert actual.tensors.keys() == expected.tensors.keys()
    for kind, tensors in expected.tensors.items():
        assert actual.tensors[kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            other = actual.tensors[kind][name]
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(_bits(other), _bits(tensor)), name
    assert _without_hosts(actual.state) == _without_hosts(expected.state)


def _without_hosts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state without the places of the experts, which may differ."""
    layers = [
        {**layer, "experts": {**layer["experts"], "hosts": None}} for layer in state["experts"]["layers"]
    ]
    # A tuple and the list that JSON makes of it are equal here.
    return json.loads(json.dumps({**state, "experts": layers}))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
