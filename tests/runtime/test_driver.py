"""The driver's restarts, with fake attempts in place of Ray: their workers write events as real
ones do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from harness.storage.checkpoints import save_checkpoint, small_contents
from orchestrator.checkpoint.files import Contents
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, TaskFailed, TrainingFailed
from orchestrator.live.callbacks.callback_values import EndInfo
from orchestrator.live.callbacks.callbacks import Callback, CallbackRunner
from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.runtime import driver as module
from orchestrator.runtime.bootstrap import REQUESTS_FILE, Assignment
from orchestrator.runtime.driver import Attempt, AttemptResult, Observers, drive
from orchestrator.runtime.folder_server import DriverEnd
from orchestrator.runtime.recovery import Failure, GiveUp
from orchestrator.runtime.recovery_log import FailureTimes, RecoveryLog
from orchestrator.storage.folder import RemoteFolder
from orchestrator.train.remote.mirror import Mirror
from orchestrator.train.remote.run import RemoteRun

LOST = Failure("worker", "worker 1 was lost", 1, loss="died")
COMPLETED = AttemptResult("completed")
FAILED = AttemptResult(failure=LOST)


@dataclass
class FakeAttempt:
    """An attempt that writes its workers' events at the first poll and ends at the second."""

    result: AttemptResult
    write_events: Callable[[], None]
    polls: int = 0
    closed: bool = False

    def wait(self, timeout_s: float) -> AttemptResult | None:
        self.polls += 1
        if self.polls == 1:
            self.write_events()
            return None
        return self.result

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeCluster:
    """Runs the attempts that the test plans: their results, and the steps that their workers do."""

    run_dir: Path
    planned: list[tuple[AttemptResult, range]]
    slots: int = 2
    assignments: list[Assignment] = field(default_factory=list)
    started_workers: list[int] = field(default_factory=list)
    attempts: list[FakeAttempt] = field(default_factory=list)
    clock_offset_s: float = 0.0
    """How far the clock of the workers' node is ahead."""
    last_event: Event | None = None
    """The event after the steps."""

    def start(
        self,
        assignment: Assignment,
        workers: int,
        gpu: bool,
        log: EventLog,
        recovery_log: RecoveryLog,
    ) -> Attempt:
        result, steps = self.planned[len(self.attempts)]
        self.assignments.append(assignment)
        self.started_workers.append(workers)
        self.attempts.append(FakeAttempt(result, lambda: self.write_events(workers, steps)))
        return self.attempts[-1]

    def write_events(self, workers: int, steps: range) -> None:
        log = EventLog(self.run_dir / "events.jsonl")
        if steps:
            log.write(kinds.Start(workers=workers, step=steps[0] - 1, build_seconds=0.001, time=self._time()))
        for step in steps:
            time.sleep(0.002)
            log.write(kinds.Step(step=step, time=self._time()))
        if self.last_event:
            log.write(self.last_event)
        log.close()

    def _time(self) -> float:
        return time.time() + self.clock_offset_s

    def events(self, kind: str) -> list[dict[str, Any]]:
        return of_kind(read_events(self.run_dir / "events.jsonl"), kind)


@dataclass(frozen=True)
class FakePrepared:
    """A prepared run on two workers."""

    resolved: Any
    plan: Any = field(default_factory=lambda: SimpleNamespace(workers=SimpleNamespace(value=2)))
    task: Any = None

    def with_secrets(self) -> FakePrepared:
        return self


@dataclass
class FakeScreen:
    notes: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    closed: bool = False

    def __call__(self, event: Event) -> None:
        self.shown.append(event.EVENT)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def close(self) -> None:
        self.closed = True


FakeClusters = Callable[..., FakeCluster]


@pytest.fixture
def fake_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeClusters:
    """``fake_cluster((result, steps), ...)``: a cluster for these attempts."""

    def make(*planned: tuple[AttemptResult, range], slots: int = 2) -> FakeCluster:
        cluster = FakeCluster(tmp_path, list(planned), slots)
        monkeypatch.setattr(module, "placement_groups", set)
        monkeypatch.setattr(module, "_copy_logs", lambda *_: None)
        monkeypatch.setattr(module, "resources_now", lambda: {"CPU": slots, "GPU": 0})
        monkeypatch.setattr(module, "_NODE_RETURN_SECONDS", 0.0)
        monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
        monkeypatch.setattr(module, "uses_gpus", lambda *_: False)
        monkeypatch.setattr(module, "open_link", lambda *_: None)
        monkeypatch.setattr(module, "record_failure", lambda *_: None)
        return cluster

    return make


