"""Checkpoints that two and three hosts write together: complete or never published."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from experts.hosts.membership import GroupLeft
from harness.hosts.save_hosts import SaveHost, make_hosts, run_hosts, save_steps
from harness.storage.snapshots import assert_same_contents, captured_contents
from orchestrator.checkpoint.files import load
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.record.events.kinds import Checkpoint

OPERATIONS = ("mkdir", "rename", "fsync", "rmdir", "unlink", "open", "write")


class Killed(BaseException):
    """Takes the place of SIGKILL for one host: our code must not catch it."""


@contextmanager
def faulty_disk(
    monkeypatch: pytest.MonkeyPatch, host: int, strike: Callable[[int], BaseException | None]
) -> Iterator[list[str]]:
    """Call ``strike`` with the number of each file-system operation of a host's thread.

    Its error is raised in place of the operation. Yields the operations that were done."""
    done: list[str] = []
    numbers = itertools.count()

    def replaced(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread().name.startswith(f"checkpoint-{host}"):
                error = strike(next(numbers))
                if error is not None:
                    raise error
                done.append(name)
            return real(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, replaced(name, getattr(os, name)))
        yield done


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_process_reads_what_all_hosts_have_written(tmp_path: Path, size: int) -> None:
    hosts = make_hosts(size, tmp_path)
    assert run_hosts(hosts, save_steps(10, 20)) == [None] * size
    assert hosts[0].log.saved_steps == [10, 20]
    assert names_in(tmp_path) == ["step_00000010", "step_00000020"]
    contents = load(tmp_path / "step_00000020")
    expected = captured_contents(hosts[0].state, Progress(step=20))
    assert_same_contents(contents, expected)
    writers = {name[-17:-12] for name in names_in(tmp_path / "step_00000020") if "safetensors" in name}
    assert len(writers) == size, "each host has written files of its own"
    files = (tmp_path / "step_00000020").iterdir()
    num_bytes = sum(path.stat().st_size for path in files if path.name != "manifest.json")
    (*_, event) = hosts[0].log.events
    assert isinstance(event, Checkpoint)
    assert event.bytes == num_bytes


def test_buffers_are_those_of_the_main_host(tmp_path: Path) -> None:
    """Running means differ from worker to worker in data parallel training."""
    hosts = make_hosts(3, tmp_path)
    for rank, host in enumerate(hosts):
        for buffer in host.state.model.buffers():
            buffer.fill_(rank)
    run_hosts(hosts, save_steps(10))
    model = load(tmp_path / "step_00000010").tensors["model"]
    buffers = [model[f"2.{name}"] for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert [float(buffer.sum()) for buffer in buffers] == [0.0] * 3


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_host_killed_at_each_operation_publishes_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    """The others go on, then leave the group. A new group saves the step again, and no remains stay."""
    run_hosts(make_hosts(3, tmp_path / "intact"), save_steps(10))
    for limit in range(100):
        folder = tmp_path / "run"
        shutil.copytree(tmp_path / "intact", folder)
        hosts = make_hosts(3, folder)
        with faulty_disk(monkeypatch, killed, lambda n, at=limit: Killed() if n >= at else None) as done:
            finished = save_until_killed(hosts, killed)
        published = (folder / "step_00000020").exists()
        assert hosts[0].log.saved_steps == ([20] if finished else [])
        # Only the main host publishes, by a rename; it may be killed after it.
        assert published == finished or (killed == 0 and "rename" in done)
        newest, skipped = CheckpointStore(folder, repair=False).newest_good()
        assert newest is not None
        assert (newest.path.name, skipped) == ("step_00000020" if published else "step_00000010", [])
        assert run_hosts(make_hosts(2, folder), save_steps(20, 30)) == [None, None]
        assert names_in(folder) == ["step_00000020", "step_00000030"]
        shutil.rmtree(folder)
        if finished:
            assert limit > 5
            return
    pytest.fail("the save never finished")


def save_until_killed(hosts: list[SaveHost], killed: int) -> bool:
    """Save step 20. Leave the group where a host is killed. Return whether none was."""
    writers = {host.world.rank: host.open_writer() for host in hosts}
    assert run_hosts(hosts, lambda host: writers[host.world.rank].save(Progress(step=20))) == [None] * 3
    write = writers[killed]._write
    assert write is not None
    finished = not isinstance(write.result.exception(timeout=60), Killed)
    if finished:
        writers[0].finish()
    for host in hosts:
        host.membership.leave()
        writers[host.world.rank].close()
    if killed != 0:
        writers[0].poll()
    return finished


@pytest.mark.parametrize("full", [0, 1, 2])
def test_a_full_disk_on_any_host_is_a_warning_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    hosts = make_hosts(3, tmp_path, keep=3)
    run_hosts(hosts, save_steps(10))
    hosts = make_hosts(3, tmp_path, keep=3)
    no_space = OSError(28, "No space left on device")
    with faulty_disk(monkeypatch, full, lambda n: no_space if n == 2 else None):
        assert run_hosts(hosts, save_steps(20)) == [None] * 3
    (warning,) = hosts[0].log.warnings
    assert warning.startswith(f"step 20 could not be saved: host {full}: [Errno 28] No space left")
    assert names_in(tmp_path) == ["step_00000010"], "the failed save is removed"
    assert run_hosts(make_hosts(3, tmp_path, keep=3), save_steps(30)) == [None] * 3
    assert names_in(tmp_path) == ["step_00000010", "step_00000030"]


def test_a_folder_that_cannot_be_created_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    hosts = make_hosts(3, tmp_path)
    monkeypatch.setattr(hosts[0].checkpoints, "begin", refuse)
    assert run_hosts(hosts, save_steps(10)) == [None] * 3
    (warning,) = hosts[0].log.warnings
    assert "No space left" in warning
    assert not names_in(tmp_path)


def test_hosts_with_different_parameters_save_nothing(tmp_path: Path) -> None:
    """A tensor that the others leave to a host which does not have it would be missing."""
    hosts = make_hosts(3, tmp_path)
    parameter = next(hosts[2].state.model.parameters())
    del hosts[2].state.optimizer.state[parameter]
    assert run_hosts(hosts, save_steps(10)) == [None] * 3
    (warning,) = hosts[0].log.warnings
    assert "host 2 has other parameters" in warning
    assert not names_in(tmp_path)


def test_a_second_save_waits_for_the_first_until_the_group_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 1 does not get on with its files. No other host hangs."""
    hosts = make_hosts(3, tmp_path)
    released = threading.Event()

    def block(_: int) -> None:
        released.wait(60)

    def leave_when_all_wait() -> None:
        # The hosts with their files on disk wait for a peer; host 1 waits for its own disk.
        looks = 0
        while looks < 5:
            waiting = [hosts[rank].membership.observe().waiting for rank in (0, 2)]
            looks = looks + 1 if all(waiting) else 0
            threading.Event().wait(0.02)
        for host in hosts:
            host.membership.leave()
        released.set()

    watcher = threading.Thread(target=leave_when_all_wait, daemon=True)
    with faulty_disk(monkeypatch, 1, block):
        watcher.start()
        errors = run_hosts(hosts, save_steps(10, 20))
    watcher.join()
    assert [type(error) for error in errors] == [GroupLeft] * 3
    assert not CheckpointStore(tmp_path).newest_first()


