"""Tests of the link between the driver's run folder and a worker's, without Ray."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from ray.exceptions import NodeDiedError

from orchestrator.errors import UserError
from orchestrator.record.events import EventLog, read_events
from orchestrator.record.log import SilentLog
from orchestrator.runtime import folder_link, shared_folder
from orchestrator.runtime.bootstrap import (
    LINKED_FILES,
    Assignment,
    DriverRequests,
    check_run_dir,
    worker_folder,
)
from orchestrator.runtime.folder_link import FolderLink, FolderServer, Link
from orchestrator.storage.folder import RemoteFolder
from orchestrator.storage.local_files import replace_file
from orchestrator.train.remote.mirror import Mirror
from orchestrator.train.remote.publish_requests import ABANDON, ask, open_requests
from orchestrator.train.remote.publish_requests import FOLDER as PUBLISH_REQUESTS

_WAIT_S = 60.0


class Handle:
    """Calls the server as Ray's handle of an actor does, in this process."""

    def __init__(self, run_dir: Path) -> None:
        self.is_down = False
        self.num_refused = 0
        self.num_lost_replies = 0
        self._run_dir = run_dir
        self.restart()
        self.open = SimpleNamespace(remote=lambda is_main: self._server.open(is_main))
        self.exchange = SimpleNamespace(remote=self._exchange)

    def restart(self) -> None:
        """Start the server again, as Ray does after its process has died."""
        self._server = FolderServer(self._run_dir, LINKED_FILES)

    def _exchange(self, *arguments: Any) -> Any:
        if self.is_down:
            self.num_refused += 1
            raise ConnectionError("the node of the driver does not answer")
        reply = self._server.exchange(*arguments)
        if self.num_lost_replies:
            self.num_lost_replies -= 1
            raise TimeoutError("the reply was lost")
        return reply


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_link, "_FLUSH_SECONDS", _WAIT_S)
    monkeypatch.setattr(folder_link, "ray", SimpleNamespace(get=lambda reply, timeout=None: reply))


@pytest.fixture
def driver_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "driver"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs" / "nonce").write_text("this run")
    (run_dir / "events.jsonl").touch()
    (run_dir / "plan.json").write_text('{"batch_size": 8}')
    return run_dir


@pytest.fixture
def handle(driver_dir: Path) -> Handle:
    return Handle(driver_dir)


