"""Tests of feeding trackers: no tracker, however hostile, delays the training."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.fakes.fake_tracker import CONFIG, FakeTracker
from harness.runs.records import made
from orchestrator.errors import UserError
from orchestrator.live.trackers.tracker_backends import Tracker, TrackerFactory
from orchestrator.live.trackers.trackers import TrackerThread
from orchestrator.record.events import kinds
from orchestrator.record.files.event_log import EventLog


def step(number: int) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": 1.0 / number}


def recording_factory(built: list[Any], kind: type[FakeTracker] = FakeTracker) -> TrackerFactory:
    """Return a factory that appends each tracker it builds to ``built``."""

    def build(run_dir: Path, run_name: str, config: Mapping[str, Any]) -> Tracker:
        built.append(kind(run_dir, run_name, config))
        return built[-1]

    return build


def test_short_steps_are_thinned_to_ten_per_second(tmp_path: Path) -> None:
    built: list[FakeTracker] = []
    thread = TrackerThread({"one": recording_factory(built)}, tmp_path, "run-1", CONFIG)
    # Ten seconds of steps of 10 ms, each with an evaluation, which is not thinned.
    for number in range(1000):
        thread(made({"event": "step", "time": 100 + number / 100, "step": number, "loss": 1.0}))
        thread(
            made(
                {"event": "evaluate", "time": 100 + number / 100, "step": number, "loss": 2.0, "metrics": {}}
            )
        )
    thread.close()
    assert 80 <= len(built[0].points["train/loss"]) <= 101
    assert len(built[0].points["validation/loss"]) == 1000


def test_a_tracker_gets_all_numbers_in_one_thread_of_its_own(tmp_path: Path) -> None:
    built: list[FakeTracker] = []
    warnings: list[str] = []
    thread = TrackerThread(
        {"one": recording_factory(built), "two": recording_factory(built)},
        tmp_path,
        "run-1",
        CONFIG,
        warnings.append,
    )
    log = EventLog(tmp_path / "events.jsonl", [thread])
    log.write(kinds.Start(task="digits", step=0))
    for number in range(1, 101):
        log.write(kinds.Step(time=float(number), step=number, loss=1.0 / number))
    thread.text("plan", "two workers")
    thread.close()
    thread.close()
    log.write(kinds.Step(step=101, loss=0.0))  # too late, and harmless
    for fake in built:
        assert (fake.name, fake.config, fake.closed) == ("run-1", CONFIG, 1)
        assert fake.points["train/loss"] == [(number, 1.0 / number) for number in range(1, 101)]
        assert fake.texts["plan"] == "two workers"
        assert "task: digits" in fake.texts["start"]
        assert len(fake.threads) == 1
        assert threading.get_ident() not in fake.threads
    assert len(built) == 2
    assert warnings == []


def test_a_tracker_that_raises_is_reported_once_and_switched_off(tmp_path: Path) -> None:
    calls: list[int] = []

    class Raising(FakeTracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            calls.append(step)
            raise OSError("no route to host")

    built: list[Any] = []
    warnings: list[str] = []
    thread = TrackerThread(
        {"bad": recording_factory(built, Raising), "good": recording_factory(built)},
        tmp_path,
        "run-1",
        CONFIG,
        warnings.append,
    )
    for number in range(1, 21):
        thread(made(step(number)))
    thread.close()
    good = next(fake for fake in built if type(fake) is FakeTracker)
    bad = next(fake for fake in built if type(fake) is Raising)
    assert calls == [1, 2, 3]
    assert len(good.points["train/loss"]) == 20
    assert bad.closed == 1
    assert len(warnings) == 2
    assert "the tracker bad failed: OSError: no route to host" in warnings[0]
    assert "3 times in a row and is switched off" in warnings[1]


def test_a_tracker_that_raises_now_and_then_stays_on(tmp_path: Path) -> None:
    class Moody(FakeTracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            if step % 3:
                raise OSError("not now")
            super().log(step, values)

    built: list[FakeTracker] = []
    warnings: list[str] = []
    thread = TrackerThread(
        {"moody": recording_factory(built, Moody)}, tmp_path, "run-1", CONFIG, warnings.append
    )
    for number in range(1, 31):
        thread(made(step(number)))
    thread.close()
    assert len(built[0].points["train/loss"]) == 10
    assert len(warnings) == 1


def test_warnings_are_delivered_in_the_callers_thread(tmp_path: Path) -> None:
    """The receiver writes to the event log, which one thread owns, even from within the listener."""

    class Raising(FakeTracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("no route to host")

    threads: set[int] = set()

    def on_warning(message: str) -> None:
        threads.add(threading.get_ident())
        log.write(kinds.Warned(kind="tracker", message=message))

    thread = TrackerThread({"bad": recording_factory([], Raising)}, tmp_path, "run-1", CONFIG, on_warning)
    log = EventLog(tmp_path / "events.jsonl", [thread])
    for number in range(1, 50):
        log.write(kinds.Step(step=number, loss=0.5))
    thread.close()
    log.close()
    assert threads == {threading.get_ident()}


def test_a_tracker_that_does_not_start_is_reported(tmp_path: Path) -> None:
    def refuse(run_dir: Path, run_name: str, config: Mapping[str, Any]) -> Tracker:
        raise UserError("no API key")

    warnings: list[str] = []
    thread = TrackerThread({"bad": refuse}, tmp_path, "run-1", CONFIG, warnings.append)
    thread(made(step(1)))
    thread.close()
    assert len(warnings) == 1
    assert "did not start: UserError: no API key" in warnings[0]


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Event that hanging trackers wait for; set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def test_a_tracker_that_hangs_in_log_delays_nothing(tmp_path: Path, release: threading.Event) -> None:
    entered = threading.Event()

    class Hanging(FakeTracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            entered.set()
            release.wait(60)

    built: list[Any] = []
    warnings: list[str] = []
    factories = {"hanging": recording_factory(built, Hanging), "good": recording_factory(built)}
    thread = TrackerThread(factories, tmp_path, "run-1", CONFIG, warnings.append, close_timeout_s=0.2)
    thread(made(step(1)))
    assert entered.wait(30)
    for number in range(2, 101):
        thread(made(step(number)))  # returns, though the tracker still hangs in its first call
    thread.close()
    assert not release.is_set()
    good = next(fake for fake in built if type(fake) is FakeTracker)
    assert len(good.points["train/loss"]) == 100
    assert good.closed == 1
    assert len(warnings) == 1
    assert "the tracker hanging did not finish in time and is abandoned; about 100 updates" in warnings[0]


@pytest.mark.parametrize("where", ["construction", "close"])
def test_a_tracker_that_hangs_elsewhere_is_abandoned(
    where: str, tmp_path: Path, release: threading.Event
) -> None:
    entered = threading.Event()

    def hang() -> None:
        entered.set()
        release.wait(60)

    class Hanging(FakeTracker):
        def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
            super().__init__(run_dir, run_name, config)
            if where == "construction":
                hang()

        def close(self) -> None:
            if where == "close":
                hang()

    warnings: list[str] = []
    thread = TrackerThread(
        {"hanging": Hanging}, tmp_path, "run-1", CONFIG, warnings.append, close_timeout_s=0.2
    )
    thread(made(step(1)))
    thread.close()
    assert entered.wait(30)
    assert not release.is_set()
    assert len(warnings) == 1
    assert "abandoned" in warnings[0]


def test_a_full_queue_drops_updates_and_counts_them(tmp_path: Path, release: threading.Event) -> None:
    entered = threading.Event()

    class Slow(FakeTracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            entered.set()
            release.wait(60)
            super().log(step, values)

    built: list[FakeTracker] = []
    warnings: list[str] = []
    thread = TrackerThread(
        {"slow": recording_factory(built, Slow)}, tmp_path, "run-1", CONFIG, warnings.append, queue_size=4
    )
    thread(made(step(1)))
    assert entered.wait(30)
    for number in range(2, 12):
        thread(made(step(number)))
    assert thread.dropped == {"slow": 6}
    release.set()
    thread.close()
    assert [number for number, _ in built[0].points["train/loss"]] == [1, 2, 3, 4, 5]
    assert built[0].closed == 1
    assert warnings == [
        "the tracker slow was too slow: 6 updates were dropped there; events.jsonl has them all"
    ]


@pytest.mark.extended
def test_the_real_trackers_run_side_by_side(tmp_path: Path, elsewhere: Path) -> None:
    warnings: list[str] = []
    thread = TrackerThread(
        ["tensorboard", "wandb"], tmp_path / "run", "run-1", CONFIG, warnings.append, close_timeout_s=120
    )
    thread(made(step(1)))
    thread.close()
    assert warnings == []
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))
    assert list((tmp_path / "run" / "wandb").rglob("*.wandb"))


def test_heavy_packages_are_imported_late() -> None:
    code = """if True:
        import sys, orchestrator.live.trackers.trackers, orchestrator.live.screen.screen, orchestrator.record.machine.monitor
        heavy = {"torch", "ray", "tensorboard", "wandb", "mlflow", "pynvml", "psutil", "rich", "numpy"} & set(sys.modules)
        assert not heavy, heavy"""  # noqa: E501
    subprocess.run([sys.executable, "-c", code], check=True)