def test_a_host_that_waits_for_its_disk_shows_progress(tmp_path: Path) -> None:
    """A wait for peers is no progress of one's own: the membership says that the host waits."""
    (host,) = make_hosts(1, tmp_path)
    writer = host.open_writer()
    writer.save(Progress(step=10))
    num_tensors = len(host.state.model.state_dict()) + 6
    assert host.num_signs == num_tensors, "one sign for each tensor that is copied"
    writer.finish()
    writer.close()


@pytest.mark.extended
def test_pieces_written_while_the_loop_waits_are_signs_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host,) = make_hosts(1, tmp_path)
    writer = host.open_writer()
    seen = threading.Event()

    def hold_until_seen(number: int) -> None:
        if number > 4:  # some pieces are written by then
            seen.wait(60)

    host.count_sign = seen.set
    writer = host.open_writer()
    with faulty_disk(monkeypatch, 0, hold_until_seen):
        writer.save(Progress(step=10))
        seen.clear()
        writer.finish()
    writer.close()
    assert host.log.saved_steps == [10]


def test_the_copy_is_of_the_step_that_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters change while the thread writes."""
    (host,) = make_hosts(1, tmp_path)
    released = threading.Event()

    def hold(_: int) -> None:
        released.wait(60)

    writer = host.open_writer()
    expected = captured_contents(host.state, Progress(step=10))
    with faulty_disk(monkeypatch, 0, hold):
        writer.save(Progress(step=10))
        with torch.no_grad():
            for parameter in host.state.model.parameters():
                parameter.zero_()
        released.set()
        writer.finish()
    writer.close()
    assert_same_contents(load(tmp_path / "step_00000010"), expected)