def linked(handle: Handle, run_dir: Path, rank: int = 0) -> FolderLink:
    return FolderLink(Link("memory://run", handle), run_dir, rank)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_events_logs_and_files_of_a_worker_come_to_the_driver(
    handle: Handle, driver_dir: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "worker"
    with linked(handle, run_dir) as link:
        log = EventLog(run_dir / "events.jsonl")
        log.write("step", step=1, loss=2.0)
        link.flush()
        assert [event["step"] for event in read_events(driver_dir / "events.jsonl")] == [1]
        (run_dir / "plan.json").write_text('{"batch_size": 4}')
        (run_dir / "logs" / "worker_0.log").write_text("first\n")
        link.flush()
        (run_dir / "logs" / "worker_0.log").open("a").write("second\n")
        log.write("step", step=2, loss=1.0)
        log.close()
    assert [event["step"] for event in read_events(driver_dir / "events.jsonl")] == [1, 2]
    assert json.loads((driver_dir / "plan.json").read_text()) == {"batch_size": 4}
    assert (driver_dir / "logs" / "worker_0.log").read_text() == "first\nsecond\n"


def test_a_worker_begins_with_the_record_and_sees_the_run(
    handle: Handle, driver_dir: Path, tmp_path: Path
) -> None:
    EventLog(driver_dir / "events.jsonl").write("load", step=7)
    run_dir = tmp_path / "worker"
    prepared: Any = None
    with linked(handle, run_dir):
        check_run_dir(Assignment(prepared, run_dir, run_dir, "this run", None), "worker 0")
        assert json.loads((run_dir / "plan.json").read_text()) == {"batch_size": 8}
        assert [event["step"] for event in read_events(run_dir / "events.jsonl")] == [7]
    # It has sent nothing twice.
    assert len(read_events(driver_dir / "events.jsonl")) == 1


def test_a_torn_line_is_sent_when_it_is_whole(handle: Handle, driver_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "worker"
    with linked(handle, run_dir) as link, (run_dir / "events.jsonl").open("a") as file:
        file.write('{"event": "step",')
        file.flush()
        link.flush()
        assert (driver_dir / "events.jsonl").read_bytes() == b""
        file.write(' "step": 1}\n')
    assert [event["step"] for event in read_events(driver_dir / "events.jsonl")] == [1]


def test_events_of_a_main_host_that_was_replaced_are_dropped(
    handle: Handle, driver_dir: Path, tmp_path: Path
) -> None:
    with linked(handle, tmp_path / "old") as old:
        EventLog(tmp_path / "old" / "events.jsonl").write("step", step=1)
        old.flush()
        with linked(handle, tmp_path / "new"):
            EventLog(tmp_path / "old" / "events.jsonl").write("step", step=2, stale=True)
            old.flush()
            EventLog(tmp_path / "new" / "events.jsonl").write("step", step=2)
    events = read_events(driver_dir / "events.jsonl")
    assert [(event["step"], "stale" in event) for event in events] == [(1, False), (2, False)]


def test_a_request_of_a_main_host_that_was_replaced_is_dropped(
    handle: Handle, driver_dir: Path, tmp_path: Path
) -> None:
    """The next group may have resumed from an earlier checkpoint than the one that it would publish."""
    with linked(handle, tmp_path / "old") as old, linked(handle, tmp_path / "new") as new:
        for worker, name in (("old", "publish-step_00000040.1"), ("new", "publish-step_00000020.2")):
            replace_file(tmp_path / worker / PUBLISH_REQUESTS / f"{name}.request", b"a manifest")
        for link in (old, new):
            link.flush()
    assert [request.subject for request in open_requests(driver_dir)] == ["step_00000020.2"]


def test_a_worker_that_opens_the_record_after_the_clock_was_set_back_writes_it(
    handle: Handle, driver_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked(handle, tmp_path / "old") as old, monkeypatch.context() as clock:
        clock.setattr("time.time_ns", lambda: 1)
        with linked(handle, tmp_path / "new"):
            clock.undo()
            EventLog(tmp_path / "old" / "events.jsonl").write("step", step=1, stale=True)
            old.flush()
            EventLog(tmp_path / "new" / "events.jsonl").write("step", step=1)
    (event,) = read_events(driver_dir / "events.jsonl")
    assert "stale" not in event


def test_files_outside_of_the_run_folder_are_not_read(driver_dir: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    server = FolderServer(driver_dir, ())
    writer, _ = server.open(is_main=True)
    assert server.exchange(writer, [], [str(secret), "../secret", "plan.json"]).keys() == {"plan.json"}


def test_a_large_file_stays_and_is_told_once(
    handle: Handle,
    driver_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(folder_link, "_MAX_FILE_BYTES", 10)
    with linked(handle, tmp_path / "worker") as link:
        (tmp_path / "worker" / "trace.json").write_bytes(bytes(11))
        link.flush()
        link.flush()
    assert not (driver_dir / "trace.json").exists()
    assert caplog.text.count("trace.json has more than 10 B, and is not sent to the driver") == 1
    assert not link.is_complete


def test_requests_of_the_driver_come_to_the_worker(handle: Handle, driver_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "worker"
    with linked(handle, run_dir) as link:
        for num_saves in (1, 2):
            DriverRequests(num_saves=num_saves).write(driver_dir / "logs")
            link.flush()
            found = json.loads((run_dir / "logs" / "requests.json").read_text())
            assert found["num_saves"] == num_saves


def test_what_was_written_while_the_driver_did_not_answer_comes_later(
    handle: Handle, driver_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_link, "_FLUSH_SECONDS", 0.0)
    run_dir = tmp_path / "worker"
    handle.is_down = True
    with linked(handle, run_dir) as link:
        log = EventLog(run_dir / "events.jsonl")
        log.write("step", step=1)
        link.flush()
        assert (driver_dir / "events.jsonl").read_bytes() == b""
        handle.is_down = False
        log.write("step", step=2)
        wait_until(lambda: len(read_events(driver_dir / "events.jsonl")) == 2)


def test_a_restarted_server_takes_events_of_the_worker_that_had_opened_the_record(
    handle: Handle, driver_dir: Path, tmp_path: Path
) -> None:
    with linked(handle, tmp_path / "old") as old, linked(handle, tmp_path / "new") as new:
        EventLog(tmp_path / "new" / "events.jsonl").write("step", step=1)
        new.flush()
        handle.restart()
        EventLog(tmp_path / "new" / "events.jsonl").write("step", step=2)
        new.flush()
        EventLog(tmp_path / "old" / "events.jsonl").write("step", step=2, stale=True)
        old.flush()
    events = read_events(driver_dir / "events.jsonl")
    assert [(event["step"], "stale" in event) for event in events] == [(1, False), (2, False)]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_was_sent_again_after_a_lost_reply_is_written_once(
    handle: Handle, driver_dir: Path, tmp_path: Path, is_restarted: bool
) -> None:
    run_dir = tmp_path / "worker"
    with linked(handle, run_dir) as link:
        log = EventLog(run_dir / "events.jsonl")
        for step in (1, 2, 3):
            handle.num_lost_replies = 1
            log.write("step", step=step)
            (run_dir / "logs" / "worker_0.log").open("a").write(f"step {step}\n")
            wait_until(lambda: handle.num_lost_replies == 0)
            if is_restarted:
                handle.restart()
            link.flush()
        log.close()
    assert [event["step"] for event in read_events(driver_dir / "events.jsonl")] == [1, 2, 3]
    assert (driver_dir / "logs" / "worker_0.log").read_text() == "step 1\nstep 2\nstep 3\n"


def test_a_flush_does_not_count_while_the_driver_does_not_answer(
    handle: Handle, driver_dir: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "worker"
    handle.is_down = True
    with linked(handle, run_dir) as link:
        EventLog(run_dir / "events.jsonl").write("step", step=1)
        seen: list[bytes] = []

        def flush() -> None:
            link.flush()
            seen.append((driver_dir / "events.jsonl").read_bytes())

        thread = threading.Thread(target=flush)
        thread.start()
        num_refused = handle.num_refused
        wait_until(lambda: handle.num_refused > num_refused + 1)
        assert not seen
        handle.is_down = False
        thread.join()
    assert b'"step"' in seen[0]


def test_the_last_events_are_sent_again_until_they_arrive(
    handle: Handle, driver_dir: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "worker"
    with linked(handle, run_dir):
        handle.is_down = True
        EventLog(run_dir / "events.jsonl").write("end", status="completed")
        later = threading.Timer(0.3, setattr, (handle, "is_down", False))
        later.start()
    assert [event["event"] for event in read_events(driver_dir / "events.jsonl")] == ["end"]


def test_last_events_that_do_not_arrive_are_told(
    handle: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_link, "_LAST_SECONDS", 0.0)
    with linked(handle, tmp_path / "worker"):
        handle.is_down = True
    assert "the last events and logs did not reach the driver" in caplog.text


def test_files_that_cannot_be_read_are_left_out_and_told_once(
    handle: Handle,
    driver_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == "secret.txt":
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    run_dir = tmp_path / "worker"
    with linked(handle, run_dir) as link:
        os.mkfifo(run_dir / "a.pipe")
        (run_dir / "secret.txt").write_text("of another user")
        for step in (1, 2):
            EventLog(run_dir / "events.jsonl").write("step", step=step)
            link.flush()
            assert len(read_events(driver_dir / "events.jsonl")) == step
    assert not (driver_dir / "a.pipe").exists()
    assert caplog.text.count("secret.txt cannot be read, and is not sent to the driver") == 1


def test_the_driver_answers_the_main_host_through_the_link(
    handle: Handle, driver_dir: Path, tmp_path: Path
) -> None:
    uploads = Mirror(driver_dir, RemoteFolder(f"memory://{uuid4().hex}"))
    uploads.start(SilentLog(), keep=1)
    run_dir = tmp_path / "worker"
    with linked(handle, run_dir):
        for number in range(2):
            ask(run_dir, ABANDON, f"5-{number}", b"", lambda: None)
    uploads.stop()
    assert not list(run_dir.rglob("*.request"))
    assert not list(driver_dir.rglob("*.request"))


def test_workers_of_two_nodes_with_one_temporary_folder_have_folders_of_their_own(
    handle: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prepared: Any = SimpleNamespace(earlier=None)
    link = Link("memory://run", handle)
    assignment = Assignment(prepared, tmp_path / "driver", tmp_path, "this run", None, link)
    folders: set[Path] = set()
    for node in ("node1", "node2"):
        monkeypatch.setattr("socket.gethostname", lambda node=node: node)
        with worker_folder(assignment, 1) as folder:
            folders.add(folder.assignment.run_dir)
    assert len(folders) == 2


def assignment_of(handle: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Assignment:
    """Return the data of a worker that is linked to the driver, with folders of its node in ``tmp``."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    prepared: Any = SimpleNamespace(earlier=None)
    link = Link("memory://run", handle)
    return Assignment(prepared, tmp_path / "driver", tmp_path, "this run", None, link)


def test_the_last_worker_of_a_node_removes_the_folders_of_the_run(
    handle: Handle, driver_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assignment = assignment_of(handle, tmp_path, monkeypatch)
    monkeypatch.setattr("socket.gethostname", iter(("node1", "node2")).__next__)
    with worker_folder(assignment, 0) as first:
        downloaded = first.assignment.run_dir.parent / "downloaded-1" / "step_00000040"
        downloaded.mkdir(parents=True)
        with worker_folder(assignment, 1) as second:
            (second.assignment.run_dir / "logs" / "worker_1.log").write_text("all of it\n")
        assert not second.assignment.run_dir.exists()
        assert downloaded.exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert (driver_dir / "logs" / "worker_1.log").read_text() == "all of it\n"


def test_files_that_did_not_reach_the_driver_stay_on_the_node(
    handle: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_link, "_LAST_SECONDS", 0.0)
    assignment = assignment_of(handle, tmp_path, monkeypatch)
    with worker_folder(assignment, 0) as folder:
        run_dir = folder.assignment.run_dir
        (run_dir.parent / "downloaded-1").mkdir()
        handle.is_down = True
        EventLog(run_dir / "events.jsonl").write("end", status="completed")
    assert [event["event"] for event in read_events(run_dir / "events.jsonl")] == ["end"]
    assert not (run_dir.parent / "downloaded-1").exists()


# Whether the nodes share a disk


def test_a_node_that_is_lost_while_it_is_asked_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(call: str) -> bool:
        if call == "lost":
            raise NodeDiedError("the node was lost")
        return True

    task = SimpleNamespace(options=lambda scheduling_strategy: task, remote=lambda argument: next(calls))
    calls = iter(["good", "lost", "good too"])
    fake_ray = SimpleNamespace(
        remote=lambda **_: lambda function: task,
        wait=lambda calls, num_returns, timeout: (calls, []),
        get=get,
    )
    monkeypatch.setattr(shared_folder, "ray", fake_ray)
    nodes = [{"NodeID": f"{number:056x}", "NodeManagerAddress": f"10.0.0.{number}"} for number in range(3)]
    answers = shared_folder._ask_nodes(nodes, shared_folder.sees_file, "path")
    assert answers == [("10.0.0.0", True), ("10.0.0.2", True)]


def answering(
    monkeypatch: pytest.MonkeyPatch, sees_folder: list[bool], reasons: list[str], link: object = None
) -> None:
    """Let nodes answer the two questions of the driver."""

    def ask_nodes(_nodes: object, function: Callable[..., Any], *_: str) -> list[tuple[str, Any]]:
        answers = sees_folder if function is shared_folder.sees_file else reasons
        return [(f"10.0.0.{number}", answer) for number, answer in enumerate(answers)]

    monkeypatch.setattr(shared_folder, "_other_nodes", lambda kind: [])
    monkeypatch.setattr(shared_folder, "_ask_nodes", ask_nodes)
    monkeypatch.setattr(shared_folder, "start_server", lambda *_: link)


def test_nodes_that_see_the_folder_are_not_linked(driver_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, [True, True], ["unreachable"])
    assert shared_folder.open_link(driver_dir, RemoteFolder("memory://r"), gpu=False) is None


def test_one_node_that_does_not_see_the_folder_links_all(
    driver_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteFolder(f"memory://{uuid4().hex}")
    answering(monkeypatch, [True, False], ["", ""], link="server")
    assert shared_folder.open_link(driver_dir, remote, gpu=False) == Link(remote.url, "server")
    assert remote.files() == {}


def test_a_node_that_sees_neither_folder_ends_the_run_before_it_starts(
    driver_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, [False, False], ["", "NoCredentialsError: Unable to locate credentials"])
    with pytest.raises(UserError, match=r"node 10\.0\.0\.1 sees neither .* credentials of the storage"):
        shared_folder.open_link(driver_dir, RemoteFolder("memory://r"), gpu=False)


def test_a_node_tells_what_it_sees(driver_dir: Path, tmp_path: Path) -> None:
    nonce = str(driver_dir / "logs" / "nonce")
    assert shared_folder.sees_file(nonce, "this run")
    assert not shared_folder.sees_file(nonce, "another run")
    assert not shared_folder.sees_file(str(tmp_path / "nothing"), "this run")
    remote = RemoteFolder(f"file://{tmp_path}/remote")
    assert shared_folder.why_unreachable(remote.url, "this run") == "it is another folder there"
    remote.write(".reachable", b"this run")
    assert shared_folder.why_unreachable(remote.url, "this run") == ""
    assert "cannot read" in shared_folder.why_unreachable(f"file://{nonce}", "this run")