def drive_run(
    cluster: FakeCluster,
    screen: FakeScreen | None = None,
    remote: RemoteRun | None = None,
    callbacks: CallbackRunner | None = None,
    **settings: Any,
) -> str:
    config = Config.of(run_dir=cluster.run_dir, trackers=[], **settings)
    prepared: Any = FakePrepared(SimpleNamespace(config=config))
    ray_cluster: Any = SimpleNamespace(autoscaling=False)
    shown: Any = screen or FakeScreen()
    observers = Observers(shown, callbacks or CallbackRunner([]), remote)
    return drive(cluster.start, prepared, ray_cluster, cluster.run_dir, observers)


def test_a_run_without_a_failure_writes_no_recovery(fake_cluster: FakeClusters) -> None:
    cluster = fake_cluster((COMPLETED, range(1, 6)))
    assert drive_run(cluster) == "completed"
    assert cluster.assignments[0].resume is None
    assert cluster.events("failure") == cluster.events("recovery") == []
    assert cluster.attempts[0].closed


class FailingAtEnd(Callback):
    def on_end(self, end: EndInfo) -> None:
        raise ZeroDivisionError(end.status)


def test_an_error_of_the_last_callback_is_the_end_of_the_run(
    fake_cluster: FakeClusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the run comes with the last events, after the driver has looked for errors of callbacks."""
    cluster = fake_cluster((COMPLETED, range(1, 6)))
    recorded: list[BaseException] = []
    monkeypatch.setattr(module, "record_failure", lambda _, error, *__: recorded.append(error))

    def write_end(_: FakeAttempt) -> None:
        log = EventLog(cluster.run_dir / "events.jsonl")
        log.write(kinds.End(status="completed", reason="5 steps done", steps=5, seconds=1.0))
        log.close()

    monkeypatch.setattr(FakeAttempt, "close", write_end)
    with pytest.raises(TaskFailed, match="ZeroDivisionError: completed"):
        drive_run(cluster, callbacks=CallbackRunner([FailingAtEnd()], raise_errors=True))
    assert [type(error) for error in recorded] == [TaskFailed]


def test_the_driver_uploads_what_the_workers_save_through_a_restart(fake_cluster: FakeClusters) -> None:
    screen = FakeScreen()
    cluster = fake_cluster((FAILED, range(1, 9)), (COMPLETED, range(6, 12)))
    store = CheckpointStore(cluster.run_dir / "checkpoints")
    state = {"progress": vars(Progress(step=5))}
    save_checkpoint(store, 5, Contents(small_contents(5).tensors, state))
    folder = RemoteFolder(f"memory://{uuid4().hex}/run1")
    remote = RemoteRun(folder, cluster.run_dir, Mirror(cluster.run_dir, folder))
    assert drive_run(cluster, screen, remote) == "completed"
    (upload,) = cluster.events("upload")
    assert upload["step"] == 5
    assert screen.shown.count("upload") == 1
    assert "checkpoints/step_00000005/manifest.json" in folder.files()
    remote.mirror.finish()
    for name in ("events.jsonl", "events.driver.jsonl"):
        assert folder.read(name, 2**20) == (cluster.run_dir / name).read_bytes()


def test_a_restart_is_recorded_by_the_driver_from_the_workers_events(fake_cluster: FakeClusters) -> None:
    screen = FakeScreen()
    cluster = fake_cluster((FAILED, range(1, 9)), (COMPLETED, range(6, 12)))
    assert drive_run(cluster, screen) == "completed"
    (failure,) = cluster.events("failure")
    assert (failure["message"], failure["rank"], failure["step"]) == ("worker 1 was lost", 1, 8)
    (recovery,) = cluster.events("recovery")
    assert (recovery["attempt"], recovery["source"]) == (1, "disk")
    assert (recovery["workers_before"], recovery["workers"]) == (2, 2)
    assert (recovery["step"], recovery["lost_steps"]) == (5, 3)
    restart = cluster.events("start")[1]
    steps = [event for event in cluster.events("step") if event["time"] > restart["time"]]
    assert recovery["restore_seconds"] == pytest.approx(0.001, abs=1e-4)
    assert recovery["replay_seconds"] == pytest.approx(steps[2]["time"] - restart["time"], abs=1e-4)
    last_sign_of_life = cluster.events("step")[7]["time"]
    assert recovery["total_seconds"] == pytest.approx(steps[0]["time"] - last_sign_of_life, abs=1e-4)
    assert screen.shown.count("recovery") == 1
    assert cluster.assignments[1].resume is not None


@pytest.mark.parametrize("offset_s", [3600.0, -3600.0])
def test_a_wrong_clock_of_a_node_does_not_falsify_the_times_of_a_recovery(
    fake_cluster: FakeClusters, offset_s: float
) -> None:
    cluster = fake_cluster((FAILED, range(1, 9)), (COMPLETED, range(6, 12)))
    cluster.clock_offset_s = offset_s
    drive_run(cluster)
    (recovery,) = cluster.events("recovery")
    seconds = {name: value for name, value in recovery.items() if name.endswith("_seconds")}
    assert all(0 <= value < 60 for value in seconds.values()), seconds


def test_the_source_of_a_recovery_is_the_one_that_the_workers_record(tmp_path: Path) -> None:
    """A checkpoint newer than the snapshots was expected, and turned out to be damaged."""
    with module._RunRecord(tmp_path, []) as record:
        record.recovery_log.failed(LOST, "host 1 was lost", 3, 9, FailureTimes(1000.0, 1001.0))
        record.recovery_log.regrouped(3, "disk", 1002.0)
        EventLog(tmp_path / "events.jsonl").write(kinds.Resume(step=5, path=None, source="memory"))
        record.poll()
        record.recovery_log.restored(1003.0)
        record.recovery_log.stepped(9, 1004.0)
    (recovery,) = of_kind(read_events(tmp_path / "events.jsonl"), "recovery")
    assert recovery["source"] == "memory"


def test_steps_that_are_not_repeated_and_have_no_events_are_told(tmp_path: Path) -> None:
    """The main host was lost after its snapshot had arrived, and before the events of its steps."""
    workers = EventLog(tmp_path / "events.jsonl")
    with module._RunRecord(tmp_path, []) as record:
        for steps, resumed in (((1, 2), 2), ((3,), 5), ((6,), 5)):
            for step in steps:
                workers.write(kinds.Step(step=step))
            workers.write(kinds.Resume(step=resumed, path=None, source="memory"))
            record.poll()
    (warning,) = of_kind(read_events(tmp_path / "events.jsonl"), "warning")
    assert "the events of steps 4 to 5 are missing" in warning["message"]


@pytest.mark.parametrize("has_end", [True, False])
def test_a_linked_run_whose_last_events_have_not_arrived_has_failed(
    fake_cluster: FakeClusters, monkeypatch: pytest.MonkeyPatch, has_end: bool
) -> None:
    cluster = fake_cluster((COMPLETED, range(1, 5)))
    folder = RemoteFolder(f"memory://{uuid4().hex}/run1")
    monkeypatch.setattr(module, "open_link", lambda *_: DriverEnd(folder.url, None))
    # The end of an earlier session does not count.
    EventLog(cluster.run_dir / "events.jsonl").write(kinds.End(status="stopped", steps=0))
    remote = RemoteRun(folder, cluster.run_dir, Mirror(cluster.run_dir, folder))
    if has_end:
        cluster.last_event = kinds.End(status="completed", steps=4)
        assert drive_run(cluster, remote=remote) == "completed"
        return
    with pytest.raises(
        TrainingFailed, match=rf"have not reached the driver.*orchestrator resume {folder.url}"
    ):
        drive_run(cluster, remote=remote)


def test_the_driver_writes_nothing_to_the_file_of_the_workers(fake_cluster: FakeClusters) -> None:
    cluster = fake_cluster((FAILED, range(1, 9)), (COMPLETED, range(6, 12)))
    screen = FakeScreen()
    drive_run(cluster, screen)
    lines = (cluster.run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["event"] for line in lines} == {"start", "step"}
    events = read_events(cluster.run_dir / "events.jsonl")
    markers = [event["event"] for event in events if event["event"] != "step"]
    assert markers == ["start", "failure", "start", "recovery"]
    assert screen.shown == [event["event"] for event in events], "shown in the order of the record"


def test_a_run_that_ends_before_the_lost_steps_are_repeated_has_its_recovery(
    fake_cluster: FakeClusters,
) -> None:
    cluster = fake_cluster((FAILED, range(1, 9)), (AttemptResult("stopped"), range(6, 7)))
    assert drive_run(cluster) == "stopped"
    (recovery,) = cluster.events("recovery")
    assert (recovery["step"], recovery["lost_steps"]) == (5, 3)


def test_a_failure_that_is_final_keeps_the_recovery_before_it(fake_cluster: FakeClusters) -> None:
    given_up = AttemptResult(failure=LOST, given_up=GiveUp("worker 1 was lost; no host is left"))
    cluster = fake_cluster((FAILED, range(1, 9)), (given_up, range(6, 8)))
    with pytest.raises(TrainingFailed, match="no host is left"):
        drive_run(cluster)
    assert len(cluster.events("recovery")) == 1


def test_out_of_memory_restarts_with_half_the_micro_batch(fake_cluster: FakeClusters) -> None:
    exhausted = AttemptResult(failure=Failure("memory", "worker 0 ran out", 0, 8))
    cluster = fake_cluster((exhausted, range(0)), (exhausted, range(0)), (COMPLETED, range(1, 3)))
    assert drive_run(cluster) == "completed"
    resumes = [assignment.resume for assignment in cluster.assignments[1:]]
    assert [resume.halvings for resume in resumes if resume is not None] == [1, 2]
    (recovery,) = cluster.events("recovery")
    assert recovery["attempt"] == 2, "the first restart reached no step: one recovery covers both"


def test_a_smaller_cluster_restarts_fewer_workers(fake_cluster: FakeClusters) -> None:
    cluster = fake_cluster((FAILED, range(1, 3)), (COMPLETED, range(1, 5)), slots=1)
    assert drive_run(cluster) == "completed"
    assert cluster.started_workers == [2, 1]
    (recovery,) = cluster.events("recovery")
    assert (recovery["workers_before"], recovery["workers"]) == (2, 1)


def test_too_many_failures_end_the_run(fake_cluster: FakeClusters) -> None:
    cluster = fake_cluster((FAILED, range(1, 3)), (FAILED, range(1, 3)))
    with pytest.raises(TrainingFailed, match="--max-failures is 1"):
        drive_run(cluster, max_failures=1)
    assert all(attempt.closed for attempt in cluster.attempts)


def test_failures_that_lie_far_apart_do_not_add_up(fake_cluster: FakeClusters) -> None:
    """However quickly they follow each other: the distance is counted in steps."""
    cluster = fake_cluster(
        (FAILED, range(1, 3)),
        (FAILED, range(1, 103)),
        (FAILED, range(101, 203)),
        (COMPLETED, range(201, 203)),
    )
    assert drive_run(cluster, max_failures=1) == "completed"
    assert len(cluster.events("failure")) == 3


def test_failures_while_steps_are_repeated_are_no_progress(fake_cluster: FakeClusters) -> None:
    cluster = fake_cluster((FAILED, range(1, 151)), (FAILED, range(1, 120)), (FAILED, range(1, 140)))
    with pytest.raises(TrainingFailed, match="failed 3 times within 100 steps of progress"):
        drive_run(cluster, max_failures=2)


def test_memory_that_cannot_be_halved_is_an_error_of_resources(fake_cluster: FakeClusters) -> None:
    exhausted = AttemptResult(failure=Failure("memory", "worker 0 ran out", 0, 1))
    with pytest.raises(ResourceError, match="cannot be halved"):
        drive_run(fake_cluster((exhausted, range(0))))


def test_a_request_to_stop_is_passed_on_by_a_file(
    fake_cluster: FakeClusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Requested:
        def __enter__(self) -> Callable[[], bool]:
            return lambda: True

        def __exit__(self, *_: object) -> None: ...

    screen = FakeScreen()
    monkeypatch.setattr(module, "stop_on_signal", Requested)
    cluster = fake_cluster((AttemptResult("stopped"), range(1, 3)))
    assert drive_run(cluster, screen) == "stopped"
    assert (cluster.run_dir / "logs" / REQUESTS_FILE).exists()
    assert any("stopping after this step" in note for note in screen.notes)


def test_a_full_disk_at_the_end_neither_hides_the_error_nor_keeps_the_screen_open(
    fake_cluster: FakeClusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(log: RecoveryLog, at: float) -> None:
        raise OSError(28, "No space left on device")

    recorded: list[BaseException] = []
    screen = FakeScreen()
    cluster = fake_cluster((FAILED, range(1, 3)))
    monkeypatch.setattr(RecoveryLog, "close", full_disk)
    monkeypatch.setattr(module, "record_failure", lambda _, error, *rest: recorded.append(error))
    with pytest.raises(TrainingFailed, match="--max-failures 0"):
        drive_run(cluster, screen, max_failures=0)
    assert [type(error) for error in recorded] == [TrainingFailed]
    assert screen.closed
