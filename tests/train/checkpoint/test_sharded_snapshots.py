"""Snapshots of a sharded dense part: any number of hosts resumes from the shards of three."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from harness.hosts.ranks import run_ranks
from harness.runs.steppers import make_stepper
from harness.storage.snapshots import (
    CPU,
    GENERATION,
    HOST_OF,
    PROGRESS,
    TASK,
    CopyingSink,
    CountingSource,
    HostSnapshot,
    HostSnapshots,
    assert_same_contents,
    dense_part,
    merge_all,
    merge_parts,
    own_part,
    state_of,
)
from orchestrator.checkpoint.files import Contents, HostPart
from orchestrator.config.settings import Config
from orchestrator.plan.estimate import ShardingForm
from orchestrator.train.checkpoint.capture import capture
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.restore import restore
from orchestrator.train.checkpoint.snapshot_format import read_part
from orchestrator.train.checkpoint.snapshot_source import fetch_contents
from orchestrator.train.checkpoint.snapshots import Snapshots, SnapshotTarget
from orchestrator.train.data.steps import Feed, StepBatch
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.optim.named_optimizers import build_named_optimizer
from orchestrator.train.optim.optimizer import ScheduledOptimizer
from orchestrator.train.stepper import Stepper

STEPS = PROGRESS.step


def build(
    world: World, host_of: Any, sharding: ShardingForm, optimizer: str
) -> tuple[Stepper, list[StepBatch]]:
    """Return a stepper, and the batches of the steps before and after the snapshot."""
    stepper, feed = make_stepper(
        TASK, 4, 12, learning_rate=1e-2, world=world, host_of=host_of, sharding=sharding
    )
    settings = Config.of(optimizer=optimizer, learning_rate=1e-2).optim
    built = build_named_optimizer(stepper.strategy.model, settings, fused=optimizer == "adamw")
    stepper.optimizer = ScheduledOptimizer(built, lambda _: 1.0)
    return stepper, first_batches(feed, 2 * STEPS)


def first_batches(feed: Feed, count: int) -> list[StepBatch]:
    batches = [batch for epoch in range(count) for batch in feed.steps(epoch)]
    return batches[:count]


def part_of_checkpoint(stepper: Stepper, world: World) -> HostPart:
    return capture(state_of(stepper), PROGRESS, world, PinnedBuffers(CPU)).part


@dataclass(frozen=True)
class HostRecord:
    snapshot: HostSnapshot
    part: HostPart
    """This host's part of a checkpoint of the same step."""
    final_part: HostPart
    """The same, as many steps later."""


def train_on_host(
    rank: int, size: int, store: str, sharding: ShardingForm, optimizer: str = "adamw"
) -> HostRecord:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        stepper, batches = build(world, HOST_OF if size > 1 else None, sharding, optimizer)
        for step in range(STEPS):
            stepper.run(batches[step], step)
        # A forward pass without a backward pass leaves parameters gathered, as an evaluation does.
        with torch.no_grad():
            stepper.strategy.model(batches[0].micro_batches[0].fetch()[0])
        sink = CopyingSink()
        target = SnapshotTarget(sink, PinnedBuffers(CPU), GENERATION)
        Snapshots(state_of(stepper), world, target).take(PROGRESS)
        part = part_of_checkpoint(stepper, world)
        for step in range(STEPS, 2 * STEPS):
            stepper.run(batches[step], step)
        return HostRecord(sink.snapshots[0], part, part_of_checkpoint(stepper, world))


@pytest.fixture(scope="module")
def zero3() -> list[HostRecord]:
    return run_ranks(train_on_host, 3, "zero3")


def resume_on_host(
    rank: int,
    size: int,
    store: str,
    snapshots: HostSnapshots,
    host_of: Any,
    sharding: ShardingForm,
    optimizer: str = "adamw",
) -> tuple[HostPart, HostPart, list[int]]:
    """Return this host's part of a checkpoint now and at the end, and the hosts whose parts it has read."""
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        stepper, batches = build(world, host_of, sharding, optimizer)
        source = CountingSource(snapshots)
        state = state_of(stepper)
        assert restore(fetch_contents(source, rank, state.model), state) == PROGRESS
        part = part_of_checkpoint(stepper, world)
        for step in range(STEPS, 2 * STEPS):
            stepper.run(batches[step], step)
        return part, part_of_checkpoint(stepper, world), source.ranks_read


