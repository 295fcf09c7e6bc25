"""The buffers of snapshots: on a GPU allocated once, by a thread, before the first is due."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.snapshots import Snapshots, SnapshotTarget
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.parts.precision import Precision
from orchestrator.train.parts.world import World
from tests.support.snapshots import CPU, CopyingSink

GPU = torch.device("cuda", 0)
TENSOR_BYTES = 4 * 1600 + 3 * 64  # 40 × 40 weights, and a bias of 160 bytes in aligned places


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The size of each buffer that is allocated, and the name of the thread; no GPU is needed."""
    allocated: list[tuple[int, str]] = []

    def allocate(self: PinnedBuffers, num_bytes: int) -> Tensor:
        allocated.append((num_bytes, threading.current_thread().name))
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(PinnedBuffers, "_allocate", allocate)
    return allocated


def make_snapshots(every: int, buffers: PinnedBuffers) -> Snapshots:
    model = nn.Linear(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = TrainState(model, optimizer, Precision("fp32", CPU))
    snapshots = Snapshots(state, World.single_process(), SnapshotTarget(CopyingSink(), buffers, 0))
    snapshots.every = every
    return snapshots


def test_a_thread_allocates_both_buffers_once(allocations: list[tuple[int, str]]) -> None:
    """A host that joins another group uses them again."""
    buffers = PinnedBuffers(GPU)
    for _ in range(2):
        snapshots = make_snapshots(4, buffers)
        for _ in range(3):
            snapshots.prepare()
        assert len({buffers.next_buffer(TENSOR_BYTES).data_ptr() for _ in range(4)}) == 2
    assert [thread for _, thread in allocations] == ["pinned-buffers"] * 2
    assert len({num_bytes for num_bytes, _ in allocations}) == 1
    assert allocations[0][0] > TENSOR_BYTES


def test_nothing_is_allocated_where_no_snapshot_is_due(
    allocations: list[tuple[int, str]],
) -> None:
    buffers = PinnedBuffers(GPU)
    make_snapshots(0, buffers).prepare()
    assert buffers._allocation is None
    assert allocations == []


def test_a_cpu_allocates_when_a_buffer_is_needed(
    allocations: list[tuple[int, str]],
) -> None:
    buffers = PinnedBuffers(CPU)
    buffers.prepare(100)
    assert buffers._allocation is None
    assert buffers.next_buffer(100).numel() >= 100
    assert len(allocations) == 1
