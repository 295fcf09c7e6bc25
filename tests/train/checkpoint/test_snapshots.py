"""When snapshots are taken, and the buffers that they are written into."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import orchestrator.train.checkpoint.snapshot_format as format_module
from experts.hosts.actor_host import Outbox
from experts.hosts.group import GroupFactory
from experts.hosts.membership import GroupLeft, GroupMembership
from harness.storage.snapshots import CPU, CopyingSink, HostSnapshot, dense_part, merge_all
from orchestrator.checkpoint.progress import Progress
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.snapshot_format import read_part
from orchestrator.train.checkpoint.snapshots import (
    Snapshots,
    SnapshotSink,
    SnapshotTarget,
)
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.stores import open_store
from orchestrator.train.group.world import World


class AddressRecorder(Outbox):
    """The outbox of a host, with the memory addresses of all snapshots put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def put(self, header: Any, own: Any, dense: Any) -> None:
        self.addresses.append(dense.__array_interface__["data"][0])
        super().put(header, own, dense)


@pytest.fixture
def state() -> TrainState:
    model = nn.Linear(40, 40)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0), Precision("fp32", CPU))


def make_snapshots(
    every: int, state: TrainState, sink: SnapshotSink, world: World | None = None
) -> Snapshots:
    target = SnapshotTarget(sink, PinnedBuffers(CPU), 0)
    snapshots = Snapshots(state, world or World.single_process(), target)
    snapshots.every = every
    return snapshots