def assert_same_tensors(parts: Any, expected: Contents) -> None:
    actual = merge_parts(list(parts))
    same_random = replace(actual, state={**actual.state, "random": expected.state["random"]})
    assert_same_contents(same_random, expected)


@pytest.mark.extended
def test_the_shards_of_all_hosts_are_the_checkpoint(zero3: list[HostRecord]) -> None:
    contents = merge_parts([host.part for host in zero3])
    assert_same_contents(merge_all([host.snapshot for host in zero3]), contents)


def test_a_host_keeps_its_own_rows_alone(zero3: list[HostRecord]) -> None:
    """The 4 rows of the last layer are those of two hosts, and of none on the third."""
    entries = [
        {entry.name: entry for entry in read_part(own_part(host.snapshot))[0] if entry.rows is not None}
        for host in zero3
    ]
    assert [of_host["head.weight"].shape for of_host in entries] == [(2, 8), (2, 8), (0, 8)]
    assert [of_host["exp_avg/stem.weight"].shape for of_host in entries] == [(3, 7), (3, 7), (2, 7)]
    headers = [host.snapshot[0] for host in zero3]
    dense = [entry for entry in read_part(dense_part(zero3[0].snapshot))[0] if entry.shape]
    assert dense
    assert all(".ffn." in entry.name for entry in dense), "gates and their buffers alone are whole"
    assert [header.sharded for header in headers] == [True] * 3


def test_as_many_hosts_go_on_with_the_same_bits(zero3: list[HostRecord]) -> None:
    """Each reads its own part alone."""
    snapshots = [host.snapshot for host in zero3]
    results = run_ranks(resume_on_host, 3, snapshots, HOST_OF, "zero3")
    assert_same_tensors([part for part, _, _ in results], merge_parts([host.part for host in zero3]))
    assert_same_tensors([part for _, part, _ in results], merge_parts([host.final_part for host in zero3]))
    assert [read for _, _, read in results] == [[0], [1], [2]]


FEWER = ((1, 0, 0, 1, 0, 1, 0), (0, 0, 1, 0, 1, 1, 0))
MORE = ((3, 0, 0, 1, 0, 1, 2), (0, 3, 1, 0, 3, 1, 0))
"""Five hosts; the last one has no expert, and of 4, 7 and 8 rows none: it only learns their names."""


@pytest.mark.parametrize(
    ("hosts", "host_of"),
    [
        (2, FEWER),
        (5, MORE),
        pytest.param(1, None, marks=pytest.mark.extended),
        pytest.param(4, MORE, marks=pytest.mark.extended),
        pytest.param(3, ((2, 0, 0, 1, 2, 1, 0), (0, 1, 1, 2, 1, 2, 0)), marks=pytest.mark.extended),
    ],
)
def test_other_hosts_divide_the_rows_anew(zero3: list[HostRecord], hosts: int, host_of: Any) -> None:
    snapshots = [host.snapshot for host in zero3]
    sharding = "zero3" if hosts > 1 else "none"
    results = run_ranks(resume_on_host, hosts, snapshots, host_of, sharding)
    assert_same_tensors([part for part, _, _ in results], merge_parts([host.part for host in zero3]))


@pytest.mark.extended
def test_hosts_divide_the_rows_of_a_single_one() -> None:
    """A run that was left with one host has the dense part whole, until others join it."""
    (alone,) = run_ranks(train_on_host, 1, "none")
    assert not alone.snapshot[0].sharded
    results = run_ranks(resume_on_host, 3, [alone.snapshot], HOST_OF, "zero3")
    assert_same_tensors([part for part, _, _ in results], merge_parts([alone.part]))


@pytest.mark.extended
@pytest.mark.parametrize("optimizer", ["adamw8bit", "muon", "sgd"])
def test_state_in_other_forms_goes_with_its_rows(optimizer: str) -> None:
    """Codes, the scales of their blocks, and momenta, on two hosts after three."""
    hosts = run_ranks(train_on_host, 3, "zero3", optimizer)
    snapshots = [host.snapshot for host in hosts]
    results = run_ranks(resume_on_host, 2, snapshots, FEWER, "zero3", optimizer)
    assert_same_tensors([part for part, _, _ in results], merge_parts([host.part for host in hosts]))


@pytest.mark.extended
def test_zero2_after_an_evaluation() -> None:
    hosts = run_ranks(train_on_host, 3, "zero2")
    contents = merge_parts([host.part for host in hosts])
    assert_same_contents(merge_all([host.snapshot for host in hosts]), contents)
