"""Hosts that resume together: each reads its own part, and all take the same checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experts.expert_state import remote_expert_names
from harness.hosts.ranks import run_ranks
from harness.runs.steppers import make_stepper, run_steps
from harness.storage.forged_files import reseal
from harness.storage.snapshots import (
    CPU,
    HOST_OF,
    TASK,
    CopyingSink,
    CountingSource,
    HostSnapshot,
    HostSnapshots,
    assert_same_contents,
    merge_all,
    merge_parts,
    state_of,
)
from orchestrator.checkpoint.files import Contents, HostPart, load
from orchestrator.checkpoint.hashed_file import HashedReader
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.errors import CheckpointDamaged, UserError
from orchestrator.record.events.kinds import Event, Resume, SkippedCheckpoint
from orchestrator.record.files.log import SilentLog
from orchestrator.train.checkpoint.capture import capture
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.restore import restore
from orchestrator.train.checkpoint.snapshots import Snapshots, SnapshotTarget
from orchestrator.train.checkpoint.writer import CheckpointWriter
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world
from orchestrator.train.worker.resume import StartPoint, _find_on_main, _load_together, restore_newest

OTHER_HOSTS = ((1, 0, 0, 1, 0, 1, 0), (0, 0, 1, 0, 1, 1, 0))


Saved = tuple[Path, HostSnapshots]


def save_on_host(rank: int, size: int, store: str, folder: Path) -> HostSnapshot:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        stepper, feed = make_stepper(TASK, 4, 12, learning_rate=1e-2, world=world, host_of=HOST_OF)
        state = state_of(stepper)
        writer = CheckpointWriter(CheckpointStore(folder), state, world, SilentLog())
        sink = CopyingSink()
        snapshots = Snapshots(state, world, SnapshotTarget(sink, PinnedBuffers(CPU), 0))
        for step in (2, 3, 4):
            run_steps(stepper, feed, 1)
            if step == 3:
                snapshots.take(Progress(step=step))
            else:
                writer.save(Progress(step=step))
        writer.finish()
        writer.close()
        return sink.snapshots[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The checkpoints of steps 2 and 4 that three hosts have written, and their snapshots of step 3."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    return folder, run_ranks(save_on_host, 3, folder)


@pytest.fixture
def folder(saved: Saved, tmp_path: Path) -> Path:
    shutil.copytree(saved[0], tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


@dataclass(frozen=True)
class Resumed:
    path: str | None
    skipped: list[tuple[str, str]]
    num_bytes: int
    """Bytes of the checkpoint's tensors that the host has read."""
    num_signs: int
    part: HostPart | None


def resume_on_host(rank: int, size: int, store_path: str, folder: Path, host_of: Any) -> Resumed | str:
    read: list[int] = []
    signs: list[None] = []
    real = HashedReader._read_unverified

    def counted(self: HashedReader, begin: int, num_bytes: int) -> memoryview:
        if "safetensors" in self._name:
            read.append(num_bytes)
        return real(self, begin, num_bytes)

    HashedReader._read_unverified = counted  # this process ends with the function
    with process_group_world(file_store(store_path, size), rank, size, CPU, "gloo", 60) as world:
        stepper, _ = make_stepper(TASK, 4, 12, learning_rate=1e-2, world=world, host_of=host_of)
        state = state_of(stepper)
        store = CheckpointStore(folder, repair=rank == 0)
        start = StartPoint(store, world, SilentLog(), lambda: signs.append(None))
        try:
            found = _find_on_main("auto", start)
            checkpoint, skipped = _load_together(found, start, remote_expert_names(state.model))
        except UserError as error:
            return str(error)
        part = None
        if checkpoint is not None:
            progress = restore(checkpoint.contents, state)
            part = capture(state, progress, world, PinnedBuffers(CPU)).part
        entries = [(entry.path.name, entry.reason) for entry in skipped]
        name = checkpoint.path.name if checkpoint else None
        return Resumed(name, entries, sum(read), len(signs), part)


def data_bytes(contents: Contents, is_counted: Callable[[str], bool]) -> int:
    """Return the bytes of the tensors of the parameters that ``is_counted`` chooses."""
    model = [tensor.nbytes for name, tensor in contents.tensors["model"].items() if is_counted(name)]
    slots = contents.tensors["optimizer"].items()
    optimizer = [tensor.nbytes for key, tensor in slots if is_counted(key.partition("/")[2])]
    return sum(model) + sum(optimizer)


def header_bytes(checkpoint: Path) -> int:
    files = checkpoint.glob("*.safetensors")
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files)


