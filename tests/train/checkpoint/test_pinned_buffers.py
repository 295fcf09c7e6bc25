"""The buffers of snapshots: on a GPU allocated once, by a thread, before the first is due."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor, nn

from harness.storage.snapshots import CPU, CopyingSink
from orchestrator.errors import ResourceError
from orchestrator.train.checkpoint import pinned_buffers
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.snapshots import Snapshots, SnapshotTarget
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.world import World

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


class FakeCudart:
    """Keeps the pinned ranges as CUDA does; the answers are the codes of its errors."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.failure = 0
        """The code that the next pinning returns."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        del flags
        if self.failure:
            return self.failure
        overlaps = any(
            address < start + size and start < address + num_bytes for start, size in self.pinned.items()
        )
        if overlaps:
            return 712
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.pinned.pop(address, None) else 713


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()

    def check_error(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    monkeypatch.setattr(pinned_buffers, "_cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    return fake


def test_buffers_that_nobody_closed_are_unpinned_when_they_are_collected(cudart: FakeCudart) -> None:
    """Their pages are mapped again for the next buffers."""
    for _ in range(3):
        buffers = PinnedBuffers(GPU)
        buffers.prepare(2**20)
        buffers.wait_for_allocation()
        assert len(cudart.pinned) == 2
        del buffers
        gc.collect()
        assert cudart.pinned == {}


def test_closed_buffers_are_unpinned_once(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    unpinned: list[int] = []
    unregister = cudart.cudaHostUnregister
    monkeypatch.setattr(
        cudart, "cudaHostUnregister", lambda address: (unpinned.append(address), unregister(address))[1]
    )
    buffers = PinnedBuffers(GPU)
    for num_bytes in (1000, 2**20):  # the larger ones replace the first
        buffers.next_buffer(num_bytes)
        buffers.next_buffer(num_bytes)
    buffers.close()
    buffers.close()
    del buffers
    gc.collect()
    assert len(unpinned) == 4
    assert cudart.pinned == {}


def test_an_error_of_the_thread_is_raised_where_a_buffer_is_needed(cudart: FakeCudart) -> None:
    cudart.failure = 2
    buffers = PinnedBuffers(GPU)
    buffers.prepare(1000)
    with pytest.raises(ResourceError, match=r"cannot pin 6\d\.\d KiB of host memory .* CUDA error 2"):
        buffers.next_buffer(1000)
    cudart.failure = 0
    assert buffers.next_buffer(1000).numel() >= 1000, "raised once: a later save tries again"
    buffers.close()
    assert cudart.pinned == {}


def test_closing_does_not_raise_the_error_of_the_thread(cudart: FakeCudart) -> None:
    """It would hide the error that ended the training."""
    cudart.failure = 2
    buffers = PinnedBuffers(GPU)
    buffers.prepare(1000)
    buffers.close()
