"""Snapshots of a small model trained on real ranks, next to the checkpoint of the same step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experts.membership import GroupMembership
from orchestrator.train.checkpoint.capture import capture
from orchestrator.train.checkpoint.files import Contents
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.progress import Progress
from orchestrator.train.checkpoint.snapshot_format import (
    Bytes,
    HostSnapshots,
    SnapshotHeader,
)
from orchestrator.train.checkpoint.snapshots import Snapshots, SnapshotTarget
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import World, process_group_world
from orchestrator.train.step import Stepper
from tests.support.ranks import run_ranks
from tests.support.steppers import make_stepper, run_steps
from tests.support.tiny_model import Tiny

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

HostSnapshot = tuple[SnapshotHeader, Bytes]
HostResult = tuple[HostSnapshot, Contents | None]
"""A host's snapshot, and on the main host the checkpoint of the same step."""


class CopyingSink:
    """A sink that copies each snapshot at once, so that there is always space."""

    def __init__(self) -> None:
        self.snapshots: list[HostSnapshot] = []

    def wait_for_space(self, membership: GroupMembership) -> None: ...

    def put(self, header: Any, data: Any) -> None:
        self.snapshots.append((header, data.copy()))


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
    Snapshots(2, state, world, target).take(PROGRESS)
    return sink.snapshots[0], capture(state, PROGRESS, world)


def train_and_snapshot(rank: int, size: int, store: str, task: Tiny, host_of: Any) -> HostResult:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        placement = host_of if size > 1 else None
        stepper, feed = make_stepper(task, 4, 12, learning_rate=1e-2, world=world, host_of=placement)
        run_steps(stepper, feed, 4)
        seed_generators(rank)
        return snapshot_and_checkpoint(state_of(stepper), world)


def take_snapshots(task: Tiny, host_of: Any, size: int = 3) -> tuple[HostSnapshots, Contents]:
    """Train on ``size`` hosts. Return the snapshots of all, and the checkpoint of the same step."""
    results = run_ranks(train_and_snapshot, size, task, host_of)
    (contents,) = [contents for _, contents in results if contents is not None]
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
    assert actual.state == expected.state


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