def fill_weights(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def weight_in(snapshot: HostSnapshot) -> float:
    values = merge_all([snapshot]).tensors["model"]["weight"].unique().tolist()
    assert len(values) == 1, f"the snapshot mixes several steps: {values}"
    return values[0]


def steps_taken(snapshots: Snapshots, steps: Iterable[int]) -> list[int]:
    """Take the snapshots that are due. Return their steps."""
    taken: list[int] = []
    for step in steps:
        if snapshots.due(step):
            snapshots.take(Progress(step=step))
            taken.append(step)
    return taken


def test_snapshots_are_due_every_few_steps(state: TrainState) -> None:
    assert steps_taken(make_snapshots(4, state, CopyingSink()), range(1, 13)) == [4, 8, 12]
    assert steps_taken(make_snapshots(0, state, CopyingSink()), range(13)) == []


def test_the_interval_counts_from_the_last_snapshot(state: TrainState) -> None:
    """A new interval may change it, and a host that resumes begins with the state of its snapshot."""
    snapshots = make_snapshots(4, state, CopyingSink())
    assert steps_taken(snapshots, range(1, 7)) == [4]
    snapshots.every = 5
    assert steps_taken(snapshots, range(7, 21)) == [9, 14, 19]
    snapshots.every = 2
    assert steps_taken(snapshots, range(21, 25)) == [21, 23]
    target = SnapshotTarget(CopyingSink(), PinnedBuffers(CPU), 0)
    resumed = Snapshots(state, World.single_process(), target, first_step=23)
    resumed.every = 4
    assert steps_taken(resumed, range(24, 33)) == [27, 31]


def test_a_snapshot_says_when_it_was_taken_and_how_long_it_stalled(state: TrainState) -> None:
    sink = CopyingSink()
    before = time.time()
    make_snapshots(1, state, sink).take(Progress(step=1))
    header = sink.snapshots[0][0]
    assert before <= header.taken_at <= time.time()
    assert 0.0 < header.stall_s <= time.time() - before + 0.1


def test_a_step_is_copied_once(state: TrainState) -> None:
    sink = CopyingSink()
    snapshots = make_snapshots(4, state, sink)
    for step in (4, 4, 8):
        snapshots.take(Progress(step=step))
    assert [header.step for header, _, _ in sink.snapshots] == [4, 8]


def test_a_snapshot_keeps_the_state_of_its_step(state: TrainState) -> None:
    sink = CopyingSink()
    snapshots = make_snapshots(1, state, sink)
    progress = Progress(step=1)
    fill_weights(state.model, 1.0)
    snapshots.take(progress)
    fill_weights(state.model, 2.0)
    progress.step = 2
    progress.samples = 99
    assert weight_in(sink.snapshots[0]) == 1.0
    assert read_part(dense_part(sink.snapshots[0]))[1]["progress"]["samples"] == 0


def test_a_snapshot_that_is_being_fetched_is_not_overwritten(state: TrainState) -> None:
    """Two buffers: while the first snapshot is fetched, the second is taken.

    The third waits until the second is being fetched, because the first has arrived by then."""
    outbox = AddressRecorder()
    snapshots = make_snapshots(1, state, outbox)
    in_flight: HostSnapshot | None = None
    for step in range(1, 8):
        fill_weights(state.model, float(step))
        if step > 1:
            in_flight = outbox.fetch()
        snapshots.take(Progress(step=step))
        if in_flight is not None:
            assert weight_in(in_flight) == float(step - 1)
    assert len(set(outbox.addresses)) == 2, "two buffers are enough, and no more are allocated"


def test_a_snapshot_that_is_not_fetched_blocks_the_next(state: TrainState) -> None:
    """It is not overwritten, and a host that is to leave its group stops waiting."""
    outbox = AddressRecorder()
    membership = GroupMembership()
    snapshots = make_snapshots(1, state, outbox, world_with(membership))
    fill_weights(state.model, 1.0)
    snapshots.take(Progress(step=1))
    fill_weights(state.model, 2.0)
    membership.leave()
    with pytest.raises(GroupLeft):
        snapshots.take(Progress(step=2))
    assert weight_in(outbox.fetch()) == 1.0


def test_a_host_whose_last_snapshot_is_not_fetched_yet_counts_as_waiting(state: TrainState) -> None:
    outbox = Outbox()
    membership = GroupMembership()
    snapshots = make_snapshots(1, state, outbox, world_with(membership))
    snapshots.take(Progress(step=1))
    thread = threading.Thread(target=snapshots.take, args=(Progress(step=2),))
    thread.start()
    while not membership.observe().waiting:
        assert thread.is_alive(), "the second snapshot was taken without waiting"
        time.sleep(0.001)
    waits_before = membership.observe().num_completed
    outbox.fetch()
    thread.join()
    assert membership.observe() == (waits_before + 1, False)
    assert outbox.fetch()[0].step == 2


def world_with(membership: GroupMembership) -> World:
    factory = GroupFactory(open_store("127.0.0.1", "")[0], "x", 0, 1, membership)
    return replace(World.single_process(), group_factory=factory)


def test_growing_state_gets_larger_buffers(state: TrainState) -> None:
    """An optimizer has no state before its first step."""
    optimizer = torch.optim.AdamW(state.model.parameters())
    sink = CopyingSink()
    snapshots = make_snapshots(1, replace(state, optimizer=optimizer), sink)
    for step in range(1, 4):
        snapshots.take(Progress(step=step))
        for parameter in state.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    sizes = [dense.size for _, _, dense in sink.snapshots]
    assert sizes[0] < sizes[1]
    tensor_bytes = [header.dense_end for header, _, _ in sink.snapshots]
    assert tensor_bytes[0] < tensor_bytes[1] == tensor_bytes[2]
    merged = merge_all(sink.snapshots[2:])
    assert torch.equal(merged.tensors["optimizer"]["exp_avg/weight"], torch.full((40, 40), 0.19))


def test_the_layout_is_computed_once_per_buffer(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed again for tensors of other shapes, even if they have the same size."""
    offsets: list[int] = []
    real_view = format_module._view

    def recording_view(buffer: Tensor, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        offsets.append(offset)
        return real_view(buffer, offset, shape, dtype)

    monkeypatch.setattr(format_module, "_view", recording_view)
    sink = CopyingSink()
    snapshots = make_snapshots(1, state, sink)
    for step in range(1, 7):
        fill_weights(state.model, float(step))
        snapshots.take(Progress(step=step))
    assert len(offsets) == 2 * 2, "weight and bias, in two buffers"
    assert [weight_in(snapshot) for snapshot in sink.snapshots] == [
        1.0,
        2.0,
        3.0,
        4.0,
        5.0,
        6.0,
    ]
    state.model.weight = nn.Parameter(torch.full((20, 80), 7.0))
    snapshots.take(Progress(step=7))
    assert merge_all(sink.snapshots[6:]).tensors["model"]["weight"].shape == (
        20,
        80,
    )
    assert weight_in(sink.snapshots[6]) == 7.0