def test_each_host_reads_the_dense_part_and_its_own_experts(folder: Path) -> None:
    results = run_ranks(resume_on_host, 3, folder, HOST_OF)
    contents = load(folder / "step_00000004")
    assert_same_contents(without_random(merge_parts([one.part for one in results])), without_random(contents))
    for rank, result in enumerate(results):
        assert (result.path, result.skipped) == ("step_00000004", [])
        own = {
            f"blocks.{layer}.ffn.bank.{expert}."
            for layer, hosts in enumerate(HOST_OF)
            for expert, host in enumerate(hosts)
            if host == rank
        }
        needed = data_bytes(contents, lambda n, own=own: ".bank." not in n or n.startswith(tuple(own)))
        assert result.num_bytes == needed + header_bytes(folder / "step_00000004")
        assert result.num_signs > 0
    assert max(result.num_bytes for result in results) < data_bytes(contents, lambda _: True)


def without_random(contents: Contents) -> Contents:
    state = {key: value for key, value in contents.state.items() if key != "random"}
    return Contents(contents.tensors, state)


def test_other_hosts_read_what_three_hosts_have_written(folder: Path) -> None:
    results = run_ranks(resume_on_host, 2, folder, OTHER_HOSTS)
    merged = merge_parts([result.part for result in results])
    assert_same_contents(without_random(merged), without_random(load(folder / "step_00000004")))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_damage_that_one_host_finds_sends_all_to_the_checkpoint_before(folder: Path, rank: int) -> None:
    damage = damage_experts_of(rank, folder / "step_00000004")
    for result in run_ranks(resume_on_host, 3, folder, HOST_OF):
        assert result.path == "step_00000002"
        assert result.skipped == [("step_00000004", damage)]


def damage_experts_of(rank: int, checkpoint: Path) -> str:
    """Change the last byte of a host's file. Return the damage in words.

    It belongs to the host's experts: no other host reads it."""
    file = checkpoint / f"optimizer_{rank:05d}.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointDamaged) as damage:
        load(checkpoint)
    return str(damage.value)


class RecordingLog(SilentLog):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, *events: Event) -> None:
        self.events += events


def recover_on_host(
    rank: int, size: int, store_path: str, folder: Path, snapshots: HostSnapshots
) -> tuple[HostPart, Event]:
    """Resume as after a failure, with snapshots of step 3 and a newer checkpoint."""
    with process_group_world(file_store(store_path, size), rank, size, CPU, "gloo", 60) as world:
        stepper, _ = make_stepper(TASK, 4, 12, learning_rate=1e-2, world=world, host_of=HOST_OF)
        state = state_of(stepper)
        log = RecordingLog()
        start = StartPoint(CheckpointStore(folder, repair=rank == 0), world, log)
        progress = restore_newest(CountingSource(snapshots), state, start, checkpoint_is_newer=True)
        (event,) = log.events
        return capture(state, progress, world, PinnedBuffers(CPU)).part, event


def test_a_checkpoint_newer_than_the_snapshots_is_taken_if_it_is_good(folder: Path, saved: Saved) -> None:
    results = run_ranks(recover_on_host, 3, folder, saved[1])
    merged = merge_parts([part for part, _ in results])
    assert_same_contents(without_random(merged), without_random(load(folder / "step_00000004")))
    for _, event in results:
        assert event == Resume(step=4, path="step_00000004")


@pytest.mark.parametrize("rank", [0, 2])
def test_snapshots_are_taken_before_checkpoints_older_than_they(
    folder: Path, saved: Saved, rank: int
) -> None:
    """The checkpoint of step 4 is damaged: the snapshots of step 3 are the newest good state."""
    damage = damage_experts_of(rank, folder / "step_00000004")
    results = run_ranks(recover_on_host, 3, folder, saved[1])
    merged = merge_parts([part for part, _ in results])
    assert_same_contents(without_random(merged), without_random(merge_all(saved[1])))
    skipped = (SkippedCheckpoint("step_00000004", damage),)
    for _, event in results:
        assert event == Resume(step=3, skipped=skipped, source="memory")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["abandoned_step_00000004", "step_00000002"], "it must not outrank the next snapshots"


def test_hosts_begin_anew_together_where_every_checkpoint_is_damaged(folder: Path) -> None:
    for step in (2, 4):
        (folder / f"step_0000000{step}" / "model_00001.safetensors").unlink()
    for result in run_ranks(resume_on_host, 3, folder, HOST_OF):
        assert result.path is None
        assert [name for name, _ in result.skipped] == ["step_00000004", "step_00000002"]


def test_a_checkpoint_of_another_format_is_refused_by_all(folder: Path) -> None:
    """Not passed over as damaged: an older one would be taken, or the run begin anew."""
    reseal(folder / "step_00000004", lambda manifest: manifest.update(format=1))
    for message in run_ranks(resume_on_host, 3, folder, HOST_OF):
        assert "has checkpoint format 1" in message
        assert "this version reads format 2" in message
